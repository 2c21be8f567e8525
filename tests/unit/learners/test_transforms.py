"""Clipping and trust ratios on pieces small enough to compute by hand."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.core.state import describe
from paceline.learners.base import Sums, add_up
from paceline.learners.transforms import ClipNorm, Piece, Transform, TrustRatio


def piece(
    gradient: list[float], value: list[float] | None = None, index: int = 0, dimensions: int = 2
) -> Piece:
    return Piece(
        index, dimensions, torch.tensor(value or [1.0] * len(gradient)), torch.tensor(gradient)
    )


def apply(transform: Transform, *servers: list[Piece]) -> Sums:
    totals = add_up(transform.sums(pieces) for pieces in servers)
    for pieces in servers:
        transform.apply(pieces, totals)
    return totals


def gradients(pieces: list[Piece]) -> list[float]:
    return [number for each in pieces for number in each.gradient.tolist()]


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.0, -1.0, nan])
def test_a_limit_is_above_zero(limit: float) -> None:
    with pytest.raises(ValueError, match=rf"^limit={limit}: a norm to clip to must be above 0$"):
        ClipNorm(limit)


@pytest.mark.parametrize(
    "given", [{"eta": 0.0}, {"eta": -1.0}, {"eta": nan}, {"weight_decay": -0.1}]
)
def test_a_trust_ratio_is_above_zero(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^eta=.*, weight_decay=.*: use eta > 0, weight_decay >"):
        TrustRatio(**given)


def test_a_weight_decay_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay=nan"):
        TrustRatio(weight_decay=nan)


def test_limits_that_are_allowed() -> None:
    assert (ClipNorm(inf).limit, TrustRatio(1e-9, 0.0).eta) == (inf, 1e-9)
    assert TrustRatio() == TrustRatio(eta=0.001, weight_decay=0.0)
    assert describe(TrustRatio(eta=0.02)) == "TrustRatio(eta=0.02)"


# --- clipping ------------------------------------------------------------------------------------


def test_a_gradient_is_scaled_down_to_the_limit() -> None:
    one, other = [piece([3.0, 0.0])], [piece([0.0], index=0), piece([4.0], index=1, dimensions=1)]
    assert apply(ClipNorm(1.0), one, other) == {"clip": pytest.approx(25.0)}
    assert gradients(one + other) == pytest.approx([0.6, 0.0, 0.0, 0.8], rel=1e-6)


@pytest.mark.parametrize("limit", [5.1, 100.0, inf])
def test_below_the_limit_not_a_bit_changes(limit: float) -> None:
    pieces = [piece([3.0, 4.0]), piece([1e-30, -0.0], index=1)]
    before = [each.gradient.clone() for each in pieces]
    apply(ClipNorm(limit), pieces)
    for each, gradient in zip(pieces, before, strict=True):
        assert each.gradient.numpy().tobytes() == gradient.numpy().tobytes()


def test_no_gradient_is_not_clipped() -> None:
    pieces = [piece([0.0, 0.0])]
    assert apply(ClipNorm(0.5), pieces) == {"clip": 0.0}
    assert gradients(pieces) == [0.0, 0.0]


def test_a_slice_without_pieces_has_its_part_in_the_sums() -> None:
    assert apply(ClipNorm(1.0), [], [piece([3.0, 4.0])]) == {"clip": pytest.approx(25.0)}
    assert apply(TrustRatio(), [], []) == {}


def test_squares_are_added_up_in_double_precision() -> None:
    """In single precision 2**24 + 1 is 2**24."""
    totals = ClipNorm(1.0).sums([piece([2.0**12, 1.0])])
    assert totals["clip"] == pytest.approx(2.0**24 + 1, rel=1e-12)
    totals = TrustRatio().sums([piece([2.0**12, 1.0], [1.0, 2.0**12])])
    assert list(totals.values()) == pytest.approx([2.0**24 + 1] * 2, rel=1e-12)


@pytest.mark.parametrize("bad", [nan, inf])
def test_a_gradient_that_is_no_number_stays_none(bad: float) -> None:
    """As with torch: nothing hides that a run has diverged."""
    pieces = [piece([bad, 1.0])]
    apply(ClipNorm(1.0), pieces)
    assert not torch.isfinite(pieces[0].gradient[0])


# --- trust ratios --------------------------------------------------------------------------------


def test_a_tensor_gets_a_rate_after_its_norms() -> None:
    """|w| = 10, |g| = 5: 0.1 * 10 / (5 + 0.5 * 10) = 0.1 times g + 0.5 w."""
    one, other = [piece([3.0], [6.0])], [piece([4.0], [8.0])]
    totals = apply(TrustRatio(0.1, 0.5), one, other)
    assert totals == {
        "trust.0.value": pytest.approx(100.0),
        "trust.0.gradient": pytest.approx(25.0),
    }
    assert gradients(one + other) == pytest.approx([0.1 * (3 + 3), 0.1 * (4 + 4)], rel=1e-6)


def test_each_tensor_has_its_own_rate() -> None:
    pieces = [piece([3.0, 4.0], [0.0, 2.0], index=4), piece([0.0, 2.0], [8.0, 6.0], index=7)]
    apply(TrustRatio(0.5), pieces)
    first, second = 0.5 * 2 / 5, 0.5 * 10 / 2
    assert gradients(pieces) == pytest.approx([3 * first, 4 * first, 0, 2 * second], rel=1e-6)


@pytest.mark.parametrize("dimensions", [0, 1])
def test_biases_stay_as_they_are(dimensions: int) -> None:
    pieces = [piece([3.0, 4.0], dimensions=dimensions)]
    assert apply(TrustRatio(0.1, 0.5), pieces) == {}
    assert gradients(pieces) == [3.0, 4.0]


@pytest.mark.parametrize("gradient, value", [([0.0, 0.0], [3.0, 4.0]), ([3.0, 4.0], [0.0, 0.0])])
def test_without_a_norm_there_is_no_rate(gradient: list[float], value: list[float]) -> None:
    pieces = [piece(gradient, value)]
    apply(TrustRatio(0.1, 0.5), pieces)
    assert gradients(pieces) == gradient


def test_a_slice_of_zeros_in_a_tensor_that_is_not() -> None:
    """The norms are those of the whole tensor: here 1 * 5 / (2 + 0) = 2.5."""
    zeros, rest = [piece([2.0], [0.0])], [piece([0.0, 0.0], [3.0, 4.0])]
    apply(TrustRatio(1.0), zeros, rest)
    assert gradients(zeros + rest) == pytest.approx([5.0, 0.0, 0.0], rel=1e-6)


def test_a_learner_hands_its_transform_to_the_server() -> None:
    recipe = pl.TorchLearner(
        torch.nn.Linear(1, 1),
        lambda model, batch: model(batch[0]).mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        torch.utils.data.TensorDataset(torch.ones(4, 1)),
        batch_size=4,
        transform=ClipNorm(1.0),
    )
    server = recipe.server()
    before = server.vector.copy()
    server.step([1.0], [torch.tensor([3.0, 4.0]).numpy()], frozenset())
    assert before - server.vector == pytest.approx([0.6, 0.8], rel=1e-5)
