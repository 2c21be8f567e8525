"""Makes the golden journals anew: `python tests/golden/make.py`, after a change that was meant.

A journal that comes out differently means that a policy or the simulator decides differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paceline as pl
from paceline.core.coordinator import run
from paceline.core.journal import Header
from paceline.core.policy import Policy
from paceline.core.protocol import MAIN, Peer, Step
from paceline.core.state import describe
from paceline.data.partition.base import Partition
from paceline.engines.base import Job
from paceline.gossip.job import GossipJob
from paceline.gossip.simulated import SimulatedGossip
from paceline.learners.base import Learner

FOLDER = Path(__file__).parent


def unequal(**more: object) -> pl.Simulator:
    """Return three workers of different pace, one of which is away for a while."""
    delays = [
        pl.delays.Exponential(0.5),
        pl.delays.ShiftedExponential(0.5, 0.5),
        pl.delays.Exponential(2.0),
    ]
    schedule = [(1.5, pl.protocol.Left("w1")), (3.0, pl.protocol.Joined("w1"))]
    return pl.Simulator(3, delays, pl.delays.Link(latency=0.01), schedule=schedule, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A small run: what is in its file, and how it is simulated."""

    policy: Callable[[], Policy]
    steps: int
    learner: Learner = pl.learners.TimingOnly(batch_size=8)
    engine: Callable[[], pl.Simulator] = unequal
    batch: int = 8


QUADRATIC = pl.learners.Quadratic((1.0, 0.25), noise=0.1, batch_size=8)

TILES = Partition([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5])

CASES: dict[str, Case] = {
    "sync": Case(lambda: pl.policies.MinWorkers(3, pl.sync()), 5, QUADRATIC),
    "sync_of_n": Case(lambda: pl.policies.Gather(4), 4),
    "k_sync": Case(lambda: pl.k_sync(2), 6, QUADRATIC),
    "k_sync_uninterrupted": Case(
        lambda: pl.k_sync(2), 6, engine=lambda: unequal(interruptible=False)
    ),
    "k_async": Case(lambda: pl.k_async(2), 8),
    "asynchronous": Case(pl.asynchronous, 12, QUADRATIC),
    "asynchronous_bounded": Case(lambda: pl.asynchronous(2), 12),
    "rennala": Case(lambda: pl.rennala(4), 5),
    "ringmaster": Case(lambda: pl.ringmaster(2), 8, QUADRATIC),
    "ringmaster_without_stops": Case(lambda: pl.ringmaster(2, stops=False), 8),
    "local_sgd": Case(lambda: pl.policies.MinWorkers(3, pl.local_sgd(3)), 4, QUADRATIC),
    "adaptive_k_sync": Case(
        lambda: pl.k_sync(pl.policies.GrowOnNoise(1, 3, memory=2), samples=2), 12, QUADRATIC
    ),
    "bandit": Case(lambda: pl.policies.MinWorkers(3, pl.bandit(1)), 12),
    "bandit_hedged": Case(
        lambda: pl.policies.MinWorkers(
            3, pl.bandit(1, 1, index=pl.selection.Thompson(), discount=0.9)
        ),
        8,
    ),
    "ata": Case(lambda: pl.policies.MinWorkers(3, pl.ata(6)), 6, QUADRATIC),
    "by_speed": Case(
        lambda: pl.policies.MinWorkers(3, pl.policies.Gather(placement=pl.BySpeed())), 6
    ),
    "k_sync_of_tiles": Case(
        lambda: pl.policies.MinWorkers(
            3, pl.policies.Gather(2, placement=pl.policies.Placed(TILES, bound=1.0))
        ),
        10,
    ),
    "tiles_that_stay": Case(
        lambda: pl.policies.MinWorkers(
            3, pl.policies.Gather(2, placement=pl.policies.Placed(TILES, move=False))
        ),
        10,
    ),
    "coded": Case(lambda: pl.policies.MinWorkers(3, pl.coded(1, 2)), 6, QUADRATIC),
    "gossip": Case(
        lambda: pl.gossip.Gossip(
            pl.gossip.ring(3),
            pl.gossip.Difference(0.5),
            pl.gossip.OnChange(0.4, every=3),
            tiled=False,
        ),
        12,
        QUADRATIC,
    ),
    "deadline": Case(lambda: pl.deadline(1.0), 8, engine=lambda: unequal(unit=2)),
}


def policy(name: str) -> Policy:
    """Return the policy of a case, with its end; nodes are stopped by their engine."""
    chosen = CASES[name].policy()
    return (
        chosen
        if isinstance(chosen, pl.gossip.Gossip)
        else pl.policies.Until(chosen, steps=CASES[name].steps)
    )


def simulate(name: str) -> pl.Journal:
    """Run a case and return its journal."""
    case, engine = CASES[name], CASES[name].engine()
    if isinstance(chosen := case.policy(), pl.gossip.Gossip):
        return one_of_nodes(case, chosen, SimulatedGossip(engine.lend()))
    header = Header(describe(case.policy()), case.batch)
    coordinator = pl.protocol.Coordinator(policy(name), case.batch, pl.Journal(header))
    engine.open(
        Job(
            learner=case.learner,
            server=case.learner.server(),
            wants=case.policy().wants,
            seed=1,
        )
    )
    run({MAIN: coordinator}, engine)
    return coordinator.journal


def one_of_nodes(case: Case, policy: pl.gossip.Gossip, engine: SimulatedGossip) -> pl.Journal:
    """Return the journal of w1, which leaves for a while."""
    headers = {
        node: Header(describe(policy), case.batch, peer=Peer(node, others, (2,)))
        for node, others in policy.graph.neighbors.items()
    }
    journal, steps = pl.Journal(headers["w1"]), 0
    for node, entry in engine.entries(GossipJob(case.learner, policy, headers, seed=1)):
        if node == "w1":
            journal.append(entry)
            steps += any(isinstance(command, Step) for command in entry.commands)
            if steps == case.steps:
                engine.stop("enough")
    return journal


if __name__ == "__main__":
    for name in CASES:
        path = FOLDER / f"{name}.jsonl"
        journal = simulate(name)
        journal.save(path)
        print(f"{path.name}: {len(journal)} entries, {path.stat().st_size} bytes")
