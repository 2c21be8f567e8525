"""What is trained in a storm: policies, codecs, and who keeps the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from paceline.codes.approximate import Approximate, least_squares
from paceline.core.policy import Policy
from paceline.data.partition.base import Partition
from paceline.learners.arrays import LeastSquares
from paceline.learners.base import Learner
from paceline.learners.robust import CenteredClip, Robust, TrimmedMean
from paceline.policies.choosers import Chooser, GrowOnNoise, GrowWhenStationary, Schedule
from paceline.policies.coded import Coded, code_for, coded
from paceline.policies.deadline import Deadline, deadline
from paceline.policies.gather import Gather
from paceline.policies.named import (
    asynchronous,
    ata,
    bandit,
    k_async,
    k_sync,
    local_sgd,
    rennala,
    ringmaster,
    sync,
)
from paceline.policies.placement.base import BySpeed
from paceline.policies.placement.tiles import Placed
from paceline.policies.ringleader import ringleader
from paceline.policies.wrappers import OnlyWorkers
from tests.storms.rolling import Rolling

PROBLEM = Rolling((1.0, 0.3, 0.1, 0.5, 0.2), noise=0.1, lr=0.04, batch_size=12)


@dataclass(frozen=True)
class Case:
    """What is trained: a policy, how many workers it needs, and what it promises.

    servers: who keep the model, in the driver's place.
    nodes: machines, of which some may be lost.
    """

    name: str
    policy: Policy
    workers: int
    needs: int  # workers, or it cannot go on
    staleness: float = 0.0  # versions that a result may be behind
    codec: Any = None
    down: Any = None
    servers: int = 0
    nodes: int = 1
    learner: Learner = PROBLEM
    tiles: Partition | None = None
    robust: Robust | None = None
    sum_on_nodes: bool = False

    @property
    def exact(self) -> bool:
        """Whether doing it again one task after the other must give the same model."""
        from paceline.codecs.base import Elementwise

        return self.codec is None and (self.down is None or isinstance(self.down, Elementwise))

    @property
    def tolerance(self) -> float:
        """By how much, relatively, it may differ: servers decode slices, which round otherwise, and
        so do sums by node."""
        decoded = self.servers and self.policy.needs_exact_results
        return 1e-9 if decoded or self.sum_on_nodes else 0.0


def case_of(rng: random.Random) -> Case:
    """Draw what is trained."""
    n = rng.randint(3, 7)
    k = rng.randint(1, n - 1)
    spread = rng.randint(1, 4)
    cases: list[Callable[[], Case]] = [
        lambda: Case("sync", sync(), n, 1),
        lambda: Case("k_sync", k_sync(k), n, k),
        lambda: Case("k_async", k_async(k), n, 1, inf),
        lambda: Case("asynchronous", asynchronous(), n, 1, inf),
        lambda: Case("bounded", asynchronous(spread), n, 1, spread),
        lambda: Case("rennala", rennala(k + 1), n, 1),
        lambda: Case("ringmaster", ringmaster(spread + 1), n, 1, spread),
        lambda: Case("loose", Gather(k, max_staleness=spread, preempt=False), n, k, spread),
        lambda: Case("bandit", bandit(k, hedge=rng.randint(0, n - k)), n, k),
        lambda: Case("ata", ata(n), n, 1),
        lambda: Case("local_sgd", local_sgd(3), n, 1),
        lambda: Case("by speed", Gather(placement=BySpeed()), n, 1),
        lambda: Case("growing", k_sync(_chooser(rng, n)), n, n),
        lambda: Case("deadline", deadline(rng.uniform(1.0, 4.0)), n, 1),
        lambda: Case("among", OnlyWorkers([f"w{i}" for i in range(1, n)], sync()), n, n),
        lambda: _placed(rng, n, k),
        lambda: Case("coded", _coded(rng, n), n, n - 1),
        lambda: Case("verified", coded(2, verify=rng.randint(1, 2)), n, n - 1),
        lambda: Case("estimated", Coded(_estimate, wait=n - 1), n, n - 1),
        lambda: Case("encoded", k_sync(k), n, k, codec=_codec(rng)),
        lambda: Case("lazy", k_sync(k), n, k, codec=_lazy(rng, n)),
        lambda: Case("public copy", k_sync(k), n, k, codec=_codec(rng, 0.3), down=_down(rng)),
        lambda: _robust(rng, n),
        *(lambda: _servers(rng, n, k, spread) for _ in range(4)),
        lambda: Case("ringleader", ringleader(most=spread), n, 1, inf),
    ]
    return rng.choice(cases)()


def _servers(rng: random.Random, n: int, k: int, spread: int) -> Case:
    """Draw a case whose model is kept by servers."""
    choices: list[tuple[Policy, int, float]] = [
        (sync(), 1, 0.0),
        (k_sync(k), k, 0.0),
        (k_async(k), 1, inf),
        (asynchronous(spread), 1, spread),
        (rennala(k + 1), 1, 0.0),
        (ringmaster(spread + 1), 1, spread),
        (local_sgd(3), 1, 0.0),
        (k_sync(_chooser(rng, n)), n, 0.0),
        (deadline(rng.uniform(1.0, 4.0)), 1, 0.0),
        (coded(1, rng.randint(1, 2)), n - 1, 0.0),
    ]
    policy, needs, staleness = rng.choice(choices)
    learner = Rolling(
        PROBLEM.curvature, noise=0.1, lr=0.04, batch_size=12, totals=rng.random() < 0.3
    )
    codec = None if policy.needs_exact_results else _codec(rng, 0.2)
    servers, nodes = rng.randint(1, 3), rng.randint(1, 3)
    return Case(
        *("servers", policy, n, needs, staleness),
        codec=codec,
        servers=servers,
        nodes=nodes,
        learner=learner,
    )


def _chooser(rng: random.Random, n: int) -> Chooser:
    lag = rng.randint(1, 3)
    choosers: list[Chooser] = [
        Schedule({0: 1, 12: max(n // 2, 1), 30: n}),
        GrowWhenStationary(1, n, threshold=2, burn_in=4, lag=lag),
        GrowOnNoise(1, n, memory=6, lag=lag),
    ]
    return rng.choice(choosers)


def _coded(rng: random.Random, n: int) -> Coded:
    return rng.choice([coded(1), coded(1), coded(1, messages=2), coded(2)])


def _estimate(n: int) -> Approximate:
    return least_squares(code_for(n, 1, 1), min(1, n - 1))


def _placed(rng: random.Random, n: int, k: int) -> Case:
    """Draw a case in which data have their places."""
    draw = np.random.default_rng(rng.randrange(2**32))
    features = draw.standard_normal((96, 4))
    learner = LeastSquares(features, features.sum(axis=1), lr=0.05, batch_size=12)
    tiles = Partition(draw.permutation(np.arange(96) % (2 * n)))
    placed = Placed(tiles, move=rng.random() < 0.7)
    policies: list[Policy] = [
        Gather(placement=placed),
        Gather(k, placement=placed),
        Deadline(rng.uniform(1.0, 4.0), placement=placed),
    ]
    policy = rng.choice(policies)
    needs = n if not placed.move else k
    return Case("placed", policy, n, needs, learner=learner, tiles=tiles)


def _robust(rng: random.Random, n: int) -> Case:
    rules: list[Robust] = [TrimmedMean(1), CenteredClip(1.0)]
    rule = rng.choice(rules)
    k = rng.randint(3, n)
    return Case("robust", k_sync(k), n, k, robust=rule)


def _codec(rng: random.Random, likely: float = 1.0) -> Any:
    from paceline.codecs.chain import Chain
    from paceline.codecs.feedback import DeepGradient, Feedback
    from paceline.codecs.quantize import BFloat16, Half, Int8, Sign
    from paceline.codecs.sparse import RandomK, TopK

    codecs = [
        *(Int8(), Half(), BFloat16(), RandomK(0.5), Chain(RandomK(0.5), Int8())),
        *(Feedback(TopK(0.5)), Feedback(Sign()), DeepGradient(0.5, momentum=0.5)),
    ]
    return rng.choice(codecs) if rng.random() < likely else None


def _lazy(rng: random.Random, n: int) -> Any:
    from paceline.codecs.lazy import Lazy
    from paceline.codecs.sparse import TopK
    from paceline.codecs.triggers import Always, Lag

    return rng.choice([Lazy(Always(), TopK(0.5)), Lazy(Lag(1)), Lazy(Lag(n), TopK(0.5))])


def _down(rng: random.Random) -> Any:
    from paceline.codecs.quantize import Half, Int8
    from paceline.codecs.sparse import TopK

    return rng.choice([Int8(), Half(), TopK(0.5)])
