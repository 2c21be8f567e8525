"""Vectors to messages and back: lengths, padding, types, slices, and rounding once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codes.blocks import (
    Array,
    combine,
    combine_rows,
    covering,
    decoded,
    encode,
    message_length,
    sketch,
    split,
)


@given(st.integers(1, 40), st.integers(1, 7))
def test_blocks_hold_the_vector_and_zeros(length: int, m: int) -> None:
    vector = np.arange(1.0, length + 1)
    blocks = split(vector, m)
    assert blocks.shape == (m, message_length(length, m))
    assert blocks.T.reshape(-1)[:length].tolist() == vector.tolist()
    assert not blocks.T.reshape(-1)[length:].any()


def test_blocks_are_a_view_if_nothing_is_padded() -> None:
    vector = np.arange(6.0)
    assert np.shares_memory(split(vector, 3), vector)


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["f4", "f8"]),
    st.data(),
)
def test_a_message_is_the_combination_of_blocks(
    length: int, m: int, parts: int, dtype: str, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    terms = [
        (tuple(rng.choice([0.0, 1.0, -0.5, 2.7], m).tolist()), rng.standard_normal(length))
        for _ in range(parts)
    ]
    typed = [(c, g.astype(dtype)) for c, g in terms]
    message = encode(typed, m)
    expected = sum(np.array(c) @ split(g.astype(np.float64), m) for c, g in typed)
    assert message.dtype == dtype and message.shape == (message_length(length, m),)
    np.testing.assert_allclose(message, expected, rtol=1e-6 if dtype == "f4" else 1e-12, atol=1e-6)


def test_long_vectors_go_in_chunks() -> None:
    """Lengths around the borders of chunks and of batches of rows give the same as one product."""
    rng = np.random.default_rng(0)
    for length in (8191, 8192, 8193, 2 * 8192 + 1, 40_001):
        g = rng.standard_normal((20, length))
        coefficients = [tuple(row) for row in rng.standard_normal((20, 2)).tolist()]
        expected = sum(np.array(c) @ split(x, 2) for c, x in zip(coefficients, g, strict=True))
        message = encode(list(zip(coefficients, g, strict=True)), 2)
        np.testing.assert_allclose(message, expected, atol=1e-12)
        sent = {i: split(x, 2)[0].copy() for i, x in enumerate(g)}
        whole = combine_rows(dict(enumerate(coefficients)), sent, length)
        blocks = np.array(coefficients).T @ np.array(list(sent.values()))
        np.testing.assert_allclose(whole, blocks.T.reshape(-1)[:length], atol=1e-12)


def test_float32_is_rounded_once() -> None:
    """A thousand terms that cancel: float32 sums would lose what float64 keeps."""
    g = np.random.default_rng(0).standard_normal((1000, 50)).astype(np.float32)
    message = encode([((1.1,), x) for x in g], 1)
    exact = (1.1 * g.astype(np.float64)).sum(axis=0)
    assert message.dtype == np.float32
    np.testing.assert_array_equal(message, exact.astype(np.float32))


@settings(max_examples=200)
@given(st.integers(1, 60), st.integers(1, 5), st.data())
def test_a_stretch_of_the_vector_needs_a_stretch_of_the_message(
    length: int, m: int, data: st.DataObject
) -> None:
    """Servers that own slices, cut anywhere, get theirs and together the whole."""
    cuts = sorted(data.draw(st.sets(st.integers(0, length), max_size=4)) | {0, length})
    rng = np.random.default_rng(length)
    messages = rng.standard_normal((3, message_length(length, m)))
    weights = [tuple(row) for row in rng.standard_normal((3, m)).tolist()]
    whole = combine(weights, list(messages), (0, length))
    pieces = []
    for span in pairwise(cuts):
        low, high = covering(span, m)
        pieces.append(combine(weights, [f[low:high] for f in messages], span))
    assert np.concatenate(pieces) == pytest.approx(whole)


def test_plain_weights_are_left_alone() -> None:
    vectors = [np.ones(3), np.arange(3.0)]
    assert decoded([0.5, 2.0], vectors, (0, 3)) == ([0.5, 2.0], vectors)
    factors, (vector,) = decoded([(1.0, 0.0), (0.0, 3.0)], [np.ones(2), np.ones(2)], (0, 4))
    assert factors == [1.0]
    assert vector.tolist() == [1.0, 3.0, 1.0, 3.0]


def test_sketches_add_up_as_messages_do() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5000))

    def of(message: Array) -> float:
        return sketch(message, np.random.default_rng(7))

    assert of(2 * a - 3 * b) == pytest.approx(2 * of(a) - 3 * of(b))
    b[4321] += 0.1
    assert abs(of(2 * a - 3 * b) - 2 * of(a) + 3 * of(b)) < 1e-9 < abs(of(a) - of(b))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no message"):
        encode([], 2)
    with pytest.raises(ValueError, match="use m=2"):
        encode([((1.0,), np.ones(4))], 2)
    with pytest.raises(ValueError, match=r"use m=1 of them and vectors of shape \(4,\)"):
        encode([((1.0,), np.ones(4)), ((1.0,), np.ones(5))], 1)
    with pytest.raises(ValueError, match=r"a message of shape \(4,\).*shape \(2,\)"):
        combine_rows({3: (1.0, 0.0)}, {3: np.ones(4)}, 4)
    with pytest.raises(ValueError, match="nothing can be combined"):
        combine_rows({}, {}, 4)
