"""One value per step, in memory or, for long runs, most of it in a file without a name.

A run of a million steps has twelve million figures. As Python's floats these take 350 bytes a step;
here they take 96, and with a folder to put them in none at all while the run goes.
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

Kind: TypeAlias = Literal["d", "q"]
"""Numbers with a fraction, and whole ones."""

BLOCK = 256
"""Values that are written together; with a folder the newest 256 to 511 are in memory."""
_BYTES = 8  # of a value of either kind


class Spill:
    """A file that only this process knows; it is made when there is something to write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._lock = Lock()  # who looks on reads from another thread

    def write(self, at: int, data: bytes) -> None:
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (see close)
            self._file.seek(at)
            self._file.write(data)

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
    """Numbers in order, to be added to at the end.

    spill: where all but the newest go; by default all stay in memory.
    place, places: which of the columns that share the file this is.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, kind: Kind = "d", spill: Spill | None = None, place: int = 0, places: int = 1
    ) -> None:
        self._kind, self._spill, self._place, self._places = kind, spill, place, places
        # The number of the first value in memory and these, as one: another thread may look on.
        self._newest: tuple[int, array[Any]] = 0, array(kind)

    def append(self, value: float) -> None:
        first, newest = self._newest
        newest.append(value)
        if self._spill is not None and len(newest) == 2 * BLOCK:
            self._spill.write(self._offset(first // BLOCK), newest[:BLOCK].tobytes())
            self._newest = first + BLOCK, newest[BLOCK:]

    def numbers(self) -> NDArray[Any]:
        """Return all of them as an array of their own."""
        return np.array(self._between(0, len(self)))

    def gather(self) -> None:
        """Take everything back into memory, and need the file no more."""
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
        """Return the values from one number to before another."""
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

    kinds: what each is made of.
    folder: for the file of all but the newest values; see `close`.
    """

    def __init__(self, kinds: Mapping[str, Kind], folder: Path | None = None) -> None:
        self._spill = None if folder is None else Spill(folder)
        super().__init__(
            (name, Column(kind, self._spill, place, len(kinds)))
            for place, (name, kind) in enumerate(kinds.items())
        )

    def add(self, row: Sequence[float]) -> None:
        """Take a value for each column, in their order."""
        for column, value in zip(self.values(), row, strict=True):
            column.append(value)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: column.numbers() for name, column in self.items()}

    def close(self) -> None:
        """Take what is in the file back into memory: the run is over, and is to be looked at."""
        if self._spill is not None:
            for column in self.values():
                column.gather()
            self._spill.close()
            self._spill = None
