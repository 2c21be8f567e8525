"""The processes of each family of arms on the hosts: started, given orders, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from _bench_hosts import Testbed
from _driver import Driver
from _report import our_processes
from arms.task import Order

_ports = count(29800)


class Family:
    """Processes on hosts that speak lines of JSON: one on host 0, or one on each host.

    module: the script that they run.
    mark: parts of the command lines of the processes that train, separated by a bar.
    lasting: whether they wait for further orders after a run.
    """

    module, mark, lasting, on_each = "", "", True, True
    package = requirement = ""  # of an optional install: its name, and what pip installs
    needs_ray = False

    def __init__(self, bed: Testbed, folder: Path, ray: str, venvs: Path) -> None:
        self._bed, self._folder, self._ray, self._venvs = bed, folder, ray, venvs
        self.processes: dict[int, Driver] = {}
        self._started = 0

    def python(self) -> str:
        own = self._venvs / self.package / "bin" / "python"
        return str(own) if self.package else sys.executable

    def why_not(self) -> str:
        """Return why the arms of this family cannot run here, or nothing."""
        if self.package and self.site(self._venvs) is None:
            return f"{self.package} is not installed; run with --install"
        return ""

    @classmethod
    def site(cls, venvs: Path) -> Path | None:
        """Return the folder with the installed package of these arms."""
        found = venvs.glob(f"{cls.package}/lib/python*/site-packages/{cls.package}")
        return next((each.parent for each in found if cls.package), None)

    def prepare(self, order: Order, hosts: list[int]) -> None:
        """Start the processes that a run needs, unless they wait already."""
        if not self.processes:
            self._begin(order)
            for host in hosts if self.on_each else [0]:
                self._start(host, order)
            for process in self.processes.values():
                while not self._heard(process, 180).get("ready"):
                    pass

    def _heard(self, process: Driver, seconds: float) -> dict[str, Any]:
        said = process.heard(seconds)
        if not said:
            raise RuntimeError(f"{self.module} did not answer in {seconds:g} s")
        return said

    def _begin(self, order: Order) -> None:
        """Start what the processes need besides."""

    def _arguments(self, host: int, order: Order) -> list[str]:
        raise NotImplementedError

    def _start(self, host: int, order: Order) -> None:
        self._started += 1
        folder = self._folder / f"{type(self).__name__}-{self._started}-{host}"
        folder.mkdir()
        arguments = self._arguments(host, order)
        self.processes[host] = Driver(self._bed.hosts, "-m", arguments, folder, host, self.python())

    def give(self, order: Order) -> None:
        """Order all processes to train."""
        for process in self.processes.values():
            process.order(**asdict(order))

    def comes_back(self, host: int, order: Order) -> None:
        """Start the process of a host again in a run under way."""
        if self.on_each:
            self._start(host, order)
            self.processes[host].order(**asdict(order))

    def said(self) -> list[dict[str, Any]]:
        """Return the lines since the last call; raise if a process that must be there has ended."""
        found = []
        for process in list(self.processes.values()):
            while line := process.heard(0.01):
                found.append(line)
        return found

    def loses(self, host: int) -> None:
        """Forget the process of a host that was killed."""
        self.processes.pop(host, None)

    def finish(self, seconds: float) -> dict[str, Any]:
        """Wait until all processes have ended the run; return what host 0 said of it."""
        last: dict[str, Any] = {}
        try:
            for _, process in sorted(self.processes.items()):
                while not (said := self._heard(process, seconds)).get("end"):
                    pass
                last = last or said
            if not self.lasting:
                self.end()
        except RuntimeError as error:
            self.end()
            last = {"finish": str(error)[-300:]}
        return last

    def end(self) -> None:
        """Kill all processes; the next run starts others."""
        for process in self.processes.values():
            _kill(process.process)
        self.processes.clear()


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it has started."""
    for pid in _tree(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)


def _tree(root: int) -> list[int]:
    """Return a process that this one has started, and its descendants; none if it has ended."""
    parents = {pid: int(fields[1]) for pid, fields in our_processes().items()}
    found = [root] if root in parents else []
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


