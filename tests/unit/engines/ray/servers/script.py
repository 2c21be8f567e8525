"""A scripted cluster for the recovery machine: a test tells it events, and compares calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from paceline.core.protocol import Task, Work
from paceline.engines.ray.servers.events import (
    Add,
    Apply,
    Call,
    Event,
    KeepState,
    MayBeLate,
    Probe,
    Reduce,
    Reduced,
    Remove,
    Replace,
    ResultsUnusable,
    SetUp,
    Started,
    StateKept,
    StepTaken,
    TakeStep,
    Watch,
)
from paceline.engines.ray.servers.fleet import Settings
from paceline.engines.ray.servers.machine import Machine
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.slices import Copy, Kept, Object, Result
from paceline.engines.ray.worker import Token
from paceline.learners.base import Layout, Sums

Kind = TypeVar("Kind")
Asked = tuple[Any, ...]
"""The kind of a call, and what it asks for."""


class Script:
    """A machine of servers with four values each, the first with two, and the fleet that it sees.

    servers, workers: their nodes.
    respawns: of all servers together.
    """

    def __init__(
        self,
        servers: Mapping[str, str],
        workers: Mapping[str, str],
        totals: bool = False,
        respawns: int = 9,
        rounded: bool = False,
        sum_on_nodes: bool = False,
        direct: bool = False,
        chunks: int = 1,
        adapts: bool = False,
    ) -> None:
        self.computing = 0.0  # seconds of each task
        self.now, self.probing, self.respawns = 0.0, False, respawns
        self.nodes, self.worker_of, self.up = dict(servers), dict(workers), set[str]()
        self.lost: set[str] = set()
        self.calls: list[Call] = []
        layout = Layout(4 * len(servers) - 2)
        spans = zip([*servers] * chunks, layout.spans(len(servers), chunks), strict=True)
        parts = [Object("s0")] if rounded else [Object("v0"), Object("s0")]
        copies = [(name, Copy(0, [span], parts)) for name, span in spans]
        self.placement = Placement(servers, self.worker_nodes)
        settings = Settings(
            *(layout, 8, totals, frozenset(), 20.0),
            rounded=rounded,
            sum_on_nodes=sum_on_nodes,
            direct=direct,
            chunks=chunks,
            adapts=adapts,
        )
        self.machine = Machine(settings, self, self.placement, copies, self._do)

    # --- the fleet, as the machine sees it -------------------------------------------------------

    @property
    def workers(self) -> int:
        return len(self.worker_of)

    def alive(self) -> Collection[str]:
        return {*self.nodes.values(), *self.worker_of.values()} - {*self.lost, ""}

    def worker_nodes(self) -> Sequence[str]:
        return list(dict.fromkeys(n for n in self.worker_of.values() if n not in self.lost))

    def has_worker(self, token: Token) -> bool:
        return token.worker in self.worker_of

    def has(self, server: str) -> bool:
        return server in self.nodes

    def joined(self, server: str) -> bool:
        return server in self.up

    def node(self, server: str) -> str:
        return self.nodes[server]

    def address(self, node: str) -> str:
        return node

    def _do(self, call: Call) -> None:
        self.calls.append(call)
        match call:
            case Replace(server):
                self.up.discard(server)
                self.nodes[server] = ""
                self.respawns -= 1
                if self.respawns < 0:
                    del self.nodes[server]
            case Remove(server):
                del self.nodes[server]
            case Add(server):
                self.nodes[server] = ""

    # --- the script ------------------------------------------------------------------------------

    def last(self, kind: type[Kind], server: str) -> Kind:
        """Return the last call of a kind to a server."""
        calls = [call for call in self.calls if isinstance(call, kind)]
        return next(call for call in reversed(calls) if vars(call)["server"] == server)

    def last_probe(self) -> Probe:
        return next(call for call in reversed(self.calls) if isinstance(call, Probe))

    def start(self) -> list[Asked]:
        begin = len(self.calls)
        self.machine.start()
        return [asked(call) for call in self.calls[begin:]]

    def told(self, event: Event) -> list[Asked]:
        begin = len(self.calls)
        self.machine.handle(event)
        return [asked(call) for call in self.calls[begin:]]

    def started(self, server: str, node: str = "", has_arrays: bool = False) -> list[Asked]:
        self.nodes[server] = node or self.nodes[server]
        self.up.add(server)
        return self.told(Started(self.last(SetUp, server), has_arrays))

    def all_started(self, has_arrays: bool = False) -> None:
        self.start()
        for server in self.nodes:
            self.started(server, has_arrays=has_arrays)

    def taken(
        self, server: str, seconds: Sequence[float] = (), has_arrays: bool = False
    ) -> list[Asked]:
        kind = Apply if self.machine.steps.history.log[-1].totals is not None else TakeStep
        call: Any = self.last(kind, server)
        return self.told(StepTaken(call, {}, has_arrays, seconds))

    def reduced(self, server: str, sums: Sums) -> list[Asked]:
        return self.told(Reduced(self.last(Reduce, server), sums))

    def watched(self) -> list[Asked]:
        """Have the seconds of the last watch pass."""
        call = next(call for call in reversed(self.calls) if isinstance(call, Watch))
        self.now += call.seconds
        return self.told(MayBeLate(call))

    def kept(self, index: int, life: int | None = 0) -> list[Asked]:
        """Tell that the state of a slice was kept; without a life of the keeper, that it failed."""
        calls = [call for call in self.calls if isinstance(call, KeepState)]
        call = next(call for call in reversed(calls) if call.index == index)
        return self.told(StateKept(call, None if life is None else Kept(call.keeper, life)))

    def unusable(
        self,
        server: str,
        lost: Sequence[int] = (),
        late: Sequence[int] = (),
        bad: Mapping[int, str] | None = None,
    ) -> list[Asked]:
        return self.told(ResultsUnusable(self.last(TakeStep, server), lost, late, bad or {}))

    def answered(self, task: Task, loss: float = 1.0) -> list[Asked]:
        """Have a worker compute a task on the newest model, or compute it again."""
        begin, machine = len(self.calls), self.machine
        token, spans, node = token_of(task), machine.steps.slots.spans, self.worker_of[task.worker]
        slices = [f"{task.id}:{start}" for start, _ in spans]
        machine.expect(Result(token, task, machine.steps.model, spans, slices, node))
        machine.accept(token, task.samples, {"loss": loss}, self.computing)
        return [asked(call) for call in self.calls[begin:]]

    def step(self, *workers: str) -> list[Asked]:
        """Take a step along a result of each worker."""
        first = 100 * (self.machine.steps.model.number + 1)
        tasks = [task_of(first + i, worker) for i, worker in enumerate(workers)]
        for task in tasks:
            self.answered(task)
        begin = len(self.calls)
        self.machine.step({task.id: 1 / len(tasks) for task in tasks}, keep=False)
        return [asked(call) for call in self.calls[begin:]]


def task_of(id: int, worker: str) -> Task:
    return Task(id, worker, Work(), 0, 0.0, 8, 0)


def token_of(task: Task) -> Token:
    return Token("run", task.worker, 0, task.id)


def asked(call: Call) -> Asked:
    return type(call), *(getattr(call, each.name) for each in fields(call) if each.compare)
