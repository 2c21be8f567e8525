"""A study: which transport should move the slices of a model between hosts.

Four hosts on this machine (network namespaces, `paceline.testing.hosts`), each behind a link of
100 Mbit/s, with 20 ms round trips. Each host has one peer. In an exchange every peer cuts its
vector into four slices and sends slice j to peer j. So three quarters of the vector leave each
host, and as much arrives. An exchange takes from a common start until the last peer has all
slices, in arrays of numpy. The first and the last value of each slice are checked.

- gloo: `isend` and `irecv` of torch.distributed;
- ray store: an actor per host returns its slices as objects, and the receivers fetch references;
- ray carrier: the same objects, read through the reply of a carrier on the sender's node;
- ray push: calls from actor to actor with chunks of the slices as inline arguments;
- zeromq: a PUSH and a PULL socket for each ordered pair, in chunks of 256 KiB;
- sockets: a blocking TCP connection of the standard library for each ordered pair;
- nixl: one-sided reads of registered memory, by UCX over TCP.

Conditions: `alone`; `loss`, 1 % of the frames on every link; `slow`, one link at a tenth; `death`,
SIGKILL to the processes of the candidate on one host, 0.2 s after the start of an exchange. In the
last two, "three" is the time until the other peers have the slices of one another.

The candidates take turns. Each has 3 warm exchanges before it is measured, of at most 20 MB in
`alone` and 5 MB elsewhere. The hosts use Reno, unless `--congestion` names another algorithm: with
BBR the same exchange of 5 MB took 0.5 to 9 s on two busy cores, without a lost frame. BBR estimated
8 to 25 Mbit/s for a connection. Compare only candidates of one run, on an idle machine: between
runs on a shared machine the times of a candidate differed by up to 3.5 times. Processor time is the
sum over the processes of all four hosts. It has ticks of 10 ms, so it is a mean over the exchanges.
The time of the simulated wire is not in it. For Ray it includes the daemons of the nodes. Needs
root, `ip`, and a C compiler.

    python benchmarks/transports.py [--quick] [--only sockets,gloo] [--conditions alone,loss]
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from _report import OtherLoad, finish, machine, parser, quantile, table
from paceline.testing.hosts import Hosts, missing

RATE, DELAY, QUEUE = 100e6, 0.005, 1 << 20
COUNT, LAST = 4, 3  # the last host is slow, or dies
SLOW, LOSS = 0.1, 0.01
SIZES = {"alone": [5, 20, 100], "loss": [5, 20], "slow": [5, 20], "death": [20]}  # MB
WARM_UP, DEATHS = 3, 3
LEAD = 0.3  # seconds from a command to the common start; commands do not use the links
KILL_AFTER = 0.2
LIMIT, DEATH_LIMIT = 90.0, 12.0  # seconds for an exchange
CHUNK = 256 << 10  # of zeromq, in bytes
HIGH_WATER = 16  # chunks that wait in a socket of zeromq
CARRIED, CARRIED_CHUNK, PUSHED_CHUNK = 8 << 20, 4 << 20, 2 << 20
INLINE = {  # for the processes whose replies or arguments carry the slices
    "RAY_max_direct_call_object_size": str(CARRIED + (1 << 16)),
    "RAY_task_rpc_inlined_bytes_limit": str(64 << 20),
}
NEEDS = {"zeromq": ("zmq", "pyzmq"), "nixl": ("nixl_cu12", "nixl-cu12"), "gloo": ("torch", "torch")}


def bound(megabytes: float) -> float:
    """Return the seconds that the links need for an exchange at least."""
    return megabytes * 1e6 * (COUNT - 1) / COUNT * 8 / RATE + 2 * DELAY


# --- a peer --------------------------------------------------------------------------------------


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def in_threads(works: dict[int, Callable[[], None]], until: float) -> tuple[dict[int, float], Any]:
    """Run the works at once; return when each has ended, and the errors of the others."""
    ended: dict[int, float] = {}
    errors: dict[int, str] = {}

    def run(key: int, work: Callable[[], None]) -> None:
        try:
            work()
            ended[key] = time.monotonic()
        except Exception as error:  # any error of any transport is a result of this study
            errors[key] = in_a_line(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = set(works) - set(ended) - set(errors)
    return dict(ended), errors | dict.fromkeys(late, "timeout")


class Vector:
    """The slices that a peer sends, and those that it receives."""

    def __init__(self, rank: int, megabytes: int) -> None:
        self.rank = rank
        self.mine = np.ones(megabytes * 250_000, np.float32)
        self.got = np.ones_like(self.mine)

    def mark(self, round_: int, length: int) -> None:
        """Write to the ends of each slice values that no other slice and round has."""
        for to in range(COUNT):
            part = self.part(self.mine, to, length)
            part[0], part[-1] = (
                self._code(round_, self.rank, to),
                -self._code(round_, self.rank, to),
            )

    def check(self, round_: int, source: int, part: np.ndarray[Any, Any], length: int) -> None:
        code = self._code(round_, source, self.rank)
        if part.dtype != np.float32 or len(part) != length or (part[0], part[-1]) != (code, -code):
            raise ValueError(f"wrong slice from {source}: {part[0]}, {part[-1]}, not {code}")

    @staticmethod
    def part(array: np.ndarray[Any, Any], index: int, length: int) -> np.ndarray[Any, Any]:
        return array[index * length : (index + 1) * length]

    @staticmethod
    def _code(round_: int, source: int, to: int) -> float:
        return float(round_ * 16 + source * 4 + to + 1)


class Peer:
    """One process on each host; a subclass sends one slice and receives one, each in a thread."""

    def __init__(self, rank: int, base: int, megabytes: int) -> None:
        self.rank, self.base = rank, base
        self.vector = Vector(rank, megabytes)
        self.others = [other for other in range(COUNT) if other != rank]

    def connect(self) -> None:
        raise NotImplementedError

    def send(self, to: int, round_: int, part: np.ndarray[Any, Any], limit: float) -> None:
        raise NotImplementedError

    def receive(self, source: int, round_: int, into: np.ndarray[Any, Any], limit: float) -> None:
        raise NotImplementedError

    def exchange(
        self, round_: int, length: int, members: list[int], start: float, limit: float
    ) -> dict[str, Any]:
        """Exchange slices; return when each arrived, and errors by peer."""
        vector = self.vector
        vector.mark(round_, length)

        def send(to: int) -> None:
            wait_until(start)
            self.send(to, round_, vector.part(vector.mine, to, length), limit)

        def receive(source: int) -> None:
            wait_until(start)
            into = vector.part(vector.got, source, length)
            self.receive(source, round_, into, limit)
            vector.check(round_, source, into, length)

        others = [other for other in self.others if other in members]
        works: dict[int, Callable[[], None]] = {}
        for other in others:
            works[other] = lambda source=other: receive(source)  # type: ignore[misc]
            works[other + COUNT] = lambda to=other: send(to)  # type: ignore[misc]
        ended, errors = in_threads(works, start + limit)
        arrived = {source: ended[source] for source in others if source in ended}
        return {"arrived": {self.rank: arrived}, "errors": {self.rank: errors}}

    def close(self) -> None:
        pass


def address(rank: int) -> str:
    return f"10.88.0.{rank + 1}"


def mesh(
    rank: int, base: int, others: Iterable[int]
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Return a connection to each other peer, and one from each."""
    outgoing: dict[int, socket.socket] = {}
    incoming: dict[int, socket.socket] = {}
    until = time.monotonic() + 30
    with socket.create_server((address(rank), base + rank)) as server:
        for other in others:
            while other not in outgoing:
                try:
                    outgoing[other] = socket.create_connection((address(other), base + other), 5)
                except OSError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.1)
            outgoing[other].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            outgoing[other].sendall(bytes([rank]))
        server.settimeout(30)
        while len(incoming) < len(outgoing):
            connection = server.accept()[0]
            connection.settimeout(30)
            incoming[connection.recv(1)[0]] = connection
    return outgoing, incoming


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as the view has."""
    while view:
        if not (count := connection.recv_into(view)):
            raise ConnectionError("the peer has closed the connection")
        view = view[count:]


class Sockets(Peer):
    """Both sides know round and length, so the bytes have no header."""

    def connect(self) -> None:
        self.outgoing, self.incoming = mesh(self.rank, self.base, self.others)

    def send(self, to: int, round_: int, part: np.ndarray[Any, Any], limit: float) -> None:
        self.outgoing[to].settimeout(limit)
        self.outgoing[to].sendall(part.view(np.uint8).data)

    def receive(self, source: int, round_: int, into: np.ndarray[Any, Any], limit: float) -> None:
        self.incoming[source].settimeout(limit)
        fill(self.incoming[source], into.view(np.uint8).data)

    def close(self) -> None:
        for connection in (*self.outgoing.values(), *self.incoming.values()):
            connection.close()


class ZeroMQ(Peer):
    """A socket has one sender, so its chunks arrive in order, and it needs no header."""

    def connect(self) -> None:
        zmq = importlib.import_module("zmq")
        self.context = zmq.Context()
        self.push, self.pull = {}, {}
        for other in self.others:
            self.pull[other] = self.context.socket(zmq.PULL)
            self.pull[other].setsockopt(zmq.RCVHWM, HIGH_WATER)
            self.pull[other].bind(f"tcp://{address(self.rank)}:{self.base + other}")
            self.push[other] = self.context.socket(zmq.PUSH)
            self.push[other].setsockopt(zmq.SNDHWM, HIGH_WATER)
            self.push[other].connect(f"tcp://{address(other)}:{self.base + self.rank}")
        for each in (*self.push.values(), *self.pull.values()):
            each.setsockopt(zmq.LINGER, 0)

    def send(self, to: int, round_: int, part: np.ndarray[Any, Any], limit: float) -> None:
        view = part.view(np.uint8).data
        self.push[to].sndtimeo = int(limit * 1000)
        for begin in range(0, len(view), CHUNK):
            self.push[to].send(view[begin : begin + CHUNK], copy=False)

    def receive(self, source: int, round_: int, into: np.ndarray[Any, Any], limit: float) -> None:
        view = into.view(np.uint8).data
        self.pull[source].rcvtimeo = int(limit * 1000)
        for begin in range(0, len(view), CHUNK):
            chunk = view[begin : begin + CHUNK]
            if self.pull[source].recv_into(chunk) != len(chunk):
                raise ValueError("a chunk has another length")

    def close(self) -> None:
        self.context.destroy(linger=0)


class Gloo(Peer):
    """The group stays as it is when a peer has ended.

    A wait that times out closes all connections of a process: "Application timeout caused pair
    closure". So after a death the next exchange fails.
    """

    def connect(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist, self.lock = torch, dist, threading.Lock()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address(0)}:{self.base}",
            rank=self.rank,
            world_size=COUNT,
            timeout=timedelta(seconds=LIMIT),
        )

    def send(self, to: int, round_: int, part: np.ndarray[Any, Any], limit: float) -> None:
        with self.lock:
            work = self.dist.isend(self.torch.from_numpy(part), to, tag=round_)
        work.wait(timedelta(seconds=limit))  # type: ignore[union-attr]

    def receive(self, source: int, round_: int, into: np.ndarray[Any, Any], limit: float) -> None:
        with self.lock:
            work = self.dist.irecv(self.torch.from_numpy(into), source, tag=round_)
        work.wait(timedelta(seconds=limit))  # type: ignore[union-attr]


class Nixl(Peer):
    """A peer notifies the others when its slices are ready; each then reads its own slice."""

    def connect(self) -> None:
        os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="eth0", NIXL_LOG_LEVEL="WARN")
        api = importlib.import_module("nixl_cu12._api")
        config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        self.agent = api.nixl_agent(str(self.rank), config)
        arrays = (self.vector.mine, self.vector.got)
        regions = [(array.ctypes.data, array.nbytes, 0, "") for array in arrays]
        self.registered = self.agent.register_memory(regions, "DRAM")
        about = self.agent.get_agent_metadata()
        head = np.array([len(about), self.vector.mine.ctypes.data], np.uint64).tobytes()
        outgoing, incoming = mesh(self.rank, self.base, self.others)
        self.at: dict[int, int] = {}
        for connection in outgoing.values():
            connection.sendall(head + about)
        for other, connection in incoming.items():
            fill(connection, memoryview(received := bytearray(16)))
            length, self.at[other] = map(int, np.frombuffer(received, np.uint64))
            fill(connection, memoryview(metadata := bytearray(length)))
            self.agent.add_remote_agent(bytes(metadata))

    def exchange(
        self, round_: int, length: int, members: list[int], start: float, limit: float
    ) -> dict[str, Any]:
        vector, agent = self.vector, self.agent
        vector.mark(round_, length)
        waiting = {other for other in self.others if other in members}
        arrived: dict[int, float] = {}
        errors: dict[int, str] = {}
        reads: dict[int, Any] = {}
        wait_until(start)
        for other in waiting:
            try:
                agent.send_notif(str(other), str(round_).encode())
            except Exception as error:
                errors[other + COUNT] = f"{type(error).__name__}: {error}"
        while waiting and time.monotonic() < start + limit:
            for name, notes in agent.get_new_notifs().items():
                source = int(name)
                if str(round_).encode() in notes and source in waiting:
                    into = vector.part(vector.got, source, length)
                    from_ = self.at[source] + self.rank * into.nbytes
                    reads[source] = agent.initialize_xfer(
                        "READ",
                        agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM"),
                        agent.get_xfer_descs([(from_, into.nbytes, 0)], "DRAM"),
                        name,
                    )
                    agent.transfer(reads[source])
            for source in [*reads]:
                try:
                    state = agent.check_xfer_state(reads[source])
                    if state == "PROC":
                        continue
                    if state != "DONE":
                        raise RuntimeError(f"the transfer is in state {state}")
                    arrived[source] = time.monotonic()
                    vector.check(round_, source, vector.part(vector.got, source, length), length)
                except Exception as error:
                    errors[source] = f"{type(error).__name__}: {error}"
                with suppress(Exception):
                    agent.release_xfer_handle(reads.pop(source))
                waiting.discard(source)
            time.sleep(0.0005)
        errors |= dict.fromkeys(waiting, "timeout")
        return {"arrived": {self.rank: arrived}, "errors": {self.rank: errors}}


# --- on Ray --------------------------------------------------------------------------------------


class Holder:
    """An actor that returns its slices as objects, and fetches the slices of the others."""

    def __init__(self, rank: int, megabytes: int) -> None:
        self.vector = Vector(rank, megabytes)

    def pid(self) -> int:
        return os.getpid()

    def cut(self, round_: int, length: int, start: float) -> list[Any]:
        vector = self.vector
        vector.mark(round_, length)
        wait_until(start)
        return [
            None if to == vector.rank else vector.part(vector.mine, to, length)
            for to in range(COUNT)
        ]

    def collect(
        self,
        sources: list[int],
        refs: list[Any],
        carriers: dict[int, Any],
        round_: int,
        length: int,
        until: float,
    ) -> Any:
        vector = self.vector

        def fetch(source: int, ref: Any) -> None:
            limit = until - time.monotonic()
            if not carriers:
                vector.check(round_, source, ref.future().result(limit), length)
                return
            whole = length * 4 <= CARRIED
            step = length if whole else CARRIED_CHUNK // 4
            begins = range(0, length, step)
            read = carriers[source].read
            futures = [read.remote([ref], begin, begin + step).future() for begin in begins]
            if whole:
                vector.check(round_, source, futures[0].result(limit), length)
                return
            into = vector.part(vector.got, source, length)
            for begin, future in zip(begins, futures, strict=True):
                into[begin : begin + step] = future.result(max(0.0, until - time.monotonic()))
            vector.check(round_, source, into, length)

        works = {
            source: lambda source=source, ref=ref: fetch(source, ref)
            for source, ref in zip(sources, refs, strict=True)
        }
        return in_threads(works, until)  # type: ignore[arg-type]


class Carrier:
    """Returns parts of objects of its node's store, within the reply."""

    def pid(self) -> int:
        return os.getpid()

    async def read(self, refs: Sequence[Any], begin: int, end: int) -> Any:
        return (await refs[0])[begin:end]


