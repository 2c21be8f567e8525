"""Objects as they travel: a header of JSON, and the bytes of their arrays. Nothing is unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from paceline.learners.base import Array

PREFIX = struct.Struct("<IQ")
"""The bytes of the header, and of the arrays."""
LONGEST_HEADER = 2**20
_KINDS = "biuf"  # of arrays: numbers, never Python objects

Thing: TypeAlias = "Array | tuple[dict[str, Array], dict[str, Any]] | None"
"""What travels: an array, a state of arrays and plain data, or None."""


class Message(NamedTuple):
    """A header, the buffers that follow it, and the key of the object that they are.

    order: of two messages that wait, the one with the lower number is sent first.
    """

    header: bytes
    buffers: Sequence[Array] = ()
    key: int | None = None
    order: int = -1

    def pieces(self) -> list[memoryview]:
        """Return the bytes to send, in order."""
        size = sum(buffer.nbytes for buffer in self.buffers)
        first = memoryview(PREFIX.pack(len(self.header), size) + self.header)
        return [first, *(b.reshape(-1).view(np.uint8).data for b in self.buffers if b.nbytes)]


def note(**content: Any) -> Message:
    """Return a message without arrays."""
    return Message(json.dumps(content).encode())


Part: TypeAlias = tuple[int, int]
"""Where a part begins in an array, and the length of the whole array."""


def encode(
    key: int,
    thing: Thing,
    order: int = 0,
    to: Sequence[Any] | None = None,
    part: Part | None = None,
) -> Message:
    """Return the message that carries an object under its key. Its arrays are not copied.

    to: the address at which it ends, if another process passes it on.
    part: the array is only a part of the object.
    """
    data: Any = None
    if isinstance(thing, tuple):
        arrays, data = thing
        kind = "state"
    else:
        arrays = {} if thing is None else {"": thing}
        kind = "none" if thing is None else "array"
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    about = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    header = {"key": key, "kind": kind, "arrays": about, "data": data, "order": order}
    if to is not None:
        header["to"] = to
    if part is not None:
        header["part"] = part
    return Message(json.dumps(header).encode(), list(arrays.values()), key, order)


def room(header: dict[str, Any]) -> dict[str, Array]:
    """Return empty arrays for the bytes that follow a header."""
    found = {}
    for name, dtype, shape in header.get("arrays", ()):
        made = np.dtype(dtype)
        if made.kind not in _KINDS:
            raise ValueError(f"arrays of type {dtype} do not travel")
        found[name] = np.empty(shape, made)
    return found


def decode(header: dict[str, Any], arrays: dict[str, Array]) -> Thing:
    """Return the object of a message whose arrays are filled. It cannot be changed."""
    for array in arrays.values():
        array.flags.writeable = False
    if header["kind"] == "state":
        return arrays, header["data"]
    return arrays[""] if header["kind"] == "array" else None
