"""Kinds of machine: what each worker of a fleet reserves, holds and costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Any

from paceline.core.checks import check_whole
from paceline.core.protocol import Prices, WorkerId, worker_names

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Kind:
    """A kind of machine. Its workers are called by its name: "a100-0", "a100-1", …

    count: the number of its workers, or (least, most). Training begins with the least number, and
        uses up to the most as machines come and go.
    cpus: CPUs that Ray reserves per worker; by default an equal share of the free cores, at most 1.
    gpus: GPUs that Ray reserves per worker; by default 1 if the learner's device is "cuda".
    resources: custom resources of Ray per worker, as in `ray start --resources='{"big": 1}'`.
    labels: labels that the node must have, as in `ray start --labels="market=spot"`.
    accelerator_type: the accelerator that the node must have, by Ray's name for it: "A100", "T4".
    runtime_env: Ray's runtime environment of the worker's process.
    max_samples: the samples that fit into a worker's memory; needs a placement such as `BySpeed()`.
    price: of a worker's hour; `Trainer(prices=…)` replaces it.
    cloud: "aws", "gcp" or "azure". Workers then ask their machine's metadata service every two
        seconds whether the cloud takes it back, and leave in time.

    >>> Kind("cpu", count=(1, 3)).workers
    ('cpu-0', 'cpu-1', 'cpu-2')
    """

    name: str
    _: KW_ONLY
    count: int | tuple[int, int] = 1
    cpus: float | None = None
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    accelerator_type: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    max_samples: int | None = None
    price: float | None = None
    cloud: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"Kind({self.name!r}): use letters, digits, - and _ in a name, and begin it with a "
                'letter, for example "a100"'
            )
        self._check_count()
        if self.max_samples is not None:
            check_whole("max_samples", self.max_samples)
        amounts = {"cpus": self.cpus, "gpus": self.gpus, "price": self.price, **self.resources}
        for name, value in amounts.items():
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"Kind {self.name}: {name}={value!r}: use a finite number >= 0")
        if self.cloud not in (None, "aws", "gcp", "azure"):
            raise ValueError(f"Kind {self.name}: cloud={self.cloud!r}: use aws, gcp or azure")
        if reserved := [name for name in ("CPU", "GPU") if name in self.resources]:
            raise ValueError(
                f"Kind {self.name}: resources names {' and '.join(reserved)}; use cpus= and gpus="
            )

    def _check_count(self) -> None:
        given = self.count
        if not isinstance(given, tuple):
            check_whole("count", given)
            return
        if len(given) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in given):
            raise ValueError(f"Kind {self.name}: count={given!r}: use a number, or (least, most)")
        least, most = given
        if not (0 <= least <= most and most >= 1):
            raise ValueError(
                f"Kind {self.name}: count={given!r}: use (least, most) with 0 <= least <= most, "
                "and most >= 1"
            )

    @property
    def least(self) -> int:
        """The number of its workers that must be up before training begins."""
        return self.count[0] if isinstance(self.count, tuple) else self.count

    @property
    def most(self) -> int:
        """The largest number of its workers."""
        return self.count[1] if isinstance(self.count, tuple) else self.count

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The names of its workers, in order."""
        return tuple(f"{self.name}-{i}" for i in range(self.most))


@dataclass(frozen=True)
class Fleet:
    """The workers of an engine in order, each with its kind of machine."""

    kinds: Mapping[WorkerId, Kind]

    @classmethod
    def of(cls, kinds: Iterable[Kind]) -> Fleet:
        """Return the workers of all kinds."""
        given = tuple(kinds)
        if not given or not all(isinstance(kind, Kind) for kind in given):
            raise ValueError(f'fleet={given!r}: give kinds of machine, such as [Kind("a100")]')
        names = Counter(kind.name for kind in given)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(
                f"fleet= has several kinds named {', '.join(twice)}; give each a name of its own"
            )
        return cls({worker: kind for kind in given for worker in kind.workers})

    @classmethod
    def alike(cls, workers: Sequence[WorkerId], cpus: float | None = None) -> Fleet:
        """Return workers of one kind under these names."""
        return cls(dict.fromkeys(workers, Kind("w", count=len(workers), cpus=cpus)))

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(self.kinds)

    @property
    def least(self) -> int:
        """The number of workers that training begins with: at least one."""
        return max(sum(kind.least for kind in self._each()), 1)

    def missing(self, up: Iterable[WorkerId]) -> dict[str, int]:
        """Return how many workers of each kind are missing before training may begin."""
        there = Counter(self.kinds[worker].name for worker in up)
        wanted = {kind.name: kind.least - there[kind.name] for kind in self._each()}
        return {name: number for name, number in wanted.items() if number > 0}

    def required(self) -> list[WorkerId]:
        """Return as many workers of each kind as training needs to begin."""
        seen: Counter[str] = Counter()
        found = []
        for worker, kind in self.kinds.items():
            seen[kind.name] += 1
            if seen[kind.name] <= kind.least:
                found.append(worker)
        return found

    def prices(self) -> Prices:
        """Return the price of each worker's hour; 0 for a kind without one."""
        if all(kind.price is None for kind in self._each()):
            return Prices()
        return Prices({worker: kind.price or 0.0 for worker, kind in self.kinds.items()})

    def max_samples(self) -> dict[WorkerId, int]:
        """Return the limit of each worker that has one."""
        limits = {worker: kind.max_samples for worker, kind in self.kinds.items()}
        return {worker: limit for worker, limit in limits.items() if limit is not None}

    def check_fixed(self, what: str) -> None:
        """Raise ValueError if workers may be absent, for a `what` that needs all of them."""
        if elastic := [kind for kind in self._each() if kind.least < kind.most]:
            first = elastic[0]
            raise ValueError(
                f"{what} needs all workers from the start, and Kind {first.name} has "
                f"count={first.count}; use count={first.most}"
            )

    def _each(self) -> list[Kind]:
        return list({kind.name: kind for kind in self.kinds.values()}.values())


def fleet_of(
    workers: int | None, fleet: Iterable[Kind] | None, cpus: float | None, gpus: object
) -> Fleet:
    """Return the fleet of an engine that was given a number of workers, or kinds of machine."""
    if (workers is None) == (fleet is None):
        raise ValueError(
            f"workers={workers!r}, fleet={fleet!r}: give a number of workers, or the kinds of "
            'machine, such as fleet=[Kind("a100", count=4)]'
        )
    if fleet is not None:
        if cpus is not None or gpus is not None:
            raise ValueError(
                "cpus= and gpus= are for workers=…; with fleet=, each Kind has its own"
            )
        return Fleet.of(fleet)
    assert workers is not None
    check_whole("workers", workers)
    return Fleet.alike(worker_names(workers), cpus)
