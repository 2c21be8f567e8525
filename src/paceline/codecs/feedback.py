"""Error feedback: a sender remembers what a message left out, and adds it to the next one.

The memory is in units of the model, learning rate times gradient. A learning rate that changes
from step to step thus neither inflates nor shrinks it. A vector that is not finite is sent alone
and leaves the memory unchanged: one overflow must not spoil all later messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from paceline.codecs.base import Codec, Message, Sender, State, checked
from paceline.codecs.chain import Chain
from paceline.codecs.sparse import RandomK, TopK


@dataclass(frozen=True)
class Feedback:
    """Sends C(p) with p = g + e / rate and remembers e = rate (p - D(C(p))).

    At a constant rate this is the rule of Stich, Cordonnier and Jaggi 2018 (arXiv 1809.07599) and
    Karimireddy et al. 2019 (arXiv 1901.09847). For a single worker x - e is, at all times, where
    plain SGD with the same gradients would be. The codec's error must be smaller than the vector.
    With a scaled RandomK it is larger, so that codec is refused.
    refunds: whether a message that no step used goes back into the memory. A result too old for a
        step then arrives with a later message; without refunds it is lost, as without a codec.
    decay: the factor of e in the next message, p = g + decay e / rate. Below 1 old remainders fade
        out. For local steps, 0.95 takes the place of the outer momentum in SparseLoCo (Sarfi et al.
        2025, arXiv 2508.15706). Messages that go back into the memory fade as well.
    """

    codec: Codec
    refunds: bool = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.codec, Feedback | DeepGradient):
            raise ValueError(f"{self.codec} has error feedback already; use it without Feedback")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}: use a number above 0 and at most 1")
        if expands(self.codec):
            raise ValueError(
                f"the error of {self.codec} may exceed its input, so the memory of Feedback would "
                "grow without bound; use scaled=False"
            )

    def encode(self, vector: Tensor, key: int) -> Message:
        """Return the message for one vector, without memory; only senders remember."""
        return self.codec.encode(vector, key)

    def decode(self, message: Message, size: int) -> Tensor:
        return self.codec.decode(message, size)

    def sender(self, size: int) -> Sender:
        return _FeedbackSender(self, size)


class _FeedbackSender:
    def __init__(self, recipe: Feedback, size: int) -> None:
        self._codec, self._size, self._recipe = recipe.codec, size, recipe
        self._inner = recipe.codec.sender(size)
        self._error: Tensor | None = None

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        _check(vector, self._size, rate)
        vector = checked(vector)
        if not rate or not finite(vector):  # a step of rate 0 uses nothing and leaves no error
            return self._inner.send(vector, key, rate)
        if self._error is None:
            self._error = torch.zeros_like(vector)
        wanted = torch.add(vector, self._error.to(vector), alpha=self._recipe.decay / rate)
        message = self._inner.send(wanted, key, rate)
        self._error = wanted.sub_(self._codec.decode(message, self._size)).mul_(rate)
        return message

    def refund(self, message: Message) -> None:
        if not self._recipe.refunds:
            return
        sent = self._codec.decode(message, self._size)
        if message.rate and finite(sent):
            if self._error is None:
                self._error = torch.zeros_like(sent)
            self._error.add_(sent.to(self._error), alpha=message.rate)

    def state_dict(self) -> State:
        inner = {f"inner.{name}": tensor for name, tensor in self._inner.state_dict().items()}
        return inner if self._error is None else inner | {"error": self._error.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        inner = {name: tensor for name, tensor in state.items() if name.startswith("inner.")}
        self._inner.load_state_dict({name[6:]: tensor for name, tensor in inner.items()})
        self._error = state["error"].clone() if "error" in state else None


@dataclass(frozen=True)
class DeepGradient:
    """Sends the largest of accumulated momentum: u = m u + g, v += u, TopK(v), v = 0 where sent.

    Deep Gradient Compression (Lin et al. 2017, arXiv 1712.01887). The step that takes the messages
    has no momentum of its own. Where v was sent, u is zeroed as well (factor masking), except if
    the message holds all numbers. Then no number is late, and this is SGD with momentum. The unit
    of v is that of the model, rate times u. `clip` bounds the norm of each worker's gradient; for a
    bound c on the sum of N workers, use c / sqrt(N). The first messages send the fractions of
    `warmup` in place of `fraction`, each for `stage` messages. A refund adds to v; u stays
    unchanged.
    """

    fraction: float
    momentum: float = 0.9
    masking: bool = True
    clip: float | None = None
    warmup: tuple[float, ...] = ()
    stage: int = 1
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for fraction in (self.fraction, *self.warmup):
            TopK(fraction)  # raises for an invalid fraction
        if (
            not 0 <= self.momentum < 1
            or self.stage < 1
            or (self.clip is not None and self.clip <= 0)
        ):
            raise ValueError(
                f"momentum={self.momentum}, stage={self.stage}, clip={self.clip}: use a momentum "
                "from 0 to below 1, a stage of 1 or more, and a clip above 0 or None"
            )

    def at(self, sent: int) -> TopK:
        """Return the codec of the next message after `sent` messages."""
        stage = sent // self.stage
        fraction = self.warmup[stage] if stage < len(self.warmup) else self.fraction
        return TopK(fraction, self.sizes)

    def encode(self, vector: Tensor, key: int) -> Message:
        """Return the message for one vector, without memory; only senders remember."""
        return self.at(len(self.warmup) * self.stage).encode(vector, key)

    def decode(self, message: Message, size: int) -> Tensor:
        return TopK(self.fraction, self.sizes).decode(message, size)

    def sender(self, size: int) -> Sender:
        self.at(0).count(size)  # raises for a wrong size
        return _DeepSender(self, size)


class _DeepSender:
    def __init__(self, recipe: DeepGradient, size: int) -> None:
        self._recipe, self._size = recipe, size
        self._sent = 0
        self._velocity: Tensor | None = None  # u
        self._pending: Tensor | None = None  # rate times v

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        _check(vector, self._size, rate)
        vector = checked(vector)
        codec = self._recipe.at(self._sent)
        self._sent += 1
        if not finite(vector):
            return Message(codec.encode(vector, key).parts, rate)
        if self._recipe.clip is not None:
            norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
            vector = vector * min(1.0, self._recipe.clip / (norm + 1e-6))  # as clip_grad_norm_ does
        velocity = self._velocity
        velocity = (
            vector.clone() if velocity is None else velocity.mul_(self._recipe.momentum) + vector
        )
        self._velocity = velocity
        if not rate:  # such a step uses nothing and leaves no error
            return Message(codec.encode(velocity, key).parts, rate)
        wanted = velocity.clone()
        if self._pending is not None:
            wanted.add_(self._pending.to(vector), alpha=1 / rate)
        message = Message(codec.encode(wanted, key).parts, rate)
        places = codec.places(message, self._size)
        wanted[places] = 0
        self._pending = wanted.mul_(rate)
        if self._recipe.masking and places.numel() < self._size:
            velocity[places] = 0
        return message

    def refund(self, message: Message) -> None:
        sent = self._recipe.decode(message, self._size)
        if message.rate and finite(sent):
            if self._pending is None:
                self._pending = torch.zeros_like(sent)
            self._pending.add_(sent.to(self._pending), alpha=message.rate)

    def state_dict(self) -> State:
        state = {"sent": torch.tensor([self._sent])}
        for name, tensor in (("velocity", self._velocity), ("pending", self._pending)):
            if tensor is not None:
                state[name] = tensor.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sent = int(state.get("sent", 0))  # absent if no message was sent before saving
        self._velocity = state["velocity"].clone() if "velocity" in state else None
        self._pending = state["pending"].clone() if "pending" in state else None


def expands(codec: Codec) -> bool:
    match codec:
        case RandomK(scaled=scaled):
            return scaled
        case Chain(first=first, second=second):
            return expands(first) or expands(second)
        case _:
            return False


def _check(vector: Tensor, size: int, rate: float) -> None:
    if vector.numel() != size:
        raise ValueError(
            f"the vector has {vector.numel()} values, and this sender takes {size}; make a sender "
            "for each size"
        )
    if not (rate >= 0 and isfinite(rate)):
        raise ValueError(f"rate={rate}: use a finite learning rate >= 0")


def finite(vector: Tensor) -> bool:
    return bool(vector.sum().isfinite())
