"""Columns with one value per step, in memory or, for long runs, mostly in a file without a name.

A run of a million steps has twelve million values. As Python's floats these take 350 bytes a step.
Here they take 96, and with a folder for the file almost no memory during the run.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from paceline.core.logs import logger_of

logger = logger_of(__name__)

Kind: TypeAlias = Literal["d", "q"]
"""The type codes of floating-point numbers and of integers."""

BLOCK = 256
"""The number of values written together; with a folder, the newest 256 to 511 are in memory."""
_BYTES = 8  # per value of either kind


class Spill:
    """A temporary file without a name, created at the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._lock = Lock()  # the live view reads from another thread

    def write(self, at: int, data: bytes) -> None:
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 (see close)
                    dir=self._folder, buffering=0
                )
            self._file.seek(at)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]

    def read(self, at: int, count: int) -> bytes:
        with self._lock:
            assert self._file is not None
            self._file.seek(at)
            return self._file.read(count)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()


class Column(Sequence[float]):
    """A sequence of numbers that grows at its end.

    spill: the file for all but the newest values; by default all stay in memory.
    place, places: the index of this column, and the number of columns that share the file.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, kind: Kind = "d", spill: Spill | None = None, place: int = 0, places: int = 1
    ) -> None:
        self._kind, self._spill, self._place, self._places = kind, spill, place, places
        # Index of the first value in memory, and the values: a tuple, since other threads read it.
        self._newest: tuple[int, array[Any]] = 0, array(kind)

    def append(self, value: float) -> None:
        first, newest = self._newest
        newest.append(value)
        if self._spill is not None and len(newest) == 2 * BLOCK:
            try:
                self._spill.write(self._offset(first // BLOCK), newest[:BLOCK].tobytes())
            except OSError as error:
                logger.warning("metrics of steps are kept in memory from now on: %s", error)
                return
            self._newest = first + BLOCK, newest[BLOCK:]

    def numbers(self) -> NDArray[Any]:
        """Return a copy of all values as an array."""
        return np.array(self._between(0, len(self)))

    def gather(self) -> None:
        """Load all values into memory and release the file."""
        if self._spill is not None:
            self._newest, self._spill = (0, self._between(0, len(self))), None

    def __len__(self) -> int:
        first, newest = self._newest
        return first + len(newest)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step < 0:
                raise ValueError(f"[{index.start}:{index.stop}:{step}]: use reversed(column)")
            return self._between(begin, max(begin, end))[::step].tolist()
        at = index if index >= 0 else index + len(self)
        if not 0 <= at < len(self):
            raise IndexError(f"column[{index}]: there are {len(self)} values")
        value: float = self._between(at, at + 1)[0]
        return value

    def __iter__(self) -> Iterator[float]:
        for begin in range(0, len(self), BLOCK):
            yield from self._between(begin, min(begin + BLOCK, len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column | list):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Column({list(self)})"

    def _between(self, begin: int, end: int) -> array[Any]:
        """Return the values from index `begin` up to, but without, `end`."""
        first, newest = self._newest
        if begin >= first:
            return newest[begin - first : end - first]
        assert self._spill is not None
        found = array(self._kind)
        for block in range(begin // BLOCK, -(-min(end, first) // BLOCK)):
            found.frombytes(self._spill.read(self._offset(block), BLOCK * _BYTES))
        before = begin - begin % BLOCK
        if end > first:
            found.extend(newest[: end - first])
        return found[begin - before : end - before]

    def _offset(self, block: int) -> int:
        return (block * self._places + self._place) * BLOCK * _BYTES


class Columns(dict[str, Column]):
    """Columns by name, of one length.

    kinds: the number type of each column.
    folder: holds the file of all but the newest values; see `close`.
    """

    def __init__(self, kinds: Mapping[str, Kind], folder: Path | None = None) -> None:
        self._spill = None if folder is None else Spill(folder)
        super().__init__(
            (name, Column(kind, self._spill, place, len(kinds)))
            for place, (name, kind) in enumerate(kinds.items())
        )

    def add(self, row: Sequence[float]) -> None:
        """Append a value to each column, in the order of the columns."""
        for column, value in zip(self.values(), row, strict=True):
            column.append(value)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: column.numbers() for name, column in self.items()}

    def close(self) -> None:
        """Load all values into memory and close the file, when the run is over."""
        if self._spill is not None:
            for column in self.values():
                column.gather()
            self._spill.close()
            self._spill = None
