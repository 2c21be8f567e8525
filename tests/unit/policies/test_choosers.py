"""How many results a step waits for: plans, and tests of when more are worth it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import cos, inf, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import paceline as pl
from paceline.core.coordinator import Coordinator
from paceline.core.journal import Journal
from paceline.core.ledger import Ledger
from paceline.core.protocol import Stat, Step, Stepped
from paceline.core.schema import load_state, save_state
from paceline.policies.choosers import (
    Chooser,
    GrowOnNoise,
    GrowWhenStationary,
    Schedule,
    bound_optimal,
    switching_times,
)
from paceline.testing import History, legal_histories

# Five workers of rate 5, waited for one, two, …: 1/5 (H_5 - H_(5-k)).
FIVE = [sum(1 / i for i in range(6 - k, 6)) / 5 for k in range(1, 6)]
BOUND: dict[str, Any] = {
    "lr": 1e-3,
    "smoothness": 2.0,
    "convexity": 1.0,
    "variance": 10.0,
    "samples": 10,
    "gap": 100.0,
}


def fit(k: Chooser, steps: int, workers: int = 4, dimensions: int = 20, **problem: float) -> pl.Run:
    settings: dict[str, Any] = {"noise": 1.0, **problem}
    learner = pl.learners.Quadratic((1.0,) * dimensions, **settings)
    policy = pl.policies.Gather(k, work=pl.protocol.Work(samples=1))
    return pl.Trainer(learner, policy, pl.Simulator(workers), progress=False).fit(steps=steps)


def sizes(journal: Journal) -> list[int]:
    """How many results each step used."""
    steps = (c for entry in journal for c in entry.commands if isinstance(c, Step))
    return [len(step.weights) for step in steps]


def growth(journal: Journal) -> dict[int, int]:
    """The first step of each new k."""
    pairs = enumerate(pairwise(sizes(journal)), start=2)
    return {version: k for version, (before, k) in pairs if k != before}


def at(version: int, now: float = 0.0) -> Ledger:
    ledger = Ledger(8)
    ledger.version, ledger.now = version, now
    return ledger


def tell(chooser: Chooser, *dots: float, since: int = 0, norm: float = 1.0) -> list[int]:
    """Tell of one step after the other, and return what is chosen after each."""
    chosen = []
    for version, dot in enumerate(dots, start=since + 1):
        stats: dict[Stat, float] = {"dot": dot, "norm": norm}
        chooser.learn(at(version), Stepped(version, stats))
        chosen.append(chooser.choose(at(version)))
    return chosen


# --- schedules -----------------------------------------------------------------------------------


def test_a_schedule_changes_with_the_steps() -> None:
    run = fit(Schedule({4: 3, 0: 1, 2: 2}), 6)
    assert sizes(run.journal) == [1, 1, 2, 2, 3, 3]
    assert Schedule({4: 3, 0: 1, 2: 2}).most == 3


def test_a_schedule_changes_with_the_seconds() -> None:
    learner, policy = (
        pl.learners.Quadratic(batch_size=4),
        pl.policies.Gather(Schedule({0: 1, 2.5: 4}, "seconds")),
    )
    engine = pl.Simulator(4, pl.delays.Fixed(1.0), unit=1.0)
    run = pl.Trainer(learner, policy, engine, progress=False).fit(steps=3)
    # The first takes 4 s, with all four samples on one worker.
    assert sizes(run.journal) == [1, 4, 4]
    early = Schedule({0: 1, 2.5: 4}, "seconds")
    assert [early.choose(at(9, now)) for now in (0.0, 2.4, 2.5, 100.0)] == [1, 1, 4, 4]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, r"plan={} does not say how to begin; give a k from 0 on"),
        ({5: 2}, r"plan={5: 2} does not say how to begin"),
        ({0: 0}, r"has k=0; use whole numbers k >= 1"),
        ({0: 1, 3: 2.5}, r"has k=2.5; use whole numbers k >= 1"),
        ({0: 1, -3: 2}, r"has a k from -3 on; use steps >= 0"),
        ({0: 1, inf: 2}, r"has a k from inf on; use steps >= 0"),
        ({0: 3, 5: 2}, r"goes from k=3 down to k=2; k may only grow"),
    ],
)
def test_bad_plans_are_refused(plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(plan)


def test_a_schedule_counts_steps_or_seconds() -> None:
    with pytest.raises(ValueError, match="unit='epochs': a schedule counts 'steps' or 'seconds'"):
        Schedule({0: 1}, "epochs")  # type: ignore[arg-type]


def test_more_than_the_workers_are_refused_beforehand() -> None:
    with pytest.raises(ValueError, match="k=5 exceeds the 4 workers"):
        fit(Schedule({0: 1, 1000: 5}), 1)


# --- bound-optimal switching times ---------------------------------------------------------------


def test_switching_times_of_the_literature() -> None:
    times, errors = zip(*switching_times(FIVE, **BOUND), strict=True)
    assert times == pytest.approx((496.920, 621.624, 793.654, 1102.519), abs=5e-4)
    assert errors == pytest.approx((1.400e-3, 7.25e-4, 4.64e-4, 3.14e-4), rel=1e-3)


def bound(times: list[float], end: float) -> float:
    """Return the error bound at a time, if k grows at these times."""
    error, now = BOUND["gap"], 0.0
    for k, until in enumerate([*times, end], start=1):
        floor = BOUND["lr"] * BOUND["smoothness"] * BOUND["variance"] / (2 * k * BOUND["samples"])
        steps = (until - now) / FIVE[k - 1]
        error, now = floor + (1 - BOUND["lr"]) ** steps * (error - floor), until
    return float(error)


def test_no_switching_times_nearby_are_better() -> None:
    found = switching_times(FIVE, **BOUND)
    times, end = [time for time, _ in found], 1400.0
    for i, (time, error) in enumerate(found):
        assert bound(times[:i], time) == pytest.approx(error)
        for factor in (0.97, 1.03):
            other = [*times[:i], time * factor, *times[i + 1 :]]
            assert bound(other, end) > bound(times, end)


def test_what_is_too_slow_from_the_start_is_left_at_once() -> None:
    little = {**BOUND, "gap": 5e-4}
    times = switching_times(FIVE, **little)
    assert [time for time, _ in times[:2]] == [0.0, 0.0] and 0.0 < times[2][0] < times[3][0]
    assert [error for _, error in times[:2]] == [5e-4, 5e-4]
    assert bound_optimal(FIVE, **little).plan == {0.0: 3, times[2][0]: 4, times[3][0]: 5}
    assert switching_times([1.0, 1.0], **BOUND) == [(0.0, 100.0)]  # the second costs nothing


def test_a_bound_optimal_schedule_is_in_seconds() -> None:
    schedule = bound_optimal(np.array(FIVE), **BOUND)  # type: ignore[arg-type]
    assert [schedule.choose(at(0, now)) for now in (0.0, 496.9, 497.0, 800.0, 1e9)] == [
        1,
        1,
        2,
        4,
        5,
    ]
    Coordinator(pl.policies.Gather(schedule), batch=8).state()  # it can be saved
    assert bound_optimal([1.0], **BOUND) == Schedule({0.0: 1}, "seconds")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": []}, r"seconds=\[\]: give the finite seconds > 0"),
        ({"seconds": [1.0, inf]}, r"seconds=\[1.0, inf\]: give the finite seconds > 0"),
        ({"variance": 0.0}, r"variance=0.0: the bound needs it finite and > 0"),
        ({"gap": -1.0}, r"gap=-1.0: the bound needs it finite and > 0"),
        ({"samples": 0}, r"samples=0: the bound needs it finite and > 0"),
        ({"lr": 0.5, "convexity": 2.0}, r"needs lr \* convexity < 1; use lr < 0.5"),
    ],
)
def test_a_bound_needs_possible_constants(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        switching_times(**{"seconds": FIVE, **BOUND, **given})


# --- the sign test -------------------------------------------------------------------------------


def test_the_counter_goes_up_and_down() -> None:
    chooser = GrowWhenStationary(2, 9, step=3, threshold=1, burn_in=0)
    # The first product is none; then 0 twice, not -2, then 1, 0, 1 and 2, which is above 1.
    assert tell(chooser, 0.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0) == [2, 2, 2, 2, 2, 2, 5]
    # Step 8 is begun with two, 9 is the first with five, and 10 the first that is compared to it.
    assert tell(chooser, -1.0, -1.0, -1.0, -1.0, since=7) == [5, 5, 5, 8]
    assert tell(chooser, *[-1.0] * 9, since=11)[-1] == 9 == chooser.most  # and not 11
    assert tell(chooser, *[-1.0] * 9, since=20)[-1] == 9


def test_the_burn_in_counts_from_the_last_change() -> None:
    chooser = GrowWhenStationary(1, 3, threshold=0, burn_in=5)
    # 5 steps must pass before the 6th; after it step 7 is begun, so that 8 to 12 must pass.
    assert tell(chooser, *[-1.0] * 13) == [1] * 5 + [2] * 7 + [3]


def test_other_events_and_steps_without_a_product_do_not_count() -> None:
    chooser = GrowWhenStationary(1, 2, threshold=0, burn_in=0, lag=3)
    assert chooser.wants == {("dot", 3)} and GrowWhenStationary(1, 2).wants == {"dot"}
    chooser.learn(at(4), pl.protocol.Joined("w0"))
    chooser.learn(at(4), Stepped(4, {"loss": 1.0}))
    chooser.learn(at(3), Stepped(3, {"dot": -1.0}))  # with a step before the first
    assert chooser.choose(at(4)) == 1
    chooser.learn(at(4), Stepped(4, {"dot": -1.0}))
    assert chooser.choose(at(4)) == 2
    chooser.learn(at(4), pl.protocol.Left("w0"))


def test_far_from_the_optimum_k_stays() -> None:
    run = fit(GrowWhenStationary(1, 4, threshold=0, burn_in=0), 40, start=1000.0)
    assert sizes(run.journal) == [1] * 40


def test_at_a_standstill_k_grows() -> None:
    run = fit(GrowWhenStationary(1, 4, threshold=10, burn_in=20), 1000, start=10.0)
    found = growth(run.journal)
    assert list(found.values()) == [2, 3, 4]
    # Noise and curvature let the loss be 20 * lr / (2 - lr) / 2 = 0.53 in the end.
    assert run.metrics["loss"][min(found) - 50 : min(found)].mean() < 1.0
    assert run.metrics["loss"][-200:].mean() < 0.5 * 0.53  # a quarter with four


def test_k_grows_soon_after_a_long_descent() -> None:
    """The gradient of 100 at the start is below the noise of 1 after ln 100 / lr = 460 steps."""
    run = fit(GrowWhenStationary(1, 2), 1400, workers=2, start=100.0, lr=0.01)
    (first,) = growth(run.journal)
    assert 460 < first < 1400


def test_a_counter_of_an_older_checkpoint_may_be_negative() -> None:
    chooser = GrowWhenStationary(1, 2, threshold=1, burn_in=0)
    load_state(chooser, {**save_state(chooser), "state": {"k": 1, "changed_at": 0, "count": -900}})
    assert tell(chooser, -1.0, -1.0, -1.0, since=1) == [1, 1, 2]


@pytest.mark.parametrize("workers", [2, 4])
def test_under_a_delay_only_the_lag_beyond_it_turns_negative(workers: int) -> None:
    """With equal workers, each step but the first ones is `workers - 1` versions old."""
    delay, lr = workers - 1, 0.05

    def products(lag: int) -> Any:
        chooser = GrowWhenStationary(1, 1, lag=lag)  # only listens
        policy = pl.policies.Gather(
            chooser, max_staleness=inf, refill=True, preempt=False, work=pl.protocol.Work(samples=1)
        )
        learner = pl.learners.Quadratic((1.0,) * 50, start=0.0, noise=1.0, lr=lr)
        trainer = pl.Trainer(
            learner, policy, pl.Simulator(workers, pl.delays.Fixed(1.0)), progress=False
        )
        journal = trainer.fit(steps=4000).journal
        stats = [entry.event.stats for entry in journal if isinstance(entry.event, Stepped)]
        return np.array([each["dot"] / 50 for each in stats if "dot" in each][200 // lag :])

    # The stationary autocovariance of x_(j+1) = x_j - lr (x_(j-delay) + noise), exact up to lag
    # delay + 1, where the noise that both have in common is taken off.
    angle = 2 * np.arcsin(lr / 2)
    y = angle * (delay + 0.5)
    shift = y / 2 - pi / 4
    variance = lr * (1 + sin(y)) / (2 * cos(y) * cos(angle / 2))

    def expected(lag: int) -> float:
        common = lr if lag == delay + 1 else 0.0
        return float(variance / cos(shift) * cos(angle * lag - shift)) - common

    for lag in (1, workers):
        found = products(lag)
        error = found.std() / len(found) ** 0.5
        assert found.mean() == pytest.approx(expected(lag), abs=4 * error)
        assert found.mean() > 4 * error if lag == 1 else found.mean() < -4 * error


@pytest.mark.parametrize(("lag", "grows"), [(1, False), (2, True)])
def test_under_a_delay_the_lag_decides_whether_k_grows(lag: int, grows: bool) -> None:
    chooser = GrowWhenStationary(1, 2, threshold=20, burn_in=0, lag=lag)
    policy = pl.policies.Gather(
        chooser, max_staleness=inf, refill=True, preempt=False, work=pl.protocol.Work(samples=1)
    )
    learner = pl.learners.Quadratic((1.0,) * 50, start=0.0, noise=1.0, lr=0.1)
    engine = pl.Simulator(2, pl.delays.Fixed(1.0))
    run = pl.Trainer(learner, policy, engine, progress=False).fit(steps=1500)
    assert (sizes(run.journal)[-1] == 2) is grows


# --- measured noise ------------------------------------------------------------------------------


def test_k_grows_to_where_noise_and_signal_meet() -> None:
    """Hardly moving, at a distance of 1 with noise 2: k results have a ratio of 4 / k."""
    chooser = GrowOnNoise(1, 16, noise=0.7, memory=100)
    run = fit(chooser, 900, workers=16, dimensions=200, noise=2.0, lr=1e-9)
    found = growth(run.journal)
    assert list(found.values()) == [2, 4, 6]  # twofold at most, then 4 / 0.7 rounded up
    assert min(b - a for a, b in pairwise([0, *found])) >= 100


def test_k_grows_near_the_optimum_and_not_far_away() -> None:
    chooser = GrowOnNoise(1, 4)
    far = fit(chooser, 30, start=100.0)
    assert sizes(far.journal) == [1] * 30  # where the gradient is still 4 times the noise
    near = fit(chooser, 100, start=0.0)
    assert list(growth(near.journal).values()) == [2, 4]
    run = fit(chooser, 400, start=100.0)
    assert list(growth(run.journal).values()) == [2, 4]
    assert run.metrics["loss"][min(growth(run.journal))] < 10.0  # noise alone is 20 / 2


def test_averages_start_anew_when_k_has_grown() -> None:
    chooser = GrowOnNoise(1, 8, memory=3)
    assert tell(chooser, 0.0, -1.0, -1.0, -1.0) == [1, 1, 1, 2]  # the first product is none
    # Of 5 and 6 the product is with a step of k = 1; then three of no noise, and three of much.
    assert tell(chooser, -1.0, -1.0, 1.0, 1.0, 1.0, since=4) == [2] * 5
    assert tell(chooser, 0.7, 0.7, -2.0, since=9) == [2, 2, 4]
    assert chooser.wants == {"norm", "dot"} and GrowOnNoise(1, 2, lag=4).wants == {
        "norm",
        ("dot", 4),
    }


# --- both ----------------------------------------------------------------------------------------

CHOOSERS: dict[str, Callable[[], Chooser]] = {
    "Schedule": lambda: Schedule({0: 1, 1: 2, 3: 4}),
    "Schedule in seconds": lambda: Schedule({0: 1, 5.0: 3}, "seconds"),
    "GrowWhenStationary": lambda: GrowWhenStationary(1, 4, threshold=0, burn_in=1),
    "GrowOnNoise": lambda: GrowOnNoise(1, 5, noise=0.5, memory=2),
}


@pytest.mark.parametrize("name", CHOOSERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=legal_histories())
def test_saved_halfway_it_goes_on_the_same(name: str, history: History) -> None:
    policy = pl.policies.Gather(CHOOSERS[name](), work=pl.protocol.Work(samples=1))
    entries = list(history.play(policy).journal)
    used = sizes(history.play(policy).journal)
    assert used == sorted(used)  # k never shrinks
    half = len(entries) // 2
    first, second = Coordinator(policy, batch=8), Coordinator(policy, batch=8)
    for entry in entries[:half]:
        first.handle(entry.now, entry.event)
    second.load(first.state())
    for entry in entries[half:]:
        second.handle(entry.now, entry.event)
    assert list(second.journal) == entries[half:]


@pytest.mark.parametrize("name", ["GrowWhenStationary", "GrowOnNoise"])
def test_a_resumed_run_is_the_same(tmp_path: Path, name: str) -> None:
    """It is saved between two products, with one vector kept."""
    choosers: dict[str, Chooser] = {
        "GrowWhenStationary": GrowWhenStationary(1, 4, threshold=5, burn_in=5, lag=3),
        "GrowOnNoise": GrowOnNoise(1, 4, memory=10, lag=3),
    }
    learner = pl.learners.Quadratic((1.0,) * 20, start=1.0, noise=1.0)
    policy = pl.policies.Gather(choosers[name], work=pl.protocol.Work(samples=1))

    def trainer() -> pl.Trainer:
        saves = pl.Checkpoints(tmp_path, every=1000)
        return pl.Trainer(learner, policy, pl.Simulator(4), progress=False, checkpoints=saves)

    whole = trainer().fit(steps=400)
    before = trainer().fit(steps=50)
    after = trainer().resume(tmp_path / "step-00000050").fit(steps=400)
    assert sizes(before.journal) + sizes(after.journal) == sizes(whole.journal)
    assert np.array_equal(after.model, whole.model)
    assert max(growth(whole.journal)) > 50


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GrowWhenStationary(0, 4), "first=0, last=4: use 1 <= first <= last"),
        (lambda: GrowWhenStationary(5, 4), "first=5, last=4: use 1 <= first <= last"),
        (lambda: GrowWhenStationary(1, 4, step=0), "step=0: k may only grow; use step >= 1"),
        (lambda: GrowWhenStationary(1, 4, threshold=-1), "threshold=-1, burn_in=100: counts"),
        (lambda: GrowWhenStationary(1, 4, burn_in=-1), "burn_in=-1: counts; use both >= 0"),
        (lambda: GrowWhenStationary(1, 4, lag=0), "lag=0: .* use lag >= 1"),
        (lambda: GrowOnNoise(0, 4), "first=0, last=4: use 1 <= first <= last"),
        (lambda: GrowOnNoise(1, 4, noise=0.0), "noise=0.0: .* use a finite noise > 0"),
        (lambda: GrowOnNoise(1, 4, noise=inf), "noise=inf: .* use a finite noise > 0"),
        (lambda: GrowOnNoise(1, 4, memory=0), "memory=0: .* use memory >= 1"),
        (lambda: GrowOnNoise(1, 4, lag=-1), "lag=-1: .* use lag >= 1"),
    ],
)
def test_bad_arguments_say_what_is_allowed(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
