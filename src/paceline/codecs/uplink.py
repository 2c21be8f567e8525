"""Results on their way from a worker: encoded slice by slice, and decoded where they are added up.

What is trained goes through the codec; what is not (buffers such as BatchNorm's statistics) is sent
as it is, behind it. A worker remembers its last messages, until it is told that one of them was not
used: then it is given back to the memory of its sender.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.codecs.base import Bytes, Codec, Message, Sender, pack, unpack

Span = tuple[int, int]
_REMEMBERED = 4  # messages; a result is used or given up soon after it was sent


class Uplink:
    """A worker's side of a codec: one sender for each slice that results are cut into.

    If they are cut otherwise, as when a server is lost, memories begin anew.
    """

    def __init__(self, codec: Codec, trained: int) -> None:
        self._codec, self._trained = codec, trained
        self._spans: list[Span] = []
        self._senders: list[Sender | None] = []
        self._sent: OrderedDict[int, list[Message | None]] = OrderedDict()

    def send(
        self, vector: NDArray[Any], task: int, rate: float, spans: Sequence[Span]
    ) -> list[Bytes]:
        """Return the packed slices of a task's result."""
        self._cut(spans)
        packed, messages = [], list[Message | None]()
        for (start, stop), sender in zip(self._spans, self._senders, strict=True):
            middle = max(min(stop, self._trained), start)
            tail = torch.from_numpy(vector[middle:stop])
            message = None
            if sender is not None:
                message = sender.send(torch.from_numpy(vector[start:middle]), task, rate)
            messages.append(message)
            parts = () if message is None else message.parts
            packed.append(pack(Message((*parts, tail), rate)))
        self._sent[task] = messages
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        return packed

    def refund(self, tasks: Iterable[int]) -> None:
        """Take back the results of tasks that no step has used."""
        for task in tasks:
            for sender, message in zip(self._senders, self._sent.pop(task, ()), strict=False):
                if sender is not None and message is not None:
                    sender.refund(message)

    def _cut(self, spans: Sequence[Span]) -> None:
        given = [(start, stop) for start, stop in spans]
        if given != self._spans:
            sizes = [max(min(stop, self._trained) - start, 0) for start, stop in given]
            self._senders = [self._codec.sender(size) if size else None for size in sizes]
            self._spans = given
            self._sent.clear()

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the senders' memories, by slice."""
        return {
            f"{place}.{name}": tensor.numpy()
            for place, sender in enumerate(self._senders)
            if sender is not None
            for name, tensor in sender.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, NDArray[Any]], spans: Sequence[Span]) -> None:
        """Go on with the memories of an uplink that cut results likewise."""
        self._cut(spans)
        for place, sender in enumerate(self._senders):
            if sender is not None:
                mine = {
                    name.partition(".")[2]: torch.from_numpy(np.array(array))
                    for name, array in state.items()
                    if name.partition(".")[0] == str(place)
                }
                sender.load_state_dict(mine)


def received(packed: Bytes, codec: Codec, span: Span, trained: int) -> NDArray[Any]:
    """Return a slice of a result from its packed message."""
    start, stop = span
    middle = max(min(stop, trained), start)
    message = unpack(packed)
    *parts, tail = message.parts
    if tail.numel() != stop - middle:
        raise ValueError(
            f"a message with {tail.numel()} numbers behind the trained ones, where the slice "
            f"{start} to {stop} has {stop - middle}"
        )
    vector = torch.empty(stop - start, dtype=tail.dtype)
    if middle > start:
        vector[: middle - start] = codec.decode(Message(tuple(parts), message.rate), middle - start)
    vector[middle - start :] = tail
    return vector.numpy()
