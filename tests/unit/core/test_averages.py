"""The averages of a step are those over all that the losses count, however rows are divided."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.averages import by_count, mean_loss, scaled

# A result: its samples, the tokens of each, and the gradient (or loss) summed over its tokens.
RESULT = st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(-99, 99))
RESULTS = st.lists(RESULT, min_size=1, max_size=6)


@given(RESULTS, st.sampled_from([0.25, 0.5, 1.0]))
def test_a_step_is_the_mean_over_tokens_times_its_damping(
    results: list[tuple[list[int], int]], damping: float
) -> None:
    """A message is the sum of gradients per sample, and a weight the result's part of samples."""
    samples = sum(len(rows) for rows, _ in results)
    tokens = sum(sum(rows) for rows, _ in results)
    weights = [damping * len(rows) / samples for rows, _ in results]
    counts = [sum(rows) / len(rows) for rows, _ in results]
    messages = [total / len(rows) for rows, total in results]
    found = by_count(weights, counts)
    if not tokens:
        assert found == weights
        return
    step = sum(w * v for w, v in zip(found, messages, strict=True) if isinstance(w, float))
    exact = Fraction(sum(total for _, total in results), tokens) * Fraction(damping)
    assert step == pytest.approx(float(exact), rel=1e-9, abs=1e-9)


@given(RESULTS)
def test_the_loss_of_a_step_is_the_mean_over_tokens(results: list[tuple[list[int], int]]) -> None:
    counted = [(rows, total) for rows, total in results if sum(rows)]
    weights = [float(len(rows)) for rows, _ in counted]
    counts = [sum(rows) / len(rows) for rows, _ in counted]
    losses = [total / sum(rows) for rows, total in counted]
    found = mean_loss(weights, losses, counts)
    if not counted:
        assert found is None
        return
    exact = Fraction(sum(total for _, total in counted), sum(sum(rows) for rows, _ in counted))
    assert found == pytest.approx(float(exact), rel=1e-9, abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=5),
    st.data(),
)
def test_the_decoded_count_of_a_coded_step_becomes_one(
    weights: list[tuple[float, float]], data: st.DataObject
) -> None:
    size = len(weights)
    counts = data.draw(st.lists(st.floats(0.5, 50), min_size=size, max_size=size))
    decoded = sum(first * count for (first, _), count in zip(weights, counts, strict=True))
    if abs(decoded) < 1e-3:  # an encoded count of nearly 0 has no place in a real code
        return
    found = by_count(weights, counts)
    for given_pair, pair in zip(weights, found, strict=True):
        assert isinstance(pair, tuple)
        assert pair == pytest.approx([each / decoded for each in given_pair])


def test_results_without_counts_keep_their_weights() -> None:
    weights = [0.25, 0.75]
    assert by_count(weights, [None, None]) is weights
    assert by_count(weights, [1.0, None]) == weights  # a missing count is 1


def test_an_unknown_loss_is_left_out() -> None:
    assert mean_loss([0.5, 0.25, 0.25], [2.0, None, 5.0], [None, None, None]) == pytest.approx(3.0)
    assert mean_loss([0.5, 0.5], [None, None], [None, None]) is None
    # The count of a coded result is encoded, so it weighs no loss.
    assert mean_loss([(1.0,), (1.0,)], [2.0, 4.0], [7.0, 1.0]) == pytest.approx(3.0)


def test_all_coefficients_of_a_result_are_scaled() -> None:
    assert scaled(0.5, 4.0) == 2.0
    assert scaled((0.5, -1.0), 4.0) == (2.0, -4.0)
