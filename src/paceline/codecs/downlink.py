"""Model codec: sends models to workers as their values, or as changes of a public copy.

An elementwise codec sends the values of each version, rounded. Workers compute on the rounded
values; the server's own values stay exact. Neither end remembers a message.

Any other codec sends changes of a copy that both ends keep. The server keeps the copy that its
messages add up to, x̂. For a version x it sends C(x - x̂), and x̂ moves by the decoded message. The
next difference holds what a message left out, so that no other memory is needed. Workers compute on
x̂. A worker that missed versions gets their messages, or the whole copy once these are longer than
it. Untrained numbers are sent unencoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.codecs.base import (
    Bytes,
    Codec,
    Elementwise,
    Message,
    TwoEnded,
    header_length,
    pack,
)
from paceline.codecs.feedback import DeepGradient, Feedback, expands
from paceline.codecs.uplink import Span, received


class Values:
    """The server's end of an elementwise codec."""

    def __init__(self, codec: Elementwise, vector: NDArray[Any], trained: int) -> None:
        self._codec, self._trained, self._span = codec, trained, (0, vector.size)
        self.whole_bytes = rounded_bytes(codec, self._span, trained, vector.itemsize)

    def publish(self, version: int, vector: NDArray[Any]) -> Bytes:
        """Return the message of a version of the model."""
        return rounded(self._codec, vector, self._span, self._trained)

    def since(self, known: int | None, version: int) -> None:
        """Return that the whole message is to be sent."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return {}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Do nothing: this end has no memory."""


def rounded(codec: Elementwise, values: NDArray[Any], span: Span, trained: int) -> Bytes:
    """Return the message of a slice of the model; `opened` reads it."""
    middle = max(min(span[1], trained), span[0]) - span[0]
    parts = codec.encode(torch.from_numpy(values[:middle]), 0).parts if middle else ()
    return pack(Message((*parts, torch.from_numpy(values[middle:]))))


def rounded_bytes(codec: Elementwise, span: Span, trained: int, itemsize: int) -> int:
    """Return the length of the message of a slice, whose unencoded values have `itemsize` bytes."""
    middle = max(min(span[1], trained), span[0])
    encoded, tail = middle - span[0], span[1] - middle
    return header_length(2 if encoded else 1) + encoded * codec.dtype.itemsize + tail * itemsize


def opened(model: NDArray[Any], codec: Codec, span: Span, trained: int) -> NDArray[Any]:
    """Return a model, or a slice of it, as workers compute on it, from the form that was sent."""
    return received(model, codec, span, trained) if isinstance(codec, Elementwise) else model


class Downlink:
    """The server's end of other codecs: the public copy, and the newest messages that made it."""

    whole_bytes: int | None = None  # of the copy: as many as without a codec

    def __init__(self, codec: Codec, vector: NDArray[Any], trained: int) -> None:
        check_memoryless(codec, "model_codec")
        self._codec, self._trained = codec, trained
        self.copy = np.array(vector)
        self._changes: OrderedDict[int, Bytes] = OrderedDict()  # by the version they lead to
        self._first = -1  # the version before the first of them

    def publish(self, version: int, vector: NDArray[Any]) -> NDArray[Any]:
        """Move the copy towards a version of the model, and return the copy."""
        if version in self._changes or (not self._changes and version == self._first):
            return self.copy
        if self._first < 0:
            self._first = version
            return self.copy
        trained = self._trained
        change = torch.from_numpy(vector[:trained] - self.copy[:trained])
        message = self._codec.encode(change, version)
        tail = torch.from_numpy(np.array(vector[trained:]))
        self._changes[version] = packed = pack(Message((*message.parts, tail)))
        moved = self.copy.copy()  # readers may still hold the copy before
        moved[:trained] += self._codec.decode(message, trained).numpy()
        moved[trained:] = vector[trained:]
        self.copy = moved
        while sum(each.nbytes for each in self._changes.values()) > vector.nbytes + packed.nbytes:
            self._first, _ = self._changes.popitem(last=False)
        return moved

    def since(self, known: int | None, version: int) -> list[Bytes] | None:
        """Return the messages after version `known` up to `version`; None: send the whole copy."""
        if known is None or known < self._first or known > version:
            return None
        return [packed for at, packed in self._changes.items() if known < at <= version]

    def state_dict(self) -> dict[str, NDArray[Any]]:
        changes = {f"down.{version}": packed for version, packed in self._changes.items()}
        return {"down.copy": self.copy, "down.first": np.array(self._first), **changes}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        mine = {name.partition(".")[2]: a for name, a in state.items() if name.startswith("down.")}
        self.copy, self._first = np.array(mine.pop("copy")), int(mine.pop("first"))
        self._changes = OrderedDict((int(name), mine[name]) for name in sorted(mine, key=int))


def downlink(codec: Codec, vector: NDArray[Any], trained: int) -> Downlink | Values:
    """Return the server's end of a model codec."""
    if isinstance(codec, Elementwise):
        return Values(codec, vector, trained)
    return Downlink(codec, vector, trained)


def moved(copy: NDArray[Any], changes: Sequence[Bytes], codec: Codec, trained: int) -> NDArray[Any]:
    """Return a worker's copy of the model after some messages."""
    copy = np.array(copy)
    for packed in changes:
        change = received(packed, codec, (0, copy.size), trained)
        copy[:trained] += change[:trained]
        copy[trained:] = change[trained:]
    return copy


def has_memory(codec: Codec) -> bool:
    """Return whether messages include what earlier ones left out."""
    return isinstance(codec, Feedback | DeepGradient | TwoEnded)


def check_memoryless(codec: Codec, name: str) -> None:
    """Refuse a codec with a memory or an unbounded error: a public copy can use neither."""
    if has_memory(codec):
        raise ValueError(
            f"{name}={codec}: the messages here are differences, which already include what "
            "earlier messages left out; give the codec without error feedback"
        )
    if expands(codec):
        raise ValueError(
            f"{name}={codec}: its error may exceed its input, so copies of the model would not "
            "converge to the model; use scaled=False"
        )
