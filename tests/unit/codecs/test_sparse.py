"""Top-K and random-K: which numbers, ties, the error that theory allows, and the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.sparse import RandomK, TopK, _largest, share


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def square(vector: Tensor) -> float:
    return float(vector @ vector)


@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -3.0, float("inf")]), min_size=1, max_size=30),
    st.floats(0.01, 1.0),
)
def test_the_largest_are_sent_and_the_first_of_equals(numbers: list[float], part: float) -> None:
    vector, codec = torch.tensor(numbers), TopK(part)
    k = codec.count(len(numbers))
    chosen = sorted(sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:k])
    message = codec.encode(vector, 0)
    assert codec.places(message, len(numbers)).tolist() == chosen
    assert message.parts[0].tolist() == [numbers[i] for i in chosen]
    expected = [number if i in chosen else 0.0 for i, number in enumerate(numbers)]
    assert codec.decode(message, len(numbers)).tolist() == expected


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_what_is_no_number_is_largest(k: int) -> None:
    nan, inf = float("nan"), float("inf")
    magnitude = torch.tensor([inf, 1.0, nan, 2.0, nan, inf])
    order = [2, 4, 0, 5, 3, 1]
    assert _largest(magnitude, k).tolist() == sorted(order[:k])


def test_the_fraction_is_rounded_up_but_not_by_rounding_errors() -> None:
    assert [share(0.07, 100), share(0.071, 100), share(1e-9, 5), share(1.0, 5)] == [7, 8, 1, 5]
    assert all(share(k / n, n) == k for n in range(1, 300) for k in range(1, n + 1))


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 20))
def test_top_k_misses_no_more_than_its_share(n: int, fraction: float, seed: int) -> None:
    vector, codec = normal(n, seed), TopK(fraction)
    missed = square(vector - codec.decode(codec.encode(vector, 0), n))
    assert missed <= (1 - codec.count(n) / n) * square(vector) * (1 + 1e-12)


def test_top_k_misses_exactly_its_share_of_equal_numbers() -> None:
    vector, codec = torch.ones(40), TopK(0.25)
    assert square(vector - codec.decode(codec.encode(vector, 0), 40)) == 30


def test_by_tensor_each_sends_its_own_largest_and_one_at_least() -> None:
    vector = torch.tensor([9.0, 8.0, 7.0, 6.0, 0.1, 0.3, 0.2, 0.01])
    codec = TopK(0.5, (4, 0, 3, 1))
    assert codec.count(8) == 5
    assert codec.places(codec.encode(vector, 0), 8).tolist() == [0, 1, 5, 6, 7]
    assert TopK(0.01, (4, 0, 3, 1)).count(8) == 3
    assert TopK(0.5).places(TopK(0.5).encode(vector, 0), 8).tolist() == [0, 1, 2, 3]
    for size in (7, 9):
        with pytest.raises(
            ValueError, match=f"the vector has {size} values and the tensors have 8"
        ):
            codec.sender(size)


@pytest.mark.parametrize("codec", [TopK, RandomK])
@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_fractions_that_are_none_are_refused(codec: type[TopK | RandomK], fraction: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        codec(fraction)


def test_one_percent_of_a_million_is_short() -> None:
    vector = normal(1_000_000, dtype=torch.float32)
    message = TopK(0.01).encode(vector, 0)
    assert message.parts[0].numel() == 10_000
    assert message.nbytes <= 0.0130 * vector.nbytes  # the aim was 0.0175
    assert RandomK(0.01).encode(vector, 0).nbytes == 10_000 * 4 + 8


def test_everything_is_sent_as_it_is_at_fraction_one() -> None:
    vector = normal(50)
    for codec in (TopK(1.0), RandomK(1.0), RandomK(1.0, scaled=True)):
        assert torch.equal(codec.decode(codec.encode(vector, 1), 50), vector)
    assert TopK(1.0).encode(vector, 0).nbytes == vector.nbytes


def test_random_k_draws_every_place_alike() -> None:
    n, draws = 20, 2000
    codec, vector = RandomK(0.25), torch.ones(20)
    sent = sum(codec.decode(codec.encode(vector, key), n) for key in range(draws))
    assert isinstance(sent, Tensor)
    # Each is drawn with probability 1/4: the deviation is 27, and 5 of them are allowed.
    assert (sent - draws / 4).abs().max() < 5 * (draws * 3 / 16) ** 0.5
    assert sent.sum() == draws * 5


def test_random_k_misses_its_share_and_is_right_on_average_if_scaled() -> None:
    n, draws, vector = 16, 2000, normal(16)
    plain, scaled = RandomK(0.25), RandomK(0.25, scaled=True)
    missed = [square(vector - plain.decode(plain.encode(vector, key), n)) for key in range(draws)]
    assert sum(missed) / draws == pytest.approx(0.75 * square(vector), rel=0.03)
    reads = torch.stack([scaled.decode(scaled.encode(vector, key), n) for key in range(draws)])
    # A number is read as 4 x with probability 1/4, of which the deviation is sqrt(3) |x|.
    assert ((reads.mean(0) - vector).abs() < 4.5 * 3**0.5 * vector.abs() / draws**0.5).all()
    spread = (reads - vector).square().sum(1).mean()
    assert float(spread) == pytest.approx(3 * square(vector), rel=0.06)
