"""What is learned from a task: its own seconds and fixed ones, without outliers and first tasks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import paceline as pl
from paceline.core.ledger import Ledger
from paceline.core.protocol import Assign, Cancel, Finished, Joined, Left, Stepped, Work
from paceline.core.schema import load_state, save_state
from paceline.policies.placement.pace import Pace


class Course:
    """Workers whose tasks end as the test says; what they teach goes to a pace."""

    def __init__(self, *workers: str, smoothing: float = 0.3) -> None:
        self.pace, self.ledger, self._task = Pace(smoothing), Ledger(batch=64), 0
        for worker in workers:
            self.join(worker)

    def join(self, worker: str) -> None:
        self._tell(Joined(worker))

    def leave(self, worker: str) -> None:
        self._tell(Left(worker))

    def _tell(self, event: Joined | Left | Stepped | Finished) -> None:
        for news in self.ledger.record(self.ledger.now, event):
            self.pace.learn(self.ledger, news)  # type: ignore[arg-type]

    def assign(self, worker: str, samples: int = 10, steps: int = 1) -> int:
        self.ledger.apply(Assign(worker, Work(samples=samples, steps=steps)))
        self._task += 1
        return self._task - 1

    def task(self, worker: str, seconds: float, own: float = 0.0, samples: int = 10) -> None:
        """Have a worker take some seconds for a task, of which it computes `own`."""
        self.end(self.assign(worker, samples), seconds, samples, own)

    def end(self, task: int, seconds: float, samples: int, own: float) -> None:
        self.ledger.now += seconds
        self._tell(Finished(task, samples, own))

    def sent(self, **seconds: float) -> None:
        self._tell(Stepped(1, sending=seconds))

    def seconds(self, worker: str) -> float:
        """Return the learned seconds per sample."""
        return 1 / self.pace.of([worker])[0]


def test_a_first_task_that_took_long_counts_until_there_is_a_second() -> None:
    """It loads code and data: five times as long here."""
    course = Course("a")
    course.task("a", 5.0)
    assert course.seconds("a") == pytest.approx(0.5)
    course.task("a", 1.0)
    assert course.seconds("a") == pytest.approx(0.1)


def test_a_first_task_counts_if_it_took_less_than_twice_as_long() -> None:
    course = Course("a")
    for seconds in (1.8, 1.0):
        course.task("a", seconds)
    assert course.seconds("a") == pytest.approx(0.14)


def test_a_steady_pace_gives_every_task_its_weight_from_the_first_one_on() -> None:
    course = Course("a", smoothing=0.5)
    course.pace = Pace(0.5, steady=True)
    found = []
    for seconds in (5.0, 1.0, 9.0):
        course.task("a", seconds)
        found.append(course.seconds("a"))
    assert found == pytest.approx([0.5, 0.3, 0.6])


def test_a_task_that_took_long_for_once_changes_nothing() -> None:
    course = Course("a")
    for seconds in (1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0):
        course.task("a", seconds)
        assert course.seconds("a") == pytest.approx(0.1)


def test_a_worker_that_became_slow_is_followed() -> None:
    course = Course("a", smoothing=0.5)
    for _ in range(5):
        course.task("a", 1.0)
    found = []
    for _ in range(6):
        course.task("a", 3.0)
        found.append(course.seconds("a"))
    assert found == pytest.approx([0.1, 0.2, 0.25, 0.275, 0.2875, 0.29375])


def test_a_worker_that_returns_keeps_its_speed_and_its_first_task_does_not_count() -> None:
    course = Course("a", "b")
    for _ in range(4):
        course.task("a", 1.0)
        course.task("b", 2.0)
    course.leave("a")
    assert course.pace.known() == {"b": pytest.approx(5.0)}
    course.join("a")
    assert course.seconds("a") == pytest.approx(0.1)
    course.task("a", 8.0)  # it starts again
    assert course.seconds("a") == pytest.approx(0.1)
    course.task("a", 1.0)
    assert course.seconds("a") == pytest.approx(0.1)


def test_a_cancelled_task_tells_only_that_a_worker_is_slower() -> None:
    course = Course("a", "b")
    for _ in range(4):
        course.task("a", 1.0)
    late = course.assign("a")
    course.task("b", 0.4)  # so the task of a ran for 0.4 s at least
    course.pace.learn(course.ledger, Cancel(late))
    assert course.seconds("a") == pytest.approx(0.1)


def test_messages_are_told_from_computing() -> None:
    """Of 4 seconds for 10 samples one is computing: twice the samples take 5."""
    course = Course("a", "b", "c")
    for _ in range(4):
        course.task("a", 4.0, own=1.0)
        course.task("b", 1.2, own=1.0)
        course.task("c", 1.2, own=1.0)
    names = ["a", "b", "c"]
    speeds, fixed = course.pace.parts(names, 10)
    assert speeds == pytest.approx([10.0] * 3)
    usual = 0.2 + 0.05 * 1.2  # of this task a twentieth is noise
    assert fixed == pytest.approx([3.0 - usual, 0.0, 0.0])
    for seconds in (9.0, 2.0, 2.0):
        course.sent(b=seconds, c=0.0)
    _, fixed = course.pace.parts(names, 10)
    assert fixed == pytest.approx([3.0 - 2.2 - 0.05 * 3.2, 0.0, 0.0])  # the median is now that of b


def test_unknown_workers_count_as_the_mean() -> None:
    course = Course("a", "b", "c")
    course.task("a", 1.0)
    course.task("b", 2.0)
    assert course.pace.of(["c"]) == pytest.approx([7.5])
    assert course.pace.parts(["c", "a", "b"], 10)[0] == pytest.approx([7.5, 10.0, 5.0])


def test_a_share_is_used_in_each_local_step() -> None:
    """Ten samples in each of five steps: computing takes 2 seconds, 0.2 for a sample of a share."""
    course = Course("a")
    for _ in range(4):
        task = course.assign("a", 10, steps=5)
        course.end(task, 3.0, 50, own=2.0)
    assert course.seconds("a") == pytest.approx(3.0 / 50)
    (speed,), _ = course.pace.parts(["a"], 10)
    assert speed == pytest.approx(10 / 2.0)


def test_its_state_can_be_saved_and_restored() -> None:
    course, other = Course("a", "b"), Pace(0.3)
    for _ in range(3):
        course.task("a", 4.0, own=1.0)
    course.sent(a=1.5)
    load_state(other, save_state(course.pace))
    assert save_state(other) == save_state(course.pace)
    assert other.parts(["a", "b"], 10) == course.pace.parts(["a", "b"], 10)


def test_behind_a_slow_link_a_share_is_smaller_and_all_arrive_at_once() -> None:
    """The messages of one of four workers take 4 s; the others compute for it."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1024, 8))
    learner = pl.learners.Logistic(features, np.sign(features[:, 0]), lr=0.5, batch_size=400)
    rate = learner.message_bytes / 2.0
    links = [pl.delays.Link(0.0, 100 * rate, 100 * rate)] * 3 + [pl.delays.Link(0.0, rate, rate)]

    def fit(placement: pl.BySpeed | None) -> pl.Run:
        engine = pl.Simulator(4, pl.delays.Fixed(10.0), links, unit=100)
        trainer = pl.Trainer(learner, pl.sync(), engine, progress=False, placement=placement)
        return trainer.fit(steps=20)

    adapted, equal = fit(pl.BySpeed()), fit(None)
    assert np.diff(equal.metrics["seconds"])[-1] == pytest.approx(14.0)
    # All at once would be after 10.04 + 3.96 / 4; a twentieth of a task counts as noise.
    assert 11.03 <= np.diff(adapted.metrics["seconds"])[-1] <= 11.03 + 0.4
    assert set(adapted.metrics["samples"]) == {400}  # the batch stays
    assert adapted.model == pytest.approx(equal.model, rel=1e-12)
    places = adapted.samples()
    assert all(a.offset + a.samples == b.offset for a, b in pairwise(places))
