"""PowerSGD for one sender: exact where the rank suffices, the best approximation when warm."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from paceline.codecs.lowrank import LowRank


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def residual_network() -> list[tuple[int, ...]]:
    """Return the shapes of a ResNet-18 for CIFAR-10."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    for inside, out in ((64, 64), (64, 128), (128, 256), (256, 512)):
        for first in (inside, out):
            shapes += [(out, first, 3, 3), (out,), (out,), (out, out, 3, 3), (out,), (out,)]
        if inside != out:
            shapes += [(out, inside, 1, 1), (out,), (out,)]
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize("actual", [0, 1, 2, 3])
def test_matrices_of_the_rank_or_less_are_exact(actual: int) -> None:
    matrix = normal(20, actual) @ normal(actual, 30, seed=1)
    bias = normal(7, seed=2)
    vector = torch.cat([matrix.reshape(-1), bias])
    codec = LowRank(3, ((20, 5, 6), (7,)))
    sender = codec.sender(607)
    for message in (codec.encode(vector, 5), *(sender.send(vector, key) for key in range(4))):
        assert message.parts[0].numel() == codec.count(607) == (20 + 30) * 3 + 7
        read = codec.decode(message, 607)
        torch.testing.assert_close(read, vector, atol=1e-12, rtol=1e-12)
        assert torch.equal(read[600:], bias)


def test_a_warm_start_finds_the_best_approximation() -> None:
    left, right = torch.linalg.qr(normal(30, 20)).Q, torch.linalg.qr(normal(40, 20, seed=1)).Q
    values = 0.8 ** torch.arange(20.0, dtype=torch.float64)
    codec, vector = LowRank(3, ((30, 40),)), (left * values @ right.T).reshape(-1)
    best = values[3:].norm()
    sender = codec.sender(1200)
    errors = [
        float((codec.decode(sender.send(vector, key), 1200) - vector).norm() / best)
        for key in range(60)
    ]
    assert all(late <= early + 1e-12 for early, late in pairwise(errors))
    assert errors[0] > 1.05 and errors[-1] == pytest.approx(1, abs=1e-9)
    cold = [codec.decode(codec.encode(vector, key), 1200) - vector for key in range(20)]
    assert min(float(error.norm() / best) for error in cold) > 1.01


def test_a_cold_start_misses_no_more_than_its_share() -> None:
    vector, codec = torch.eye(12, dtype=torch.float64).reshape(-1), LowRank(2, ((12, 12),))
    missed = [
        float((codec.decode(codec.encode(vector, key), 144) - vector).square().sum())
        for key in range(50)
    ]
    # A projection to 2 of 12 dimensions leaves 10 of the identity, and less of what has a shape.
    assert missed == pytest.approx([10.0] * 50)
    other = normal(12, 12).reshape(-1)
    missed = [
        float((codec.decode(codec.encode(other, key), 144) - other).square().sum())
        for key in range(50)
    ]
    assert max(missed) < float(other.square().sum())
    assert sum(missed) / 50 < 10 / 12 * float(other.square().sum())


def test_a_sender_recovers_from_zeros() -> None:
    codec = LowRank(1, ((10, 10),))
    sender = codec.sender(100)
    assert codec.decode(sender.send(torch.zeros(100), 0), 100).count_nonzero() == 0
    matrix = torch.zeros(10, 10)
    matrix[7] = torch.arange(10.0)  # which no product with a zero Q would ever find
    read = codec.decode(sender.send(matrix.reshape(-1), 1), 100)
    torch.testing.assert_close(read, matrix.reshape(-1))


def test_small_gradients_are_sent_as_well_as_large_ones() -> None:
    matrix = (normal(20, 2) @ normal(2, 30, seed=1)).float().reshape(-1)
    codec = LowRank(2, ((20, 30),))
    for scale in (1.0, 1e-25, 1e25):
        sender = codec.sender(600)
        for key in range(3):
            read = codec.decode(sender.send(matrix * scale, key), 600)
            assert (read / scale - matrix).norm() < 1e-5 * matrix.norm()


def test_what_would_not_be_shorter_is_sent_as_it_is() -> None:
    shapes = ((), (5,), (4, 4), (3, 0), (1, 9), (8, 8))
    codec = LowRank(2, shapes)
    size = 1 + 5 + 16 + 0 + 9 + 64
    assert codec.count(size) == 1 + 5 + 16 + 0 + 9 + 2 * 16
    vector = normal(size)
    read = codec.decode(codec.encode(vector, 0), size)
    assert torch.equal(read[:31], vector[:31]) and not torch.equal(read[31:], vector[31:])


def test_a_residual_network_shrinks_as_reckoned() -> None:
    shapes = tuple(residual_network())
    size = 11_173_962
    ratios = [size / LowRank(rank, shapes).count(size) for rank in (1, 2, 4)]
    assert [round(ratio) for ratio in ratios] == [243, 136, 72]


def test_other_sizes_and_ranks_are_refused() -> None:
    codec = LowRank(1, ((10, 10),))
    with pytest.raises(ValueError, match="the vector has 99 values and the shapes have 100"):
        codec.sender(99)
    with pytest.raises(ValueError, match="use 1 or more"):
        LowRank(0, ())
