"""Events about servers, which the recovery machine receives, and the calls that it answers with.

Two calls are equal if they ask for the same. A call also carries the state that it works on, and
the objects that it fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline.core.protocol import Stat, Task, WorkerId
from paceline.engines.base import Writing
from paceline.engines.ray.servers.slices import (
    Copy,
    Kept,
    LeftOut,
    NodeSum,
    Object,
    Pieces,
    Slot,
    Step,
    Version,
)
from paceline.learners.base import Span, Sums

if TYPE_CHECKING:  # which needs ray
    from paceline.engines.ray.worker import Token

Way: TypeAlias = tuple[str, str]
"""The node that fetches, and the node that it fetches from."""


# --- calls to servers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SumUp:
    """Have a server add up the results of its node, for servers on other nodes.

    No answer is awaited. The results replace a sum that does not come.
    """

    server: str
    version: int
    step: Step = field(compare=False, repr=False)
    results: NodeSum = field(compare=False, repr=False)


@dataclass(frozen=True)
class SetUp:
    """Have a server start a slice from a copy.

    cut: the number of the present cut. A server forgets all that it has of an earlier one.
    """

    server: str
    version: int
    span: Span
    slot: Slot = field(compare=False, repr=False)
    copy: Copy = field(compare=False, repr=False)
    values: Object = field(compare=False, repr=False)
    state: Object = field(compare=False, repr=False)
    cut: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True)
class TakeStep:
    """Have a server add up its pieces and step, in one call."""

    server: str
    version: int
    slot: Slot = field(compare=False, repr=False)
    step: Step = field(compare=False, repr=False)
    pieces: Pieces = field(compare=False, repr=False)
    values: Object = field(compare=False, repr=False)
    state: Object = field(compare=False, repr=False)


@dataclass(frozen=True)
class Reduce:
    """Have a server add up its pieces, and return its sums."""

    server: str
    version: int
    slot: Slot = field(compare=False, repr=False)
    step: Step = field(compare=False, repr=False)
    pieces: Pieces = field(compare=False, repr=False)


@dataclass(frozen=True)
class Apply:
    """Have a server step, given the sums over all slices."""

    server: str
    version: int
    totals: Sums
    slot: Slot = field(compare=False, repr=False)
    step: Step = field(compare=False, repr=False)
    values: Object = field(compare=False, repr=False)
    state: Object = field(compare=False, repr=False)


@dataclass(frozen=True)
class KeepState:
    """Have a server on another node keep the optimizer's state of a slice."""

    keeper: str
    index: int
    version: int
    oldest: int  # versions before it are dropped
    cut: int = field(compare=False, repr=False)
    slot: Slot = field(compare=False, repr=False)
    state: Object = field(compare=False, repr=False)


@dataclass(frozen=True)
class GiveState:
    """Have a server return a state that it keeps."""

    keeper: str
    index: int
    version: int
    cut: int = field(compare=False, repr=False)
    state: Object = field(compare=False, repr=False)


@dataclass(frozen=True)
class WriteSlice:
    """Have a server write a slice and its state into a file."""

    server: str
    version: int
    file: str
    writing: Writing = field(compare=False, repr=False)
    token: str = field(compare=False, repr=False)
    timeout: float = field(compare=False, repr=False)
    copy: Copy = field(compare=False, repr=False)


# --- calls to workers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AskHeld:
    """Ask all workers which versions they hold, for a server that has lost its slice."""

    server: str
    slot: Slot = field(compare=False, repr=False)


@dataclass(frozen=True)
class ReadHeld:
    """Have a worker return a slice of a version that it holds."""

    worker: str
    version: int
    span: Span
    values: Object = field(compare=False, repr=False)


@dataclass(frozen=True)
class Probe:
    """Time transfers of `size` bytes between nodes.

    out, seconds: for a left-out server, the server and the excess seconds that count as slow.
    """

    purpose: Literal["routes", "failed routes", "suspects", "left out"]
    ways: Sequence[Way]
    size: int
    out: LeftOut | None = field(default=None, compare=False, repr=False)
    seconds: float = 0.0


# --- processes, and requests to the engine -------------------------------------------------------


@dataclass(frozen=True)
class Watch:
    """Report after some seconds that a server may be late with a step, or with the copy of a state.

    It names what it is about, since it must not keep the objects of a step.
    starts: of all slices until now.
    """

    server: str
    version: int
    copy: bool = field(compare=False)
    starts: int = field(compare=False)
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class AskAnew:
    """Have workers that wait for a version of the model ask for it again: a slice has moved."""

    model: Version = field(compare=False, repr=False)


