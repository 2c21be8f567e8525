"""What the driver knows of a sharded model: versions, results, slices and steps, as references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.protocol import Coefficients, Stat, Task
from paceline.engines.ray.worker import Token
from paceline.learners.base import Recipe, Span, Sums


@dataclass(eq=False)
class Version:
    """A version of the model, as the references of its slices."""

    number: int
    spans: Sequence[Span]
    refs: list[Any]
    nodes: list[str | None]  # where a carrier has the slice
    taken: bool = False  # whether all servers have taken the step to it, lost ones as well
    missing: set[int] = field(default_factory=set)  # slices that were lost with their node
    gone: bool = False  # whether such a slice cannot be had any more

    @property
    def known(self) -> bool:
        return all(ref is not None for ref in self.refs)

    @property
    def whole(self) -> bool:
        return self.taken and not self.missing


@dataclass(eq=False)
class Result:
    """A worker's vector, as the references of its slices, and what it was made from."""

    token: Token
    task: Task
    model: Version
    spans: Sequence[Span]
    slices: Sequence[Any]
    node: str
    samples: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class Copy:
    """A slice as of some version: values and state, in turn, of the parts that cover it."""

    version: int
    spans: Sequence[Span]
    parts: Sequence[Any]
    node: str | None = None  # which they would be lost with
    rescued: bool = False  # whether there may be a better one if this turns out to be lost


@dataclass(eq=False)
class Slot:
    """One slice: whose it is, and where to start again if that server is lost."""

    index: int
    span: Span
    recipe: Recipe
    server: str
    newest: Copy  # as the server left it
    sent: int = -1  # the newest step that the server was told to take
    held: int = -1  # the newest version that a worker on another node has
    states: dict[int, Any] = field(default_factory=dict)  # by version: small ones, or who has it
    copied: int = -1  # the newest version whose state is elsewhere, if that was possible
    attempts: int = 0
    slow: int = 0  # steps in a row


@dataclass(eq=False)
class Step:
    """A step on its way through the servers. Lists go by slot."""

    version: int
    weights: list[Coefficients]
    results: list[Result]
    stats: dict[Stat, float]
    model: Version
    states: list[Any]
    sums: dict[int, Sums] = field(default_factory=dict)
    totals: Sums | None = None
    done: dict[int, list[float]] = field(default_factory=dict)  # seconds of each result's way
    stalled: set[int] = field(default_factory=set)  # slots that miss a result
