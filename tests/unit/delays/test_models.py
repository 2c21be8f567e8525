"""Models of response time against the distributions, means and memories that they promise."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from math import inf, log, nan, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.core.state import describe
from paceline.delays.compound import Bursts, Delays, Mixture, PerWorker, Scaled, resolve
from paceline.delays.models import (
    Delay,
    Erlang,
    Exponential,
    Fixed,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Trace,
)


def draw(model: Delay, count: int, seed: int = 7, step: float = 0.0) -> list[float]:
    """Sample one worker's delays at times that are `step` seconds apart."""
    rng = np.random.default_rng(seed)
    memory: dict[str, float] = {}
    return [model.sample(rng, step * index, memory) for index in range(count)]


# Each with the variance of one sample, so that the tolerance is not the sample's own word.
VARIANCES: list[tuple[Delay, float]] = [
    (Fixed(0.3), 0.0),
    (Exponential(0.1), 0.1**2),
    (ShiftedExponential(0.2, 0.1), 0.1**2),
    (Erlang(4, 0.2), 0.2**2 / 4),
    (LogNormal(0.1, 0.5), 0.1**2 * float(np.exp(0.25) * np.expm1(0.25))),
    (Pareto(0.1, 4.0), 0.1**2 * 4 / (3**2 * 2)),
    (Mixture([Fixed(0.1), Fixed(0.5)], [3, 1]), 0.4**2 * 3 / 16),
    (Scaled(Exponential(0.1), 3.0), 0.3**2),
]


@pytest.mark.parametrize(("model", "variance"), VARIANCES, ids=lambda value: repr(value)[:24])
def test_sample_mean_is_the_mean(model: Delay, variance: float) -> None:
    count = 20_000
    error = abs(float(np.mean(draw(model, count))) - model.mean)
    assert error <= 5 * sqrt(variance / count) + 1e-12


@pytest.mark.parametrize(
    ("model", "cdf"),
    [
        (Exponential(0.1), stats.expon(scale=0.1).cdf),
        (ShiftedExponential(0.2, 0.1), stats.expon(loc=0.2, scale=0.1).cdf),
        (Erlang(3, 0.6), stats.gamma(3, scale=0.2).cdf),
        (LogNormal(0.1, 0.7), stats.lognorm(0.7, scale=0.1).cdf),
        (Pareto(0.1, 1.5), stats.pareto(1.5, scale=0.1).cdf),
        (Pareto(0.1, 0.5), stats.pareto(0.5, scale=0.1).cdf),
        (Scaled(Exponential(0.1), 2.0), stats.expon(scale=0.2).cdf),
    ],
    ids=describe,
)
def test_samples_follow_the_distribution(
    model: Delay, cdf: Callable[[np.ndarray], np.ndarray]
) -> None:
    assert stats.kstest(draw(model, 10_000), cdf).pvalue > 1e-3


def test_heavy_tails_have_no_mean() -> None:
    assert Pareto(0.1, 1.0).mean == inf
    assert Pareto(0.1, 2.0).mean == pytest.approx(0.2)
    assert Scaled(Pareto(0.1, 0.9), 2.0).mean == inf
    assert Bursts(Fixed(0.1), Pareto(0.1, 0.9), 1.0, 1.0).mean == inf
    assert Mixture([Fixed(0.1), Pareto(0.1, 0.9)], [1.0, 0.0]).mean == pytest.approx(0.1)


def test_the_most_extreme_arguments_still_give_finite_samples() -> None:
    assert np.isfinite(draw(Pareto(1.0, 0.1), 10_000)).all()
    assert np.isfinite(draw(LogNormal(1.0, 30.0), 10_000)).all()
    assert np.isfinite(LogNormal(1.0, 30.0).mean)


@pytest.mark.parametrize("step", [0.05, 1.0, 1000.0])
def test_bursts_are_slow_for_their_share_of_time(step: float) -> None:
    fast_for, slow_for, count = 3.0, 1.0, 40_000
    seconds = np.array(draw(Bursts(Fixed(0.0), Fixed(1.0), fast_for, slow_for), count, step=step))
    share = slow_for / (fast_for + slow_for)
    # The state at times h apart has correlation r = exp(-h / relaxation), which inflates the
    # variance of the average by (1 + r) / (1 - r).
    correlation = np.exp(-step * (1 / fast_for + 1 / slow_for))
    variance = share * (1 - share) * (1 + correlation) / (1 - correlation) / count
    assert abs(seconds.mean() - share) <= 5 * sqrt(variance)


@pytest.mark.parametrize("step", [0.01, 0.02, 0.3])
def test_bursts_switch_with_time_and_not_with_samples(step: float) -> None:
    fast_for, slow_for = 2.0, 1.0
    count = round(3000 / step)
    slow = np.array(draw(Bursts(Fixed(0.0), Fixed(1.0), fast_for, slow_for), count, step=step)) > 0
    # Of the slow starts, those that are fast a step later: the chain's exact transition.
    rate = 1 / fast_for + 1 / slow_for
    expected = fast_for / (fast_for + slow_for) * (1 - np.exp(-rate * step))
    leaving, starts = int((slow[:-1] & ~slow[1:]).sum()), int(slow[:-1].sum())
    assert abs(leaving / starts - expected) <= 5 * sqrt(expected * (1 - expected) / starts)


