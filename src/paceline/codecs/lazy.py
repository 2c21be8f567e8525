"""Lazily sent results: workers send only what has changed, and both ends keep the last state.

A worker sends C(g - ĝ) for the tensors for which its trigger fires. At both ends ĝ starts at 0 and
moves by the decoded message. The server adds up ĝ in place of the worker's result. All messages,
even those without a tensor, are numbered and must be read in order.
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
from paceline.codecs.triggers import Always, Lag, Trigger
from paceline.core.protocol import Figure
from paceline.core.schema import load_state, save_state


@dataclass(frozen=True)
class Lazy:
    """Sends C(g - ĝ) when the trigger fires; the server uses ĝ in place of g at all times.

    With `Lag` these are lazily aggregated gradients, LAG-WK (Chen, Giannakis, Sun and Yin, 2018,
    arXiv 1805.09965). With `Always` and a codec such as TopK it is EF21 (Richtárik, Sokolov and
    Fatkhullin, 2021, arXiv 2106.05203). Steps here use the mean of the results, and not their sum
    as in the paper on LAG. The rule of the paper is then `Lag(workers=1)`.

    trigger: each worker has its own copy, which gets the statistics of each tensor.
    codec: encodes the difference; None: the tensors themselves are sent, unencoded.
    momentum: each worker sends its average v = momentum v + (1 - momentum) g in place of g. With
        `Always` and TopK it is EF21-SGDM (Fatkhullin, Tyurin and Richtárik, 2023, arXiv
        2305.15155), which needs no large batches. The server's optimizer then has no momentum.
    """

    trigger: Trigger = Always()
    codec: Codec | None = None
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: use a number from 0 to below 1")
        if isinstance(self.codec, Feedback | DeepGradient | Lazy):
            raise ValueError(
                f"{self.codec} has error feedback, and the differences of Lazy already include "
                "what earlier messages left out; give Lazy the codec without error feedback"
            )
        if self.codec is None:
            return
        if expands(self.codec):
            raise ValueError(
                f"the error of {self.codec} may exceed its input, so the differences of Lazy "
                "would grow without bound; use scaled=False"
            )
        check_partial(self.codec, self.trigger)

    def encode(self, vector: Tensor, key: int) -> Message:
        self._refuse()

    def decode(self, message: Message, size: int) -> Tensor:
        self._refuse()

    def sender(self, size: int) -> Sender:
        self._refuse()

    def whole_sender(self, sizes: Sequence[int]) -> LazySender:
        return LazySender(self, sizes)

    def reader(self, sizes: Sequence[int]) -> Known:
        return Known(self, sizes)

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self} needs state at sender and receiver, which only Trainer(codec=…) keeps: give "
            "it there directly, and use Feedback elsewhere"
        )


class Known:
    """One end's state of a worker's results: ĝ, and the number of messages that made it."""

    def __init__(self, recipe: Lazy, sizes: Sequence[int]) -> None:
        self._codec, self._sizes = recipe.codec, list(sizes)
        self.number = 0
        self.vector: Tensor | None = None

    def take(self, message: Message, dtype: torch.dtype) -> Tensor:
        """Apply the next message, and return ĝ, which is never changed in place."""
        told, bits, *parts = message.parts
        number, whole = told.tolist()
        if number != self.number + 1:
            raise RuntimeError(
                f"message {number} of a worker arrived after message {self.number}, so sender and "
                "receiver differ; this is a bug in the engine"
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
        self._model: Tensor | None = None  # of the last vector, if the trigger wants "move"
        self._momentum = recipe.momentum
        self._average: Tensor | None = None  # of the vectors, if there is momentum

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        """Return the message for a vector that was computed on a model."""
        vector = self._averaged(checked(vector))
        number, known = self._known.number + 1, self._known.vector
        change = vector if known is None else vector - known
        named = self._fires(number, vector, change, rate, model)
        whole, parts = self._codec is None, tuple[Tensor, ...]()
        if any(named):
            chosen = self._only(change, named)
            # After an overflow no difference can restore ĝ.
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

    def _averaged(self, vector: Tensor) -> Tensor:
        """Return the average with earlier vectors; one that is not finite stays as it is."""
        if not self._momentum or not finite(vector):
            return vector
        average = (
            vector.clone()
            if self._average is None
            else self._average.lerp(vector, 1 - self._momentum)
        )
        self._average = average
        return average

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
                raise ValueError(f"{self._trigger} needs the model; give model=")
            before, self._model = self._model, model
            figures["move"] = self._norms(model - (model if before is None else before))
        return self._trigger.fires(number, figures, self._sizes, rate)

    def _norms(self, vector: Tensor) -> list[float]:
        pieces = torch.split(vector, self._sizes)
        return [float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in pieces]

    def _only(self, vector: Tensor, named: Sequence[bool]) -> Tensor:
        """Return the tensors to send, concatenated."""
        if all(named):
            return vector
        return torch.cat(list(compress(torch.split(vector, self._sizes), named)))

    def refund(self, message: Message) -> None:
        """Do nothing: both ends apply every message, used or not."""

    def state_dict(self) -> State:
        trigger = json.dumps(save_state(self._trigger)).encode()
        state = self._known.state_dict()
        state["trigger"] = torch.frombuffer(bytearray(trigger), dtype=torch.uint8)
        others = {"model": self._model, "average": self._average}
        return state | {name: each for name, each in others.items() if each is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._known.load_state_dict(state)
        self._model, self._average = state.get("model"), state.get("average")
        if "trigger" in state:
            load_state(self._trigger, json.loads(state["trigger"].numpy().tobytes()))


def check_partial(codec: Codec, trigger: Trigger) -> None:
    """Refuse a codec of one vector size with a trigger that sends some of the tensors."""
    if isinstance(trigger, Always | Lag):  # these send all tensors or none
        return
    try:
        codec.sender(1)
    except ValueError as error:
        raise ValueError(
            f"{codec} is for vectors of one size, and {trigger} sends some tensors without the "
            "others; use Always or Lag with it, or leave the sizes out"
        ) from error
