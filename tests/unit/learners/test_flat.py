"""One vector for a module: views of it, buffers in it, and what is kept out of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from paceline.learners.flat import FlatModule, as_tensor, flat_size, hollow


class Odd(nn.Module):
    """Tied and frozen weights, a scalar, and buffers of every kind."""

    count: torch.Tensor
    scratch: torch.Tensor
    same: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.tensor([5, 6]))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("same", self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm(self.decode(self.encode(x)) * self.scale))


M = TypeVar("M", bound=nn.Module)


def flattened(module: M, changing: Collection[str] = ()) -> tuple[FlatModule, M]:
    """Return a module as one vector, and the module itself, whose tensors are now views."""
    flat = FlatModule(module, changing=changing)
    assert flat.module is module
    return flat, module


def test_parameters_and_gradients_are_views() -> None:
    flat, module = flattened(Odd())
    for buffer, tensors in (
        (flat.values, [p.data for p in flat.parameters]),
        (flat.grads, [p.grad for p in flat.parameters]),
    ):
        start = 0
        for tensor in tensors:
            assert tensor is not None
            assert tensor.data_ptr() == buffer[start:].data_ptr()
            start += tensor.numel()
    flat.values[1:10] = torch.arange(9.0)
    assert module.encode.weight.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    module(torch.randn(4, 3)).square().sum().backward()
    assert flat.grads[: flat.trainable].abs().sum() > 0
    assert module.scale.grad is not None
    assert module.scale.grad == flat.grads[0]


def test_an_optimizer_moves_the_values() -> None:
    flat = FlatModule(nn.Linear(2, 1))
    before = flat.values.clone()
    flat.grads.copy_(torch.tensor([1.0, 2.0, 3.0]))
    torch.optim.SGD(flat.parameters, lr=0.5).step()
    assert torch.equal(flat.values, before - torch.tensor([0.5, 1.0, 1.5]))


def test_the_values_are_those_of_the_module() -> None:
    module = Odd()
    weight = module.encode.weight.detach().clone()
    flat = FlatModule(module)
    expected = [
        2.0,  # scale
        *weight.reshape(-1).tolist(),  # tied: once
        *([1.0] * 3 + [0.0] * 3),  # norm: weight, bias
        *(5.0, 6.0),  # count: once, though under two names
        *([0.0] * 3 + [1.0] * 3 + [0.0]),  # norm: mean, variance, batches
    ]
    assert flat.values.tolist() == expected
    assert flat.trainable == 16
    assert len(flat.parameters) == 4


def test_tied_weights_stay_tied() -> None:
    flat, module = flattened(Odd())
    assert module.decode.weight is module.encode.weight
    flat.values[1] = 99.0
    assert module.decode.weight[0, 0] == 99.0
    x = torch.ones(2, 3)
    module.decode(module.encode(x)).sum().backward()
    assert flat.grads[1] != 0


def test_frozen_parameters_stay_out() -> None:
    flat, module = flattened(Odd())
    flat.values.fill_(1.0)
    assert module.frozen.tolist() == [7.0, 7.0]
    assert module.frozen.grad is None


def test_buffers_travel_and_integers_are_rounded() -> None:
    flat, module = flattened(Odd())
    vector = flat.values.numpy().copy()
    vector[16:18] = 4.6, -1.4
    vector[18] = 0.25
    vector[24] = 2.5001
    flat.load([vector[:7], vector[7:7], vector[7:]])
    assert module.count.tolist() == [5, -1]
    assert module.count.dtype == torch.int64
    assert module.get_buffer("norm.running_mean").tolist() == [0.25, 0.0, 0.0]
    assert module.norm.num_batches_tracked == 3
    assert flat.values[16:18].tolist() == [pytest.approx(4.6), pytest.approx(-1.4)]


def test_the_change_of_buffers_goes_where_gradients_go() -> None:
    flat, module = flattened(Odd())
    flat.values[16] = 4.75  # a mean of several workers' counts
    flat.push_buffers()
    module.count[1] += 3
    module.get_buffer("norm.running_var")[2] = 0.5
    flat.buffer_change()
    change = flat.grads[flat.trainable :].tolist()
    assert change == [0.25, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.5, 0.0]


def test_a_buffer_shared_by_two_modules_travels_once() -> None:
    both = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    both[1].running_mean = both[0].running_mean
    flat = FlatModule(both)
    assert flat.values.numel() == flat_size(both) == 8 + 5 + 3
    vector = flat.values.numpy().copy()
    vector[8:10] = 7.0
    flat.load([vector[:7], vector[7:7], vector[7:]])
    assert both.get_buffer("1.running_mean").tolist() == [7.0, 7.0]


def test_non_persistent_buffers_stay_out() -> None:
    flat, module = flattened(Odd())
    assert flat.values.numel() == 16 + 9
    flat.values.fill_(3.0)
    flat.push_buffers()
    assert module.scratch.tolist() == [1.0] * 4


def test_pull_takes_what_was_put_into_the_module() -> None:
    flat, module = flattened(nn.BatchNorm1d(1))
    with torch.no_grad():
        module.get_buffer("running_mean").fill_(3.0)
        module.weight.fill_(4.0)
    flat.pull(module)
    assert flat.values.tolist() == [4.0, 0.0, 3.0, 1.0, 0.0]


def test_values_in_another_memory_order_are_told_by_their_place() -> None:
    module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = module.weight.detach().clone().contiguous()
    flat, module = flattened(module)
    assert torch.equal(flat.values[:24], weight.reshape(-1))
    assert torch.equal(module.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_refused(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(ValueError, match=f"parameter 1.weight is {dtype}, and trained") as refusal:
        FlatModule(module)
    assert "p.data = p.data.float()" in str(refusal.value)
    for p in module.parameters():  # as it says
        p.data = p.data.float()
    assert FlatModule(module).trainable == 12


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter with requires_grad=True to train"):
        FlatModule(nn.Linear(2, 2).requires_grad_(False))


def test_a_vector_of_another_size_is_refused() -> None:
    flat = FlatModule(nn.Linear(2, 1))
    zeros = np.zeros(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"a model of 3 values got a vector of shape \(4,\)"):
        flat.load([zeros])
    with pytest.raises(ValueError, match=r"a model of 3 values got a vector of shape \(2,\)"):
        flat.load([zeros[:2], zeros[:2]])
    with pytest.raises(ValueError, match=r"a model of 3 values got a vector of shape \(1, 3\)"):
        flat.load([zeros[None, :3]])
    with pytest.raises(ValueError, match=r"a model of 3 values got slices of 2 values"):
        flat.load([zeros[:2]])


def test_a_server_needs_no_second_buffer() -> None:
    flat = FlatModule(nn.Linear(2, 1), with_grads=False)
    assert flat.grads.numel() == 0
    assert all(parameter.grad is None for parameter in flat.parameters)


def test_read_only_arrays_are_taken_without_a_warning() -> None:
    array = np.arange(3, dtype=np.float32)
    assert as_tensor(array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert as_tensor(array).tolist() == [0.0, 1.0, 2.0]  # warnings are errors here


# --- what does not travel ------------------------------------------------------------------------


class Masked(nn.Module):
    """A large constant, as the causal mask of a transformer, beside what training changes."""

    mask: torch.Tensor

    def __init__(self, wide: int = 200) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(wide, wide).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm(self.line(x)))


def test_a_large_constant_buffer_is_not_sent() -> None:
    flat, module = flattened(Masked())
    assert flat.values.numel() == flat_size(Masked()) == 12 + 6 + 7  # BatchNorm's are
    assert torch.equal(module.mask, torch.ones(200, 200).tril())
    flat.load([flat.values.numpy().copy()])
    module(torch.randn(4, 3)).sum().backward()
    flat.buffer_change()
    assert flat.grads[flat.trainable :].abs().sum() > 0
    small = FlatModule(Masked(100))
    assert small.values.numel() == flat_size(Masked(100)) == 12 + 6 + 7 + 100 * 100


def test_a_wide_normalization_layer_is_no_constant() -> None:
    assert flat_size(nn.BatchNorm1d(20_000)) == 4 * 20_000 + 1


@pytest.mark.parametrize("change", ["in place", "by data", "another tensor"])
def test_a_constant_that_changes_later_is_named(change: str) -> None:
    flat, module = flattened(Masked())
    flat.buffer_change()
    if change == "in place":
        module.mask[0, 1] = 5.0
    elif change == "by data":
        module.mask.data[0, 1] = 5.0
    else:
        module.mask = torch.zeros(200, 200)
    with pytest.raises(ValueError) as refusal:
        flat.buffer_change()
    assert str(refusal.value) == (
        "buffer mask (40000 values) changed in training, and a buffer of more than 16384 values is "
        "taken for a constant that is not sent; give TorchLearner(buffers=['mask']) to send it and "
        "average its changes, or register it with persistent=False to reset it for each task"
    )


def test_a_large_buffer_is_sent_if_it_is_named() -> None:
    flat, module = flattened(Masked(), ["mask"])
    assert flat.values.numel() == flat_size(Masked(), ["mask"]) == 12 + 6 + 7 + 200 * 200
    module.mask[0, 1] = 5.0
    flat.buffer_change()
    assert flat.grads.max() == 5.0
    with pytest.raises(ValueError) as refusal:
        flat_size(Masked(), ["task"])
    assert str(refusal.value) == (
        "buffers=['task']: the model has no such persistent buffers; it has mask, "
        "norm.running_mean, norm.running_var, norm.num_batches_tracked"
    )


def test_a_hollow_copy_holds_what_does_not_travel_and_nothing_else() -> None:
    module = Odd()
    module.register_buffer("wide", torch.tensor(0.1, dtype=torch.float64))
    module.register_buffer("large", torch.arange(20_000))
    copied = hollow(module)
    assert isinstance(copied, Odd)
    assert copied.decode.weight is copied.encode.weight
    real = {name for name, tensor in everything(copied) if not tensor.is_meta}
    assert real == {"frozen", "scratch", "wide", "large"}
    large = module.get_buffer("large")
    assert copied.get_buffer("large").data_ptr() != large.data_ptr()
    assert hollow(module, share=True).get_buffer("large") is large
    flat, filled = flattened(copied)
    flat.load([FlatModule(module).values.numpy()])
    for (name, tensor), (_, mine) in zip(everything(module), everything(filled), strict=True):
        assert torch.equal(tensor, mine) and tensor.dtype == mine.dtype, name
    assert filled.decode.weight is filled.encode.weight
    filled(torch.randn(4, 3)).square().sum().backward()
    assert flat.grads[: flat.trainable].abs().sum() > 0


def everything(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
