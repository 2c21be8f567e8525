"""Events in, commands out: the vocabulary that every policy and engine shares.

An event says what happened; its name is in the past tense. A command says what to do; its name is
imperative. No code here reads a clock, draws a random number, or touches a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, Protocol, TypeAlias

WorkerId: TypeAlias = str
TaskId: TypeAlias = int
Stat: TypeAlias = Literal["loss", "count", "norm", "dot", "sketch", "rate", "new_state"]
"""A statistic of a result or a step. "count" is what the loss counts, such as tokens, per sample; a
coded result has its counts encoded like its vector. "new_state" marks a result of local steps whose
worker had no state of its inner optimizer, although it should have kept one."""
Stats: TypeAlias = Mapping[Stat, float]
Figure: TypeAlias = Literal["norm", "change", "move"]
"""A norm per tensor. "norm" is |x_i| and "change" is |x_i - x̂_i|, for each tensor x_i that may be
sent and its last sent value x̂_i. "move" is how far each tensor of the model moved in the last
step, 0 before the first."""
Figures: TypeAlias = Mapping[Figure, Sequence[float]]
Want: TypeAlias = Stat | tuple[Literal["dot"], int] | tuple[Literal["each"], Figure]
"""A statistic that the engine attaches to events. ("dot", 5) is the inner product with the step
five before, at every fifth step. ("each", "change") is a `Figure`, in a decentralized run."""
Coefficients: TypeAlias = float | tuple[float, ...]
"""One factor for a vector, or m factors: one for each of the vector's m blocks."""
Tag: TypeAlias = int | str | tuple[int | str, ...] | None

SHARED = -1
"""The tile (data shard) number of the whole dataset, which every worker can draw from."""
MAIN: WorkerId = "main"
"""The name of the central coordinator; in a decentralized run every node has its own name."""


def worker_names(workers: int) -> tuple[WorkerId, ...]:
    """Return the names that an engine gives to its workers, in order.

    >>> worker_names(3)
    ('w0', 'w1', 'w2')
    """
    return tuple(f"w{i}" for i in range(workers))


def some_names(workers: Sequence[WorkerId]) -> str:
    """Return the names of workers for a message, with numbers in a row as one range.

    >>> some_names(["a100-0", "a100-1", "a100-2", "cpu-4"])
    'a100-0 to a100-2, cpu-4'
    """
    runs: list[list[WorkerId]] = []
    for name in workers:
        stem = name.rstrip("0123456789")
        if runs and stem != name and f"{stem}{int(name[len(stem) :]) - 1}" == runs[-1][-1]:
            runs[-1].append(name)
        else:
            runs.append([name])
    told = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(told[:8]) + (", …" if len(told) > 8 else "")


@dataclass(frozen=True, slots=True)
class Work:
    """A computation, without its worker, its time, and its model version.

    A tile is a data shard: a part of the dataset with its own stream of samples.
    """

    parts: Mapping[int, Coefficients] | None = None  # part -> factors; each part computed alone
    n_parts: int = 1  # parts that the samples are divided into; `parts` are some of them
    samples: int | None = None  # per local step; None: the policy's share
    steps: int = 1  # local steps; the result is then the model's change
    budget: float = inf  # seconds, after which the worker returns the samples done so far
    shares: int = 1  # of the shares that a step gathers, how many this work counts for
    tag: Tag = None  # the policy's own mark, for instance the row of a code
    tiles: Mapping[int, int] | None = None  # tile -> samples from it; None: from all data
    overlap: bool = False  # take local steps from the worker's own model until the task's is there

    @property
    def messages(self) -> int:
        """The factor m by which the result is shorter than the model: coefficients per part."""
        first = next(iter(self.parts.values())) if self.parts else 0.0
        return len(first) if isinstance(first, tuple) else 1


