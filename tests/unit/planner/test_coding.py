from __future__ import annotations

import inspect

import pytest

import paceline as pl
from paceline.core.state import describe
from paceline.planner.coding import advise
from paceline.policies.coded import coded

COMPUTING = pl.delays.ShiftedExponential(1.0, 0.2)
SLOW = pl.delays.Link(up=1e6)
MODEL = 8_000_000  # bytes: 8 s over the slow link


def test_pays_where_sending_takes_longest() -> None:
    advice = advise(COMPUTING, 12, message_bytes=MODEL, link=SLOW, steps=30)
    assert advice.pays
    assert advice.best is advice.quickest is advice.options[0]
    assert advice.best.messages >= 2
    # 1/m of the 8 s, and at least d times the shift of what is computed.
    assert advice.best.seconds > 8 / advice.best.messages + advice.best.load
    assert advice.best.times == pytest.approx(advice.best.seconds / advice.sync.seconds)
    assert describe(advice.policy) == describe(coded(advice.best.stragglers, advice.best.messages))
    assert str(advice).startswith("Coding pays on these 12 workers: coded(stragglers=")
    assert "most deep nets" in str(advice).splitlines()[0]


def test_does_not_pay_where_computing_takes_longest() -> None:
    advice = advise(pl.delays.ShiftedExponential(3.0, 0.5), 12, steps=30)
    assert not advice.pays
    assert advice.best is advice.sync is advice.options[0]
    assert describe(advice.policy) == describe(pl.sync())
    assert str(advice).startswith("Coding does not pay on these 12 workers, as it does not for")
    assert all(option.times > 1 for option in advice.options[1:])


def test_a_straggler_that_is_always_the_same_one() -> None:
    """Of 4, one takes 9 s and the others 1 s: any s = 1 hides it at twice the computing."""
    advice = advise([pl.delays.Fixed(9.0), *[pl.delays.Fixed(1.0)] * 3], 4, steps=10)
    assert advice.sync.seconds == pytest.approx(9.0)
    assert advice.best.seconds == pytest.approx(2.0)
    assert (advice.best.stragglers, advice.best.messages) == (1, 1)


def test_a_saving_that_is_not_worth_the_computing() -> None:
    """Of 4, one takes 2.04 s: s = 1 takes 2 s, 2 % less."""
    advice = advise([pl.delays.Fixed(2.04), *[pl.delays.Fixed(1.0)] * 3], 4, steps=10)
    assert advice.quickest.times == pytest.approx(2 / 2.04)
    assert not advice.pays


def test_times_are_those_of_the_simulator_and_of_arithmetic() -> None:
    link = pl.delays.Link(latency=0.5, down=4e6, up=2e6)
    advice = advise(
        pl.delays.Fixed(1.0), 4, message_bytes=MODEL, link=link, stragglers=[0], steps=5
    )
    by_shape = {(option.stragglers, option.messages): option for option in advice.options}
    assert advice.sync.seconds == pytest.approx(0.5 + 2 + 1 + 0.5 + 4 + 4 * MODEL * 0.2e-9)
    arithmetic = 2 * MODEL * 0.5e-9 + 4 * MODEL / 2 * 0.4e-9
    assert by_shape[0, 2].seconds == pytest.approx(0.5 + 2 + 2 + 0.5 + 2 + arithmetic)
    assert by_shape[0, 4].load == 4


def test_asks_only_for_the_stragglers_wanted() -> None:
    advice = advise(COMPUTING, 6, stragglers=2, steps=5)
    assert advice == advise(COMPUTING, 6, stragglers=[2], steps=5)
    assert {option.stragglers for option in advice.options[1:]} == {2}
    assert {option.load for option in advice.options} == {1, 3, 4, 5, 6}


def test_the_same_seed_gives_the_same_advice() -> None:
    first, again, other = (
        advise(pl.delays.Exponential(1.0), 5, message_bytes=MODEL, link=SLOW, steps=20, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first.sync.seconds != other.sync.seconds


def test_measured_seconds_one_trace_for_each_worker() -> None:
    traces = [
        pl.delays.Trace([1.0, 1.0, 7.0]),
        pl.delays.Trace([1.0, 7.0, 1.0]),
        pl.delays.Trace([7.0, 1.0, 1.0]),
    ]
    advice = advise(traces, 3, stragglers=[1], steps=30)
    assert advice.sync.seconds == pytest.approx(7.0)
    assert advice.best.seconds == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"one Trace for all .* give a sequence of 3"):
        advise(traces[0], 3)


def test_the_advised_policy_runs() -> None:
    advice = advise(COMPUTING, 6, message_bytes=MODEL, link=SLOW, steps=10)
    problem = pl.learners.Quadratic((1.0, 0.5), batch_size=12)
    run = pl.Trainer(problem, advice.policy, pl.Simulator(6, COMPUTING, SLOW), progress=False).fit(
        steps=3
    )
    assert run.steps == 3
    assert advice.policy is not advice.policy  # policies keep what they learn


def test_coded_is_the_function_that_can_also_advise() -> None:
    assert pl.coded.advise is advise
    assert describe(pl.coded(stragglers=2, messages=2)) == describe(coded(2, 2))
    assert inspect.getdoc(pl.coded) == inspect.getdoc(coded)
    assert inspect.signature(pl.coded) == inspect.signature(coded)
    assert repr(pl.coded) == "<paceline.coded, with paceline.coded.advise>"


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"n=1: .* use at least 2 workers"):
        advise(COMPUTING, 1)
    with pytest.raises(ValueError, match="steps=0, message_bytes=0: use steps >= 1"):
        advise(COMPUTING, 4, steps=0)
    with pytest.raises(ValueError, match=r"stragglers=\[9\] leaves no code .* 0 to 3"):
        advise(COMPUTING, 4, stragglers=[9])
    with pytest.raises(TypeError, match=r"delays=0.3 .* wrap plain seconds as Fixed"):
        advise(0.3, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a step takes no time; give delays above 0"):
        advise(pl.delays.Fixed(0.0), 4, steps=1)
