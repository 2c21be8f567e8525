"""A codec made of two: the second encodes the numbers that the first sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.codecs.base import Codec, Message, Sender, State, Stateless, Valued, valid_key


@dataclass(frozen=True)
class Chain:
    """Encodes by `first`, and the floating-point numbers of its message by `second`.

    The message holds the parts of the second, then the other parts of the first. Chains nest to
    either side: `Chain(RandomK(0.5), Chain(TopK(0.02), Int8()))` sends 1 % as bytes.
    """

    first: Valued
    second: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.first, Valued):
            raise ValueError(
                f"{self.first} sends no floating-point numbers that {self.second} could encode; "
                "begin with TopK, RandomK or LowRank, and put error feedback around the chain"
            )
        _ = self.first.extras  # a chain that ends in whole numbers raises here

    @property
    def extras(self) -> int:
        """The number of parts after the numbers; raises if the second sends no numbers."""
        return _valued(self).extras + self.first.extras

    def count(self, size: int) -> int:
        return _valued(self).count(self.first.count(size))

    def encode(self, vector: Tensor, key: int) -> Message:
        return self._joined(self.first.encode(vector, key), key)

    def decode(self, message: Message, size: int) -> Tensor:
        cut = len(message.parts) - self.first.extras
        if cut < 1:
            raise ValueError(
                f"a message of {len(message.parts)} parts, where {self} sends more than "
                f"{self.first.extras}; decode with the codec that encoded it"
            )
        values = self.second.decode(Message(message.parts[:cut]), self.first.count(size))
        return self.first.decode(Message((values, *message.parts[cut:])), size)

    def sender(self, size: int) -> Sender:
        if not isinstance(self.second.sender(self.first.count(size)), Stateless):
            raise ValueError(
                f"{self.second} keeps state for each position, and positions change from message "
                "to message in a chain; put it first, or around the chain, as in "
                "Feedback(Chain(...))"
            )
        first = self.first.sender(size)
        return Stateless(self) if isinstance(first, Stateless) else _ChainSender(self, first)

    def _joined(self, message: Message, key: int) -> Message:
        second = self.second.encode(message.parts[0], _next_key(key))
        return Message((*second.parts, *message.parts[1:]), message.rate)


class _ChainSender:
    """Sends by the first codec's own sender."""

    def __init__(self, chain: Chain, first: Sender) -> None:
        self._chain = chain
        self._first = first

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        return self._chain._joined(self._first.send(vector, key, rate), key)

    def refund(self, message: Message) -> None:
        """Do nothing: no codec that can be first in a chain remembers what it sent."""

    def state_dict(self) -> State:
        return self._first.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._first.load_state_dict(state)


def _valued(chain: Chain) -> Valued:
    if not isinstance(chain.second, Valued):
        raise ValueError(
            f"{chain} sends no floating-point numbers that another codec could encode; put the "
            "codec that sends whole numbers last"
        )
    return chain.second


def _next_key(key: int) -> int:
    """Return another key, so that the randomness of the second is independent of the first."""
    high = np.random.SeedSequence([valid_key(key), 1]).generate_state(1, np.uint64)[0]
    return int(high) >> 1
