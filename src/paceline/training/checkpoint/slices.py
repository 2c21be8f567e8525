"""State in several files, one for each slice of the model, as servers write it.

The arrays of one name are pieces of one flat array, in the order of the files. An array without
dimensions is the same in every file that has it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from paceline.learners import tensor_file
from paceline.learners.base import Array, Places
from paceline.training.checkpoint.kinds import Kind, kind_of, written

_NAME = re.compile(r"state-(\d{5})-of-(\d{5})\.safetensors")
VALUES = "server/values"


def is_slice(name: str) -> bool:
    """Return whether a file has this name because it has the state of a slice."""
    return _NAME.fullmatch(name) is not None


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of slices among the files of a checkpoint; raise ValueError if one is
    missing."""
    found = sorted(name for name in names if is_slice(name))
    expected = [f"state-{i:05d}-of-{len(found):05d}.safetensors" for i in range(len(found))]
    if found != expected:
        raise ValueError(f"the slices are {', '.join(found)}, and some are missing")
    return found


def joined_kinds(each: Sequence[Mapping[str, Kind]]) -> dict[str, Kind]:
    """Return dtype and shape of the joined arrays; raise ValueError if pieces do not fit."""
    found: dict[str, Kind] = {}
    for name, (dtype, shape) in (item for kinds in each for item in kinds.items()):
        before = found.setdefault(name, (dtype, (0,) if shape else ()))
        if before[0] != dtype or len(before[1]) != min(len(shape), 1):
            raise ValueError(f"the pieces of {name!r} have different types")
        if shape:
            found[name] = dtype, (before[1][0] + int(np.prod(shape)),)
    return found


def joined_arrays(paths: Sequence[Path], kinds: Mapping[str, Kind]) -> dict[str, Array]:
    """Return the joined arrays. A piece at a time is in memory beside them."""
    found: dict[str, Array] = {}
    filled: dict[str, int] = {}
    for path in paths:
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                piece = opened.get_tensor(name)
                if not piece.ndim:
                    if found.setdefault(name, piece).tobytes() != piece.tobytes():
                        raise ValueError(f"{name!r} has several values")
                    continue
                if name not in found:
                    found[name], filled[name] = np.empty(kinds[name][1], piece.dtype), 0
                start, filled[name] = filled[name], filled[name] + piece.size
                found[name][start : filled[name]] = piece.reshape(-1)
    return found


class Values:
    """The flat vector of the model in the files of its slices, read in chunks."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._at = [tensor_file.places(path)[VALUES] for path in paths]
        self.dtype = self._at[0].dtype
        self._ends = [0, *accumulate(place.nbytes for place in self._at)]  # bytes
        self.nbytes = self._ends[-1]

    def chunks(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of a part of the vector, which is given in bytes."""
        index = bisect_right(self._ends, start) - 1
        for (low, high), path, place in list(
            zip(pairwise(self._ends), self._paths, self._at, strict=False)
        )[index:]:
            if low >= stop:
                return
            begin, end = max(start, low) - low, min(stop, high) - low
            yield from tensor_file.read(path, place.start + begin, place.start + end)


def write_model(
    path: Path, values: Values, places: Places, trained: int, ended: Callable[[], bool]
) -> str:
    """Write the exported model from the files of its slices; return the hash of the file.

    A chunk at a time is in memory, and the values behind the first `trained` ones.
    """
    dtype = np.dtype(_TYPES[values.dtype])
    size = dtype.itemsize

    def entry(name: str, start: int, shape: tuple[int, ...]) -> tensor_file.Entry:
        begin, end = start * size, (start + int(np.prod(shape))) * size
        return tensor_file.Entry(name, values.dtype, shape, size, lambda: values.chunks(begin, end))

    tail = b"".join(values.chunks(trained * size, values.nbytes))
    entries = [entry(name, *place) for name, place in places.starts.items()]
    entries += [_rest(name, each) for name, each in places.rest(np.frombuffer(tail, dtype)).items()]
    return tensor_file.write(path, entries, ended)


_TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def _rest(name: str, tensor: Any) -> tensor_file.Entry:
    """Return the entry of a tensor of any dtype, numpy's or torch's."""
    dtype, shape = kind_of(tensor)
    file = written(tensor)
    content = memoryview(file)[8 + int.from_bytes(file[:8], "little") :]
    size = len(content) // max(int(np.prod(shape)), 1)
    return tensor_file.Entry(name, dtype, shape, size, lambda: [content])
