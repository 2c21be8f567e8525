"""The partition of the data into parts, and the number of samples of each class in a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from math import isfinite
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.schema import converted

Indices: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


class Partition:
    """Every sample in exactly one part: `of[i]` is the part of sample i.

    >>> halves = Partition([0, 1, 0, 1], parts=2)
    >>> halves.sizes.tolist(), halves.indices(1).tolist()
    ([2, 2], [1, 3])
    """

    schema = converted("partition", 1, "digest")

    def __init__(self, of: ArrayLike, parts: int | None = None) -> None:
        given = np.asarray(of)
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iu":
            raise ValueError(
                f"a partition names the part of each sample: give whole numbers in one dimension, "
                f"at least one, not {given.dtype} of shape {given.shape}; for lists of the samples "
                "of each part use Partition.from_lists"
            )
        least, most = int(given.min()), int(given.max())
        self.parts = most + 1 if parts is None else parts
        if least < 0 or most >= self.parts:
            raise ValueError(f"parts {least} to {most} were named; use 0 to {self.parts - 1}")
        self.of: NDArray[np.int32] = given.astype(np.int32)
        self.of.setflags(write=False)

    @classmethod
    def from_lists(cls, lists: Sequence[ArrayLike]) -> Partition:
        """Make a partition from the indices of each part, which must name each sample once."""
        indices = [np.asarray(each, np.int64).reshape(-1) for each in lists]
        total = sum(map(len, indices))
        of = np.full(total, -1, np.int32)
        for part, chosen in enumerate(indices):
            if len(chosen) and not (chosen.min() >= 0 and chosen.max() < total):
                raise ValueError(
                    f"part {part} names samples {chosen.min()} to {chosen.max()}, but there are "
                    f"{total} in all; name each sample from 0 on exactly once"
                )
            of[chosen] = part
        if (missing := np.flatnonzero(of < 0)).size:
            raise ValueError(
                f"{missing.size} samples are in no part, the first is {missing[0]}, and as many "
                "are named twice; name each exactly once"
            )
        return cls(of, len(indices))

    def __len__(self) -> int:
        return len(self.of)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Partition)
            and self.parts == other.parts
            and np.array_equal(self.of, other.of)
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Partition({len(self)} samples, {self.parts} parts, {self.digest})"

    def __deepcopy__(self, memo: object) -> Partition:
        return self  # it is immutable

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        if state["digest"] != self.digest:
            raise ValueError(
                f"the run was saved with partition {state['digest']}, and this one is "
                f"{self.digest}; use the same partition of the same data"
            )

    @cached_property
    def digest(self) -> str:
        """A short hash that identifies the partition."""
        return blake2b(self.of.tobytes(), digest_size=6).hexdigest()

    @cached_property
    def sizes(self) -> Indices:
        """The samples in each part."""
        return np.bincount(self.of, minlength=self.parts).astype(np.int64)

    @cached_property
    def _order(self) -> Indices:
        return np.argsort(self.of, kind="stable")

    def indices(self, part: int) -> Indices:
        """Return the samples of a part, in order."""
        if not 0 <= part < self.parts:
            raise ValueError(
                f"part={part}: this partition has {self.parts} parts; use 0 to {self.parts - 1}"
            )
        end = int(self.sizes[: part + 1].sum())
        return self._order[end - int(self.sizes[part]) : end]

    def merged(self, into: Sequence[int], parts: int | None = None) -> Partition:
        """Merge parts: part j of this partition becomes a piece of part `into[j]`."""
        if not isinstance(into, Sequence | np.ndarray) or len(into) != self.parts:
            raise ValueError(f"into={into!r}: give one entry for each of the {self.parts} parts")
        return Partition(np.asarray(into, np.int64)[self.of], parts)


def normalized(shares: Iterable[float] | int) -> Floats:
    """Return shares that add up to 1; an integer n stands for n equal shares."""
    if isinstance(shares, int | np.integer):
        if shares < 1 or isinstance(shares, bool):
            raise ValueError(f"shares={shares}: use at least 1 part")
        return np.full(int(shares), 1 / int(shares))
    given = [float(share) for share in shares]
    if not given or not all(isfinite(share) and share >= 0 for share in given) or not sum(given):
        told = ", ".join(f"{share:g}" for share in given[:8]) + (", …" if len(given) > 8 else "")
        raise ValueError(
            f"shares [{told}]: use numbers >= 0, finite, not all of them 0"
            + ("; are these labels? they come after the shares" if len(given) > 8 else "")
        )
    return np.array(given) / sum(given)


def whole_shares(total: int, shares: ArrayLike) -> Indices:
    """Divide a number into integers in proportion to shares, by the largest remainders.

    >>> whole_shares(10, [0.5, 0.25, 0.25]).tolist()
    [5, 3, 2]
    """
    return rounded(total * np.asarray(shares, np.float64), total)


def quotas(counts: Sequence[int] | Indices, shares: Floats) -> NDArray[np.int64]:
    """Return the number of samples of each class (row) in each part (column).

    Every row adds up to its class. The rounding error of a part carries over to the next class. So
    the total of a part is off by less than about one sample.
    """
    carry = np.zeros(len(shares))
    rows = []
    for count in counts:
        exact = count * shares + carry
        row = rounded(exact, int(count))
        carry = exact - row
        rows.append(row)
    return np.array(rows, np.int64).reshape(-1, len(shares))


def rounded(exact: Floats, total: int) -> Indices:
    """Round to integers >= 0 that add up to the total; the largest fractions round up."""
    exact = exact + (total - exact.sum()) / len(exact)  # carries may have changed the sum
    whole = np.floor(np.maximum(exact, 0.0)).astype(np.int64)
    missing = total - int(whole.sum())
    if missing > 0:
        whole += missing // len(whole)  # 0, except for rounding errors
        whole[np.argsort(whole - exact, kind="stable")[: missing % len(whole)]] += 1
    while missing < 0:  # a carry was larger than the class
        last = max(np.flatnonzero(whole), key=lambda j: (whole[j] - exact[j], j))
        whole[last] -= 1
        missing += 1
    return whole