class Pusher:
    """An actor that sends its slices as arguments of calls to the others."""

    def __init__(self, rank: int, megabytes: int) -> None:
        self.vector = Vector(rank, megabytes)
        self.changed = threading.Condition()
        self.missing: dict[tuple[int, int], int] = {}  # values, by round and source
        self.peers: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def meet(self, peers: list[Any]) -> None:
        self.peers = peers

    def take(self, source: int, round_: int, length: int, begin: int, chunk: Any) -> None:
        self.vector.part(self.vector.got, source, length)[begin : begin + len(chunk)] = chunk
        with self.changed:
            left = self.missing.get((round_, source), length) - len(chunk)
            self.missing[round_, source] = left
            if not left:
                self.changed.notify_all()

    def push(self, round_: int, length: int, members: list[int], start: float, until: float) -> Any:
        """Send the slices and wait for those of the others."""
        import ray

        vector = self.vector
        vector.mark(round_, length)
        others = [other for other in members if other != vector.rank]
        calls: dict[int, list[Any]] = defaultdict(list)
        wait_until(start)
        step = PUSHED_CHUNK // 4
        for begin in range(0, length, step):
            for to in others:
                chunk = vector.part(vector.mine, to, length)[begin : begin + step]
                take = self.peers[to].take
                calls[to].append(take.remote(vector.rank, round_, length, begin, chunk))

        def receive(source: int) -> None:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.missing.get((round_, source), 1) == 0,
                    max(0.0, until - time.monotonic()),
                )
            if self.missing.pop((round_, source), 1):
                raise TimeoutError("not all chunks came")
            vector.check(round_, source, vector.part(vector.got, source, length), length)

        works: dict[int, Callable[[], None]] = {}
        for other in others:
            works[other] = lambda source=other: receive(source)  # type: ignore[misc]
            works[other + COUNT] = lambda to=other: ray.get(  # type: ignore[misc]
                calls[to], timeout=max(0.0, until - time.monotonic())
            )
        ended, errors = in_threads(works, until)
        return {key: moment for key, moment in ended.items() if key < COUNT}, errors


