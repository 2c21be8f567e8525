"""Sums over response times: what was cut short counts as such, and what is old loses weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core.state import decode, encode
from paceline.policies.selection.arms import Arms, Times
from paceline.policies.selection.indices import KL


def arms(
    shape: float = 1.0,
    discount: float = 1.0,
    window: int | None = None,
    levels: tuple[float, ...] = (),
) -> Arms:
    return Arms(0, shape, discount, window, levels)


def of(book: Arms, worker: str) -> tuple[float, float, float, float]:
    """Return a worker's seconds, squares, ends and cuts."""
    row = book.rows[worker]
    times = book.times(slice(row, row + 1))
    return tuple(float(a[0]) for a in (times.seconds, times.squares, times.ended, times.cut))  # type: ignore[return-value]


def test_whole_times_and_those_cut_short() -> None:
    book = arms()
    book.observe("w0", 2.0, ended=True)
    book.observe("w0", 3.0, ended=False)
    book.observe("w1", 5.0, ended=False)
    assert of(book, "w0") == (5.0, 4.0, 1.0, 1.0)
    times = book.times(slice(0, 2))
    assert times.count.tolist() == [1.0, 1.0]  # w1 is taken to end at this moment
    assert KL().means(times).tolist() == [5.0, 5.0]


@pytest.mark.parametrize(("weibull", "scale", "k"), [(1.5, 2.0, 4), (1.0, 0.3, 2), (3.0, 1.0, 7)])
def test_censored_times_give_the_right_mean(weibull: float, scale: float, k: int) -> None:
    """Of 8 tasks the first k are awaited: left out, the rest makes the mean far too small."""
    rng = np.random.default_rng(3)
    book, naive = arms(weibull), list[float]()
    for _ in range(2000):
        drawn = np.sort(scale * rng.weibull(weibull, 8))
        for i, seconds in enumerate(drawn):
            book.observe("w0", min(seconds, drawn[k - 1]), ended=i < k)
        naive.extend(drawn[:k])
    truth = scale * float(np.mean(rng.weibull(weibull, 10**6)))
    (estimate,) = KL(shape=weibull).means(book.times(slice(0, 1)))
    assert estimate == pytest.approx(truth, rel=0.025)
    assert np.mean(naive) < (0.95 if k == 7 else 0.75) * truth


def test_the_scale_of_the_digest() -> None:
    """Weibull(1.5, 2): the results waited for alone give a scale 40 % off; with censoring 2.0."""
    rng = np.random.default_rng(0)
    drawn = 2.0 * rng.weibull(1.5, 40_000)
    limits = 2.0 * rng.weibull(1.5, 40_000)  # half of them are given up before their end
    book, only = arms(1.5), arms(1.5)
    for seconds, limit in zip(drawn, limits, strict=True):
        book.observe("w0", min(seconds, limit), ended=bool(seconds <= limit))
        if seconds <= limit:
            only.observe("w0", seconds, ended=True)

    def scale(a: Arms) -> float:
        seconds, _, ended, _ = of(a, "w0")
        return float((seconds / ended) ** (1 / 1.5))

    assert scale(book) == pytest.approx(2.0, rel=0.02)
    assert scale(only) < 0.7 * 2.0


def test_a_discount_halves_the_weight_in_the_rounds_it_says() -> None:
    book = arms(discount=0.5 ** (1 / 10))
    book.observe("w0", 4.0, ended=True)
    book.begin(10)
    assert of(book, "w0") == pytest.approx((2.0, 8.0, 0.5, 0.0))
    book.observe("w0", 1.0, ended=False)
    assert of(book, "w0") == pytest.approx((3.0, 8.0, 0.5, 1.0))
    assert book.horizon() == 11  # the rounds there were
    book.begin(10_000)
    assert book.horizon() == pytest.approx(1 / (1 - 0.5 ** (1 / 10)))


def test_weights_never_overflow() -> None:
    book = arms(discount=0.5)
    for round in range(0, 5000, 5):
        book.begin(round)
        book.observe("w0", 3.0, ended=True)
    seconds, _, ended, _ = of(book, "w0")
    assert ended == pytest.approx(1 / (1 - 0.5**5))
    assert seconds / ended == pytest.approx(3.0)


def test_a_window_forgets_all_at_once_and_leaves_no_rounding() -> None:
    book = arms(window=3)
    for round, seconds in enumerate((0.1, 0.2, 0.3)):
        book.begin(round)
        book.observe("w0", seconds, ended=round != 1)
    assert of(book, "w0") == pytest.approx((0.6, 0.1, 2.0, 1.0))
    book.begin(3)
    assert of(book, "w0") == pytest.approx((0.5, 0.09, 1.0, 1.0))
    book.begin(5)
    assert of(book, "w0") == (0.0, 0.0, 0.0, 0.0)
    assert book.horizon() == 3


