"""The wire format of updates between nodes: some tensors, as they are or as encoded changes.

Buffers that are not trained (BatchNorm's statistics) go with every message, as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.codecs.base import Bytes, Codec, Message, Valued, pack, unpack
from paceline.codecs.chain import Chain
from paceline.codecs.sparse import RandomK, TopK


@dataclass(frozen=True, eq=False)
class Update:
    """Some tensors of a model, with all their elements one after the other in `values`."""

    version: int  # of the model
    number: int  # of the sender's messages so far
    is_change: bool  # the receiver adds it to its copy
    tensors: Sequence[int]
    values: NDArray[Any]
    untrained: NDArray[Any]
    sender: int = 0  # the mark of the sender


def sender_mark(name: str) -> int:
    """Return the mark of a sender, which exposes a message under a wrong name."""
    return crc32(name.encode())


def sizes_in(codec: Codec) -> tuple[int, ...] | None:
    """Return the sizes of the tensors in each of which a codec chooses numbers, if it does."""
    while isinstance(codec, Chain):
        codec = codec.first
    return codec.sizes if isinstance(codec, TopK) else None


def codec_for(codec: Codec, sizes: Sequence[int], tensors: Sequence[int]) -> Codec:
    """Return the codec of a message with some tensors: it chooses numbers in each of them."""
    if sizes_in(codec) != tuple(sizes):
        return codec
    if isinstance(codec, Chain):
        first = codec_for(codec.first, sizes, tensors)
        assert isinstance(first, Valued)
        return Chain(first, codec.second)
    assert isinstance(codec, TopK)
    return TopK(codec.fraction, tuple(sizes[i] for i in tensors))


def pack_update(update: Update, sizes: Sequence[int], codec: Codec | None) -> Bytes:
    """Return an update as a message; the codec encodes changes.

    sizes: of all tensors of the model.
    """
    mask = np.zeros(len(sizes), np.uint8)
    mask[list(update.tensors)] = 1
    parts: tuple[torch.Tensor, ...] = (torch.from_numpy(np.array(update.values)),)
    if update.is_change:
        assert codec is not None
        used = codec_for(codec, sizes, update.tensors)
        parts = used.encode(parts[0], update.number).parts
    kind = update.sender << 1 | int(update.is_change)  # in one number: the mark costs no byte
    head = torch.tensor([update.version, update.number, kind])
    untrained = torch.from_numpy(np.array(update.untrained))
    return pack(Message((head, torch.from_numpy(np.packbits(mask)), *parts, untrained)))


def unpack_update(packed: Bytes, sizes: Sequence[int], codec: Codec | None) -> Update:
    """Invert `pack_update`, up to what the codec left out.

    sizes: of all tensors of the model.
    """
    head, mask, *parts, untrained = unpack(packed).parts
    if head.numel() != 3 or head.dtype != torch.int64 or mask.dtype != torch.uint8:
        raise ValueError(f"the header has {head.numel()} numbers of {head.dtype}, not 3 of int64")
    version, number, kind = map(int, head)
    is_change, sender = kind & 1, kind >> 1
    tensors = np.flatnonzero(np.unpackbits(mask.numpy(), count=len(sizes))).tolist()
    size = sum(sizes[i] for i in tensors)
    if is_change:
        if codec is None:
            raise ValueError(
                "the message holds changes, but without codec= messages hold whole tensors"
            )
        codec = codec_for(codec, sizes, tensors)
        if isinstance(codec, TopK | RandomK) and parts[0].numel() != codec.count(size):
            raise ValueError(f"{parts[0].numel()} numbers, where {codec} sends {codec.count(size)}")
        values = codec.decode(Message(tuple(parts)), size)
    else:
        (values,) = parts
    if values.numel() != size:
        raise ValueError(f"the message has {values.numel()} numbers for tensors of {size}")
    return Update(
        version, number, bool(is_change), tensors, values.numpy(), untrained.numpy(), sender
    )
