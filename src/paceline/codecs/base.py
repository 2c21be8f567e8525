"""The codec protocol: a codec writes a vector as a message, and reads the message as a vector.

Vectors are flat tensors of float32 or float64 on any device, and the parts of a message are flat
tensors in the types that travel. A key, a whole number from 0 to 2^63 - 1, seeds all randomness.
Equal vectors with equal keys give equal messages, on the same kind of device.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Message:
    """The encoded form of a vector, and the learning rate of the step that it was made for."""

    parts: tuple[Tensor, ...]
    rate: float = 1.0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.dim() != 1 or part.dtype not in _CODES:
                raise ValueError(
                    f"a part of shape {tuple(part.shape)} and type {part.dtype}; "
                    f"use flat parts of the types {', '.join(map(str, _TYPES))}"
                )

    @property
    def nbytes(self) -> int:
        """The bytes of the parts, without the header."""
        return sum(part.numel() * part.element_size() for part in self.parts)


class Sender(Protocol):
    """Sends vectors in turn, and may remember the part of each vector that it left out."""

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        """Return the message for a vector that a step of this learning rate will use.

        model: the model on which the vector was computed.
        """

    def refund(self, message: Message) -> None:
        """Add a message that no step used back to the memory."""

    def state_dict(self) -> State:
        """Return the memory."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the memory of another sender of this kind."""


class Codec(Protocol):
    """Writes vectors as messages and reads them again, one by one."""

    def encode(self, vector: Tensor, key: int) -> Message:
        """Return the message for a vector."""

    def decode(self, message: Message, size: int) -> Tensor:
        """Return the vector of this size that a message stands for."""

    def sender(self, size: int) -> Sender:
        """Return a sender for a sequence of vectors of this size."""


class Reader(Protocol):
    """Reads the messages of one sender in turn."""

    def take(self, message: Message, dtype: torch.dtype) -> Tensor:
        """Return the vector after the next message; it is never changed in place."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the memory of the sender, so that both ends agree."""


@runtime_checkable
class TwoEnded(Codec, Protocol):
    """A codec with a memory at both ends: each message builds on all messages before it.

    Engines do not cut its vectors into slices. They read every message, even if no step uses the
    result.
    """

    def whole_sender(self, sizes: Sequence[int]) -> Sender:
        """Return the sender of vectors that consist of tensors of these sizes."""

    def reader(self, sizes: Sequence[int]) -> Reader:
        """Return the reader of that sender's messages."""


@runtime_checkable
class Elementwise(Codec, Protocol):
    """A codec that rounds each number by itself.

    A message is a function of the values alone, and decodes to these values up to rounding. So a
    vector gives the same numbers however it is cut into slices.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The type in which each number travels."""


@runtime_checkable
class Valued(Codec, Protocol):
    """A codec whose messages begin with all their floating-point numbers, for others to encode."""

    @property
    def extras(self) -> int:
        """The number of parts that follow the numbers."""

    def count(self, size: int) -> int:
        """Return how many numbers travel for a vector of this size."""


