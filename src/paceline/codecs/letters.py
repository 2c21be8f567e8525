"""What peers tell each other of their models: some tensors, as they are or as encoded changes.

What is not trained (BatchNorm's statistics) goes with every letter, as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.codecs.base import Bytes, Codec, Message, pack, unpack
from paceline.codecs.sparse import RandomK, TopK


@dataclass(frozen=True, eq=False)
class Letter:
    """About some tensors of a model, all of whose numbers follow each other in `values`."""

    version: int  # of the model
    number: int  # of the sender's letters so far
    is_change: bool  # of the copy that the receiver has, to be added to it
    tensors: Sequence[int]
    values: NDArray[Any]
    untrained: NDArray[Any]
    sender: int = 0  # a mark of who has written it


def mark_of(name: str) -> int:
    """Return the mark of a sender: a letter under another's name is known by it."""
    return crc32(name.encode())


def seal(letter: Letter, count: int, codec: Codec | None) -> Bytes:
    """Return a letter as it travels; changes are encoded.

    count: of all tensors that there are.
    """
    mask = np.zeros(count, np.uint8)
    mask[list(letter.tensors)] = 1
    parts: tuple[torch.Tensor, ...] = (torch.from_numpy(np.array(letter.values)),)
    if letter.is_change:
        assert codec is not None
        parts = codec.encode(parts[0], letter.number).parts
    kind = letter.sender << 1 | int(letter.is_change)  # in one number: the mark costs no byte
    head = torch.tensor([letter.version, letter.number, kind])
    untrained = torch.from_numpy(np.array(letter.untrained))
    return pack(Message((head, torch.from_numpy(np.packbits(mask)), *parts, untrained)))


def unseal(packed: Bytes, sizes: Sequence[int], codec: Codec | None) -> Letter:
    """Invert `seal`, up to what the codec left out.

    sizes: of all tensors that there are.
    """
    head, mask, *parts, untrained = unpack(packed).parts
    if head.numel() != 3 or head.dtype != torch.int64 or mask.dtype != torch.uint8:
        raise ValueError(f"a letter that begins with {head.numel()} numbers of {head.dtype}")
    version, number, kind = map(int, head)
    is_change, sender = kind & 1, kind >> 1
    tensors = np.flatnonzero(np.unpackbits(mask.numpy(), count=len(sizes))).tolist()
    size = sum(sizes[i] for i in tensors)
    if is_change:
        if codec is None:
            raise ValueError("a letter about changes, where letters hold the model as it is")
        if isinstance(codec, TopK | RandomK) and parts[0].numel() != codec.count(size):
            raise ValueError(f"{parts[0].numel()} numbers, where {codec} sends {codec.count(size)}")
        values = codec.decode(Message(tuple(parts)), size)
    else:
        (values,) = parts
    if values.numel() != size:
        raise ValueError(f"a letter of {values.numel()} numbers about tensors of {size}")
    return Letter(
        version, number, bool(is_change), tensors, values.numpy(), untrained.numpy(), sender
    )
