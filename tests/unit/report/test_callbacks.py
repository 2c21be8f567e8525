"""The progress line, on a terminal and off it, under a clock of the test's own."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from math import isnan

import pytest

import paceline as pl
from paceline.core.journal import Entry, Header
from paceline.core.protocol import Evaluated, Finished, Joined, LrScaled, Start, Step, Task, Work
from paceline.report.callbacks import Callback, Live, Progress, ProgressLine, progress_of
from paceline.report.metrics import Meter

SERVER = pl.learners.Quadratic().server()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(step: int = 1, **changed: float) -> Progress:
    made = Progress(
        *(step, 2.5, 0.125, 64, 0.5, 0.25, 25.6, 4, 4, 0.0, 5, 1, 800, 640, 0.0),
        SERVER.model,
        lambda reason: None,
    )
    return replace(made, **changed)  # type: ignore[arg-type]


LINE = "step {}  loss 0.1250  waiting 25%  26 samples/s  4 workers  2.5 s"


def test_off_a_terminal_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, clock)
    for step, now in ((1, 0.0), (2, 5.0), (3, 9.9), (4, 10.0), (5, 11.0)):
        clock.now = now
        line.stepped(progress(step))
    line.ended("5 steps taken")
    assert stream.getvalue().splitlines() == [
        LINE.format(1),
        LINE.format(4),
        LINE.format(5),  # the last one is never missing
        "ended: 5 steps taken",
    ]


def test_on_a_terminal_one_line_kept_current() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream, clock)
    for step, now in ((1, 0.0), (2, 0.1), (3, 0.2)):
        clock.now = now
        line.stepped(progress(step))
    line.ended("enough")
    assert stream.getvalue() == (
        f"\r\033[K{LINE.format(1)}\r\033[K{LINE.format(3)}\nended: enough\n"
    )


def test_what_an_engine_waits_for_is_shown_until_it_has_begun() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, Clock())
    asked, stages = threading.Event(), ["starting Ray", "1 of 2 are up", "1 of 2 are up"]

    def starting() -> str:
        if not stages:
            asked.set()
            return ""
        return stages.pop(0)

    line.started(Live(Header(), {}, Meter(), lambda: 0.0, starting))
    assert asked.wait(30)
    line.stepped(progress())
    line.ended("done")
    shown = stream.getvalue().splitlines()
    assert shown == ["1 of 2 are up (0 s)", LINE.format(1), "ended: done"]


def test_what_is_shown_is_not_shown_twice() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, Clock())
    line.stepped(progress())
    line.ended("done")
    assert stream.getvalue().count("step 1") == 1


def test_a_trainer_shows_its_progress_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learner, engine = pl.learners.Quadratic(batch_size=2), pl.Simulator(2)
    pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=2)
    assert capsys.readouterr() == ("", "")
    pl.Trainer(learner, pl.sync(), engine).fit(steps=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("step 1  loss 0.5000  waiting ")
    assert shown.err.endswith("ended: 2 steps taken\n")


def meter() -> Meter:
    meter = Meter()
    task = Task(0, "w0", Work(samples=8), 0, 0.0, 8, 0)
    meter.observe(Entry(0.0, Joined("w0"), (Start(task),)))
    meter.observe(Entry(3.0, Joined("w1"), ()))
    meter.observe(Entry(4.0, Finished(0, 8, 4.0, {"loss": 0.5}), (Step({0: 1.0}),)))
    return meter


def test_progress_is_read_from_the_figures() -> None:
    told: list[str] = []
    events: list[Evaluated | LrScaled] = []
    seen = progress_of(meter(), 16, 2, SERVER.model, told.append, events.append)
    assert (seen.step, seen.seconds, seen.loss, seen.samples) == (1, 4.0, 0.5, 8)
    assert (seen.epoch, seen.throughput, seen.workers) == (0.5, 2.0, 2)
    assert seen.waiting == pytest.approx(1 / 5)
    seen.stop("enough")
    assert told == ["enough"]
    assert seen.model().tolist() == [1.0]
    assert seen.model() is not SERVER.vector
    seen.evaluated({"loss": 2})
    seen.evaluated({"accuracy": 0.5}, step=0, mode="max")
    assert events == [Evaluated(1, {"loss": 2.0}), Evaluated(0, {"accuracy": 0.5}, "max")]
    seen.scale_lr(0.5, "it is late")
    assert events.pop() == LrScaled(0.5, "it is late")
    for scale in (0.0, float("inf"), -1.0):
        with pytest.raises(ValueError, match=f"scale={scale}"):
            seen.scale_lr(scale)
    with pytest.raises(ValueError, match="no metric"):
        seen.evaluated({})
    none = progress_of(meter(), None, 2, SERVER.model, told.append, events.append)
    assert isnan(none.epoch)


def test_nodes_that_have_not_joined_are_left_out() -> None:
    live = Live(Header(), {"w10": meter(), "w0": meter(), "w1": Meter()}, Meter(), lambda: 4.0)
    assert list(live.workers()) == ["w0"]
    live = Live(Header(), {"w1": meter(), "w0": meter()}, Meter(), lambda: 4.0)
    assert list(live.workers()) == ["w0", "w1"]


def test_a_callback_may_leave_everything_out() -> None:
    silent = Callback()
    silent.started(Live(Header(), {}, Meter(), lambda: 0.0))
    silent.stepped(progress())
    silent.ended("done")


class Bad(Callback):
    def ended(self, reason: str) -> None:
        raise RuntimeError("cannot close")


class Closing(Callback):
    closed = ""

    def ended(self, reason: str) -> None:
        self.closed = reason


def test_all_are_told_of_the_end_although_one_fails() -> None:
    closing = Closing()
    engine = pl.Simulator(2, pl.delays.Fixed(1.0))
    trainer = pl.Trainer(pl.learners.Quadratic(), pl.sync(), engine, callbacks=[Bad(), closing])
    with pytest.raises(RuntimeError, match="cannot close"):
        trainer.fit(steps=2)
    assert closing.closed == "2 steps taken"


class Old(Callback):
    def started(self) -> None:  # type: ignore[override]
        pass


def test_a_callback_that_takes_no_live_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"Old.started takes no Live: write started\(self, live\)"):
        pl.Trainer(pl.learners.Quadratic(), pl.sync(), pl.Simulator(2), callbacks=[Old()])
