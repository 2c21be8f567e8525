"""One step with a code: all rows send their messages, some are lost, the sum is recovered."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations

import numpy as np

from paceline.codes.base import Array, Code
from paceline.codes.blocks import combine_rows, encode


def gradients(code: Code, length: int = 600, dtype: type = np.float64) -> Array:
    rng = np.random.default_rng(123)
    return rng.standard_normal((code.parts, length)).astype(dtype)


def messages(code: Code, g: Array) -> dict[int, Array]:
    rows = {i: code.row(i) for i in range(code.n)}
    return {
        i: encode([(c, g[part]) for part, c in row.items()], code.messages)
        for i, row in rows.items()
        if row
    }


def error(code: Code, g: Array, sent: dict[int, Array], missing: Collection[int]) -> float:
    """Return the relative error of the sum."""
    weights = code.decode([i for i in range(code.n) if i not in missing])
    assert not set(weights) & set(missing)
    assert all(len(weight) == code.messages for weight in weights.values())
    found = combine_rows(weights, sent, g.shape[1])
    assert found.dtype == g.dtype
    true = g.astype(np.float64).sum(axis=0)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def worst(code: Code, dtype: type = np.float64, length: int = 600) -> float:
    """Return the worst error over every set of as many stragglers as the code bears."""
    g = gradients(code, length, dtype)
    sent = messages(code, g)
    return max(error(code, g, sent, lost) for lost in everyone(code.n, code.stragglers))


def everyone(n: int, s: int) -> Iterable[tuple[int, ...]]:
    return combinations(range(n), s)
