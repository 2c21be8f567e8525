"""An observer is told of every fit in the process, while it looks on."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.training.observers import Observer, Setup, observing

LEARNER = pl.learners.Quadratic(batch_size=8)


def trainer(engine: pl.Simulator | None = None, **more: object) -> pl.Trainer:
    options = {"progress": False, "seed": 3, **more}
    return pl.Trainer(LEARNER, pl.sync(), engine or pl.Simulator(2), **options)  # type: ignore[arg-type]


class Notes(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[str, Setup, int]] = []

    def fitting(self, setup: Setup) -> None:
        self.told.append(("fitting", setup, 0))

    def fitted(self, setup: Setup, run: pl.Run) -> None:
        self.told.append(("fitted", setup, run.steps))


def test_it_is_told_of_every_fit() -> None:
    notes, engine = Notes(), pl.Simulator(2)
    setup = Setup(LEARNER, engine, pl.Prices(per_hour=1.0), 3)
    with observing(notes):
        made = trainer(engine, prices=pl.Prices(per_hour=1.0))
        assert notes.told == []
        made.fit(steps=2)
        made.fit(steps=5)
    made.fit(steps=6)
    assert notes.told == [
        *(("fitting", setup, 0), ("fitted", setup, 2)),
        *(("fitting", setup, 0), ("fitted", setup, 5)),
    ]


class Refuses(Observer):
    def fitting(self, setup: Setup) -> None:
        raise LookupError("not now")


def test_it_may_prevent_a_fit() -> None:
    made = trainer()
    with observing(Refuses()), pytest.raises(LookupError, match="not now"):
        made.fit(steps=2)
    assert made.step == 0
    assert made.fit(steps=2).steps == 2
    assert made.step == 2


class Fails(pl.Callback):
    def stepped(self, progress: pl.Progress) -> None:
        raise ZeroDivisionError


def test_it_is_not_told_of_a_run_that_failed() -> None:
    notes = Notes()
    with observing(notes), pytest.raises(ZeroDivisionError):
        trainer(callbacks=[Fails()]).fit(steps=2)
    assert [name for name, _, _ in notes.told] == ["fitting"]


class Wishes(Observer):
    progress = True


def test_it_may_wish_how_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    trainer().fit(steps=2)
    assert capsys.readouterr().err == ""
    with observing(Wishes()):
        trainer().fit(steps=2)
    assert "step 2" in capsys.readouterr().err


def test_a_run_says_whether_it_was_summed_up() -> None:
    run = trainer().fit(steps=2)
    assert not run.is_summarized
    run.summary()
    assert run.is_summarized