def test_bursts_sojourns_are_exponential_in_seconds() -> None:
    bursts = Bursts(Fixed(0.0), Fixed(1.0), 2.0, 1.0)
    rng = np.random.default_rng(3)
    memory: dict[str, float] = {}
    lasted: dict[float, list[float]] = {0.0: [], 1.0: []}
    now = 0.0
    for _ in range(4000):
        state = bursts.sample(rng, now, memory)
        assert bursts.sample(rng, memory["until"] - 1e-9, memory) == state
        lasted[state].append(memory["until"] - now)
        now = memory["until"]
    assert stats.kstest(lasted[0.0], stats.expon(scale=2.0).cdf).pvalue > 1e-3
    assert stats.kstest(lasted[1.0], stats.expon(scale=1.0).cdf).pvalue > 1e-3


def test_bursts_start_in_their_stationary_state() -> None:
    bursts = Bursts(Fixed(0.0), Fixed(1.0), 1.0, 4.0)
    rng = np.random.default_rng(5)
    first = [bursts.sample(rng, 100.0, {}) for _ in range(5000)]
    assert abs(np.mean(first) - 0.8) <= 5 * sqrt(0.8 * 0.2 / 5000)
    assert bursts.mean == pytest.approx(0.8)


def test_bursts_survive_idle_times_that_dwarf_their_sojourns() -> None:
    seconds = draw(Bursts(Fixed(0.0), Fixed(1.0), 1e-9, 1e-9), 1000, step=1e9)
    assert 300 < sum(seconds) < 700


def test_trace_replays_in_order_and_loops() -> None:
    trace = Trace([0.1, 0.2, 0.3])
    assert draw(trace, 7) == [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1]
    assert trace.seconds == (0.1, 0.2, 0.3)
    assert trace.mean == pytest.approx(0.2)
    assert Trace(np.array([0.5, 1.0]).tolist()) == Trace((0.5, 1))


def test_two_workers_replay_one_trace_on_their_own() -> None:
    trace, rng = Trace((1.0, 2.0)), np.random.default_rng(0)
    first: dict[str, float] = {}
    second: dict[str, float] = {}
    assert [trace.sample(rng, 0.0, first) for _ in range(3)] == [1.0, 2.0, 1.0]
    assert trace.sample(rng, 0.0, second) == 1.0


def test_nested_memories_do_not_clash() -> None:
    mixture = Mixture([Trace((1.0, 2.0, 3.0)), Trace((10.0, 20.0, 30.0))], [1, 1])
    seconds = draw(mixture, 60)
    low = [value for value in seconds if value < 10]
    high = [value for value in seconds if value >= 10]
    assert low == draw(Trace((1.0, 2.0, 3.0)), len(low))
    assert high == draw(Trace((10.0, 20.0, 30.0)), len(high))
    assert min(len(low), len(high)) > 10


def test_bursts_inside_bursts_keep_two_clocks() -> None:
    inner = Bursts(Trace((1.0,)), Scaled(Trace((2.0, 3.0)), 1.0), 5.0, 5.0)
    rng = np.random.default_rng(1)
    memory: dict[str, float] = {}
    for index in range(2000):
        Bursts(inner, inner, 5.0, 5.0).sample(rng, 0.5 * index, memory)
    nested = {"slow", "until", "fast.position", "slow.position"}
    assert memory.keys() == {"slow", "until"} | {
        f"{state}.{key}" for state in ("fast", "slow") for key in nested
    }


class Forgetful:
    """Remembers its first sample, and forgets at its second."""

    mean = 1.0

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return memory.pop("seen") if "seen" in memory else memory.setdefault("seen", 2.0)


def test_what_a_nested_model_forgets_is_forgotten() -> None:
    mixture = Mixture([Forgetful()], [1])
    memory: dict[str, float] = {}
    rng = np.random.default_rng(0)
    mixture.sample(rng, 0.0, memory)
    assert memory == {"0.seen": 2.0}
    mixture.sample(rng, 0.0, memory)
    assert memory == {}


RICH = Bursts(
    Mixture([Exponential(0.1), Trace((0.2, 0.3)), Erlang(2, 0.1)], [1, 2, 1]),
    Scaled(Bursts(Pareto(0.1, 2.0), LogNormal(0.3, 1.0), 0.5, 0.5), 4.0),
    fast_for=2.0,
    slow_for=1.0,
)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pause=st.integers(1, 99))
def test_a_run_resumes_exactly_from_its_saved_memory(seed: int, pause: int) -> None:
    whole = draw(RICH, 100, seed=seed, step=0.3)
    rng = np.random.default_rng(seed)
    memory: dict[str, float] = {}
    again = [RICH.sample(rng, 0.3 * index, memory) for index in range(pause)]
    memory = json.loads(json.dumps(memory))
    model = copy.deepcopy(RICH)
    again += [model.sample(rng, 0.3 * index, memory) for index in range(pause, 100)]
    assert again == whole
    assert all(type(value) is float for value in [*again, *memory.values()])


