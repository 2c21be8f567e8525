"""Files in the safetensors format that are written and read piece by piece.

The library of that format writes tensors that are in memory. Here they come in chunks, which may be
read from other files, and are hashed on the way. Neither writing nor hashing a chunk holds the
interpreter's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from paceline.learners.base import Array

CHUNK = 2**22
"""Bytes that are written, and hashed, at a time."""
_LARGEST_HEADER = 10**8  # bytes, as in the safetensors library
_DTYPES = {
    **{"?": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16"},
    **{"u4": "U32", "i4": "I32", "f4": "F32", "u8": "U64", "i8": "I64", "f8": "F64"},
}
Chunks: TypeAlias = Iterable[bytes | bytearray | memoryview]


class Ended(Exception):
    """Writing was ended from outside."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    dtype: as safetensors names it.
    chunks: yields its bytes, each time anew.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    itemsize: int
    chunks: Callable[[], Chunks]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


def entry_of(name: str, array: Array) -> Entry:
    """Return the entry of an array; raise ValueError if safetensors has no such dtype."""
    array = np.asarray(array, order="C")
    return Entry(name, dtype_name(array.dtype), array.shape, array.itemsize, lambda: _cut(array))


def dtype_name(dtype: Any) -> str:
    """Return the name that safetensors has for a dtype of numpy."""
    kind = np.dtype(dtype)
    code = "?" if kind == np.bool_ else f"{kind.kind}{kind.itemsize}"
    if code not in _DTYPES or kind.byteorder == ">":
        raise ValueError(f"an array of {kind} cannot be saved; use a dtype that safetensors has")
    return _DTYPES[code]


def write(path: Path, entries: Iterable[Entry], ended: Callable[[], bool] = lambda: False) -> str:
    """Write a new file and flush it to disk; return its SHA-256.

    The largest dtypes come first, so that every tensor is aligned, as the library does it.
    ended: asked before each chunk; if it returns True, raise `Ended`.
    """
    order = sorted(entries, key=lambda entry: (-entry.itemsize, entry.name))
    found = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for chunk in chain([_header(order)], *map(_checked, order)):
            if ended():
                raise Ended(str(path))
            _write_all(file, chunk)
            found.update(chunk)
        os.fsync(file.fileno())
    return found.hexdigest()


def _checked(entry: Entry) -> Iterator[Any]:
    left = entry.nbytes
    for chunk in entry.chunks():
        left -= len(chunk)
        yield chunk
    if left:
        raise ValueError(f"{entry.name!r} has {entry.nbytes - left} bytes, not {entry.nbytes}")


def _write_all(file: Any, chunk: Any) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {}
    start = 0
    for entry in entries:
        stop = start + entry.nbytes
        about = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        header[entry.name] = about
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _cut(array: Array) -> Iterator[memoryview]:
    flat = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    for start in range(0, len(flat), CHUNK):
        yield flat[start : start + CHUNK]


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file
    nbytes: int


def places(path: Path) -> Mapping[str, Place]:
    """Return where the tensors of a file are; raise ValueError if it is no such file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"{path} has no header")
        header = json.loads(file.read(length))
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            start, stop = about["data_offsets"]
            if not 0 <= start <= stop <= size - 8 - length:
                raise ValueError(f"{path} does not contain {name!r}")
            shape = tuple(about["shape"])
            found[name] = Place(about["dtype"], shape, 8 + length + start, stop - start)
    return found


def read(path: Path, start: int, stop: int) -> Iterator[memoryview]:
    """Yield a range of a file in chunks, which are valid until the next one."""
    buffer = bytearray(min(CHUNK, max(stop - start, 0)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            count = file.readinto(memoryview(buffer)[: stop - start])
            if not count:
                raise ValueError(f"{path} ends at byte {start}, before {stop}")
            yield memoryview(buffer)[:count]
            start += count
