"""The bits of a model that `sync` trains are those of version 0.1."""

from __future__ import annotations

import hashlib

import numpy as np

import paceline as pl

# Of sums and products that every processor rounds alike; recorded with version 0.1.
HASH = "57735bac76ed255b"


def test_sync_trains_the_same_bits_as_ever() -> None:
    learner = pl.learners.Quadratic((1.0, 0.5, 0.1), noise=0.3, lr=0.05, batch_size=12)
    engine = pl.Simulator(4, pl.delays.Exponential(1.0))
    run = pl.Trainer(learner, pl.sync(), engine, progress=False, seed=3).fit(steps=25)
    assert hashlib.sha256(np.ascontiguousarray(run.model).tobytes()).hexdigest()[:16] == HASH
