"""Which figures are sent under which names, and what a run's configuration looks like."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

import paceline as pl
from paceline.core.journal import Header
from paceline.integrations.trackers.base import Tracker
from paceline.integrations.trackers.figures import (
    FIGURES,
    WORKER_FIGURES,
    configuration,
    report,
    values,
)
from paceline.report.callbacks import Live, Progress


class Kept(Tracker):
    """Keeps what it is told."""

    def __init__(self, every: int = 1, workers_every: int = 10) -> None:
        super().__init__(every, workers_every)
        self.sent: dict[int, dict[str, float]] = {}
        self.given: dict[str, object] = {}
        self.reports: list[str] = []

    def _open(self, live: Live) -> None:
        self.given = dict(configuration(live.header))

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        before = self.sent.setdefault(step, {})
        assert not set(before) & set(figures)  # nothing is sent twice
        before.update(figures)

    def _close(self, live: Live, reason: str) -> None:
        self.reports.append(report(live, reason))


def train(tracker: pl.Callback, steps: int = 7, **more: object) -> pl.Run:
    features = np.random.default_rng(0).normal(size=(40, 3))
    learner = pl.learners.LeastSquares(features, features.sum(axis=1), batch_size=6)
    engine = pl.Simulator(
        3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.15), pl.delays.Fixed(1.0)], unit=1
    )
    return pl.Trainer(
        learner, pl.k_sync(2), engine, callbacks=[tracker], progress=False, seed=3, **more  # type: ignore[arg-type]
    ).fit(steps=steps)  # fmt: skip


def test_the_figures_are_those_of_the_run() -> None:
    kept = Kept(workers_every=1)
    run = train(kept, prices=pl.Prices(per_hour=36.0))
    assert list(kept.sent) == [1, 2, 3, 4, 5, 6, 7]
    columns = {
        "train/loss": "loss",
        "time/seconds": "seconds",
        "step/number": "step",
        "step/results": "results",
        "step/staleness": "staleness",
        "cost/dollars": "dollars",
    }
    for name, column in columns.items():
        assert [sent[name] for sent in kept.sent.values()] == run.metrics[column].tolist()
    last = kept.sent[7]
    assert last["train/samples"] == run.meter.samples_used
    assert last["train/epoch"] == run.meter.samples_used / 40
    assert last["workers/present"] == 3
    assert 0 < last["workers/waiting"] < 1
    # What is cancelled and started in response to a step is told of in the next.
    assert 0 < last["tasks/wasted_share"] == last["tasks/wasted"] / last["tasks/started"]
    both = last["cost/gigabytes_down"] + last["cost/gigabytes_up"]
    assert last["cost/gigabytes"] == pytest.approx(both)
    assert both > 0
    assert last["worker_speed/w0"] == pytest.approx(10)
    assert last["worker_speed/w1"] == pytest.approx(1 / 0.15)
    assert last["worker_share_used/w0"] == 1.0
    assert last["worker_share_used/w2"] == 0.0
    assert kept.reports == [run.summary()]


def test_what_is_no_number_is_left_out() -> None:
    kept = Kept()
    engine = pl.Simulator(2)
    pl.Trainer(pl.learners.TimingOnly(4), pl.sync(), engine, callbacks=[kept], progress=False).fit(
        steps=2
    )
    assert not {"train/loss", "train/epoch", "cost/dollars"} & set(kept.sent[2])
    assert kept.sent[2]["step/results"] == 2


def test_every_so_many_steps_and_the_last() -> None:
    kept = Kept(every=3)
    train(kept)
    assert list(kept.sent) == [3, 6, 7]
    kept = Kept(every=7)
    train(kept)
    assert list(kept.sent) == [7]
    for wrong in ({"every": 0}, {"workers_every": 0}):
        with pytest.raises(
            ValueError, match="every=0: the steps between two writes; use 1 or more"
        ):
            Kept(**wrong)


def test_the_figures_of_each_worker_are_sent_less_often() -> None:
    kept = Kept(every=2, workers_every=5)
    train(kept, steps=13)
    told = [step for step, sent in kept.sent.items() if "worker_speed/w2" in sent]
    assert list(kept.sent) == [2, 4, 6, 8, 10, 12, 13]
    assert told == [2, 8, 13]  # with the first that is due, and with the last
    kept = Kept()
    run = train(kept, steps=3)
    assert "worker_speed/w2" not in kept.sent[2]
    for worker, tally in run.meter.workers.items():  # as it was in the end
        assert kept.sent[3][f"worker_speed/{worker}"] == tally.speed(run.meter.now)


def test_without_a_main_node() -> None:
    kept = Kept(workers_every=4)
    learner = pl.learners.Quadratic((1.0, 0.3), batch_size=6)
    trainer = pl.Trainer(
        learner,
        pl.gossip.Gossip(pl.gossip.ring(3)),
        pl.Simulator(3),
        callbacks=[kept],
        progress=False,
    )
    run = trainer.fit(steps=4)
    assert list(kept.sent) == [1, 2, 3, 4]
    assert kept.sent[1]["worker_speed/w2"] > 0
    assert run.summary().startswith(kept.reports[0])


def test_the_configuration_is_flat() -> None:
    kept = Kept()
    train(
        kept, codec=pl.codecs.Half(), prices=pl.Prices(per_hour={"w0": 1.0, "w1": 2.0, "w2": 3.0})
    )
    given = kept.given
    assert given["policy"] == "k_sync(2)"
    assert given["seed"] == 3
    assert given["batch_size"] == 6
    assert given["codec"] == "Half()"
    assert given["prices.per_hour.w1"] == 2.0
    assert given["versions.paceline"] == pl.__version__
    assert str(given["engine"]).startswith("Simulator(")
    assert all(isinstance(value, str | int | float) for value in given.values())
    assert list(given) == sorted(given)


def test_a_list_becomes_text_and_nothing_is_left_out() -> None:
    about = {"forecast": {"intervals": {"seconds": [1.5, None]}}, "other": None}
    given = configuration(Header("Gather()", 8, about, tiles=(3, 4)))
    assert given["forecast.intervals.seconds"] == "[1.5, null]"
    assert given["tiles"] == 2
    assert "other" not in given


def test_names_fit_all_trackers() -> None:
    names = [figure.name for figure in (*FIGURES, *WORKER_FIGURES)]
    assert len(set(names)) == len(names)
    for figure in (*FIGURES, *WORKER_FIGURES):
        assert re.fullmatch(r"paceline_[a-z_]+", figure.metric)
    assert len({figure.metric for figure in (*FIGURES, *WORKER_FIGURES)}) == len(names)


def test_a_run_that_fails_is_closed_all_the_same() -> None:
    class Breaks(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 3:
                raise RuntimeError("of the user")

    kept = Kept(every=2)
    trainer = pl.Trainer(
        pl.learners.Quadratic(),
        pl.sync(),
        pl.Simulator(2),
        callbacks=[kept, Breaks()],
        progress=False,
    )
    with pytest.raises(RuntimeError, match="of the user"):
        trainer.fit(steps=5)
    assert list(kept.sent) == [2, 3]
    assert "(ended: failed)" in kept.reports[0]


def test_an_error_at_the_start_reaches_the_user_and_later_ones_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Kept):
        def _write(self, step: int, figures: Mapping[str, float]) -> None:
            super()._write(step, figures)
            if step == 2:
                raise OSError("no space left on device")

    class Shut(Kept):
        def _open(self, live: Live) -> None:
            raise OSError("no such server")

    full, shut = Full(), Shut()
    run = train(full)
    assert run.steps == 7
    assert list(full.sent) == [1, 2]
    assert len(full.reports) == 1  # and let go of what it has
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "Full failed at step 2 and gets no more metrics; the run continues "
        "(OSError: no space left on device)"
    )
    with pytest.raises(OSError, match="no such server"):
        train(shut)
    assert not shut.reports
    assert train(full, steps=1).steps == 1  # a new run is a new beginning


def test_figures_of_a_step_alone() -> None:
    kept: list[dict[str, float]] = []

    class Look(pl.Callback):
        def started(self, live: Live) -> None:
            self.live = live

        def stepped(self, progress: Progress) -> None:
            kept.append(values(progress, self.live))

    train(Look(), steps=1)
    (found,) = kept
    assert set(found) == {figure.name for figure in FIGURES} - {"cost/dollars"}
