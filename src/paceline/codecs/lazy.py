"""Results that are sent as far as they have changed: both ends keep what was last known of them.

A worker sends C(g - ĝ), of those tensors alone for which its trigger fires, and ĝ moves at both
ends by what that decodes to; at first it is 0. Whoever adds results up takes ĝ for the worker's.
All messages are numbered, also those about nothing, and have to be read in turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.base import Codec, Message, Sender, State, checked
from paceline.codecs.feedback import DeepGradient, Feedback, expands, finite
from paceline.core.protocol import Figure
from paceline.core.state import load_state, save_state
from paceline.policies.triggers import Always, Lag, Trigger


@dataclass(frozen=True)
class Lazy:
    """Sends C(g - ĝ) when the trigger fires, and lets ĝ stand for g at all times.

    With `Lag` these are lazily aggregated gradients, LAG-WK (Chen, Giannakis, Sun and Yin, 2018,
    arXiv 1805.09965); with `Always` and a codec such as TopK it is EF21 (Richtárik, Sokolov and
    Fatkhullin, 2021, arXiv 2106.05203). Steps here take the mean of the results, and not their sum
    as in the paper on LAG: its rule is then `Lag(workers=1)`.

    trigger: each worker has a copy of it, which is shown its vectors tensor by tensor.
    codec: of the difference; without one, tensors that are sent are sent as they are.
    """

    trigger: Trigger = Always()
    codec: Codec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.codec, Feedback | DeepGradient | Lazy):
            raise ValueError(
                f"{self.codec} remembers by itself, and differences hold what was left out "
                "already; give Lazy the codec without its memory"
            )
        if self.codec is None:
            return
        if expands(self.codec):
            raise ValueError(
                f"{self.codec} may miss by more than it was given, and differences would grow "
                "without bound; use scaled=False"
            )
        check_partial(self.codec, self.trigger)

    def encode(self, vector: Tensor, key: int) -> Message:
        self._refuse()

    def decode(self, message: Message, size: int) -> Tensor:
        self._refuse()

    def sender(self, size: int) -> Sender:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self} needs a memory at both ends, which Trainer(codec=…) has: give it there by "
            "itself, and use Feedback elsewhere"
        )


class Known:
    """What one end knows of a worker's results: ĝ, and how many messages have made it."""

    def __init__(self, recipe: Lazy, sizes: Sequence[int]) -> None:
        self._codec, self._sizes = recipe.codec, list(sizes)
        self.number = 0
        self.vector: Tensor | None = None

    def take(self, message: Message, dtype: torch.dtype) -> Tensor:
        """Move by the next message; return ĝ, which is never changed in place."""
        told, bits, *parts = message.parts
        number, whole = told.tolist()
        if number != self.number + 1:
            raise RuntimeError(
                f"message {number} of a worker came after {self.number}, so that the two ends "
                "differ: an engine's fault"
            )
        self.number = number
        named = np.unpackbits(bits.numpy(), count=len(self._sizes)).tolist()
        if self.vector is None:
            self.vector = torch.zeros(sum(self._sizes), dtype=dtype)
        if any(named):
            sizes = list(compress(self._sizes, named))
            if whole or self._codec is None:
                (values,) = parts
            else:
                values = self._codec.decode(Message(tuple(parts), message.rate), sum(sizes))
            moved = self.vector.clone()
            into = compress(torch.split(moved, self._sizes), named)
            for piece, value in zip(into, torch.split(values, sizes), strict=True):
                if whole:
                    piece.copy_(value)
                else:
                    piece.add_(value)
            self.vector = moved
        return self.vector

    def state_dict(self) -> State:
        number = {"number": torch.tensor([self.number])}
        return number if self.vector is None else {**number, "known": self.vector}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.number = int(state.get("number", 0))
        self.vector = state.get("known")


class LazySender:
    """The worker's end."""

    def __init__(self, recipe: Lazy, sizes: Sequence[int]) -> None:
        self._codec, self._sizes = recipe.codec, list(sizes)
        self._known = Known(recipe, sizes)
        self._trigger = deepcopy(recipe.trigger)
        self._model: Tensor | None = None  # of the last vector, if moves are to be seen

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        """Return the message for a vector that was computed on a model."""
        vector = checked(vector)
        number, known = self._known.number + 1, self._known.vector
        change = vector if known is None else vector - known
        named = self._fires(number, vector, change, rate, model)
        whole, parts = self._codec is None, tuple[Tensor, ...]()
        if any(named):
            chosen = self._only(change, named)
            # After an overflow no difference brings ĝ back.
            whole = whole or not finite(chosen)
            if whole or self._codec is None:
                parts = (self._only(vector, named),)
            else:
                parts = self._codec.encode(chosen, key).parts
        told = torch.tensor([number, whole], dtype=torch.int32)
        bits = torch.from_numpy(np.packbits(np.array(named, dtype=bool)))
        message = Message((told, bits, *parts), rate)
        self._known.take(message, vector.dtype)
        return message

    def _fires(
        self, number: int, vector: Tensor, change: Tensor, rate: float, model: Tensor | None
    ) -> list[bool]:
        figures: dict[Figure, list[float]] = {}
        wants = self._trigger.wants
        if "norm" in wants:
            figures["norm"] = self._norms(vector)
        if "change" in wants:
            figures["change"] = self._norms(change)
        if "move" in wants:
            if model is None:
                raise ValueError(f"{self._trigger} has to be shown the model; give model=")
            before, self._model = self._model, model
            figures["move"] = self._norms(model - (model if before is None else before))
        return self._trigger.fires(number, figures, self._sizes, rate)

    def _norms(self, vector: Tensor) -> list[float]:
        pieces = torch.split(vector, self._sizes)
        return [float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in pieces]

    def _only(self, vector: Tensor, named: Sequence[bool]) -> Tensor:
        """Return the tensors that are sent, one after the other."""
        if all(named):
            return vector
        return torch.cat(list(compress(torch.split(vector, self._sizes), named)))

    def refund(self, message: Message) -> None:
        """Do nothing: used or not, both ends know what was sent."""

    def state_dict(self) -> State:
        trigger = json.dumps(save_state(self._trigger)).encode()
        state = self._known.state_dict()
        state["trigger"] = torch.frombuffer(bytearray(trigger), dtype=torch.uint8)
        return state if self._model is None else {**state, "model": self._model}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._known.load_state_dict(state)
        self._model = state.get("model")
        if "trigger" in state:
            load_state(self._trigger, json.loads(state["trigger"].numpy().tobytes()))


def check_partial(codec: Codec, trigger: Trigger) -> None:
    """Refuse a codec that is made for whole vectors with a trigger that chooses tensors."""
    if isinstance(trigger, Always | Lag):  # which send all tensors, or none
        return
    try:
        codec.sender(1)
    except ValueError as error:
        raise ValueError(
            f"{codec} is for vectors of one size, and {trigger} sends some tensors without the "
            "others; use Always or Lag with it, or leave the sizes out"
        ) from error
