"""The interface of an engine for the trainer: jobs, workers and a clock, beside commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.protocol import Engine, Want, WorkerId
from paceline.data.partition.base import Partition
from paceline.engines.kinds import Fleet
from paceline.learners.base import Learner, Saved, Server

if TYPE_CHECKING:  # which need torch and ray
    from paceline.codecs.base import Codec
    from paceline.engines.ray.pool import RayWorkers
    from paceline.engines.simulator import SimulatedWorkers


@dataclass(frozen=True, kw_only=True)
class Job:
    """The description of one run that an engine receives."""

    learner: Learner
    server: Server
    wants: frozenset[Want] = frozenset()
    seed: int = 0
    began: float = 0.0  # seconds already spent, if a run is resumed
    steps: int = 0  # the version already reached
    min_workers: int = 1  # workers that must be up before the clock starts
    tiles: Partition | None = None  # the data shards, each with samples of its own
    codec: Codec | None = None  # encodes results
    model_codec: Codec | None = None  # encodes models
    skip_limit: int = 0  # results in a row, not finite, that end the run; 0: skip no result
    adapts: bool = False  # whether a worker whose messages take longer gets fewer samples
    overlaps: bool = False  # whether local steps begin before the model has arrived


@dataclass(eq=False)
class Writing:
    """The files of one version of the model, each with a slice, while servers write them.

    hashes: the SHA-256 of each file, by the name of the file, in the order of the slices.
    data: the state of all slices that is in no array, once all files are written.
    failure: why there will be no such files; empty while there may be.
    """

    version: int
    folder: Path
    hashes: dict[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    failure: str = ""

    @property
    def under_way(self) -> bool:
        return self.data is None and not self.failure


class Writer(Protocol):
    """Has the processes that keep the model write it, while they go on with the next steps."""

    def begin(self, folder: Path, timeout: float) -> Writing:
        """Begin to write the newest version into a folder; it may take `timeout` seconds."""

    def wait(self, writing: Writing, timeout: float) -> None:
        """Return when the files are written, cannot be, or the timeout in seconds has passed."""

    def give_up(self, writing: Writing) -> None:
        """Stop waiting for files; servers may still write them."""


class TrainingEngine(Engine, Protocol):
    """An engine with workers of its own. Between `open` and `close` it serves one job."""

    @property
    def size(self) -> int:
        """The number of workers it will report as joined."""

    @property
    def workers(self) -> Sequence[WorkerId]:
        """The names of these workers, in order."""

    @property
    def fleet(self) -> Fleet:
        """The kind of machine of each worker."""

    @property
    def is_exact(self) -> bool:
        """Whether `open` continues the work in flight that `save` returned."""

    @property
    def starting(self) -> str:
        """The reason why a job has not begun yet; "" once it has. Any thread may read it."""

    def open(self, job: Job, saved: Saved | None = None) -> None:
        """Begin a job; with `saved`, continue exactly from the state that `save` returned."""

    def save(self) -> Saved | None:
        """Return the state from which `open` continues exactly; None if the engine cannot."""

    def settle(self) -> None:
        """Bring the job's server to the newest version, wherever the engine keeps the model."""

    def writer(self, folder: Path) -> Writer | None:
        """Return how the processes that keep the model write it into folders within this one.

        None: they cannot, so `settle` has to bring it here.
        """

    def interrupt(self, reason: str) -> None:
        """Report `Interrupted` next. A signal handler may call it."""

    def now(self) -> float:
        """Return the seconds that have passed on this engine's clock."""

    def close(self) -> None: ...

    def lend(self) -> SimulatedWorkers | RayWorkers:
        """Return the workers, for a run that drives them itself and opens no job here."""
