"""Events in, commands out: the vocabulary that every policy and engine shares.

Events are past tense: it happened. Commands are imperative: make it so. Nothing here reads a
clock, draws a random number, or touches a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, Protocol, TypeAlias

WorkerId: TypeAlias = str
TaskId: TypeAlias = int
Stat: TypeAlias = Literal["loss", "norm", "dot", "sketch", "rate"]
Stats: TypeAlias = Mapping[Stat, float]
Figure: TypeAlias = Literal["norm", "change", "move"]
"""Of each tensor x_i that may be sent: |x_i|; |x_i - x̂_i|, x̂_i as it was last sent; and of each
tensor of the model: how far it moved in the last step, 0 before the first."""
Figures: TypeAlias = Mapping[Figure, Sequence[float]]
Want: TypeAlias = Stat | tuple[Literal["dot"], int] | tuple[Literal["each"], Figure]
"""A statistic to attach; ("dot", 5) is the product with the step five before, every fifth step, and
("each", "change") a figure of each tensor, where there is no main node."""
Coefficients: TypeAlias = float | tuple[float, ...]
"""A factor of a vector, or m of them: one for each of the vector's m blocks."""
Tag: TypeAlias = int | str | tuple[int | str, ...] | None

SHARED = -1
"""The tile that stands for the whole data, drawn from by whoever comes."""
MAIN: WorkerId = "main"
"""The node that decides when there is only one; without a main node every peer is its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to compute, without saying where, when, or on which model."""

    parts: Mapping[int, Coefficients] | None = None  # of the samples, computed each by itself
    cut: int = 1  # into so many parts, of which these are some
    samples: int | None = None  # per local step; None: the policy's share
    steps: int = 1  # local steps; the result is then the model's change
    budget: float = inf  # seconds, after which whatever is done is returned
    shares: int = 1  # how many of the shares that a step gathers this is
    tag: Tag = None  # the policy's own mark, for instance the row of a code
    tiles: Mapping[int, int] | None = None  # samples from each tile of the data; None: from all

    @property
    def messages(self) -> int:
        """How many times shorter than the model the result is: m, if parts have m coefficients."""
        first = next(iter(self.parts.values())) if self.parts else 0.0
        return len(first) if isinstance(first, tuple) else 1


