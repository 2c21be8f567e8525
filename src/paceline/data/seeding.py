"""The source of all randomness: one generator for each seed and key."""

from __future__ import annotations

import numpy as np


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return the random generator of a seed and a key, the same on every machine."""
    return np.random.Generator(np.random.PCG64([seed, *(part + 1 for part in key)]))
