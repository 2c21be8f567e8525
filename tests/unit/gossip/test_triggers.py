"""Whether a message is worth sending: the published rules to the number, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf, nan, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.protocol import Figures
from paceline.core.schema import load_state, save_state
from paceline.gossip.triggers import (
    Always,
    EventGrad,
    EventGradStatic,
    Lag,
    OnChange,
    Trigger,
)

NORMS = [2.0, 2.2, 2.3, 2.36, 2.40, 2.41, 2.45, 2.40, 2.60, 2.61, 2.70, 2.95]
WALK = 10 + np.cumsum(0.05 * np.random.default_rng(0).standard_normal(1000))
DRIFT = [10 + 0.1 * p for p in range(1, 201)]


def events(trigger: Trigger, norms: Sequence[float] | np.ndarray[Any, Any]) -> list[int]:
    """Return the passes in which a single tensor of these norms is sent."""
    shown = enumerate(norms, start=1)
    return [p for p, norm in shown if trigger.fires(p, {"norm": [norm]}, [1], 0.1) == [True]]


# --- EventGraD: the oracles of the digest, D6 ----------------------------------------------------


@pytest.mark.parametrize(
    ("horizon", "sent", "used", "final"),
    [
        (
            0.9,
            [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1],
            [0, 0.9, 0.99, 0.135, 0.072, 0.0648, 0.05832, 0.0405, 0.036, 0.1125, 0.10125, 0.091125],
            0.158333,
        ),
        (
            1.0,
            [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1],
            [0, 1, 1.1, 0.15, 0.08, 0.08, 0.08, 0.045, 0.04, 0.125, 0.125, 0.125],
            0.158333,
        ),
        (
            1.1,
            [1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1],
            [
                *(0, 1.1, 1.21, 0.165, 0.088, 0.0968),
                *(0.10648, 0.117128, 0.128841, 0.0594, 0.06534, 0.0539),
            ],
            0.15,
        ),
    ],
)
def test_the_thresholds_of_eventgrad(
    horizon: float, sent: list[int], used: list[float], final: float
) -> None:
    trigger = EventGrad(horizon, warm=5)
    before, fired = [0.0], []
    for p, norm in enumerate(NORMS, start=1):
        fired += trigger.fires(p, {"norm": [norm]}, [7], 0.1)
        before += trigger.thresholds
    assert fired == [bool(each) for each in sent]
    assert [horizon * each for each in before[:-1]] == pytest.approx(used, abs=5e-7)
    assert trigger.thresholds == pytest.approx([final], abs=5e-7)


@pytest.mark.parametrize(
    ("horizon", "count"), [(0.95, 200), (1.05, 114), (1.2, 114), (1.42, 86), (1.45, 29)]
)
def test_linear_drift(horizon: float, count: int) -> None:
    assert len(events(EventGrad(horizon), DRIFT)) == count


@pytest.mark.parametrize(
    ("horizon", "count"),
    [(0.0, 1000), (0.5, 724), (0.9, 488), (0.95, 447), (1.0, 389), (1.05, 135), (1.2, 29)],
)
def test_a_random_walk(horizon: float, count: int) -> None:
    assert len(events(EventGrad(horizon), WALK)) == count


def test_a_horizon_above_1_falls_silent() -> None:
    assert events(EventGrad(1.05), WALK)[-1] == 304
    assert events(EventGrad(1.45), DRIFT)[-1] == 29


@pytest.mark.parametrize(
    ("threshold", "count"), [(0.0, 1000), (0.05, 389), (0.1, 176), (0.2, 72), (0.5, 39)]
)
def test_a_static_threshold(threshold: float, count: int) -> None:
    assert len(events(EventGradStatic(threshold), WALK)) == count


def test_warmed_up_too_short_nothing_fires_again() -> None:
    trigger = EventGrad(1.0, warm=3)
    assert events(trigger, NORMS) == [1, 2]
    assert trigger.thresholds == pytest.approx([1.1])
    assert len(events(EventGrad(1.0, warm=4), NORMS)) > 3


def test_the_first_29_passes_are_sent() -> None:
    assert events(EventGrad(1.0), [1.0] * 29) == list(range(1, 30))
    assert events(EventGradStatic(9.0), [1.0] * 60) == list(range(1, 30))


def test_a_longer_history_is_a_mean_of_more_slopes() -> None:
    trigger = EventGrad(1.0, warm=5, history=4)
    events(trigger, [1.0, 3.0, 6.0, 10.0])
    assert trigger.thresholds == [(1 + 2 + 3 + 4) / 4]


def test_a_turn_is_seen_by_its_change_only() -> None:
    one, other = np.array([3.0, 4.0]), np.array([-4.0, 3.0])
    blind, seeing = EventGradStatic(0.1, warm=2), OnChange(0.1)
    for p, (x, last) in enumerate(((one, one), (other, one)), start=1):
        shown: Figures = {
            "norm": [float(np.linalg.norm(x))],
            "change": [float(np.linalg.norm(x - last))],
        }
        assert blind.fires(p, shown, [2], 0.5) == [p == 1]
        assert seeing.fires(p, shown, [2], 0.5) == [p == 2]


def test_each_tensor_has_a_threshold_of_its_own() -> None:
    together = EventGrad(0.95, warm=5)
    streams = [WALK[:200], WALK[200:400], WALK[400:600]]
    fired = [
        together.fires(p, {"norm": norms}, [1, 2, 3], 0.1)
        for p, norms in enumerate(zip(*streams, strict=True), start=1)
    ]
    for i, stream in enumerate(streams):
        alone = events(EventGrad(0.95, warm=5), stream)
        assert [p for p, each in enumerate(fired, start=1) if each[i]] == alone


# --- ours ----------------------------------------------------------------------------------------


def test_the_threshold_is_of_rate_and_size() -> None:
    trigger = OnChange(0.3)
    sizes, rate = [4, 100, 10_000], 0.05
    limits = [0.3 * rate * sqrt(size) for size in sizes]
    assert trigger.fires(1, {"change": limits}, sizes, rate) == [True] * 3
    below = [np.nextafter(limit, 0) for limit in limits]
    assert trigger.fires(2, {"change": below}, sizes, rate) == [False] * 3
    assert trigger.fires(3, {"change": below}, sizes, rate / 2) == [True] * 3
    assert trigger.fires(4, {"change": [below[1], limits[1], 0.0]}, sizes, rate) == [
        *(True, True, False),
    ]


def test_silence_has_an_end() -> None:
    trigger = OnChange(1.0, every=5)
    sent: list[list[int]] = [[], []]
    for p in range(1, 21):
        fired = trigger.fires(p, {"change": [0.0, 9.0 if p == 7 else 0.0]}, [1, 1], 0.1)
        for i in (0, 1):
            sent[i] += [p] * fired[i]
    assert sent == [[5, 10, 15, 20], [5, 7, 12, 17]]


def test_nothing_is_sent_that_all_have() -> None:
    trigger = OnChange(0.1)
    assert not any(trigger.fires(p, {"change": [0.0]}, [10], 0.1)[0] for p in range(1, 200))
    assert OnChange(0.0).fires(1, {"change": [0.0]}, [10], 0.1) == [True]


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=40),
    st.floats(0, 2),
    st.integers(1, 9),
    st.floats(0.01, 1),
)
def test_what_is_not_sent_is_small_and_young(
    moves: list[float], scale: float, every: int, rate: float
) -> None:
    trigger, change, last = OnChange(scale, every), 0.0, 0
    for p, move in enumerate(moves, start=1):
        change += move
        if trigger.fires(p, {"change": [change]}, [9], rate) == [True]:
            change, last = 0.0, p
        assert change < scale * rate * 3 or change == 0
        assert p - last < every


def test_the_rule_of_sparq() -> None:
    # |x - x̂|^2 >= c_t rate^2, c_t = c_0 t^(1 - e), of a model of 400 numbers.
    c, e, rate, size = 50.0, 0.2, 0.1, 400
    trigger = OnChange(sqrt(c / size), growth=(1 - e) / 2)
    rng = np.random.default_rng(0)
    expected, fired = [], []
    for t in range(1, 400):
        change = float(rng.uniform(0, 15))
        expected.append(change**2 > c * t ** (1 - e) * rate**2)
        fired += trigger.fires(t, {"change": [change]}, [size], rate)
    assert fired == expected
    assert 20 < sum(fired) < 380
    assert np.mean(fired[:50]) > np.mean(fired[-50:])  # thresholds grow


def test_tensors_together_have_the_threshold_of_the_model() -> None:
    sizes = [10, 90, 300]
    limits = [0.3 * 0.1 * sqrt(size) for size in sizes]
    assert sum(limit**2 for limit in limits) == pytest.approx((0.3 * 0.1) ** 2 * sum(sizes))


def test_always() -> None:
    assert Always().wants == frozenset()
    assert Always().fires(1, {}, [1, 2], 0.1) == [True, True]


# --- LAG -----------------------------------------------------------------------------------------


def quadratics() -> tuple[list[Any], list[Any]]:
    """f_m = |A_m x - y|^2 / 2, A_m = 1.3^m q_m q_m^T + I, m = 0 … 8: ever less smooth."""
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.standard_normal((50, 50)))
    y = rng.standard_normal(50)
    of = [1.3**m * np.outer(q[:, m], q[:, m]) + np.eye(50) for m in range(9)]
    return [a.T @ a for a in of], [a.T @ y for a in of]


def descend(triggers: Sequence[Trigger]) -> tuple[int, list[int]]:
    """Return the steps to a gap of 1e-8, and the uploads of each worker, who is asked each time."""
    hessians, offsets = quadratics()
    hessian, offset = sum(hessians), sum(offsets)
    rate = 1 / np.linalg.eigvalsh(hessian)[-1]
    best = np.linalg.solve(hessian, offset)
    x, sent = np.zeros(50), [np.zeros(50)] * 9
    steps, move, uploads = 0, 0.0, [0] * 9
    while (x - best) @ hessian @ (x - best) / 2 > 1e-8:
        for m, trigger in enumerate(triggers):
            gradient = hessians[m] @ x - offsets[m]
            change = float(np.linalg.norm(gradient - sent[m]))
            if trigger.fires(steps + 1, {"change": [change], "move": [move]}, [50], rate) == [True]:
                sent[m], uploads[m] = gradient, uploads[m] + 1
        following = x - rate * sum(sent)
        move, x, steps = float(np.linalg.norm(following - x)), following, steps + 1
    return steps, uploads


def test_gradient_descent_and_lag() -> None:
    steps, uploads = descend([Always()] * 9)
    assert (steps, sum(uploads)) == (115, 1035)
    steps, uploads = descend([Lag(workers=9) for _ in range(9)])
    assert (steps, sum(uploads)) == (75, 127)
    assert uploads[0] < uploads[-1]  # whose gradient hardly changes is hardly asked


def test_lag_sees_all_tensors_as_one() -> None:
    whole, cut = Lag(3), Lag(3)
    for p in range(1, 30):
        move, change = 1 / p, 3 / p**0.5
        one = whole.fires(p, {"change": [change], "move": [move]}, [2], 0.5)
        parts: Figures = {
            "change": [change * 0.6, change * 0.8],
            "move": [move * 0.8, move * 0.6],
        }
        assert cut.fires(p, parts, [1, 1], 0.5) == one * 2


def test_lag_forgets_what_is_long_ago() -> None:
    trigger = Lag(1, memory=3, xi=1.0)
    fired = []
    for p in range(1, 8):
        shown: Figures = {"change": [1.0], "move": [2.0 if p == 2 else 0.0]}
        fired += trigger.fires(p, shown, [1], 1.0)
    assert fired == [True, False, False, False, True, True, True]


def test_lag_at_a_rate_of_zero_has_no_use_for_news() -> None:
    trigger = Lag(2)
    shown: Figures = {"change": [1.0], "move": [0.0]}
    assert [trigger.fires(p, shown, [1], 0.0) for p in (1, 2)] == [[True], [False]]


# --- all -----------------------------------------------------------------------------------------

TRIGGERS: list[Trigger] = [
    *(EventGrad(0.95, warm=4), EventGradStatic(0.1, warm=4), OnChange(0.5, 9), Lag(3)),
]


def figures(seed: int) -> list[Figures]:
    rng = np.random.default_rng(seed)
    names = ("norm", "change", "move")
    return [{name: rng.uniform(0, 1, 2) for name in names} for _ in range(60)]  # type: ignore[misc]


@pytest.mark.parametrize("make", range(len(TRIGGERS)))
def test_it_goes_on_where_it_was_saved(make: int) -> None:
    whole, first, second = (deepcopy(TRIGGERS[make]) for _ in range(3))
    shown = figures(0)
    all_at_once = [whole.fires(p, each, [3, 4], 0.2) for p, each in enumerate(shown, start=1)]
    before = [first.fires(p, each, [3, 4], 0.2) for p, each in enumerate(shown[:30], start=1)]
    load_state(second, save_state(first))
    after = [second.fires(p, each, [3, 4], 0.2) for p, each in enumerate(shown[30:], start=31)]
    assert before + after == all_at_once
    assert 0 < sum(map(sum, all_at_once)) < 120
    assert {type(each) for fired in all_at_once for each in fired} == {bool}


@pytest.mark.parametrize("make", range(len(TRIGGERS)))
@pytest.mark.parametrize("figure", [nan, inf])
def test_what_is_not_a_number_is_sent(make: int, figure: float) -> None:
    trigger = deepcopy(TRIGGERS[make])
    for p in range(1, 7):
        calm: Figures = {"norm": [min(p, 3.0)], "change": [0.0], "move": [1.0]}
        fired = trigger.fires(p, calm, [1], 0.1)
    assert fired == [False]
    assert trigger.fires(7, {**calm, "norm": [figure], "change": [figure]}, [1], 0.1) == [True]


def test_eventgrad_sends_what_stands_still() -> None:
    """Two slopes of zero make a threshold of zero, which no change is below."""
    assert events(EventGrad(0.9, warm=3), [5.0] * 9) == [1, 2]
    assert events(EventGrad(0.9, warm=4), [5.0] * 9) == list(range(1, 10))


@pytest.mark.parametrize("make", range(len(TRIGGERS)))
def test_it_wants_what_it_reads(make: int) -> None:
    trigger = deepcopy(TRIGGERS[make])
    shown: Figures = {name: [1.0] for name in trigger.wants}
    assert len(trigger.fires(1, shown, [1], 0.1)) == 1
    for name in trigger.wants:
        with pytest.raises(KeyError):
            deepcopy(TRIGGERS[make]).fires(1, {n: [1.0] for n in trigger.wants - {name}}, [1], 0.1)


def test_another_number_of_tensors_is_refused() -> None:
    for trigger in (EventGrad(1.0), EventGradStatic(1.0), OnChange(1.0)):
        trigger.fires(1, {"norm": [1.0, 1.0], "change": [1.0, 1.0]}, [1, 1], 0.1)
        with pytest.raises(ValueError):
            trigger.fires(2, {"norm": [1.0], "change": [1.0]}, [1], 0.1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: EventGrad(-1.0), "horizon=-1.0"),
        (lambda: EventGrad(inf), "finite horizon"),
        (lambda: EventGrad(1.0, history=0), "history >= 1"),
        (lambda: EventGradStatic(nan), "threshold=nan"),
        (lambda: OnChange(-0.1), "scale=-0.1"),
        (lambda: OnChange(1.0, every=0), "every >= 1, or None"),
        (lambda: OnChange(1.0, growth=0.5), "0 <= growth < 0.5"),
        (lambda: Lag(0), "workers=0"),
        (lambda: Lag(2, memory=0), "memory=0"),
        (lambda: Lag(2, xi=-1.0), "xi=-1.0"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