@dataclass(frozen=True, slots=True)
class Task:
    """Work assigned to a worker, with the id, version and offsets that the ledger set."""

    id: TaskId
    worker: WorkerId
    work: Work
    version: int  # of the model it starts from
    since: float
    samples: int  # per local step; always set
    offset: int  # of its first sample in the data stream
    attempt: int = 1  # above 1: the previous worker of this task was lost
    tile_offsets: tuple[int, ...] = ()  # for each tile, the offset in the tile's own stream
    copy_of: TaskId | None = None  # the overdue task on the same samples, which also runs

    def part(self, index: int) -> tuple[int, int]:
        """Return a part's offset in the data stream and its number of samples."""
        begin, end = (self.samples * i // self.work.n_parts for i in (index, index + 1))
        return self.offset + begin, end - begin

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield each tile, the offset in its stream, and its samples over all local steps."""
        if self.work.tiles is not None:
            for (tile, samples), offset in zip(
                self.work.tiles.items(), self.tile_offsets, strict=True
            ):
                yield tile, offset, samples * self.work.steps

    def drawn(self, samples: int) -> dict[int, int]:
        """Return how many samples of each tile are among the first `samples` of the task.

        Each local step interleaves its tiles: sample i of a tile with n samples in the step is
        ordered by (i + 1/2) / n.
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
        """The samples that the task computes: all of every local step, or those of its parts."""
        if self.work.parts is None:
            return self.samples * self.work.steps
        return sum(self.part(index)[1] for index in self.work.parts)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished task. The engine keeps its tensor under the task's id."""

    task: Task
    at: float  # arrival time, which may be earlier than the event's
    samples: int
    seconds: float
    stats: Stats


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a worker's hour and of a gigabyte to or from it: one for all, or by worker.

    idle: whether hours without a task cost the same, as for machines that stay rented.
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
            # A copy, so that the caller cannot change it, in plain numbers, for the journal.
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
    """A node of a decentralized run."""

    name: WorkerId
    neighbors: tuple[WorkerId, ...]  # at first
    tensors: tuple[int, ...]  # sizes of the model's tensors


def _any_above_zero(prices: float | Mapping[WorkerId, float]) -> bool:
    return any(prices.values()) if isinstance(prices, Mapping) else prices > 0


def _price(prices: float | Mapping[WorkerId, float], worker: WorkerId, name: str) -> float:
    if not isinstance(prices, Mapping):
        return prices
    if worker not in prices:
        raise ValueError(f"{name} names no price for {worker!r}; it has {sorted(prices)}")
    return prices[worker]


def magnitude(weight: Coefficients) -> float:
    """Return a result's weight as one number, for averages of losses: the largest |factor|."""
    return max(map(abs, weight)) if isinstance(weight, tuple) else abs(weight)


# --- events: engine -> policy --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is connected and idle. A worker that left may join again under its name.

    In a decentralized run every node is its own worker; the event may also name a peer that
    joined again.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Left:
    """A worker left, and its running tasks are lost. Decentralized: the worker may be a peer."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has a result: it computed `samples` samples in `seconds` of its own time."""

    task: TaskId
    samples: int
    seconds: float = 0.0
    stats: Stats = field(default_factory=dict)
    waited: float = 0.0  # seconds since it arrived, while the engine was busy
    # Bytes of the result (sent) and of the task's model (got); None: the size of a model, or of a
    # coded result. Decentralized: bytes sent to and received from peers since the previous task.
    sent: int | None = None
    got: int | None = None
    skipped: int = 0  # samples that are dropped, since their result was not finite


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker will be taken away. It gets no new task, and leaves when it has none.

    Policies see `Left` after the result of its last task, so that no task is lost.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Stepped:
    """The model has reached `version`.

    sending: by worker, the seconds from its answer until most servers of the model had its
        result. It is empty where response times include them.
    """

    version: int
    stats: Stats = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    sending: Mapping[WorkerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """An update of a peer's model has arrived (decentralized only)."""

    sender: WorkerId
    version: int = 0  # of the peer's model


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer set by the policy is due."""

    name: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run was asked to stop from outside the policy: Ctrl-C, a callback, a target reached."""

    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A callback evaluated the model of a step. It is recorded, and policies do not see it."""

    step: int
    metrics: Mapping[str, float]
    mode: Literal["min", "max"] = "min"  # whether the smallest or largest first metric is best


@dataclass(frozen=True, slots=True)
class LrScaled:
    """From the next step on, optimizers use their learning rate times `scale`.

    It is recorded, and policies do not see it.
    """

    scale: float
    reason: str = ""


Event: TypeAlias = (
    Joined
    | Left
    | Finished
    | Draining
    | Stepped
    | Received
    | TimerFired
    | Interrupted
    | Evaluated
    | LrScaled
)


# --- commands: policy -> engine ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a worker something to compute at the current version.

    With `redo`, the worker recomputes that lost task on the same samples, and the task counts as
    `work.shares` shares of this step. A running task that is overdue can be redone too, by an idle
    worker. The first result counts. If it is the new task's, the old one's worker counts as having
    left until it answers, and then joins again.
    """

    worker: WorkerId
    work: Work = Work()
    redo: TaskId | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The command that the engine receives for `Assign`, with the task that the ledger made."""

    task: Task


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a running task. If its result still arrives, the policy does not see it."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class Release:
    """Let a worker go that was `Draining` and has no task left; only the ledger makes it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop a held result."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class Step:
    """Advance the model by one version.

    The optimizer receives the sum of weight * result, added up in the order given. A coded result
    is m times shorter than the model; it adds weight[u] * result to block u of the model.

    `mix` first replaces the model by a weighted sum of the model and the copies that this node
    holds. These are the copies of peers' models and, under its own name, the copy of this node
    that its peers hold. The model itself has weight 1 - sum of mix.
    """

    weights: Mapping[TaskId, Coefficients]
    mix: Mapping[WorkerId, float] = field(default_factory=dict)
    keep: bool = False  # hold the results for later steps (gradient tables)
    lr_scale: float = 1.0  # a factor of the learning rate, which the ledger sets


@dataclass(frozen=True, slots=True)
class Send:
    """Send the same update of this node's model to some peers (decentralized only).

    The update changes the public copy of this node, which is the same on all peers.

    tensors: the indices of the tensors to send; None: all.
    whole: send the whole copy instead of changes, to peers that have no copy.
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


Command: TypeAlias = Assign | Start | Cancel | Release | Discard | Step | Send | SetTimer | Stop


# --- the ledger that a policy reads, and the engine that carries out its commands ---------------


class View(Protocol):
    """The read-only ledger that a policy sees, up to date after each yielded command.

    The collections are live and ordered: copy a collection before yielding commands in a loop
    over it.
    """

    @property
    def now(self) -> float: ...
    @property
    def version(self) -> int: ...
    @property
    def batch(self) -> int:
        """The global batch size: the samples that one step should use."""

    @property
    def samples(self) -> int:
        """The samples that steps have used so far."""

    @property
    def message_bytes(self) -> int:
        """The bytes of a model, and of a result, on the wire; 0 if unknown."""

    @property
    def prices(self) -> Prices:
        """The prices of workers and messages; all are 0 if the user gave none."""

    @property
    def node(self) -> WorkerId:
        """The ledger's owner: the central coordinator, or one node of a decentralized run."""

    @property
    def tensors(self) -> Sequence[int]:
        """The sizes of the model's tensors (in decentralized runs only)."""

    @property
    def workers(self) -> Collection[WorkerId]: ...
    @property
    def idle(self) -> Collection[WorkerId]:
        """Workers without a running task, longest idle first."""

    @property
    def free(self) -> Collection[WorkerId]:
        """Idle workers without a held result."""

    @property
    def running(self) -> Mapping[TaskId, Task]:
        """Running tasks, oldest first, so their versions never decrease."""

    @property
    def held(self) -> Mapping[TaskId, Result]: ...
    @property
    def held_shares(self) -> int:
        """The shares of all held results: the number of results, unless tasks have more shares."""

    @property
    def lost(self) -> Mapping[TaskId, Task]:
        """Tasks whose worker left; `Assign(redo=…)` assigns them again."""

    @property
    def late(self) -> Mapping[TaskId, Task]:
        """Overdue tasks whose samples others computed; their workers are back when they answer."""

    @property
    def copies(self) -> Mapping[WorkerId, int]:
        """The nodes whose model this node holds a copy of, with the last known version of each."""

    def staleness(self, item: Task | Result) -> int:
        """Count the versions the model has moved since the item's task began."""

    def outstanding(self, max_staleness: float) -> int:
        """Count the shares of running tasks that began at most `max_staleness` versions ago."""


class Engine(Protocol):
    """Carries commands out and reports what happened, in simulated or real time."""

    def execute(self, node: WorkerId, command: Command) -> None: ...

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        """Wait for the next event; return its time, node and event, or None if none can come."""
