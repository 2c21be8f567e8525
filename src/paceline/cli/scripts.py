"""Running a user's script as Python would, with an eye on its trainers."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.cli.figures import figures

if TYPE_CHECKING:
    from paceline.core.protocol import Prices
    from paceline.engines.base import TrainingEngine
    from paceline.learners.base import Learner
    from paceline.run import Run
    from paceline.trainer import Trainer

T = TypeVar("T")

SCRIPT = click.Path(exists=True, dir_okay=False, path_type=Path)


def run_script(script: Path, args: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGS` would.

    An error of the script is told with its traceback, as far as it is of the script, and ends the
    command with code 1.
    """
    argv, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *args], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        debug = click.get_current_context().find_root().params.get("debug")
        shown = error if debug else error.with_traceback(_from_script(error, script))
        click.echo("".join(traceback.format_exception(shown)).rstrip(), err=True)
        raise click.exceptions.Exit(1) from None
    finally:
        sys.argv, sys.path[0] = argv, path


def _from_script(error: Exception, script: Path) -> Any:
    """Return a traceback without what led to the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


@dataclass
class Watched:
    """The runs of a script: figures of each, and the last one."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    last: Run | None = None
    summarized: bool = False  # by the script itself
    failed: bool = False  # the last one lost its model to nan


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Take note of all runs, and of whether anybody asks for a summary."""
    from paceline.learners.arrays import Timing
    from paceline.run import Run
    from paceline.trainer import Trainer

    seen, train, sum_up = Watched(), Trainer.fit, Run.summary

    def fit(trainer: Trainer, **ends: Any) -> Run:
        run = train(trainer, **ends)
        first = next(iter(run.journals.values()))
        path = {} if first.path is None else {"journal": str(first.path)}
        seen.runs.append({**figures(run.meter, first.header, run.reason), **path})
        losses, seen.last = run.meter.columns["loss"], run
        arithmetic = not isinstance(trainer.learner, Timing)
        seen.failed = bool(arithmetic and losses and not isfinite(losses[-1]))
        return run

    def summary(run: Run) -> str:
        seen.summarized = True
        return sum_up(run)

    with _replaced(Trainer, "fit", fit), _replaced(Run, "summary", summary):
        yield seen


@contextlib.contextmanager
def shown_live() -> Iterator[None]:
    """Have all trainers show their workers, whatever they were told."""
    from paceline.live import require_rich
    from paceline.trainer import Trainer

    require_rich()  # before the script has done anything
    make = Trainer.__init__

    def made(trainer: Trainer, *args: Any, **options: Any) -> None:
        make(trainer, *args, **{**options, "progress": "live"})

    with _replaced(Trainer, "__init__", made):
        yield


@dataclass(frozen=True)
class Made:
    """What a trainer was made with."""

    learner: Learner
    engine: TrainingEngine
    prices: Prices | None
    seed: int


class _Done(BaseException):
    """Ends a script whose trainer is known. Only a bare `except` could swallow it."""


def at_first_fit(script: Path, args: Sequence[str], action: Callable[[Made], T]) -> T:
    """Run a script until its first `fit()`, do something else there, and end the script.

    The action is called within it, so that an engine that the script keeps is still there. A
    trainer with policy="auto" measures as soon as it is made, and is caught before that.
    """
    from paceline import trainer as module
    from paceline.trainer import Trainer

    done: list[T] = []
    failed: list[Exception] = []

    def act(made: Made) -> None:
        if not done and not failed:
            try:
                done.append(action(made))
            except Exception as error:  # which the script shall not take for its own
                failed.append(error)
        raise _Done

    def fit(trainer: Trainer, **ends: Any) -> None:
        act(Made(trainer.learner, trainer.engine, trainer.prices, trainer.seed))

    def planned(
        policy: str,
        learner: Learner,
        engine: TrainingEngine,
        target: float | None,
        prices: Prices | None,
        codec: object,
        seed: int,
    ) -> None:
        act(Made(learner, engine, prices, seed))

    with (
        _replaced(Trainer, "fit", fit),
        _replaced(module, "_planned", planned),
        contextlib.suppress(_Done, SystemExit),
    ):
        run_script(script, args)
    if failed:
        raise failed[0]
    if not done:
        raise ValueError(
            f"{script} ended without a Trainer whose fit() is called; give a script that trains, "
            "with the arguments it needs"
        )
    return done[0]


@contextlib.contextmanager
def _replaced(owner: object, name: str, by: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)
