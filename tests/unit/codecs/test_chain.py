"""Chains: what travels, the way back, nesting to either side, and what cannot be chained."""

from __future__ import annotations

import pytest
import torch

from paceline.codecs.base import Stateless
from paceline.codecs.chain import Chain
from paceline.codecs.feedback import DeepGradient, Feedback
from paceline.codecs.lowrank import LowRank
from paceline.codecs.quantize import Half, Int8, Sign
from paceline.codecs.sparse import RandomK, TopK

VECTOR = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def test_the_numbers_of_the_first_are_encoded_by_the_second() -> None:
    codec, first, second = Chain(TopK(0.1), Int8(64)), TopK(0.1), Int8(64)
    message, plain = codec.encode(VECTOR, 3), first.encode(VECTOR, 3)
    assert [part.dtype for part in message.parts] == [torch.int8, torch.float32, torch.uint8]
    assert torch.equal(message.parts[2], plain.parts[1])
    assert message.nbytes == 100 + 2 * 4 + plain.parts[1].numel()
    read = codec.decode(message, 1000)
    places = first.places(plain, 1000)
    numbers = second.decode(type(message)(message.parts[:2]), 100)
    assert torch.equal(read[places], numbers)
    assert read.count_nonzero() <= 100
    missed = (read[places] - VECTOR[places]).abs()
    assert 0 < missed.max() <= VECTOR.abs().max() / 127


def test_three_in_a_row_nest_to_either_side() -> None:
    left = Chain(Chain(RandomK(0.5), TopK(0.2)), Half())
    right = Chain(RandomK(0.5), Chain(TopK(0.2), Half()))
    for codec in (left, right):
        message = codec.encode(VECTOR, 11)
        assert [part.dtype for part in message.parts] == [torch.float16, torch.int8, torch.int64]
        read = codec.decode(message, 1000)
        assert read.count_nonzero() == 100
        sent = read != 0
        assert torch.equal(read[sent], VECTOR[sent].half().float())
    inner = Chain(RandomK(0.5), TopK(0.2))
    assert (inner.count(1000), inner.extras) == (100, 2)


def test_what_is_random_in_the_second_does_not_follow_the_first() -> None:
    # With one key for both, the second draws its quarter from the same places of every draw.
    codec, n, draws = Chain(RandomK(0.5), RandomK(0.5)), 8, 2000
    ones = torch.ones(n)
    sent = torch.stack([codec.decode(codec.encode(ones, key), n) for key in range(draws)])
    assert (sent.mean(0) - 0.25).abs().max() < 5 * (3 / 16 / draws) ** 0.5
    pairs = (sent.T @ sent / draws)[~torch.eye(n, dtype=torch.bool)]
    expected = 1 / n / (n - 1) * 2  # both of the two places that are sent
    assert (pairs - expected).abs().max() < 5 * (expected / draws) ** 0.5


def test_a_low_rank_chain_keeps_its_warm_start() -> None:
    codec = Chain(LowRank(1, ((25, 40),)), Half())
    sender = codec.sender(1000)
    missed = [
        float((codec.decode(sender.send(VECTOR, 0), 1000) - VECTOR).norm()) for _ in range(30)
    ]
    assert missed[-1] < missed[0]
    best = torch.linalg.svdvals(VECTOR.view(25, 40))[1:].norm()
    assert missed[-1] == pytest.approx(float(best), rel=1e-3)
    assert isinstance(Chain(TopK(0.1), Half()).sender(1000), Stateless)


def test_what_cannot_be_chained_is_refused() -> None:
    for first in (Int8(), Sign(), Half(), Feedback(TopK(0.1)), DeepGradient(0.1)):
        with pytest.raises(ValueError, match="begin with TopK, RandomK or LowRank"):
            Chain(first, Half())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="put the codec that sends whole numbers last"):
        Chain(Chain(TopK(0.1), Int8()), Half())
    for second in (Feedback(Int8()), DeepGradient(0.1), LowRank(1, ((10, 10),))):
        with pytest.raises(ValueError, match="put it first, or around the chain"):
            Chain(TopK(0.1), second).sender(1000)
