"""The driver's state of a model in slices: versions, results, slices and steps, as references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.core.protocol import Coefficients, Stat, Task, TaskId, WorkerId
from paceline.learners.base import Span, Sums

if TYPE_CHECKING:  # which needs ray
    from paceline.engines.ray.worker import Token


@dataclass(eq=False, slots=True)
class Object:
    """An object in the cluster's stores, named before the call that returns it is made.

    ref: the reference, which the shell sets when it makes the call.
    held: a reference to the same object in the process that made it, if it can be asked directly.
    """

    ref: Any = None
    held: Any = None

    @property
    def nearest(self) -> Any:
        """The reference that brings the object in the shortest time."""
        return self.ref if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class Kept:
    """The server process that keeps the optimizer's state of another server's slice."""

    server: str
    life: int


@dataclass(eq=False)
class Version:
    """A version of the model, as its slices."""

    number: int
    spans: Sequence[Span]
    slices: list[Object | None]
    taken: bool = False  # whether all servers have taken the step to it, lost ones as well
    missing: set[int] = field(default_factory=set)  # slices that were lost with their node
    gone: bool = False  # whether such a slice cannot be recovered
    nodes: dict[int, str] = field(default_factory=dict)  # of its slices, as far as is known

    @property
    def known(self) -> bool:
        return all(each is not None for each in self.slices)

    @property
    def whole(self) -> bool:
        return self.taken and not self.missing


@dataclass(eq=False)
class Result:
    """A worker's vector, as the references of its slices, and the task that it comes from.

    pushed: whether its slices leave as soon as they exist. Otherwise servers have to ask.
    answered: when the worker answered, on the cluster's clock.
    """

    token: Token
    task: Task
    model: Version
    spans: Sequence[Span]
    slices: Sequence[Any]
    node: str
    pushed: bool = False
    messages: int = 1
    answered: float = 0.0
    samples: int = 0
    seconds: float = 0.0  # of computing
    loss: float | None = None
    count: float | None = None


@dataclass
class Results:
    """Results by task: not yet answered, held for a step, and used but lost."""

    expected: dict[TaskId, Result] = field(default_factory=dict)
    held: dict[TaskId, Result] = field(default_factory=dict)
    again: dict[TaskId, Result] = field(default_factory=dict)  # a worker computes them once more


@dataclass(frozen=True)
class Copy:
    """A slice as of some version.

    parts: of each slice that covers it the values and the state, in turn; the state alone where it
        has the values.
    """

    version: int
    spans: Sequence[Span]
    parts: Sequence[Object]
    node: str | None = None  # whose loss would take the parts with it
    rescued: bool = False  # whether to search the workers again if this copy is lost
    other: Copy | None = None  # of the same slice on a node that is slow, if this copy is lost


@dataclass(eq=False)
class Slot:
    """One slice: its server, and the copy to start again from if the server is lost."""

    index: int
    span: Span
    server: str
    newest: Copy  # as the server left it
    sent: int = -1  # the newest step that was sent to the server
    starts: int = 0  # times that a server started the slice
    since: int = -1  # the version that its server started from
    held: int = -1  # the newest version that a worker on another node has
    states: dict[int, Object | Kept] = field(default_factory=dict)  # by version
    copied: int = -1  # the newest version whose state is elsewhere, if that was possible
    keeper: str | None = None  # the server to which a state is on its way
    watched: int = -1  # the version whose copy was watched last
    attempts: int = 0
    slow: int = 0  # steps in a row
    raised: int = -1  # the version at which its former process raised an exception


@dataclass(eq=False)
class NodeSum:
    """Results of a step that come from one node.

    members: their places among the results of the step.
    sums: their sum, for each slot of another node that fetches it in their place.
    """

    node: str
    members: list[int]
    sums: dict[int, Object] = field(default_factory=dict)


@dataclass(eq=False)
class Step:
    """A step on its way through the servers. Lists go by slot.

    former: of slots that had taken it and may have to take it again, what they had answered.
    overtaken: whether servers take it in place of another one.
    """

    version: int
    weights: list[Coefficients]
    results: list[Result]
    stats: dict[Stat, float]
    model: Version
    lr_scale: float = 1.0
    began: float = 0.0  # when it was sent to the servers, on the cluster's clock
    took: float = 0.0  # seconds until all had taken it
    states: list[Object | None] = field(default_factory=list)
    sums: dict[int, Sums] = field(default_factory=dict)
    totals: Sums | None = None
    done: dict[int, Sequence[float]] = field(default_factory=dict)  # seconds of each result
    former: dict[int, tuple[Sums | None, Sequence[float]]] = field(default_factory=dict)
    overtaken: bool = False
    stalled: set[int] = field(default_factory=set)  # slots that miss a result
    nodes: list[NodeSum] | None = None  # if results are added up by node

    @property
    def is_fresh(self) -> bool:
        """Whether all results were computed on the version that the step starts from."""
        return all(result.model.number == self.version - 1 for result in self.results)

    def sending(self) -> dict[WorkerId, float]:
        """Return the seconds that each worker's result was on its way to most servers.

        One server with a slow link is the last for all workers: that says nothing about theirs.
        Results that travel during other tasks are left out, since no worker waits for them.
        """
        known = [each for each in self.done.values() if len(each) == len(self.results)]
        if self.overtaken or len(known) < len(self.done):  # what servers fetched again took longer
            return {}
        found = dict[WorkerId, float]()
        for result, seconds in zip(self.results, zip(*known, strict=True), strict=False):
            worker, middle = result.token.worker, round(median(seconds), 4)
            if result.task.work.overlap:
                continue
            found[worker] = max(found.get(worker, 0.0), middle)
        return found

    def arrivals(self, slot: int, seconds: Sequence[float]) -> Sequence[float]:
        """Return the seconds that each result was on its way, or the sum that has it.

        seconds: from the beginning of the step until each arrived. Pushed results left before.
        """
        if self.nodes is None:
            early = [self.began - each.answered if each.pushed else 0.0 for each in self.results]
            if len(seconds) != len(early):  # a result came in several pieces
                return ()
            return [max(after + more, 0.0) for after, more in zip(seconds, early, strict=True)]
        found: dict[int, float] = {}
        rest = iter(seconds)
        for each in self.nodes:
            shared = next(rest, None) if slot in each.sums else None
            for index in each.members:
                after = next(rest, None) if slot not in each.sums else shared
                if after is None:
                    return ()
                found[index] = after
        if next(rest, None) is not None:  # a result came in several pieces
            return ()
        return [found[index] for index in range(len(found))]


@dataclass(frozen=True)
class Pieces:
    """The pieces of a step's results that meet one slice.

    weights: of each result, or of a sum in its place.
    at: where the pieces of each result go in the slice; None if each result comes as one.
    results, slices: of each piece its result, and that result's slices as they are sent now.
    groups: the places of results that are added up first, by node; None: all in one order.
    sums: the sums among the pieces, by place. Such a piece has the first of its results.
    """

    weights: list[Coefficients]
    at: list[list[Span]] | None
    refs: list[Any]
    results: list[Result]
    slices: list[Sequence[Any]]
    groups: list[list[int]] | None = None
    sums: Mapping[int, NodeSum] = field(default_factory=dict)


@dataclass(eq=False)
class LeftOut:
    """A server without a slice, because its node's link is slow.

    since: the newest version of the model then. Results on it, or on older ones, may still be on
        their way from that node. It is -1 if there are none.
    sending: the seconds that a result from there took.
    """

    node: str
    since: int
    probe_at: float  # on the cluster's clock
    interval: float
    sending: float
    good: int = 0  # probes in a row
    trial: int = 0  # steps until it is decided whether they are faster without that server
