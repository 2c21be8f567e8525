"""What the page says of a run in its first sentences."""

from __future__ import annotations

from pathlib import Path

import paceline as pl
from paceline.core.journal import read_entries, read_header
from paceline.delays.models import Delay
from paceline.report.html.collect import Record, collected
from paceline.report.html.page import record_of
from paceline.report.html.sentences import slowest, three, without_result

GOLDEN = Path(__file__).parents[3] / "golden"
QUICK = pl.delays.ShiftedExponential(0.08, 0.02)


def golden(name: str) -> Record:
    path = GOLDEN / f"{name}.jsonl"
    return collected({"main": read_header(path)}, {"main": read_entries(path)})


def ran(policy: pl.protocol.Policy, delays: list[Delay], steps: int) -> Record:
    learner = pl.learners.Quadratic(curvature=(1.0, 0.1), noise=1.0, batch_size=16)
    engine = pl.Simulator(len(delays), delays)
    return record_of(pl.Trainer(learner, policy, engine, progress=False).fit(steps=steps).journals)


def test_a_straggler_whose_tasks_are_cancelled_is_named() -> None:
    slow = pl.delays.Mixture((QUICK, pl.delays.Scaled(QUICK, 10)), (0.1, 0.9))
    record = ran(pl.k_sync(3), [QUICK, QUICK, QUICK, slow], 200)
    found = slowest(record)
    assert found is not None and found[0] == "w3" and found[2] < 0.9
    assert "of w3’s tasks 92% were cancelled, the most of all, after up to" in three(record)[1]
    assert "w2 was the slowest" in three(golden("k_sync"))[1]


def test_nobody_is_praised_whose_tasks_were_cancelled() -> None:
    record = ran(pl.k_sync(1), [pl.delays.Exponential(0.1)] * 4, 400)
    assert slowest(record)[2] > 0.67  # type: ignore[index]
    assert "no worker was slow" not in three(record)[1]
    assert "were cancelled, the most of all" in three(record)[1]
    assert "no worker was slow" in three(ran(pl.sync(), [QUICK] * 4, 40))[1]


def test_who_sits_on_its_first_task_is_named() -> None:
    record = ran(pl.asynchronous(), [QUICK, QUICK, QUICK, pl.delays.Fixed(1000.0)], 50)
    assert without_result(record) == ["w3"]
    assert "w3 never finished a task (it takes at least 6.96 s)." in three(record)[1]
    early = ran(
        pl.asynchronous(), [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), pl.delays.Fixed(0.25)], 3
    )
    assert early.workers["w2"].finished == 0 and without_result(early) == []  # not yet late