@dataclass(frozen=True)
class Stateless:
    """Sends each vector by itself."""

    codec: Codec

    def send(
        self, vector: Tensor, key: int, rate: float = 1.0, model: Tensor | None = None
    ) -> Message:
        return Message(self.codec.encode(vector, key).parts, rate)

    def refund(self, message: Message) -> None:
        """Do nothing: this sender has no memory."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(
                f"{self.codec} has no state, but was given {sorted(state)}; load it into the "
                "codec that saved it"
            )


def checked(vector: Tensor) -> Tensor:
    """Return the vector contiguous and detached; refuse any but flat float vectors."""
    if vector.dim() != 1 or vector.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a vector of shape {tuple(vector.shape)} and type {vector.dtype}; "
            "use flat vectors of float32 or float64"
        )
    return vector.detach().contiguous()


def parts_of(message: Message, count: int, codec: object) -> tuple[Tensor, ...]:
    """Return the parts of a message; refuse a message that is not of `count` parts."""
    if len(message.parts) != count:
        raise ValueError(
            f"a message of {len(message.parts)} parts, where {codec} sends {count}; "
            "decode with the codec that encoded it"
        )
    return message.parts


def generator(key: int, device: torch.device) -> torch.Generator:
    """Return the random generator for a key on a device."""
    # Hashed, since torch's generator on the CPU uses only 32 bits of a seed.
    seed = int(np.random.SeedSequence(valid_key(key)).generate_state(1)[0])
    return torch.Generator(device).manual_seed(seed)


def valid_key(key: int) -> int:
    if not 0 <= key < 2**63:
        raise ValueError(f"key={key}: use a whole number from 0 to 2^63 - 1")
    return key


# A packed message: the mark, the checksum of the rest of the header, the number of parts, the rate;
# for each part its type and its length in numbers; zeros up to a multiple of 8; then the parts.
_MARK = b"PLM1"
_FIXED = struct.Struct("<4sIId")
_PART = struct.Struct("<BQ")
_TYPES = (
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_CODES = {dtype: code for code, dtype in enumerate(_TYPES)}


def header_length(parts: int) -> int:
    """Return the bytes before the parts of a packed message."""
    return -(-(_FIXED.size + parts * _PART.size) // 8) * 8


def pack(message: Message) -> Bytes:
    """Return a message as one flat, read-only array that describes itself."""
    table = b"".join(_PART.pack(_CODES[part.dtype], part.numel()) for part in message.parts)
    at = header_length(len(message.parts))
    table = table.ljust(at - _FIXED.size, b"\0")
    fixed = _FIXED.pack(_MARK, 0, len(message.parts), message.rate)
    fixed = _FIXED.pack(_MARK, crc32(fixed[8:] + table), len(message.parts), message.rate)
    packed = np.empty(at + message.nbytes, np.uint8)
    packed[:at] = np.frombuffer(fixed + table, np.uint8)
    for part in message.parts:
        if not part.numel():
            continue  # an empty part has no stride to view it by
        raw = part.detach().contiguous().view(torch.uint8).cpu().numpy()
        packed[at : at + raw.size] = raw
        at += raw.size
    packed.flags.writeable = False  # so that no holder needs a copy of its own
    return packed


def unpack(packed: NDArray[Any]) -> Message:
    """Return the message in a packed array; aligned parts are views, the others copies."""
    if packed.dtype != np.uint8 or packed.ndim != 1 or not packed.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {packed.shape} and type {packed.dtype}; "
            "use one flat, contiguous array of uint8, as pack() makes it"
        )
    damaged = f"these {packed.size} bytes are no message, or a damaged one: "
    if packed.size < _FIXED.size:
        raise ValueError(damaged + f"a header has {_FIXED.size} bytes at least")
    mark, checksum, count, rate = _FIXED.unpack(packed[: _FIXED.size].tobytes())
    if mark != _MARK:
        raise ValueError(damaged + f"they begin with {mark!r} in place of {_MARK!r}")
    at = header_length(count)
    if packed.size < at or crc32(packed[8:at].tobytes()) != checksum:
        raise ValueError(damaged + "the header does not match its checksum")
    listed = packed[_FIXED.size : _FIXED.size + count * _PART.size].tobytes()
    table = list(_PART.iter_unpack(listed))
    if any(code >= len(_TYPES) for code, _ in table):
        raise ValueError(damaged + "a part has a type that this version does not know")
    spans = [(_TYPES[code], length * _TYPES[code].itemsize) for code, length in table]
    if packed.size != at + sum(nbytes for _, nbytes in spans):
        raise ValueError(damaged + f"{at + sum(nbytes for _, nbytes in spans)} were expected")
    parts = []
    for dtype, nbytes in spans:
        raw = view(packed[at : at + nbytes])
        aligned = raw.data_ptr() % dtype.itemsize == 0
        parts.append((raw if aligned else raw.clone()).view(dtype))
        at += nbytes
    return Message(tuple(parts), rate)


def view(array: NDArray[Any]) -> Tensor:
    """Return a tensor view of an array, for reading only."""
    with warnings.catch_warnings():  # arrays of an object store are read-only, and never written to
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
