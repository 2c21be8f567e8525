"""The arguments of a trainer, and the settings that all of its runs share."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.ledger import Ledger
from paceline.core.logs import logger_of
from paceline.core.policy import Policy
from paceline.core.protocol import Prices, Want
from paceline.core.state import describe
from paceline.data.partition.base import Partition
from paceline.engines.base import Job, TrainingEngine
from paceline.learners.arrays import TimingOnly
from paceline.learners.base import Learner, Server
from paceline.learners.robust import Robust, RobustServer
from paceline.policies.backups import Backups
from paceline.policies.named import written
from paceline.policies.placement.base import BySpeed, Placement
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.callbacks import Callback, ProgressLine
from paceline.report.live import LiveView
from paceline.training.checkpoint import Checkpoints

if TYPE_CHECKING:  # these need torch and scipy
    from paceline.codecs.base import Codec
    from paceline.planner.choose import Plan

logger = logger_of(__name__)

Shown = bool | Literal["live"]
NOTES = ("written", "optimizer_class")
"""The names of `Settings.notes`."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of a trainer, apart from its policy."""

    learner: Learner
    engine: TrainingEngine
    target: float | None
    seed: int
    callbacks: Sequence[Callback]
    min_workers: int | None
    checkpoints: Checkpoints | None
    journal: Path | str | None
    progress: Shown
    prices: Prices
    placement: Placement | None
    codec: Codec | None
    model_codec: Codec | None
    robust: Robust | None
    on_not_finite: Literal["stop", "skip"]
    skip_limit: int
    backups: bool | None


@dataclass(frozen=True)
class Settings:
    """The arguments of a trainer with its policy: checked, and the same for each of its runs."""

    given: Given
    policy: Policy
    codec: Codec | None  # the given one, or that of the plan
    tiles: Partition | None
    plan: Plan | None

    @property
    def learner(self) -> Learner:
        return self.given.learner

    @property
    def engine(self) -> TrainingEngine:
        return self.given.engine

    @property
    def min_workers(self) -> int:
        """The number of workers that must have joined before training begins."""
        given = self.given.min_workers
        return self.engine.fleet.least if given is None else given

    def driven(self, policy: Policy, ends: Mapping[str, float], wait: int) -> Until:
        """Return a policy as a run drives it: it begins with `wait` workers, and ends.

        In the simulator overdue tasks are not redone by default, as in the literature.
        """
        wished, inner = self.given.backups, policy
        if wished or (wished is None and not self.engine.is_exact):
            inner = policy if isinstance(policy, Backups) else Backups(policy)
        return Until(MinWorkers(wait, inner), **ends)

    @property
    def has_arithmetic(self) -> bool:
        return not isinstance(self.learner, TimingOnly)

    @property
    def knows_loss(self) -> bool:
        """Whether every result has a loss; a loop of the user's may report none."""
        return self.has_arithmetic and getattr(self.learner, "knows_loss", True)

    def server(self) -> Server:
        """Make a server with the initial model."""
        server, robust = self.learner.server(), self.given.robust
        return server if robust is None else RobustServer(server, robust)

    def job(self, server: Server, wants: frozenset[Want], ledger: Ledger) -> Job:
        """Return the job for an engine; it begins at the time and step of the ledger."""
        return Job(
            learner=self.learner,
            server=server,
            wants=wants,
            seed=self.given.seed,
            began=ledger.now,
            steps=ledger.version,
            min_workers=self.min_workers,
            tiles=self.tiles,
            codec=self.codec,
            model_codec=self.given.model_codec,
            skip_limit=self.given.skip_limit if self.given.on_not_finite == "skip" else 0,
            adapts=isinstance(self.policy.acting.placement, BySpeed),
            overlaps=any(work.overlap for work in self.policy.works()),
        )

    def about(self) -> dict[str, Any]:
        """Describe the settings that a resumed run must share with the first."""
        parts = {
            "codec": self.codec,
            "model_codec": self.given.model_codec,
            "robust": self.given.robust,
        }
        return {
            **self.learner.about(),
            "seed": self.given.seed,
            "policy": describe(self.policy),
            **{name: describe(part) for name, part in parts.items() if part is not None},
        }

    def notes(self) -> dict[str, Any]:
        """Return what a checkpoint notes besides `about`, and a resumed run need not share."""
        kind = getattr(self.learner, "optimizer_class", None)
        return {} if kind is None else {"written": written(self.policy), "optimizer_class": kind}

    def about_run(self) -> dict[str, Any]:
        """Describe a run for its journal."""
        return {
            **self.about(),
            "written": written(self.policy),
            "engine": repr(self.engine),
            "versions": versions(),
        }


def shown(progress: Shown, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks, plus one that shows the progress if it is wanted and missing."""
    if progress not in (True, False, "live"):
        raise ValueError(
            f'progress={progress!r}: use True for a line, "live" for a table of all workers, or '
            "False for nothing"
        )
    if not progress or any(isinstance(callback, LiveView) for callback in callbacks):
        return [*callbacks]
    if progress == "live":  # first, so that it ends even if another callback fails to
        return [LiveView(), *callbacks]
    return [*callbacks, ProgressLine()]


def unused(path: Path, step: int | None) -> Path:
    """Return an unused path for a journal, so that no earlier journal is overwritten."""
    stem = path.stem if step is None else f"{path.stem}-{step}"
    names = (path.with_stem(stem if n == 1 else f"{stem}.{n}") for n in count(1))
    found = next(name for name in names if not name.exists())
    if found != path:
        logger.warning(
            "the journal of this run is %s, since existing journals are not overwritten", found
        )
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("paceline", "torch", "ray", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