class OnRay:
    """The driver on host 0; a subclass tells the calls of an exchange."""

    actor: type[Any] = Holder
    environment: dict[str, str] = {}  # noqa: RUF012
    carries = False

    def __init__(self, rank: int, base: int, megabytes: int) -> None:
        self.megabytes = megabytes

    def connect(self) -> dict[str, Any]:
        """Start the actors; return the processes on the last host."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray = ray
        ray.init(address=f"{address(0)}:6388", log_to_driver=False, logging_level="ERROR")
        nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}

        def start(
            kind: type[Any], rank: int, env: dict[str, str], *arguments: Any, **more: Any
        ) -> Any:
            place = NodeAffinitySchedulingStrategy(nodes[address(rank)], soft=False)
            options = {"runtime_env": {"env_vars": env}} if env else {}
            made = ray.remote(num_cpus=0, max_restarts=0, **options, **more)(kind)
            return made.options(scheduling_strategy=place).remote(*arguments)

        self.actors = [
            start(self.actor, rank, self.environment, rank, self.megabytes, max_concurrency=16)
            for rank in range(COUNT)
        ]
        self.carriers = {}
        if self.carries:
            self.carriers = {rank: start(Carrier, rank, INLINE) for rank in range(COUNT)}
        everyone = [*self.actors, *self.carriers.values()]
        ray.get([actor.pid.remote() for actor in everyone], timeout=60)
        if self.actor is Pusher:
            ray.get([actor.meet.remote(self.actors) for actor in self.actors], timeout=60)
        victims = [self.actors[LAST]] + ([self.carriers[LAST]] if self.carriers else [])
        return {"victims": ray.get([actor.pid.remote() for actor in victims], timeout=60)}

    def calls(
        self, round_: int, length: int, members: list[int], start: float, until: float
    ) -> dict[int, Any]:
        """Return for each member a reference for the arrivals there."""
        slices = {
            rank: self.actors[rank].cut.options(num_returns=COUNT).remote(round_, length, start)
            for rank in members
        }
        calls = {}
        for rank in members:
            others = [other for other in members if other != rank]
            refs = [slices[other][rank] for other in others]
            calls[rank] = self.actors[rank].collect.remote(
                others, refs, self.carriers, round_, length, until
            )
        return calls

    def exchange(
        self, round_: int, length: int, members: list[int], start: float, limit: float
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"arrived": {}, "errors": {}}
        calls = self.calls(round_, length, members, start, start + limit)
        for rank, call in calls.items():
            try:
                patience = max(1.0, start + limit + 5 - time.monotonic())
                arrived, errors = self.ray.get(call, timeout=patience)
            except self.ray.exceptions.RayError as error:
                arrived, errors = {}, {rank: in_a_line(error)}
            found["arrived"][rank], found["errors"][rank] = arrived, errors
        return found

    def close(self) -> None:
        self.ray.shutdown()


class RayStore(OnRay):
    pass


class RayCarrier(OnRay):
    carries = True


class RayPush(OnRay):
    actor = Pusher
    environment = INLINE

    def calls(
        self, round_: int, length: int, members: list[int], start: float, until: float
    ) -> dict[int, Any]:
        return {
            rank: self.actors[rank].push.remote(round_, length, members, start, until)
            for rank in members
        }


CANDIDATES: dict[str, type[Any]] = {
    "sockets": Sockets,
    "zeromq": ZeroMQ,
    "gloo": Gloo,
    "nixl": Nixl,
    "ray store": RayStore,
    "ray carrier": RayCarrier,
    "ray push": RayPush,
}


def serve(name: str, rank: int, base: int, megabytes: int) -> None:
    """Do what the lines of the standard input say; answer each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print too
    side = CANDIDATES[name](rank, base, megabytes)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = getattr(side, what)(*arguments) or {}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        print(json.dumps(answer), file=answers, flush=True)
        if what == "close":
            break
    os._exit(0)  # threads may still wait for a lost peer


