"""The gradient of a session's turn: means over samples, or over what the loop counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline.learners.flat import FlatModule
from paceline.sessions.gradients import Gradients
from tests import ragged
from tests.ragged import ROWS, flat_gradient, network

ROW_NUMBERS = list(range(10))


def loop(pieces: list[list[int]], counts: bool = True) -> tuple[Gradients, nn.Module]:
    """Compute batches as a loop does, each with its mean over tokens."""
    model = network()
    gradients = Gradients(FlatModule(model, "cpu"))
    gradients.clear()
    for piece in pieces:
        loss = ragged.mean_loss(model, ragged.padded([ROWS[i] for i in piece]))
        loss.backward()
        count = torch.tensor(sum(len(ROWS[i]) - 1 for i in piece))
        gradients.add(loss, count if counts else None, len(piece), sum(map(len, pieces)))
    return gradients, model


@pytest.mark.parametrize("pieces", [[ROW_NUMBERS], [[0, 1, 2], [3], ROW_NUMBERS[4:]]])
def test_batches_are_added_up_by_their_counts(pieces: list[list[int]]) -> None:
    gradients, model = loop(pieces)
    vector, stats = gradients.whole()
    total, count = flat_gradient(model, ROW_NUMBERS)
    np.testing.assert_allclose(vector, total / len(ROW_NUMBERS), rtol=0, atol=1e-5)
    assert stats["count"] == pytest.approx(count / len(ROW_NUMBERS))
    with torch.no_grad():
        whole = ragged.mean_loss(model, ragged.padded([ROWS[i] for i in ROW_NUMBERS]))
    assert stats["loss"] == pytest.approx(whole.item(), rel=1e-6)


def test_without_counts_the_samples_weigh() -> None:
    pieces = [[0, 1, 2], [3], ROW_NUMBERS[4:]]
    gradients, model = loop(pieces, counts=False)
    vector, stats = gradients.whole()
    parts = [(len(piece), *flat_gradient(model, piece)) for piece in pieces]
    expected = sum(size / 10 * total / count for size, total, count in parts)
    np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-6)
    assert set(stats) == {"loss"}


def test_a_batch_without_anything_to_count() -> None:
    """Its mean is 0 / 0, and so is its gradient; both are left out."""
    model = network()
    gradients = Gradients(FlatModule(model, "cpu"))
    gradients.clear()
    ragged.mean_loss(model, ragged.padded([ROWS[0]])).backward()
    gradients.add(1.0, len(ROWS[0]) - 1, 1, 2)
    (torch.stack([p.sum() for p in model.parameters()]) * float("nan")).sum().backward()
    gradients.add(float("nan"), 0, 1, 2)
    vector, stats = gradients.whole()
    np.testing.assert_allclose(vector, flat_gradient(model, [0])[0] / 2, rtol=0, atol=1e-6)
    assert stats == {"loss": 1.0, "count": (len(ROWS[0]) - 1) / 2}


def test_counts_that_cannot_be() -> None:
    gradients, _ = loop([[0]])
    gradients.clear()
    with pytest.raises(ValueError, match="count=-1"):
        gradients.add(1.0, -1, 1, 2)
    gradients.clear()
    gradients.add(1.0, 5, 1, 2)
    with pytest.raises(ValueError, match="each time, or never"):
        gradients.add(1.0, None, 1, 2)