def test_models_are_values() -> None:
    assert Exponential(1) == Exponential(1.0)
    assert type(Exponential(1).mean) is float
    assert hash(Mixture([Fixed(1)], [1])) == hash(Mixture((Fixed(1.0),), (1.0,)))
    with pytest.raises(FrozenInstanceError):
        Exponential(0.1).mean = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(-1), r"Fixed got seconds=-1, which must be finite and >= 0"),
        (lambda: Exponential(0), r"Exponential got mean=0, .* > 0; use Fixed\(0.0\)"),
        (lambda: Exponential(nan), r"Exponential got mean=nan"),
        (lambda: ShiftedExponential(-0.1, 1), r"shift=-0.1, .* >= 0; use shift=0.0"),
        (lambda: ShiftedExponential(0.1, 0), r"scale=0, .* > 0; use Fixed\(shift\)"),
        (lambda: Erlang(0, 1), r"stages=0, which must be an integer >= 1"),
        (lambda: Erlang(1.5, 1), r"stages=1.5, which must be an integer >= 1"),  # type: ignore[arg-type]
        (lambda: Erlang(2, -1), r"Erlang got mean=-1"),
        (lambda: LogNormal(0, 1), r"LogNormal got median=0"),
        (lambda: LogNormal(1, 31), r"sigma=31, which must be finite and >= 0 and <= 30"),
        (lambda: Pareto(0, 1), r"Pareto got minimum=0"),
        (lambda: Pareto(1, 0.01), r"alpha=0.01, which must be finite and >= 0.1"),
        (lambda: Bursts(Fixed(1), Fixed(2), 0, 1), r"fast_for=0, .* use the slow model alone"),
        (lambda: Bursts(Fixed(1), Fixed(2), 1, inf), r"slow_for=inf, .* use the fast model"),
        (lambda: Trace(()), r"Trace got no seconds; give at least one"),
        (lambda: Trace((0.1, inf)), r"seconds\[1\]=inf, .* drop the tasks that never finished"),
        (lambda: Mixture([], []), r"Mixture got no models"),
        (lambda: Mixture([Fixed(1)], [1, 2]), r"weights=\(1.0, 2.0\) for 1 models"),
        (lambda: Mixture([Fixed(1), Fixed(2)], [2, -1]), r"one finite weight >= 0"),
        (lambda: Mixture([Fixed(1)], [0]), r"not all of them 0"),
        (lambda: Scaled(Fixed(1), 0), r"Scaled got factor=0"),
        (lambda: PerWorker([]), r"PerWorker got no models"),
    ],
)
def test_bad_arguments_say_what_is_allowed(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Scaled(0.1, 2.0),  # type: ignore[arg-type]
        lambda: Bursts(Fixed(1), 2.0, 1, 1),  # type: ignore[arg-type]
        lambda: Mixture([0.1], [1]),  # type: ignore[list-item]
        lambda: PerWorker({"a": 0.1}),  # type: ignore[dict-item]
        lambda: resolve([0.1], "a", 0),  # type: ignore[list-item]
        lambda: resolve(0.1, "a", 0),  # type: ignore[arg-type]
        lambda: resolve("fast", "a", 0),  # type: ignore[arg-type]
    ],
)
def test_plain_seconds_are_refused_with_the_way_to_wrap_them(build: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"wrap plain seconds as Fixed\(seconds\)"):
        build()


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        (Fixed(1.0), [1.0, 1.0, 1.0]),
        ([Fixed(1.0), Fixed(2.0)], [1.0, 2.0, 1.0]),
        (PerWorker((Fixed(1.0), Fixed(2.0))), [1.0, 2.0, 1.0]),
        ({"c": Fixed(3.0), "b": Fixed(2.0), "a": Fixed(1.0)}, [1.0, 2.0, 3.0]),
        (PerWorker({"c": Fixed(3.0), "b": Fixed(2.0), "a": Fixed(1.0)}), [1.0, 2.0, 3.0]),
        (Forgetful(), [1.0, 1.0, 1.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_resolve_finds_the_model_of_each_worker(delays: Delays, expected: list[float]) -> None:
    models = [resolve(delays, worker, index) for index, worker in enumerate("abc")]
    assert [model.mean for model in models] == expected


def test_a_worker_without_a_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"worker 'z' has no delay; there are delays for \['a'\]"):
        resolve({"a": Fixed(1.0)}, "z", 0)


def test_lognormal_median_is_the_median() -> None:
    above = float(np.mean(np.array(draw(LogNormal(0.4, 1.2), 10_000)) > 0.4))
    assert abs(above - 0.5) <= 5 * 0.5 / sqrt(10_000)
    assert LogNormal(0.4, 1.2).mean == pytest.approx(0.4 * float(np.exp(1.2**2 / 2)))
    assert log(LogNormal(1.0, 0.0).mean) == 0.0
