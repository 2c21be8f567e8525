"""The communication hooks on a process group of one: what is sent, kept, counted and refused.

The gradient of the models here is what a test says. Several ranks are in tests/cluster.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.base import Message, pack, unpack
from paceline.codecs.feedback import DeepGradient, Feedback
from paceline.codecs.lowrank import LowRank
from paceline.codecs.quantize import Int8
from paceline.codecs.sparse import TopK
from paceline.ddp.hooks import CodecHook, TriggeredHook, _put_mean
from paceline.gossip.triggers import Always, EventGrad, Lag, OnChange, Trigger


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(0)
    dist.init_process_group("gloo", (tmp_path / "meet").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Given(nn.Module):
    """Has the gradients that it is called with."""

    def __init__(self, **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        found = [(getattr(self, name) * each).sum() for name, each in gradients.items()]
        return torch.stack(found).sum()


def wrapped(**sizes: tuple[int, ...]) -> DistributedDataParallel:
    return DistributedDataParallel(Given(**sizes))


def pass_back(model: DistributedDataParallel, **gradients: Tensor) -> dict[str, Tensor]:
    """Return what the optimizer is given for these gradients."""
    model.zero_grad()
    model(gradients).backward()
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_small_and_flat_tensors_travel_as_they_are() -> None:
    sizes = {"big": (40, 5), "small": (10, 5), "flat": (300,)}
    given = {name: torch.randn(shape) for name, shape in sizes.items()}
    for dense_below, cut in ((100, {"big"}), (0, {"big", "small", "flat"}), (1000, set())):
        model = wrapped(**sizes)
        CodecHook(TopK(0.1), dense_below=dense_below).register(model)
        found = pass_back(model, **given)
        for name, each in given.items():
            kept = int((found[name] != 0).sum())
            assert kept == (each.numel() // 10 if name in cut else each.numel()), (name, cut)
            assert (found[name][found[name] != 0] == each[found[name] != 0]).all()


@pytest.mark.parametrize("source", ["optimizer", "function", "tensor"])
def test_memory_is_in_units_of_the_learning_rate(source: str) -> None:
    """With one rank, x - e is where SGD would be, though rates change and differ by group."""
    model = wrapped(a=(8, 8), b=(8, 8))
    inner = model.module
    rates = {"a": 0.5, "b": 0.5 if source == "function" else 0.05}
    optimizer = torch.optim.SGD([{"params": [each], "lr": rates[n]} for n, each in
                                 inner.named_parameters()])  # fmt: skip
    if source == "tensor":
        for each in optimizer.param_groups:
            each["lr"] = torch.tensor(each["lr"])
    rate = optimizer if source != "function" else (lambda: optimizer.param_groups[0]["lr"])
    hook = CodecHook(Feedback(TopK(0.1)), rate=rate, dense_below=0).register(model)
    plain = {name: torch.zeros(8, 8) for name in "ab"}
    for _ in range(12):
        given = {name: torch.randn(8, 8) for name in "ab"}
        pass_back(model, **given)
        for each, name in zip(optimizer.param_groups, "ab", strict=True):
            plain[name] -= float(each["lr"]) * given[name]
        optimizer.step()
        for each in optimizer.param_groups:
            each["lr"] = each["lr"] * 0.8
    for name, parameter in inner.named_parameters():
        error = hook.state_dict()["parameters"][name]["sender"]["error"].view(8, 8)
        assert error.norm() > 0.05 * plain[name].norm()
        torch.testing.assert_close(parameter.detach() - error, plain[name], rtol=0, atol=1e-6)


def test_a_gradient_of_zeros_leaves_the_memory_alone() -> None:
    model = wrapped(a=(8, 8))
    hook = CodecHook(Feedback(TopK(0.1)), dense_below=0).register(model)
    pass_back(model, a=torch.randn(8, 8))
    before = hook.state_dict()["parameters"]["a"]["sender"]["error"]
    assert not pass_back(model, a=torch.zeros(8, 8))["a"].any()
    assert torch.equal(hook.state_dict()["parameters"]["a"]["sender"]["error"], before)
    assert before.any()


def test_the_codec_may_follow_the_shape() -> None:
    model = wrapped(a=(30, 20), b=(10, 4, 5))
    CodecHook(lambda shape: LowRank(1, (tuple(shape),)), dense_below=0).register(model)
    given = {
        "a": torch.outer(torch.randn(30), torch.randn(20)),
        "b": torch.outer(torch.randn(10), torch.randn(20)).view(10, 4, 5),
    }
    for name, each in pass_back(model, **given).items():
        torch.testing.assert_close(each, given[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_of_gradients(dtype: torch.dtype) -> None:
    model = DistributedDataParallel(Given(a=(8, 8), b=(3,)).to(dtype))
    CodecHook(TopK(0.5), dense_below=5).register(model)
    given = {"a": torch.randn(8, 8, dtype=dtype), "b": torch.randn(3, dtype=dtype)}
    found = pass_back(model, **given)
    assert {each.dtype for each in found.values()} == {dtype}
    assert torch.equal(found["b"], given["b"])
    assert (found["a"] == given["a"]).sum() == 32


def test_numbers_in_another_order_than_the_shape() -> None:
    """As channels_last has them: what travels is what lies in the bucket, place by place."""
    inner = nn.Conv2d(4, 6, 3, bias=False)
    model = DistributedDataParallel(inner.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    CodecHook(TopK(1.0), dense_below=0).register(model)
    images = torch.randn(2, 4, 9, 9)
    model(images).square().sum().backward()
    twin = nn.Conv2d(4, 6, 3, bias=False)
    twin.load_state_dict(model.module.state_dict())
    twin(images).square().sum().backward()
    torch.testing.assert_close(model.module.weight.grad, twin.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "codec", [Feedback(TopK(0.1)), DeepGradient(0.1), Int8(16), Feedback(Int8(16))]
)
def test_codecs_resume(codec: Any) -> None:
    given = [torch.randn(9, 9) for _ in range(6)]
    whole, first, second = wrapped(a=(9, 9)), wrapped(a=(9, 9)), wrapped(a=(9, 9))
    CodecHook(codec, dense_below=0).register(whole)
    expected = [pass_back(whole, a=each)["a"] for each in given]
    hook = CodecHook(codec, dense_below=0).register(first)
    for each in given[:3]:
        pass_back(first, a=each)
    state = through_a_file(hook.state_dict())
    pass_back(first, a=torch.ones(9, 9))  # of which the state must not know
    resumed = CodecHook(codec, dense_below=0).register(second)
    resumed.load_state_dict(state)
    for each, mean in zip(given[3:], expected[3:], strict=True):
        assert torch.equal(pass_back(second, a=each)["a"], mean)
    anew = wrapped(a=(9, 9))
    CodecHook(codec, dense_below=0).register(anew)
    assert not torch.equal(pass_back(anew, a=given[3])["a"], expected[3])  # it did matter


def test_the_mean_is_over_all_messages_in_their_order() -> None:
    """Three senders, one of which has a gradient of zeros and sends no parts for it."""
    model = wrapped(a=(6, 6), b=(4,), c=(6, 6))
    hook = CodecHook(TopK(0.5), dense_below=5).register(model)
    rows = [[torch.randn(36), torch.randn(4), torch.randn(36)] for _ in range(3)]
    rows[1][0].zero_()
    names = ["a", "b", "c"]
    messages = [unpack(pack(hook._written(names, row))) for row in rows]
    found = [torch.empty(36), torch.empty(4), torch.empty(36)]
    _put_mean(messages, [hook._channels.get(name) for name in names], found)
    codec = TopK(0.5)
    for at in (0, 2):
        decoded = [codec.decode(codec.encode(row[at], 0), 36) for row in rows]
        torch.testing.assert_close(found[at], torch.stack(decoded).mean(0))
    torch.testing.assert_close(found[1], torch.stack([row[1] for row in rows]).mean(0))


def test_ranks_parameters_and_steps_round_by_themselves() -> None:
    """Or the errors of stochastic rounding would not average out."""
    ramp = torch.linspace(-1, 1, 400)
    sent = []
    for rank in (0, 1):
        hook = CodecHook(Int8(), dense_below=0).register(wrapped(a=(20, 20), b=(20, 20)))
        hook._rank = rank
        for _ in range(2):
            message = hook._written(["a", "b"], [ramp, ramp])
            sent += [message.parts[2], message.parts[4]]
    for at, one in enumerate(sent):
        assert not any(torch.equal(one, other) for other in sent[:at])


def test_a_gradient_that_is_no_number_is_seen_and_forgotten() -> None:
    broken, good = torch.randn(8, 8), torch.randn(8, 8)
    broken[3, 3] = torch.nan
    for hook in (CodecHook(Feedback(TopK(0.1)), dense_below=0), TriggeredHook(OnChange(0.1))):
        model = wrapped(a=(8, 8))
        hook.register(model)
        pass_back(model, a=good)
        assert pass_back(model, a=broken)["a"].isnan().any()
        assert pass_back(model, a=good)["a"].isfinite().all()


# --- triggers ------------------------------------------------------------------------------------


def exchanged(trigger: Trigger, norms: list[float], every: int | None = None) -> list[float]:
    """Return which gradient is stepped with, for gradients of these norms in one direction."""
    model = wrapped(a=(4,))
    TriggeredHook(trigger, every=every).register(model)
    direction = torch.tensor([0.5, 0.5, 0.5, 0.5])
    return [float(pass_back(model, a=norm * direction)["a"].sum() / 2) for norm in norms]


def test_what_has_not_changed_is_used_again() -> None:
    # The threshold is 0.5 * sqrt(4) = 1.
    assert exchanged(OnChange(0.5), [4, 4.5, 3.5, 5.5, 5, 4.5, 4]) == [4, 4, 4, 5.5, 5.5, 4.5, 4.5]


def test_the_first_gradient_and_every_kth_are_exchanged() -> None:
    norms = [1.0, 2, 3, 4, 5, 6, 7]
    assert exchanged(OnChange(1e6), norms) == [1] * 7
    assert exchanged(OnChange(1e6), norms, every=3) == [1, 1, 1, 4, 4, 4, 7]
    assert exchanged(OnChange(1e6), norms, every=1) == norms
    assert exchanged(Always(), norms) == norms


def test_lag_compares_with_the_steps_that_were_taken() -> None:
    """|g - ĝ|^2 > xi (sum of |mean|^2 over the last 2 steps), with xi = 1/2."""
    # 5 against 4: 1 < 16/2. 7 against 4: 9 < (16 + 16)/2. 8.5 against 4: 20 > 16.
    # 2 against 8.5: 42 < (16 + 72)/2 = 44. 1 against 8.5: 56 < 72. 0 against 8.5: 72.25 is not
    # above (72.25 + 72.25)/2.
    norms = [4, 5, 7, 8.5, 2, 1, 0]
    assert exchanged(Lag(workers=1, memory=2), norms) == [4, 4, 4, 8.5, 8.5, 8.5, 8.5]


def test_the_move_is_that_of_the_mean_and_not_of_this_rank() -> None:
    model = wrapped(a=(4,))
    hook = TriggeredHook(Lag(workers=1, memory=1)).register(model)
    pass_back(model, a=torch.full((4,), 2.0))
    hook._kept["a"].mean = torch.full((4,), 0.05)  # as if the others had pulled the other way
    assert torch.equal(pass_back(model, a=torch.full((4,), 2.5))["a"], torch.full((4,), 2.5))


@pytest.mark.parametrize("trigger", [OnChange(0.3, every=4), Lag(1, memory=3), EventGrad(0.9)])
def test_triggers_resume(trigger: Trigger) -> None:
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(5, 5, generator=generator) * 0.3 + 1 for _ in range(40)]
    models = [wrapped(a=(5, 5)) for _ in range(3)]
    hooks = [TriggeredHook(trigger, every=7).register(model) for model in models]
    expected = [pass_back(models[0], a=each)["a"] for each in given]
    for each in given[:20]:
        pass_back(models[1], a=each)
    state = through_a_file(hooks[1].state_dict())
    pass_back(models[1], a=torch.full((5, 5), 50.0))
    hooks[2].load_state_dict(state)
    for each, mean in zip(given[20:], expected[20:], strict=True):
        assert torch.equal(pass_back(models[2], a=each)["a"], mean)


def test_a_trigger_is_copied_for_each_tensor() -> None:
    trigger = Lag(workers=1)
    model = wrapped(a=(3,), b=(4,))
    TriggeredHook(trigger).register(model)
    pass_back(model, a=torch.ones(3), b=torch.ones(4))
    assert not trigger._moves


# --- refused -------------------------------------------------------------------------------------


def test_a_hook_has_one_model() -> None:
    hook = CodecHook(TopK(0.1))
    with pytest.raises(RuntimeError, match="no model yet"):
        hook.state_dict()
    with pytest.raises(RuntimeError, match="no model yet"):
        hook.load_state_dict({})
    with pytest.raises(TypeError, match="DistributedDataParallel, not Given"):
        hook.register(Given(a=(2,)))  # type: ignore[arg-type]
    hook.register(wrapped(a=(2, 2)))
    with pytest.raises(RuntimeError, match="is already registered on a model"):
        hook.register(wrapped(a=(2, 2)))


def test_a_state_of_another_rank_or_model_is_refused() -> None:
    hook = CodecHook(Feedback(TopK(0.1)), dense_below=0).register(wrapped(a=(4, 4)))
    state = hook.state_dict()
    with pytest.raises(ValueError, match="rank 2 of 3 and this is rank 0 of 1"):
        hook.load_state_dict({**state, "rank": 2, "ranks": 3})
    with pytest.raises(ValueError, match=r"rank 0 of 3"):
        hook.load_state_dict({**state, "ranks": 3})
    other = CodecHook(Feedback(TopK(0.1))).register(wrapped(a=(4, 4), b=(2, 2)))
    with pytest.raises(ValueError, match=r"differ in \['b'\]"):
        other.load_state_dict(state)
    dense = CodecHook(Feedback(TopK(0.1))).register(wrapped(a=(4, 4)))
    with pytest.raises(ValueError, match="dense_below"):
        dense.load_state_dict(state)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="dense_below=-1"):
        CodecHook(TopK(0.1), dense_below=-1)
    with pytest.raises(ValueError, match="every=0"):
        TriggeredHook(Always(), every=0)
    model = wrapped(a=(2, 2), b=(2, 2))
    optimizer = torch.optim.SGD([model.module.a], lr=0.1)
    with pytest.raises(ValueError, match=r"does not have \['b'\]"):
        CodecHook(TopK(0.1), rate=optimizer).register(model)


def test_an_error_in_decoding_reaches_the_user() -> None:
    class Broken(TopK):
        def decode(self, message: Message, size: int) -> Tensor:
            raise ValueError("cannot read this")

    model = wrapped(a=(8, 8))
    CodecHook(Broken(0.1), dense_below=0).register(model)
    with pytest.raises(Exception, match="cannot read this"):
        pass_back(model, a=torch.randn(8, 8))
