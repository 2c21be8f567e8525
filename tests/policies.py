"""One policy of each kind, with small numbers, for whole runs on four workers."""

from __future__ import annotations

from collections.abc import Callable

import paceline as pl
from paceline.core.policy import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "sync": pl.sync,
    "k_sync": lambda: pl.k_sync(2),
    "k_async": lambda: pl.k_async(2),
    "asynchronous": pl.asynchronous,
    "bounded staleness": lambda: pl.asynchronous(2),
    "rennala": lambda: pl.rennala(5),
    "ringmaster": lambda: pl.ringmaster(2),
    "ringmaster without stops": lambda: pl.ringmaster(2, stops=False),
    "ringleader": pl.policies.ringleader,
    "bandit": lambda: pl.bandit(2),
    "deadline": lambda: pl.deadline(1.0),
}