# --- outside -------------------------------------------------------------------------------------


class Failed(Exception):
    """A candidate did not do what it was asked."""


class Side:
    """The processes of one candidate: a peer on each host, or the driver of its actors."""

    bases = iter(range(20000, 32000, 10))

    def __init__(self, name: str, hosts: Hosts, megabytes: int) -> None:
        self.name, self.hosts, self.megabytes = name, hosts, megabytes
        self.rounds = 0
        self.start()

    def start(self) -> None:
        base = next(self.bases)
        ranks = range(1 if self.name.startswith("ray") else COUNT)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[queue.Queue[str | None]] = []
        for rank in ranks:
            plan = json.dumps([self.name, rank, base, self.megabytes])
            process = self.hosts.popen(
                rank,
                [sys.executable, __file__, "--serve", plan],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
            )
            answers: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=self._read, args=(process, answers), daemon=True).start()
            self.processes.append(process)
            self.answers.append(answers)
        found = self._ask("connect", [], range(len(self.processes)), 90)
        self.victims = [pid for each in found for pid in each.get("victims", [])]
        self.victims = self.victims or [self.processes[LAST].pid]

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
        for line in process.stdout:  # type: ignore[union-attr]
            answers.put(line)
        answers.put(None)

    def _ask(
        self, what: str, arguments: list[Any], ranks: Iterable[int], seconds: float
    ) -> list[dict[str, Any]]:
        """Send a command to processes; return the answers, {} from a process that has ended."""
        until = time.monotonic() + seconds
        ranks = list(ranks)
        for rank in ranks:
            with suppress(BrokenPipeError):
                print(json.dumps([what, arguments]), file=self.processes[rank].stdin, flush=True)
        found = []
        for rank in ranks:
            try:
                line = self.answers[rank].get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Failed(f"{what}: no answer of {rank} within {seconds:g} s") from None
            if line is None:
                self.answers[rank].put(None)  # for the next command
            found.append(json.loads(line) if line is not None else {})
            if "failed" in found[-1]:
                raise Failed(f"{what}: {found[-1]['failed']}")
            if line is None and what == "connect":
                raise Failed(f"{what}: the process has ended; {self.end_of_log()}")
        return found

    def end_of_log(self) -> str:
        self.log.seek(0)
        return self.log.read()[-600:]

    def exchange(
        self,
        megabytes: int,
        members: Sequence[int] = range(COUNT),
        limit: float = LIMIT,
        kill: bool = False,
    ) -> dict[str, Any]:
        """Return the seconds of all members and of the first three, and the errors."""
        self.rounds += 1
        start = time.monotonic() + LEAD
        if kill:
            timer = threading.Timer(LEAD + KILL_AFTER, self.kill)
            timer.start()
        ranks = members if len(self.processes) > 1 else [0]
        order = [self.rounds, megabytes * 250_000 // COUNT, list(members), start, limit]
        answers = self._ask("exchange", order, ranks, LEAD + limit + 15)
        arrived: dict[tuple[int, int], float] = {}
        errors = []
        for answer in answers:
            for to, moments in answer.get("arrived", {}).items():
                arrived |= {(int(to), int(source)): m - start for source, m in moments.items()}
            for rank, texts in answer.get("errors", {}).items():
                for other, text in texts.items():
                    way = "from" if int(other) < COUNT else "to"
                    errors.append(f"{rank} {way} {int(other) % COUNT}: {text}")

        def last(of: Iterable[int]) -> float | None:
            pairs = [(to, source) for to in of for source in of if to != source]
            return max(arrived[p] for p in pairs) if all(p in arrived for p in pairs) else None

        return {
            "all": last(members),
            "three": last([m for m in members if m != LAST]),
            "errors": errors,
            "from_dead": sum(source == LAST for _, source in arrived),
        }

    def kill(self) -> None:
        for pid in self.victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        with suppress(Failed):
            self._ask("close", [], range(len(self.processes)), 10)
        for process in self.processes:
            process.kill()
            process.wait(10)


def processor_seconds(hosts: Hosts, without: set[int]) -> float:
    """Return the processor time so far of the processes on the hosts."""
    ticks = 0
    for host in range(COUNT):
        for pid in set(hosts.pids(host)) - without:
            with suppress(OSError):  # it has ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Study:
    """All candidates, which take turns, and what was found of each."""

    def __init__(self, congestion: str) -> None:
        self.congestion = congestion
        self.sides: dict[str, Side] = {}
        self.found: dict[str, Any] = {}
        self.not_run: dict[str, str] = {}

    def begin(
        self, names: Sequence[str], conditions: dict[str, list[int]], stack: ExitStack
    ) -> None:
        largest = max(size for sizes in conditions.values() for size in sizes)
        nets: dict[bool, Hosts] = {}
        for name in names:
            module, package = NEEDS.get(name, ("ray", "ray"))
            if name != "sockets" and find_spec(module) is None:
                self.not_run[name] = f"not installed; pip install {package}"
                continue
            on_ray = name.startswith("ray")
            if on_ray not in nets:  # the daemons of Ray have hosts of their own
                net = Hosts(COUNT, delay=DELAY, rate=RATE, queue=QUEUE)
                nets[on_ray] = stack.enter_context(net)
                self.set_congestion(net)
                if on_ray:
                    nets[on_ray].start_ray(cpus=1)
            try:
                self.sides[name] = Side(name, nets[on_ray], largest)
            except Failed as error:
                self.not_run[name] = str(error)
        self.nets = list(nets.values())

    def set_congestion(self, hosts: Hosts) -> None:
        file = "/proc/sys/net/ipv4/tcp_congestion_control"  # of the host alone
        for host in range(COUNT):
            done = hosts.run(host, ["sh", "-c", f"echo {self.congestion} > {file}"], timeout=10)
            if done.returncode:
                raise RuntimeError(
                    f"--congestion {self.congestion} cannot be set: {done.stderr.strip()}; use reno"
                )

    def others(self, name: str) -> set[int]:
        sides = [side for other, side in self.sides.items() if other != name]
        return {process.pid for side in sides for process in side.processes}

    def links(self, condition: str) -> None:
        for hosts in self.nets:
            for host in range(COUNT):
                slow = condition == "slow" and host == LAST
                hosts.link(host, rate=RATE * (SLOW if slow else 1.0))
                hosts.link(host, loss=LOSS if condition == "loss" else 0.0)

    def idle(self) -> None:
        """Measure what a candidate uses while it does nothing."""
        for name, side in self.sides.items():
            before = processor_seconds(side.hosts, self.others(name))
            time.sleep(2)
            used = (processor_seconds(side.hosts, self.others(name)) - before) / 2
            self.found[f"{name}, idle"] = {"cpu_per_second": round(used, 3)}

    def measure(self, condition: str, size: int, repeats: int) -> None:
        cells: dict[str, Any] = {
            name: {"all": [], "three": [], "cpu": [], "errors": []} for name in self.sides
        }
        for turn in range(-1, repeats):
            for name, side in self.sides.items():
                cell = cells[name]
                if len(cell["errors"]) > 1:
                    continue
                try:
                    if turn < 0:
                        for _ in range(WARM_UP):
                            side.exchange(min(size, 20 if condition == "alone" else 5))
                        continue
                    before = processor_seconds(side.hosts, self.others(name))
                    seconds = side.exchange(size)
                    used = processor_seconds(side.hosts, self.others(name)) - before
                except Failed as error:
                    cell["errors"].append(str(error))
                    continue
                cell["errors"] += seconds["errors"][:1]
                if seconds["all"] is not None:
                    cell["all"].append(seconds["all"])
                    cell["three"].append(seconds["three"])
                    cell["cpu"].append(used)
        for name, cell in cells.items():
            self.keep(f"{name}, {size} MB, {condition}", cell)

    def death(self, size: int, repeats: int) -> None:
        """Kill a peer during an exchange; then try an exchange among the others."""
        cells: dict[str, Any] = {
            name: {"three": [], "next": [], "from_dead": [], "errors": []} for name in self.sides
        }
        three = range(LAST)
        for _ in range(repeats):
            for name, side in self.sides.items():
                cell = cells[name]
                try:
                    for _ in range(WARM_UP):
                        side.exchange(5)
                    first = side.exchange(size, limit=DEATH_LIMIT, kill=True)
                    cell["three"].append(first["three"])
                    cell["from_dead"].append(first["from_dead"])
                    cell["errors"] += first["errors"][:6]
                    after = side.exchange(size, three, limit=DEATH_LIMIT)
                    cell["next"].append(after["all"])
                    cell["errors"] += [f"next: {text}" for text in after["errors"][:6]]
                except Failed as error:
                    cell["errors"].append(str(error))
                self.keep(f"{name}, {size} MB, death", cell)
                try:
                    side.close()
                    side.start()
                except Failed as error:
                    cell["errors"].append(f"new start: {error}")

    def keep(self, row: str, cell: dict[str, Any]) -> None:
        """Keep what was found, and print it at once."""
        self.found[row] = cell
        line = f"{row}: " + ", ".join(
            f"{what} {told(cell[what])}" for what in ("all", "three", "next") if what in cell
        )
        if cell.get("cpu"):
            line += f", CPU {np.mean(cell['cpu']):.2f}"
        errors = dict.fromkeys(cell["errors"])
        print("\n  ".join([line, *errors]), file=sys.stderr, flush=True)


def told(seconds: Sequence[float | None]) -> str:
    """Format the median and the range; a missing value is a failure."""
    good = [each for each in seconds if each is not None]
    failed = f", {len(seconds) - len(good)} failed" if len(good) < len(seconds) else ""
    if not good:
        return "–" + failed
    return f"{quantile(good, 0.5):.2f} [{min(good):.2f}–{max(good):.2f}]{failed}"


def report(found: dict[str, Any]) -> None:
    rows = []
    for row, cell in found.items():
        if "three" not in cell:
            continue
        size = float(row.split(", ")[1].split()[0])
        used = cell.get("cpu")
        rows.append(
            [
                row,
                str(len(cell["three"])),
                f"{bound(size):.2f}",
                told(cell["all"]) if "all" in cell else "",
                told(cell["three"]),
                f"{np.mean(used):.2f}" if used else "",
                told(cell["next"]) if "next" in cell else "",
            ]
        )
    table(["", "n", "bound", "all, s", "three, s", "CPU, s", "next exchange, s"], rows)
    for row, cell in found.items():
        for text in dict.fromkeys(cell.get("errors", [])):
            print(f"{row}: {text}")
        if "cpu_per_second" in cell:
            print(f"{row}: {cell['cpu_per_second']} s of processor time each second")


def main() -> None:
    arguments = parser(__doc__, 180)
    arguments.add_argument("--only", default=",".join(CANDIDATES), help="names of candidates")
    arguments.add_argument("--conditions", default=",".join(SIZES), help="names of conditions")
    arguments.add_argument("--sizes", default="5,20,100", help="MB, of those of a condition")
    arguments.add_argument("--repeats", type=int, default=5, help="2 at 100 MB and slow 20 MB")
    arguments.add_argument("--congestion", default="reno", help="of TCP on the hosts")
    arguments.add_argument("--serve", help="for the benchmark itself, on a host")
    given = arguments.parse_args()
    if given.serve:
        serve(*json.loads(given.serve))
        return
    names = given.only.split(",")
    if unknown := set(names) - set(CANDIDATES):
        arguments.error(f"--only has {', '.join(unknown)}; use some of {', '.join(CANDIDATES)}")
    wanted = {int(size) for size in given.sizes.split(",")}
    conditions = {
        condition: [size for size in SIZES[condition] if size in wanted]
        for condition in (["alone"] if given.quick else given.conditions.split(","))
    }
    if given.quick:
        conditions = {"alone": [5]}
    about = machine("numpy", "ray", "torch") | {"congestion": given.congestion}
    if reason := missing():
        finish("transports", {"not_run": reason}, {}, False, about, given)
    load, study = OtherLoad(), Study(given.congestion)
    with ExitStack() as stack:
        study.begin(names, conditions, stack)
        if not given.quick and "alone" in conditions:
            study.idle()
        for condition, sizes in conditions.items():
            study.links(condition)
            for size in sizes:
                few = size == 100 or (condition == "slow" and size > 5)
                if condition == "death":
                    study.death(size, min(DEATHS, given.repeats))
                else:
                    study.measure(condition, size, 2 if few or given.quick else given.repeats)
        for side in study.sides.values():
            side.close()
    report(study.found)
    for name, reason in study.not_run.items():
        print(f"{name}: not run: {reason}")
    about["others"] = load.cores()
    ok = all(cell.get("all", [0]) for cell in study.found.values())
    figures = {**study.found, "not_run": study.not_run}
    finish("transports", figures, {}, ok, about, given)


if __name__ == "__main__":
    main()
