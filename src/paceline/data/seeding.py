"""All randomness: a generator for a seed and a key."""

from __future__ import annotations

import numpy as np


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return the random generator that belongs to a seed and a key, the same everywhere."""
    return np.random.Generator(np.random.PCG64([seed, *(part + 1 for part in key)]))
