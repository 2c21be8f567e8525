"""Observers of every trainer in this process; the command line observes those of a script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.protocol import Prices

if TYPE_CHECKING:  # these need numpy, and the command line's help does not
    from paceline.engines.base import TrainingEngine
    from paceline.learners.base import Learner
    from paceline.report.callbacks import Callback
    from paceline.training.run import Run
    from paceline.training.settings import Shown

_observers: list[Observer] = []


@dataclass(frozen=True)
class Setup:
    """The learner and engine of a trainer, with its prices and seed."""

    learner: Learner
    engine: TrainingEngine
    prices: Prices
    seed: int


class Observer:
    """Receives every `fit` of every trainer; override the methods that you need.

    progress: how all trainers show their progress; None: each by its own `progress=`.
    resumes: whether each trainer resumes from its own checkpoints, which it then must have.
    callbacks: are called in every run, after the trainer's own.
    """

    progress: Shown | None = None
    resumes: bool = False
    callbacks: Sequence[Callback] = ()

    def fitting(self, setup: Setup) -> None:
        """Called before a trainer measures or trains; an exception prevents it."""

    def fitted(self, setup: Setup, run: Run) -> None:
        """Called with each run that ended without an error, or by SIGTERM."""


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call an observer for every `fit` until the block ends."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell_fitting(setup: Setup) -> None:
    for observer in [*_observers]:
        observer.fitting(setup)


def tell_fitted(setup: Setup, run: Run) -> None:
    for observer in [*_observers]:
        observer.fitted(setup, run)


def wished_progress(own: Shown) -> Shown:
    """Return how to show progress: as the newest observer says, or else as the trainer says."""
    wishes = [each.progress for each in _observers if each.progress is not None]
    return wishes[-1] if wishes else own


def wish_to_resume() -> bool:
    """Return whether an observer wants each trainer to resume from its own checkpoints."""
    return any(each.resumes for each in _observers)


def more_callbacks() -> list[Callback]:
    """Return the callbacks of all observers."""
    return [callback for each in _observers for callback in each.callbacks]