@dataclass(frozen=True)
class Replace:
    """Kill a server, and start another process in its place while respawns are left."""

    server: str


@dataclass(frozen=True)
class Remove:
    """End a server that has no slice any more."""

    server: str


@dataclass(frozen=True)
class Add:
    """Start a server that was removed; `CameUp` or `NotUp` follows."""

    server: str


@dataclass(frozen=True)
class Trust:
    """Reset the respawns of a server that has taken a step."""

    server: str


@dataclass(frozen=True)
class Report:
    """Report a step that all servers have taken.

    sending: the seconds that the result of each worker was on its way, as far as is known.
    """

    stats: Mapping[Stat, float]
    sending: Mapping[WorkerId, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Ship:
    """Send the tasks that wait for their model, if it is known now."""


@dataclass(frozen=True)
class Redo:
    """Have any worker compute a task again, on its model.

    avoid: a node whose workers are not to do it, if there are others.
    """

    task: Task
    model: Version = field(compare=False, repr=False)
    avoid: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class Refuse:
    """Reject a result that was accepted, and replace its worker."""

    token: Token
    task: Task
    why: str


ServerCall: TypeAlias = SetUp | TakeStep | Reduce | Apply
WorkerCall: TypeAlias = AskHeld | ReadHeld | Probe
Request: TypeAlias = Replace | Remove | Add | Trust | Report | Ship | AskAnew | Redo | Refuse
Call: TypeAlias = (
    ServerCall | SumUp | KeepState | GiveState | WriteSlice | WorkerCall | Watch | Request
)


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A server has its slice.

    has_arrays: whether the optimizer's state has arrays, which another node should keep.
    """

    call: SetUp
    has_arrays: bool


@dataclass(frozen=True)
class Reduced:
    """A server has added up its pieces."""

    call: Reduce
    sums: Sums


@dataclass(frozen=True)
class StepTaken:
    """A server has stepped.

    seconds: until each result had arrived.
    """

    call: TakeStep | Apply
    sums: Sums
    has_arrays: bool
    seconds: Sequence[float]


@dataclass(frozen=True)
class MayBeLate:
    """The seconds of a watch have passed."""

    call: Watch


@dataclass(frozen=True)
class StateKept:
    """A state was copied to a keeper; keeper is None if the copy failed."""

    call: KeepState
    keeper: Kept | None


@dataclass(frozen=True)
class HeldTold:
    """The workers have reported which versions they hold; late workers are left out."""

    call: AskHeld
    versions: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Probed:
    """A probe has ended; `inf` stands for a timeout. Lost ways are left out."""

    call: Probe
    seconds: Mapping[Way, float]


@dataclass(frozen=True)
class ServerLost:
    """A server died, or did not answer in time."""

    server: str
    why: str


@dataclass(frozen=True)
class CameUp:
    """The process of a server without a slice has come up."""

    server: str


@dataclass(frozen=True)
class NotUp:
    """The process of a server without a slice has not come up."""

    server: str
    why: str


@dataclass(frozen=True)
class ServerRaised:
    """The code of a server raised an exception at work on a slice."""

    server: str
    slot: Slot
    why: str
    error: Exception


@dataclass(frozen=True)
class CopyLost:
    """A server could not start: the copy was lost on the way."""

    call: SetUp
    error: Exception


@dataclass(frozen=True)
class ResultsUnusable:
    """A server could not use pieces, by their place: lost, late, or refused."""

    call: TakeStep | Reduce
    lost: Sequence[int]
    late: Sequence[int]
    bad: Mapping[int, str]


@dataclass(frozen=True)
class ModelMissed:
    """A worker could not get its model."""


@dataclass(frozen=True)
class SliceWritten:
    """A server has written a slice.

    data: the part of its state that is in no array.
    """

    call: WriteSlice
    sha256: str
    data: dict[str, Any]


@dataclass(frozen=True)
class SliceNotWritten:
    """A server could not write a slice, was lost, or did not answer in time."""

    call: WriteSlice
    why: str


SlotEvent: TypeAlias = (
    Started | Reduced | StepTaken | StateKept | HeldTold | CopyLost | ResultsUnusable
)
FileEvent: TypeAlias = SliceWritten | SliceNotWritten
ServerEvent: TypeAlias = ServerLost | ServerRaised | CameUp | NotUp
Event: TypeAlias = SlotEvent | FileEvent | ServerEvent | MayBeLate | Probed | ModelMissed
