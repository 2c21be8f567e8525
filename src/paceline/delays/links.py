"""The connection of a worker: latency, and bandwidth each way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Link:
    """A worker's connection: seconds each way, and bytes per second down and up."""

    latency: float = 0.0
    down: float = inf
    up: float = inf

    def __post_init__(self) -> None:
        if self.latency < 0 or self.down <= 0 or self.up <= 0:
            raise ValueError(f"{self}: use latency >= 0 and bandwidths > 0 bytes per second")
