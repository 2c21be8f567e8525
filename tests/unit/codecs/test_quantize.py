"""Fewer bits: the errors that theory allows, rounding that is right on average, and the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.quantize import BFloat16, Half, Int8, Sign, TwoBit


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 20), st.booleans())
def test_int8_misses_less_than_a_step(n: int, block: int, seed: int, stochastic: bool) -> None:
    vector, codec = normal(n, seed), Int8(block, stochastic)
    read = codec.decode(codec.encode(vector, seed), n)
    for low in range(0, n, block):
        part, other = vector[low : low + block], read[low : low + block]
        step = part.abs().max() / 127
        assert ((part - other).abs() <= step * (1 + 1e-9) * (1 if stochastic else 0.5)).all()


def test_int8_misses_no_more_than_its_share() -> None:
    n, block, draws = 4096, 4096, 50
    vector = torch.full((n,), 0.5 / 127, dtype=torch.float64)
    vector[0] = 1  # the worst there is: all others lie halfway between two steps
    codec = Int8(block)
    missed = [
        (vector - codec.decode(codec.encode(vector, key), n)).square().sum() for key in range(draws)
    ]
    mean = float(torch.stack(missed).mean() / vector.square().sum())
    assert 0.9 * mean < mean <= block / 254**2
    assert mean == pytest.approx((n - 1) / 254**2 / float(vector.square().sum()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    n, draws = 100, 1500
    vector, codec = normal(n, dtype=dtype), Int8(32)
    mean = sum(codec.decode(codec.encode(vector, key), n) for key in range(draws)) / draws
    steps = torch.stack([part.abs().max() for part in torch.split(vector, 32)]) / 127
    step = steps.repeat_interleave(32)[:n]
    # The deviation of a rounding is half a step at most.
    assert ((mean - vector).abs() < 4.5 * 0.5 * step / draws**0.5).all()
    nearest = Int8(32, stochastic=False)
    off = (nearest.decode(nearest.encode(vector, 0), n) - vector).abs() / step
    assert off.max() > 0.4  # which would be seen above


def test_the_largest_number_never_turns_over() -> None:
    # Some of these draws are so near to 1 that 127 and they are 128 in float32.
    n = 2**20
    for sign in (1.0, -1.0):
        vector, codec = torch.full((n,), sign * 0.3), Int8(4096)
        read = codec.decode(codec.encode(vector, 1), n)
        torch.testing.assert_close(read, vector, rtol=1e-6, atol=0)


def test_zeros_and_numbers_too_small_to_scale_are_read_as_zeros_or_nearly() -> None:
    for codec in (Int8(8), Int8(8, stochastic=False), Sign(8), TwoBit(8)):
        assert codec.decode(codec.encode(torch.zeros(20), 0), 20).abs().max() == 0
        tiny = torch.full((20,), 1e-44)
        assert codec.decode(codec.encode(tiny, 0), 20).abs().max() <= 1e-44


@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 20))
def test_sign_sends_signs_times_the_mean(n: int, block: int, seed: int) -> None:
    vector, codec = normal(n, seed), Sign(block)
    read = codec.decode(codec.encode(vector, 0), n)
    for low in range(0, n, block):
        part, other = vector[low : low + block], read[low : low + block]
        torch.testing.assert_close(other, part.sign() * part.abs().mean())
        missed = part.square().sum() - part.abs().sum() ** 2 / part.numel()
        torch.testing.assert_close((part - other).square().sum(), missed, atol=1e-12, rtol=1e-9)


@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 20))
def test_two_bits_send_signs_times_one_of_two_means(n: int, block: int, seed: int) -> None:
    vector, codec = normal(n, seed), TwoBit(block)
    read = codec.decode(codec.encode(vector, 0), n)
    for low in range(0, n, block):
        part, other = vector[low : low + block], read[low : low + block]
        sizes = part.abs()
        large = sizes > sizes.mean()
        for half in (large, ~large):
            if half.any():
                expected = part[half].sign() * sizes[half].mean()
                torch.testing.assert_close(other[half], expected)
        missed = (part - other).square().sum()
        of_sign = (part - Sign(block).decode(Sign(block).encode(part, 0), part.numel())).square()
        assert missed <= of_sign.sum() + 1e-12


def test_two_bits_after_top_k_miss_less_than_one_bit() -> None:
    """Of numbers with a normal law, the largest tenth: what SparseLoCo sends."""
    chosen = normal(100_000).abs().topk(10_000).values

    def missed(codec: Sign | TwoBit) -> float:
        return float((codec.decode(codec.encode(chosen, 0), 10_000) - chosen).square().sum())

    assert 0.1 < missed(TwoBit()) / missed(Sign()) < 0.4


def test_a_block_that_is_not_finite_spoils_no_other() -> None:
    vector = normal(30)
    vector[12] = float("nan")
    for codec in (Int8(10), Sign(10), TwoBit(10)):
        finite = codec.decode(codec.encode(vector, 0), 30).isfinite()
        assert finite.tolist() == [True] * 10 + [False] * 10 + [True] * 10


def test_short_floats_round_once_and_stop_at_their_largest() -> None:
    vector = normal(1000, dtype=torch.float32)
    assert torch.equal(Half().decode(Half().encode(vector, 0), 1000), vector.half().float())
    read = BFloat16().decode(BFloat16().encode(vector, 0), 1000)
    assert torch.equal(read, vector.bfloat16().float())
    wide = torch.tensor([1e6, -1e6, float("inf"), -float("inf"), 65504.0, 1.0])
    expected = [65504.0, -65504.0, float("inf"), -float("inf"), 65504.0, 1.0]
    assert Half().decode(Half().encode(wide, 0), 6).tolist() == expected
    wide = torch.tensor([3.4e38, -3.4e38, float("inf")])
    assert wide.bfloat16().isinf().all()
    expected = [3.3895313892515355e38, -3.3895313892515355e38, float("inf")]
    assert BFloat16().decode(BFloat16().encode(wide, 0), 3).tolist() == expected
    for codec, bits in ((Half(), 11), (BFloat16(), 8)):
        missed = (codec.decode(codec.encode(vector, 0), 1000) - vector).abs()
        assert (missed <= vector.abs() * 2.0**-bits + 2.0**-25).all()


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        (Int8(100), 1003 + 11 * 4),
        (Sign(100), 126 + 11 * 4),
        (TwoBit(100), 2 * 126 + 2 * 11 * 4),
        (Half(), 2006),
        (BFloat16(), 2006),
    ],
)
def test_what_travels(codec: Int8 | Sign | TwoBit | Half | BFloat16, nbytes: int) -> None:
    assert codec.encode(normal(1003, dtype=torch.float32), 0).nbytes == nbytes


def test_a_block_has_a_number_at_least() -> None:
    for codec in (Int8, Sign, TwoBit):
        with pytest.raises(ValueError, match="one number at least"):
            codec(0)
