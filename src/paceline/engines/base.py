"""What the trainer needs of an engine beyond carrying commands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.core.protocol import Engine, Want
from paceline.data.partition.base import Partition
from paceline.learners.base import Learner, Saved, Server

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


@dataclass(frozen=True)
class Job:
    """One run, as an engine is told of it."""

    learner: Learner
    server: Server
    wants: frozenset[Want] = frozenset()
    seed: int = 0
    began: float = 0.0  # the time already spent when a run is resumed
    steps: int = 0  # the version already reached
    min_workers: int = 1  # how many must be up before the clock starts
    tiles: Partition | None = None  # of the data, where each has samples of its own
    codec: Codec | None = None  # of results on their way
    down: Codec | None = None  # of models on theirs


class TrainingEngine(Engine, Protocol):
    """An engine with workers of its own. Between `open` and `close` it serves one job."""

    @property
    def size(self) -> int:
        """The number of workers it will report as joined."""

    def open(self, job: Job, saved: Saved | None = None) -> None:
        """Begin a job; with `saved`, exactly where an earlier one was."""

    def save(self) -> Saved | None:
        """Return what `open` needs to go on exactly here; None if work in flight cannot be."""

    def settle(self) -> None:
        """Bring the job's server to the newest version, wherever the engine keeps the model."""

    def interrupt(self, reason: str) -> None:
        """Report `Interrupted` next. May be called from a signal handler."""

    def now(self) -> float:
        """Return the seconds that have passed on this engine's clock."""

    def close(self) -> None: ...
