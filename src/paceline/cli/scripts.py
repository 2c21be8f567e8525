"""Runs a user's script as Python would, and observes its trainers."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from paceline.cli.figures import figures
from paceline.core.extras import MissingRay
from paceline.training.observers import Observer, Setup, observing

if TYPE_CHECKING:
    from paceline.training.run import Run
    from paceline.training.settings import Shown

T = TypeVar("T")

SCRIPT = click.Path(exists=True, dir_okay=False, path_type=Path)


def run_script(script: Path, args: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGS` would.

    An error of the script ends the command with code 1. Its traceback is printed from the script
    on, or in full with --debug.
    """
    argv, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *args], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except MissingRay:
        raise  # its sentence says it all
    except Exception as error:
        debug = click.get_current_context().find_root().params.get("debug")
        shown = error if debug else error.with_traceback(_from_script(error, script))
        click.echo("".join(traceback.format_exception(shown)).rstrip(), err=True)
        raise click.exceptions.Exit(1) from None
    finally:
        sys.argv, sys.path[0] = argv, path


def _from_script(error: Exception, script: Path) -> Any:
    """Return the traceback of an error, beginning at the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


class Watched(Observer):
    """The runs of a script: the metrics of each run, and the last run."""

    def __init__(self, progress: Shown | None) -> None:
        self.progress = progress
        self.runs: list[dict[str, Any]] = []
        self.last: Run | None = None
        self.failed = False  # the loss of the last run is not finite
        self._summarized = False

    @property
    def summarized(self) -> bool:
        """Whether the script has asked for the summary of a run."""
        return self._summarized or (self.last is not None and self.last.is_summarized)

    def fitted(self, setup: Setup, run: Run) -> None:
        first = next(iter(run.journals.values()))
        path = {} if first.path is None else {"journal": str(first.path)}
        self.runs.append({**figures(run.meter, first.header, run.reason), **path})
        self._summarized, self.last = self.summarized, run
        from paceline.learners.arrays import TimingOnly  # needs numpy

        losses, arithmetic = run.meter.columns["loss"], not isinstance(setup.learner, TimingOnly)
        self.failed = bool(arithmetic and losses and not isfinite(losses[-1]))


@contextlib.contextmanager
def watched(live: bool) -> Iterator[Watched]:
    """Record all runs until the block ends; with `live`, all trainers show their workers."""
    if live:
        from paceline.report.live import require_rich

        require_rich()  # before the script runs
    seen = Watched("live" if live else None)
    with observing(seen):
        yield seen


class _Done(BaseException):
    """Ends a script at its first `fit`. Only a bare `except` could swallow it."""


class _Instead(Observer, Generic[T]):
    """Calls an action instead of the first `fit`, and ends the script there."""

    def __init__(self, action: Callable[[Setup], T]) -> None:
        self._action = action
        self.done: list[T] = []
        self.failed: list[Exception] = []

    def fitting(self, setup: Setup) -> None:
        if not self.done and not self.failed:
            try:
                self.done.append(self._action(setup))
            except Exception as error:  # must not reach the script
                self.failed.append(error)
        raise _Done


def at_first_fit(script: Path, args: Sequence[str], action: Callable[[Setup], T]) -> T:
    """Run a script until its first `fit()`, call an action instead, and end the script.

    The action is called inside the script, so that an engine that the script keeps is still open.
    """
    instead = _Instead(action)
    with observing(instead), contextlib.suppress(_Done, SystemExit):
        run_script(script, args)
    if instead.failed:
        raise instead.failed[0]
    if not instead.done:
        raise ValueError(
            f"{script} ended without a call of Trainer.fit(); give a script that trains, with the "
            "arguments it needs"
        )
    return instead.done[0]
