"""Error feedback: nothing is lost, whatever the rate does and whichever messages go unused."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.codecs.base import Codec, Message, pack, unpack
from paceline.codecs.chain import Chain
from paceline.codecs.feedback import DeepGradient, Feedback
from paceline.codecs.lowrank import LowRank
from paceline.codecs.quantize import BFloat16, Half, Int8, Sign, TwoBit
from paceline.codecs.sparse import RandomK, TopK

N = 40
CODECS: dict[str, Codec] = {
    "top": TopK(0.1),
    "random": RandomK(0.2),
    "int8": Int8(16),
    "sign": Sign(16),
    "two bits": TwoBit(16),
    "half": Half(),
    "bfloat16": BFloat16(),
    "low rank": LowRank(1, ((6, 6), (4,))),
    "chain": Chain(TopK(0.1), Int8()),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
RATES: dict[str, Callable[[int], float]] = {
    "constant": lambda t: 0.1,
    "decaying": lambda t: 0.3 / (1 + t),
    "growing from zero": lambda t: 0.002 * t,
    "down to zero": lambda t: 0.1 if t < 40 else 0.0,
}
every_rate = pytest.mark.parametrize("rate", RATES.values(), ids=RATES.keys())


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradient(x: Tensor, t: int) -> Tensor:
    return torch.linspace(0.1, 2, N, dtype=x.dtype) * x + 0.3 * normal(N, t, x.dtype)


@every_codec
@every_rate
def test_model_less_memory_is_plain_descent(codec: Codec, rate: Callable[[int], float]) -> None:
    sender = Feedback(codec).sender(N)
    x = start = normal(N, 99)
    taken = torch.zeros(N, dtype=torch.float64)
    for t in range(50):
        g = gradient(x, t)
        x = x - rate(t) * codec.decode(sender.send(g, t, rate(t)), N).double()
        taken += rate(t) * g
    error = sender.state_dict()["error"]
    assert error.abs().max() > 1e-7  # there is something that could be lost
    torch.testing.assert_close(x - error, start - taken, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["constant", "decaying"])
def test_it_is_the_rule_of_the_textbook(name: str) -> None:
    codec = TopK(0.1)
    sender = Feedback(codec).sender(N)
    x, other, error = normal(N), normal(N), torch.zeros(N, dtype=torch.float64)
    for t in range(50):
        rate = RATES[name](t)
        x = x - rate * codec.decode(sender.send(gradient(x, t), t, rate), N)
        wanted = rate * gradient(other, t) + error
        kept = wanted.abs().topk(4).indices
        sent = torch.zeros_like(wanted)
        sent[kept] = wanted[kept]
        error, other = wanted - sent, other - sent
        torch.testing.assert_close(x, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_a_memory_that_fades_is_the_accumulator_of_sparse_local_steps(decay: float) -> None:
    """At rate 1: e = decay e + d, send C(e), e = e - C(e)."""
    codec = Chain(TopK(0.1), TwoBit(16))
    sender = Feedback(codec, decay=decay).sender(N)
    memory = torch.zeros(N, dtype=torch.float64)
    for t in range(50):
        change = normal(N, t)
        memory = decay * memory + change
        message = sender.send(change, t, 1.0)
        memory = memory - codec.decode(message, N)
        torch.testing.assert_close(sender.state_dict()["error"], memory, rtol=0, atol=1e-12)


def test_refunding_a_message_restores_it_exactly() -> None:
    sender = Feedback(TopK(0.1)).sender(N)
    sender.send(normal(N, 1), 0, 0.3)
    error = sender.state_dict()["error"]
    message = sender.send(normal(N, 2), 1, 0.2)
    sender.refund(unpack(pack(message)))
    wanted = torch.add(normal(N, 2), error, alpha=1 / 0.2)
    assert torch.equal(sender.state_dict()["error"], wanted * 0.2)


@every_codec
@every_rate
def test_nothing_is_lost_when_messages_go_unused(
    codec: Codec, rate: Callable[[int], float]
) -> None:
    rng = random.Random(1)
    sender = Feedback(codec).sender(N)
    x = start = normal(N, 99)
    taken = torch.zeros(N, dtype=torch.float64)
    waiting: list[Message] = []
    for t in range(50):
        g = gradient(x, t)
        taken += rate(t) * g
        waiting.append(sender.send(g, t, rate(t)))
        while waiting and rng.random() < 0.6:  # late, and in any order
            message = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.5:
                sender.refund(message)
            else:
                x = x - message.rate * codec.decode(message, N).double()
    for message in waiting:
        sender.refund(message)
    error = sender.state_dict()["error"]
    torch.testing.assert_close(x - error, start - taken, rtol=0, atol=1e-11)


def test_top_1_alone_diverges_where_feedback_converges() -> None:
    # Example 1 of Beznosikov et al. 2020 (arXiv 2002.12410): f_i = <a_i, x>^2 + |x|^2 / 4 have
    # their minimum at 0, but the largest number of each gradient at (t, t, t) points away from it.
    rows = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
    rate = 0.03

    def run(codec: Codec, steps: int) -> Tensor:
        senders = [codec.sender(3) for _ in rows]
        x = torch.ones(3, dtype=torch.float64)
        for t in range(steps):
            gradients = [2 * (a @ x) * a + x / 2 for a in rows]
            messages = [s.send(g, t, rate) for s, g in zip(senders, gradients, strict=True)]
            x = x - rate * sum(codec.decode(message, 3) for message in messages) / 3
        return x

    grown = (1 + rate * 11 / 6) ** 200
    torch.testing.assert_close(run(TopK(0.01), 200), torch.full((3,), grown, dtype=torch.float64))
    assert grown > 40_000
    assert run(Feedback(TopK(0.01)), 400).norm() < 1e-5
    assert run(TopK(1.0), 400).norm() < 1e-5


def test_what_needs_no_memory_or_cannot_have_one_is_refused() -> None:
    for codec in (RandomK(0.1, scaled=True), Chain(TopK(0.1), RandomK(0.1, scaled=True))):
        with pytest.raises(ValueError, match="use scaled=False"):
            Feedback(codec)
    for recipe in (Feedback(TopK(0.1)), DeepGradient(0.1)):
        with pytest.raises(ValueError, match="has error feedback already"):
            Feedback(recipe)
        for rate in (-0.1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="use a finite learning rate"):
                recipe.sender(N).send(normal(N), 0, rate)
        with pytest.raises(ValueError, match="this sender takes 40"):
            recipe.sender(N).send(normal(N + 1), 0)


def test_deep_gradient_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        DeepGradient(0.1, warmup=(0.5, 0.0))
    for momentum, clip, stage in ((1.0, None, 1), (-0.1, None, 1), (0.9, 0.0, 1), (0.9, 1.0, 0)):
        with pytest.raises(ValueError, match="use a momentum from 0 to below 1, a stage"):
            DeepGradient(0.1, momentum, clip=clip, stage=stage)


@every_rate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deep_gradient_is_momentum_when_all_is_sent(
    rate: Callable[[int], float], dtype: torch.dtype
) -> None:
    codec = DeepGradient(1.0, momentum=0.9)
    sender = codec.sender(N)
    x = normal(N, 99, dtype)
    other = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD([other], lr=1.0, momentum=0.9)
    for t in range(50):
        x = x.add(codec.decode(sender.send(gradient(x, t), t, rate(t)), N), alpha=-rate(t))
        optimizer.param_groups[0]["lr"] = rate(t)
        other.grad = gradient(other.detach(), t)
        optimizer.step()
        assert torch.equal(x, other.detach())


@pytest.mark.parametrize("masking", [True, False])
@every_rate
def test_deep_gradient_follows_its_rule(rate: Callable[[int], float], masking: bool) -> None:
    codec = DeepGradient(0.1, momentum=0.8, masking=masking)
    sender = codec.sender(N)
    velocity, pending = torch.zeros(2, N, dtype=torch.float64)
    for t in range(60):
        g = normal(N, t)
        message = sender.send(g, t, rate(t))
        velocity = 0.8 * velocity + g
        pending = pending + rate(t) * velocity
        if rate(t) == 0:
            continue
        kept = pending.abs().topk(4).indices.sort().values
        assert codec.at(t).places(message, N).tolist() == kept.tolist()
        torch.testing.assert_close(message.parts[0] * rate(t), pending[kept])
        pending[kept] = 0
        if masking:
            velocity[kept] = 0
        state = sender.state_dict()
        torch.testing.assert_close(state["velocity"], velocity)
        torch.testing.assert_close(state["pending"], pending)
        assert not state["pending"][kept].any()
        assert bool(state["velocity"][kept].any()) is not masking


def test_a_refund_gives_back_what_was_pending() -> None:
    codec = DeepGradient(0.1)
    sender = codec.sender(N)
    sender.send(normal(N, 0), 0, 0.1)
    before = sender.state_dict()
    message = sender.send(normal(N, 1), 1, 0.1)
    sender.refund(unpack(pack(message)))
    after = sender.state_dict()
    expected = before["pending"] + 0.1 * (0.9 * before["velocity"] + normal(N, 1))
    torch.testing.assert_close(after["pending"], expected, rtol=0, atol=1e-15)
    assert not after["velocity"][codec.at(1).places(message, N)].any()


def test_warm_up_sends_more_at_first() -> None:
    codec = DeepGradient(0.05, warmup=(1.0, 0.5, 0.25), stage=2, sizes=(30, 10))
    sender = codec.sender(N)
    sent = [sender.send(normal(N, t), t).parts[0].numel() for t in range(8)]
    assert sent == [40, 40, 20, 20, 11, 11, 3, 3]
    again = codec.sender(N)
    again.load_state_dict({"sent": torch.tensor([3])})
    assert again.send(normal(N), 0).parts[0].numel() == 20


def test_gradients_are_clipped_before_they_add_up() -> None:
    codec = DeepGradient(1.0, momentum=0.5, clip=2.0)
    sender = codec.sender(4)
    long, short = torch.tensor([3.0, 0, 4.0, 0]), torch.tensor([0.0, 1.0, 0, 0])
    first = codec.decode(sender.send(long, 0), 4)
    torch.testing.assert_close(first, torch.tensor([1.2, 0, 1.6, 0]))
    second = codec.decode(sender.send(short, 1), 4)
    torch.testing.assert_close(second, torch.tensor([0.6, 1.0, 0.8, 0]))


def test_what_is_not_given_back_is_lost() -> None:
    sender = Feedback(TopK(0.5), refunds=False).sender(2)
    message = sender.send(torch.tensor([4.0, 1.0]), 0)
    sender.refund(message)
    later = TopK(0.5).decode(sender.send(torch.zeros(2), 1), 2)
    assert later.tolist() == [0.0, 1.0]
