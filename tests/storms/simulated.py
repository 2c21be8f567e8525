"""Ray in virtual time and bad weather: the real engine on simulated processes and machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from paceline.engines.base import Job
from paceline.engines.kinds import Fleet
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.engine import Ray
from paceline.engines.ray.pool import Cluster, Member, Pool
from paceline.engines.ray.reclaimed import Notice
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.transport.calls import Stores, Transport
from paceline.engines.ray.worker import Worker
from tests.storms.processes import (
    Process,
    Reference,
    ServerProcess,
    WorkerProcess,
    when_here,
)
from tests.storms.weather import World


class SimulatedCluster(Cluster):
    """What the engine takes for Ray."""

    def __init__(self, world: World) -> None:
        self._world = world

    def connect(self, address: str | None, workers: int, store_bytes: int) -> bool:
        return True

    def warn_small_stores(self, servers: bool, workers: int, model: int, state: int) -> None:
        pass

    def gpus(self) -> float:
        return 0.0

    def make_workers(
        self, fleet: Fleet, gpus: Mapping[str, float], fixed: bool, actor: type = Worker
    ) -> Callable[[str], Any]:
        def make(name: str) -> WorkerProcess:
            nodes = sorted(self.nodes() - self._world.leaving) or sorted(self.nodes())
            if name in self._world.unplaced:
                process = WorkerProcess(self._world, name, "")
                self._world.wait_for_a_node(process)
                return process
            return WorkerProcess(self._world, name, nodes[fleet.workers.index(name) % len(nodes)])

        return make

    def transport(self, direct: bool) -> Transport:
        return SimulatedDirect() if direct else Stores()

    def make_servers(self, placement: Placement) -> Callable[[str], Any]:
        def make(name: str) -> ServerProcess:
            node = placement.choose(name, self.nodes())
            assert node is not None  # the world keeps one
            return ServerProcess(self._world, name, node)

        return make

    def watch(self, tell: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        self._world.tell_leaving = tell
        return lambda: setattr(self._world, "tell_leaving", lambda nodes: None)

    def listen(self, actor: Any, tell: Callable[[Notice | None], None]) -> None:
        if (notice := self._world.notices.pop(actor.name, None)) is not None:
            tell(notice)

    def drain(self, node: str, why: str) -> None:
        self._world.leaving.add(node)

    def calls(self) -> Calls:
        return Calls(self._world.new_inbox(), self.clock)

    def clock(self) -> float:
        return self._world.now

    def put(self, thing: Any) -> Reference:
        reference = Reference(self._world)
        reference.answer(thing)
        return reference

    def get(self, refs: Any, timeout: float) -> Any:
        wanted = refs if isinstance(refs, list) else [refs]
        here: list[bool] = []
        when_here(wanted, lambda: here.append(True))
        until = self._world.now + timeout
        while not here:
            if not self._world.advance(until):
                self._world.now = until
                raise ray.exceptions.GetTimeoutError(f"not here in {timeout:g} s")
        found = [reference.result(timeout=0) for reference in wanted]
        return found if isinstance(refs, list) else found[0]

    def kill(self, actor: Process) -> None:
        # One that is paused does not obey at once, and may answer in its last moments.
        actor.ending = True
        if self._world.rng.random() < 0.2:
            self._world.after(self._world.rng.uniform(0, 30), actor.die)
        else:
            actor.die()

    def has_process(self, actor: Process) -> bool:
        return actor.placed

    def node(self) -> str:
        return "driver"

    def nodes(self) -> set[str]:
        return {*self._world.nodes, *self._world.silent}

    def has_lost(self, node: str) -> bool:
        return node in self._world.dead

    def address(self, node: str) -> str:
        return node

    def free_cpus(self) -> float:
        return 0.0

    def shutdown(self) -> None:
        pass


class SimulatedDirect(Stores):
    """Results are lost with the process of their worker."""

    direct = True

    def call(
        self,
        member: Member,
        version: int,
        to: Sequence[Member],
        waits: bool,
        method: str,
        count: int,
        *given: Any,
    ) -> tuple[Any, list[Any]]:
        first, rest = super().call(member, version, to, waits, method, count, *given)
        for reference in rest if method == "compute_slices" else ():
            reference.holder = member.actor
        return first, rest


class SimulatedRay(Ray):
    """`Ray` on a simulated cluster; by default the model is in the driver."""

    def __init__(
        self, workers: int | None, world: World, servers: Any = "driver", **options: Any
    ) -> None:
        self.world = world
        super().__init__(workers, servers=servers, timeout=world.timeout, **options)

    def _make_cluster(self) -> Cluster:
        return SimulatedCluster(self.world)

    def _is_direct(self, pool: Pool) -> bool:
        return self.world.direct

    def _chunks(self, job: Job, servers: int, direct: bool) -> int:
        enough = job.server.layout.size >= (2 * self.world.chunks - 1) * servers
        return self.world.chunks if enough else 1