@dataclass(frozen=True, slots=True)
class Task:
    """Work given to a worker, stamped by the ledger."""

    id: TaskId
    worker: WorkerId
    work: Work
    version: int  # of the model it starts from
    since: float
    samples: int  # per local step, never unknown
    draw: int  # where in the stream of data its samples begin
    attempt: int = 1  # above 1: the worker that had it before was lost
    draws: tuple[int, ...] = ()  # the same for each tile, which has a stream of its own

    def part(self, index: int) -> tuple[int, int]:
        """Return where in the stream of data a part begins, and how many samples it has."""
        begin, end = (self.samples * i // self.work.cut for i in (index, index + 1))
        return self.draw + begin, end - begin

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield tile, place in its stream, and samples, over all local steps."""
        if self.work.tiles is not None:
            for (tile, samples), draw in zip(self.work.tiles.items(), self.draws, strict=True):
                yield tile, draw, samples * self.work.steps

    def drawn(self, samples: int) -> dict[int, int]:
        """Return how many samples of each tile were computed, of so many in all.

        In each local step those of several tiles are interleaved: of a tile with n samples in the
        step, the i-th comes in the order of (i + 1/2) / n.
        """
        tiles = self.work.tiles or {}
        steps, rest = divmod(samples, self.samples)
        found = {tile: steps * count for tile, count in tiles.items()}
        if rest:
            turns = sorted(
                ((i + 0.5) / count, place, tile)
                for place, (tile, count) in enumerate(tiles.items())
                for i in range(count)
            )
            for _, _, tile in turns[:rest]:
                found[tile] += 1
        return found

    @property
    def computed(self) -> int:
        """The samples that are computed: all in each local step, or those of its parts."""
        if self.work.parts is None:
            return self.samples * self.work.steps
        return sum(self.part(index)[1] for index in self.work.parts)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished task. Its tensor stays with the engine, under the task's id."""

    task: Task
    at: float  # when it arrived, which may be before anybody looked
    samples: int
    seconds: float
    stats: Stats


@dataclass(frozen=True, slots=True)
class Prices:
    """What a worker's hour and a gigabyte to or from it cost: one price for all, or by worker.

    idle: whether hours without a task are paid as well, as for machines that stay rented.
    """

    per_hour: float | Mapping[WorkerId, float] = 0.0
    per_gigabyte: float | Mapping[WorkerId, float] = 0.0
    idle: bool = False

    def __post_init__(self) -> None:
        for name in ("per_hour", "per_gigabyte"):
            given = getattr(self, name)
            by_worker = isinstance(given, Mapping)
            for price in given.values() if by_worker else (given,):
                if not (isfinite(price) and price >= 0):
                    raise ValueError(f"{name}={given!r}: a price must be finite and >= 0")
            # Plain numbers, which a journal can hold, and out of reach of whoever gave them.
            plain = {w: float(price) for w, price in given.items()} if by_worker else float(given)
            object.__setattr__(self, name, plain)

    @property
    def charges_hours(self) -> bool:
        """Whether any worker's hour costs something."""
        return _any_above_zero(self.per_hour)

    @property
    def charges_bytes(self) -> bool:
        """Whether any worker's messages cost something."""
        return _any_above_zero(self.per_gigabyte)

    def second(self, worker: WorkerId) -> float:
        """Return the price of a second of a worker."""
        return _price(self.per_hour, worker, "per_hour") / 3600

    def byte(self, worker: WorkerId) -> float:
        """Return the price of a byte to or from a worker."""
        return _price(self.per_gigabyte, worker, "per_gigabyte") / 1e9


@dataclass(frozen=True, slots=True)
class Peer:
    """A node where there is no main one."""

    name: WorkerId
    neighbors: tuple[WorkerId, ...]  # at first
    tensors: tuple[int, ...]  # sizes of the model's


def _any_above_zero(prices: float | Mapping[WorkerId, float]) -> bool:
    return any(prices.values()) if isinstance(prices, Mapping) else prices > 0


def _price(prices: float | Mapping[WorkerId, float], worker: WorkerId, name: str) -> float:
    if not isinstance(prices, Mapping):
        return prices
    if worker not in prices:
        raise ValueError(f"{name} names no price for {worker!r}; it has {sorted(prices)}")
    return prices[worker]


def magnitude(weight: Coefficients) -> float:
    """Return how much a result counts for, where it is but a number that is averaged."""
    return max(map(abs, weight)) if isinstance(weight, tuple) else abs(weight)


# --- events: engine -> policy --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is here and idle. A worker that left may join again under its name.

    Without a main node every node is its own worker, and hears of peers that have come back.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is gone, and with it whatever it was computing. Without a main node: or a peer."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has a result: `samples` were seen in `seconds` of its own computing."""

    task: TaskId
    samples: int
    seconds: float = 0.0
    stats: Stats = field(default_factory=dict)
    waited: float = 0.0  # seconds since it arrived: the engine was busy with something else
    # Bytes that the result and the task's model took; None: as many as a model's, or a code's.
    # Without a main node: what went to and came from peers since the task before.
    sent: int | None = None
    got: int | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The model has reached `version`."""

    version: int
    stats: Stats = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """News of a peer's model has arrived (without a main node only)."""

    sender: WorkerId
    version: int = 0  # of the model that it is of


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer set by the policy is due."""

    name: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Someone outside the policy asks to stop: Ctrl-C, a callback, a target reached."""

    reason: str


Event: TypeAlias = Joined | Left | Finished | Stepped | Received | TimerFired | Interrupted


# --- commands: policy -> engine ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a worker something to compute at the current version.

    With `redo`, it is the work of a task that was lost with its worker, on the same samples, as
    `work.shares` shares of this step.
    """

    worker: WorkerId
    work: Work = Work()
    redo: TaskId | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """`Assign` as the engine sees it: the ledger has stamped the task."""

    task: Task


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up a running task. Should its result still arrive, the policy never sees it."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class Discard:
    """Give up a held result."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class Step:
    """Advance the model by one version.

    The optimizer receives the sum of weight * result, added up in the order given; of a coded
    result, m times shorter than the model, block u of the model gets the part that weight[u]
    makes of it. `mix` first replaces the model by a weighted sum with the copies that are at hand:
    those of peers, and under its own name the one that peers have of this node. The model itself
    has what is left of 1.
    """

    weights: Mapping[TaskId, Coefficients]
    mix: Mapping[WorkerId, float] = field(default_factory=dict)
    keep: bool = False  # hold the results for later steps (gradient tables)


@dataclass(frozen=True, slots=True)
class Send:
    """Tell peers of this node's model, all the same (without a main node only).

    It moves the copy that all peers have of this node, whoever is told.

    tensors: which of them; None: all.
    whole: the copy as it is, for peers who have none, in place of what has changed.
    """

    to: tuple[WorkerId, ...]
    tensors: tuple[int, ...] | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Ask for `TimerFired(name)` at a time. Setting a name again moves it; at=inf clears it."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run."""

    reason: str


Command: TypeAlias = Assign | Start | Cancel | Discard | Step | Send | SetTimer | Stop


# --- the three contracts -------------------------------------------------------------------------


class View(Protocol):
    """What a policy may look at: the ledger, read-only, current after each yielded command.

    The collections are live and ordered: copy what is iterated over while commands are yielded.
    """

    @property
    def now(self) -> float: ...
    @property
    def version(self) -> int: ...
    @property
    def batch(self) -> int:
        """The samples one step should use: the global batch size."""

    @property
    def samples(self) -> int:
        """The samples that steps have used so far."""

    @property
    def message_bytes(self) -> int:
        """The size of a model, and of a result, on the wire; 0 where it is not known."""

    @property
    def prices(self) -> Prices:
        """What workers and messages cost; nothing where no prices were given."""

    @property
    def node(self) -> WorkerId:
        """Whose books these are: the main node's, or a peer's where there is none."""

    @property
    def tensors(self) -> Sequence[int]:
        """The sizes of the model's tensors (without a main node only)."""

    @property
    def workers(self) -> Collection[WorkerId]: ...
    @property
    def idle(self) -> Collection[WorkerId]:
        """Workers with nothing to do, longest idle first."""

    @property
    def free(self) -> Collection[WorkerId]:
        """Idle workers of whom no result is held."""

    @property
    def running(self) -> Mapping[TaskId, Task]:
        """Tasks not finished, oldest first, so versions never decrease along it."""

    @property
    def held(self) -> Mapping[TaskId, Result]: ...
    @property
    def gathered(self) -> int:
        """The shares that the held results are: as many as results, unless tasks are larger."""

    @property
    def lost(self) -> Mapping[TaskId, Task]:
        """Tasks whose worker left; `Assign(redo=…)` hands them out again."""

    @property
    def copies(self) -> Mapping[WorkerId, int]:
        """Nodes of whose model a copy is at hand, and the version of each, as far as is known."""

    def delay(self, item: Task | Result) -> int:
        """Count the versions the model has moved since the item's task began."""

    def outstanding(self, max_delay: float) -> int:
        """Count the shares of running tasks that began at most `max_delay` versions ago."""


class Policy(Protocol):
    """Decides who computes, how long to wait, and what to send.

    `react` yields commands; each takes effect on the view before the next line runs. It depends
    on nothing but its arguments and the policy's own fields, which are plain data.
    """

    @property
    def wants(self) -> frozenset[Want]:
        """The statistics that the engine should attach to its events."""

    def react(self, view: View, event: Event) -> Iterator[Command]: ...


class Engine(Protocol):
    """Carries commands out and reports what happened, in simulated or real time."""

    def execute(self, node: WorkerId, command: Command) -> None: ...

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        """Wait for the next event: when, at which node, what. None: none can come."""