@pytest.mark.parametrize("window", [None, 4])
def test_one_observation_is_kept_of_who_left(window: int | None) -> None:
    book = arms(window=window)
    for _ in range(6):
        book.observe("w0", 2.0, ended=True)
    book.observe("w0", 1.0, ended=False)
    book.leave("w0")
    assert of(book, "w0") == pytest.approx((13 / 7, 24 / 7, 6 / 7, 1 / 7))
    book.observe("w0", 5.0, ended=True)
    assert of(book, "w0")[2] == pytest.approx(13 / 7)
    book.begin(10)
    if window:
        assert of(book, "w0") == (0.0, 0.0, 0.0, 0.0)
    assert book.leave("nobody") is None


def test_every_worker_is_tried_once_in_an_order_of_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        book = Arms(seed, 1.0, 1.0, None)
        names = [f"w{i}" for i in range(40)]
        book.admit(names)
        taken: list[int] = []
        while more := book.take_fresh(names, 7):
            taken.extend(more)
        assert sorted(taken) == list(range(40))
        orders.append(taken)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_the_fresh_who_are_busy_stay_fresh() -> None:
    book = arms()
    book.admit(["w0", "w1", "w2"])
    assert book.take_fresh(["w1"], 3) == [1]
    book.observe("w2", 1.0, ended=True)  # given a task without being chosen
    assert book.take_fresh(["w0", "w1", "w2"], 3) == [0]


@pytest.mark.parametrize(
    "more", [{}, {"discount": 0.9}, {"window": 5}, {"window": 5, "levels": (0.5, 2.0)}]
)
def test_saved_and_loaded_it_goes_on_the_same(more: dict[str, Any]) -> None:
    def step(book: Arms, round: int) -> None:
        book.begin(round)
        for i in book.take_fresh([f"w{i}" for i in range(30)], 2):
            book.observe(book.names[i], 1.0 + i, ended=round % 3 > 0)
        book.observe(f"w{round % 5}", 0.1 * round, ended=True)
        if round == 7:
            book.leave("w2")

    straight, first = arms(**more), arms(**more)
    for book in (straight, first):
        book.admit(f"w{i}" for i in range(30))
    for round in range(12):
        step(straight, round)
        if round < 6:
            step(first, round)
    second = arms(**more)
    second.load_state_dict(decode(encode(first.state_dict())))
    for round in range(6, 12):
        step(second, round)
    assert encode(second.state_dict()) == encode(straight.state_dict())


def test_the_sums_of_some() -> None:
    times = Times(*np.arange(8.0).reshape(4, 2), truncated=np.array([[8.0, 9.0]]))
    chosen = times.of(np.array([False, True]))
    assert chosen.seconds.tolist() == [1.0]
    assert chosen.truncated.tolist() == [[9.0]]


@pytest.mark.parametrize("more", [{}, {"discount": 0.9}, {"window": 3}])
def test_truncated_sums_lose_weight_as_the_others_do(more: dict[str, float]) -> None:
    """Summed directly from the observations and their weights."""
    book = arms(**more, levels=(1.0, 4.0))  # type: ignore[arg-type]
    for round, seconds in enumerate((0.5, 3.0, 7.0, 2.0, 9.0)):
        book.begin(round)
        book.observe("w0", seconds, ended=round != 1)
    times = book.times(slice(0, 1))
    weights = np.array([more.get("discount", 1.0) ** (4 - i) for i in range(5)])
    weights[: 2 if "window" in more else 0] = 0.0
    for level, found in zip((1.0, 4.0, np.inf), (*times.truncated, times.seconds), strict=True):
        assert found[0] == pytest.approx(weights @ np.minimum([0.5, 3.0, 7.0, 2.0, 9.0], level))


def test_a_window_forgets_an_outlier_wholly() -> None:
    """A time 200 times the usual, to the eighth power, leaves no trace once it is forgotten."""
    book, exact = arms(shape=8.0, window=20), arms(shape=8.0)
    rng = np.random.default_rng(0)
    for round in range(60):
        book.begin(round)
        seconds = 200.0 if round == 10 else float(rng.uniform(0.9, 1.1))
        book.observe("w0", seconds, ended=True)
        if round >= 40:
            exact.observe("w0", seconds, ended=True)
    assert of(book, "w0") == pytest.approx(of(exact, "w0"), rel=1e-12)


def test_who_left_untried_is_not_looked_at_until_it_returns() -> None:
    book = arms()
    names = [f"w{i}" for i in range(20)]
    book.admit(names)
    for worker in names[5:]:
        book.leave(worker)
    assert len(book._fresh) == 5
    book.arrive("w9")
    assert {book.names[row] for row in book.take_fresh(names, 20)} == {*names[:5], "w9"}