class Gloo(Family):
    """Ranks of torch.distributed."""

    module = mark = "arms.ddp"
    _meeting = ""

    def _begin(self, order: Order) -> None:
        self._meeting = f"tcp://{self._bed.hosts.ip(0)}:{next(_ports)}"

    def _arguments(self, host: int, order: Order) -> list[str]:
        return [self.module, str(host), str(order.hosts), self._meeting]


class Torchrun(Gloo):
    """The same arms under torchrun, with checkpoints: hosts may go and come."""

    lasting = False
    mark = "-u -m arms.ddp"  # not torchrun itself, so that a new process may start at full speed

    def prepare(self, order: Order, hosts: list[int]) -> None:
        self.end()
        # Without it, ranks were refused at an address of rank 0 after a restart, and did not meet.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._meeting = f"{self._bed.hosts.ip(0)}:{next(_ports)}"
        for host in hosts:
            self._start(host, order)

    def _arguments(self, host: int, order: Order) -> list[str]:
        conf = f"is_host={int(host == 0)},last_call_timeout=5,join_timeout=120"
        return [
            *("torch.distributed.run", f"--nnodes={order.least}:{order.hosts}"),
            *("--nproc-per-node=1", "--max-restarts=50", "--monitor-interval=0.5"),
            *("--rdzv-id=peers", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._meeting}"),
            *(f"--rdzv-conf={conf}", f"--local-addr={self._bed.hosts.ip(host)}"),
            *("-m", self.module, "--once", str(host), json.dumps(asdict(order))),
        ]

    def give(self, order: Order) -> None:
        """Do nothing: the order is among the arguments."""

    def comes_back(self, host: int, order: Order) -> None:
        self._start(host, order)


class Paceline(Family):
    module, mark, on_each, needs_ray = "arms.ours", "ray::Worker|ray::Server", False, True

    def _arguments(self, host: int, order: Order) -> list[str]:
        return [self.module, self._ray, self._bed.hosts.ip(0), str(order.hosts)]


class Sessions(Family):
    module = mark = "arms.sessions"
    needs_ray = True

    def _arguments(self, host: int, order: Order) -> list[str]:
        return [self.module, str(host), self._ray, self._bed.hosts.ip(host)]


class RayTrain(Family):
    module, mark, on_each, needs_ray = "arms.raytrain", "ray::RayTrainWorker", False, True
    package, requirement = "pyarrow", "pyarrow pandas"  # of ray[train], beside what Ray needs

    def _arguments(self, host: int, order: Order) -> list[str]:
        return [self.module, self._ray, self._bed.hosts.ip(0)]


class Torchft(Family):
    module = mark = "arms.torchft"
    package, lasting = "torchft", False
    requirement = "torchft-nightly==2026.10.26"  # in 0.2.0 the others end with a killed replica
    _lighthouse: subprocess.Popen[Any] | None = None
    _meeting = ""

    def _begin(self, order: Order) -> None:
        port = next(_ports)
        self._meeting = f"http://{self._bed.hosts.ip(0)}:{port}"
        command = [str(Path(self.python()).with_name("torchft_lighthouse"))]
        command += ["--min_replicas", str(order.least), "--join_timeout_ms", "5000"]
        command += ["--quorum_tick_ms", "100", "--heartbeat_timeout_ms", "5000"]
        with open(self._folder / "lighthouse.log", "a") as log:
            self._lighthouse = self._bed.hosts.popen(
                0, [*command, "--bind", f"0.0.0.0:{port}"], stdout=log, stderr=log
            )

    def _arguments(self, host: int, order: Order) -> list[str]:
        return [self.module, str(host), self._bed.hosts.ip(host), self._meeting]

    def end(self) -> None:
        super().end()
        if self._lighthouse is not None:
            _kill(self._lighthouse)
            self._lighthouse = None


class Hivemind(Family):
    module = mark = "arms.hivemind"
    package, requirement, lasting = "hivemind", "hivemind==1.1.12", False

    def _arguments(self, host: int, order: Order) -> list[str]:
        return [self.module, str(host), self._bed.hosts.ip(host)]
