"""The short way over a long link: a process on each node that sends what lies in its store.

Ray's object stores find and fetch an object in three round trips. Where a round trip takes longer
than the bytes, a slice is asked of the carrier on its node instead and comes back within the
reply: one round trip. Nothing depends on it: without a carrier, slices go by the stores.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

FAR = 0.005
"""Seconds of a round trip from which on a node counts as far."""
CARRIED_BYTES = 8 * 2**20
"""Larger slices go by the stores: their bytes take longer than the round trips saved."""
Carriers: TypeAlias = Mapping[str, Any]
"""The carrier of each far node."""


class Carrier:
    """Wrapped by `ray.remote` where it is created, so this stays a plain class."""

    async def read(self, refs: Sequence[Any]) -> Any:
        """Return an object of this node's store, when it is there."""
        return await refs[0]

    async def ping(self) -> None:
        pass


def start_carriers(nodes: Sequence[str], patience: float) -> dict[str, Any]:
    """Start a carrier on each node, and keep those that are far from here."""
    inline = {"RAY_max_direct_call_object_size": str(CARRIED_BYTES + 2**16)}
    carrier = ray.remote(
        num_cpus=0, max_restarts=0, max_task_retries=0, runtime_env={"env_vars": inline}
    )(Carrier)
    made = {
        node: carrier.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in nodes
    }
    ray.get([actor.ping.remote() for actor in made.values()], timeout=patience)
    return made if max(_round_trip(actor, patience) for actor in made.values()) > FAR else {}


def _round_trip(actor: Any, patience: float) -> float:
    times = []
    for _ in range(3):
        begin = time.monotonic()
        ray.get(actor.ping.remote(), timeout=patience)
        times.append(time.monotonic() - begin)
    return min(times)


def ask(refs: Sequence[Any], nodes: Sequence[str | None], carriers: Carriers) -> list[Any]:
    """Have objects brought here: those with a node by its carrier, the others by the stores."""
    here = ray.get_runtime_context().get_node_id()
    return [
        ref
        if node is None or node == here or node not in carriers
        else carriers[node].read.remote([ref])
        for ref, node in zip(refs, nodes, strict=True)
    ]
