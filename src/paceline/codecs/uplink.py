"""Results sent by a worker: encoded slice by slice, and decoded by the server that adds them up.

The codec encodes the trained numbers. Untrained ones (buffers such as BatchNorm's statistics)
follow unencoded. A worker keeps its last messages. When it learns that no step used a message, the
sender adds it back to its memory. A `TwoEnded` codec has a memory at the other end too, and needs
results that are not cut into slices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.base import (
    Bytes,
    Codec,
    Message,
    Reader,
    Sender,
    Stateless,
    TwoEnded,
    pack,
    unpack,
    view,
)

Span = tuple[int, int]
_REMEMBERED = 4  # messages; a result is used or discarded soon after it was sent


class Uplink:
    """A worker's end of a codec: one sender for each slice of a result.

    If the slices change, as when a server is lost, all memories start empty.
    tensors: the sizes of the trained tensors, if there is more than one.
    """

    def __init__(self, codec: Codec, trained: int, tensors: Sequence[int] = ()) -> None:
        self._codec, self._trained, self._tensors = codec, trained, tensors
        self._spans: list[Span] = []
        self._senders: list[Sender | None] = []
        self._sent: OrderedDict[int, list[Message | None]] = OrderedDict()

    def send(
        self,
        vector: NDArray[Any],
        task: int,
        rate: float,
        spans: Sequence[Span],
        model: NDArray[Any] | None = None,
    ) -> list[Bytes]:
        """Return the packed slices of a task's result.

        model: the model it was computed on; the caller must not change it afterwards.
        """
        self._cut(spans)
        packed, messages = [], list[Message | None]()
        for (start, stop), sender in zip(self._spans, self._senders, strict=True):
            middle = max(min(stop, self._trained), start)
            tail = torch.from_numpy(vector[middle:stop])
            piece, message = torch.from_numpy(vector[start:middle]), None
            if sender is not None:
                shown = None if model is None else view(model[start:middle])
                message = sender.send(piece, task, rate, shown)
            messages.append(message if self._refunds(sender) else None)
            parts = () if message is None else message.parts
            packed.append(pack(Message((*parts, tail), rate)))
        self._sent[task] = messages
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        return packed

    def refund(self, tasks: Iterable[int]) -> None:
        """Add the results of tasks that no step used back to the senders' memories."""
        for task in tasks:
            for sender, message in zip(self._senders, self._sent.pop(task, ()), strict=False):
                if sender is not None and message is not None:
                    sender.refund(message)

    def _refunds(self, sender: Sender | None) -> bool:
        """Return whether a sender may need a message again."""
        return not isinstance(self._codec, TwoEnded) and not isinstance(sender, Stateless)

    def _cut(self, spans: Sequence[Span]) -> None:
        given = [(start, stop) for start, stop in spans]
        if given != self._spans:
            sizes = [max(min(stop, self._trained) - start, 0) for start, stop in given]
            self._senders = [self._sender(size) if size else None for size in sizes]
            self._spans = given
            self._sent.clear()

    def _sender(self, size: int) -> Sender:
        if not isinstance(self._codec, TwoEnded):
            return self._codec.sender(size)
        if size != self._trained:
            raise ValueError(
                f"{self._codec} cannot encode results that are cut into slices; use "
                "Ray(servers='driver')"
            )
        return self._codec.whole_sender(self._tensors or [size])

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the senders' memories, by slice."""
        return {
            f"{place}.{name}": tensor.numpy()
            for place, sender in enumerate(self._senders)
            if sender is not None
            for name, tensor in sender.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, NDArray[Any]], spans: Sequence[Span]) -> None:
        """Load the memories of an uplink that cut results into the same slices."""
        self._cut(spans)
        for place, sender in enumerate(self._senders):
            if sender is not None:
                mine = {
                    name.partition(".")[2]: torch.from_numpy(np.array(array))
                    for name, array in state.items()
                    if name.partition(".")[0] == str(place)
                }
                sender.load_state_dict(mine)


class Receiver:
    """The server's end of one worker's uplink, for results that are not cut into slices."""

    def __init__(self, codec: Codec, size: int, trained: int, tensors: Sequence[int] = ()) -> None:
        self._codec, self._size, self._trained = codec, size, trained
        self._reader: Reader | None = None
        if isinstance(codec, TwoEnded) and trained:
            self._reader = codec.reader(tensors or [trained])

    @property
    def remembers(self) -> bool:
        """Whether it must read every message in the order of sending, even of unused results."""
        return self._reader is not None

    def read(self, packed: Bytes) -> NDArray[Any]:
        """Return a result from its packed message; the caller must not change it in place."""
        if self._reader is None:
            return received(packed, self._codec, (0, self._size), self._trained)
        message, tail = _parted(packed, (self._trained, self._size))
        vector = self._reader.take(message, tail.dtype)
        return (torch.cat((vector, tail)) if tail.numel() else vector).numpy()

    def load_state_dict(self, state: dict[str, NDArray[Any]]) -> None:
        """Load the memories of the uplink, so that both ends agree."""
        if self._reader is not None:
            mine = {
                name: torch.from_numpy(np.array(state[f"0.{name}"]))
                for name in ("number", "known")
                if f"0.{name}" in state
            }
            self._reader.load_state_dict(mine)


def received(packed: Bytes, codec: Codec, span: Span, trained: int) -> NDArray[Any]:
    """Return a slice of a vector from its packed message, which it may be a view of."""
    start, stop = span
    middle = max(min(stop, trained), start)
    message, tail = _parted(packed, (middle, stop))
    if middle == start:
        return tail.numpy()
    vector = codec.decode(message, middle - start).to(tail.dtype)
    return (torch.cat((vector, tail)) if tail.numel() else vector).numpy()


def _parted(packed: Bytes, rest: Span) -> tuple[Message, Tensor]:
    """Return a sender's message, and the untrained rest of the slice behind it."""
    message = unpack(packed)
    *parts, tail = message.parts
    if tail.numel() != rest[1] - rest[0]:
        raise ValueError(
            f"the message has {tail.numel()} values after the trained ones, where the slice has "
            f"{rest[1] - rest[0]}"
        )
    return Message(tuple(parts), message.rate), tail
