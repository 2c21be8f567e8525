"""All of a batch reaches the device.

The device is `meta`, which every build of PyTorch has and which refuses tensors of another one, as
CUDA does. `FakeTensorMode` would say "cuda", but without CUDA it can neither copy nor slice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paceline.learners.feed import move


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def batch() -> dict[str, Any]:
    pair = Pair(torch.randn(4, 6), torch.randn(4, 6))
    return {"pairs": [pair], "labels": (torch.zeros(4, dtype=torch.long), "a text", None)}


def loss(model: nn.Module, given: dict[str, Any]) -> Tensor:
    (pair,), (labels, *_) = given["pairs"], given["labels"]
    return nn.functional.cross_entropy(model(pair.first + pair.second), labels)


def test_a_forward_pass_meets_no_tensor_of_another_device() -> None:
    moved = move(batch(), "meta")
    assert isinstance(moved["pairs"][0], Pair) and moved["labels"][1:] == ("a text", None)
    assert loss(nn.Linear(6, 2, device="meta"), moved).device.type == "meta"


def test_a_tensor_that_is_left_behind_is_found_so() -> None:
    with pytest.raises(RuntimeError, match="device"):
        loss(nn.Linear(6, 2, device="meta"), batch())
