"""Several hosts on one Linux machine: network namespaces joined by slow links, with Ray on them."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from paceline.core.extras import INSTALL_RAY
from paceline.engines.ray.cluster.settings import SETTINGS
from paceline.testing.groups import Group

# For every process on a host: a token of these hosts alone, and no usage reports. Ray neither kills
# nor slows down a process to spare the machine, which others share. Gloo uses the link, not the
# address to which the machine's name resolves.
_ENVIRONMENT = {
    **SETTINGS,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
}
_PORT = 6388
_MOST = 60  # MAX_HOSTS of wire.c
_NAMESPACE, _FOLDER = re.compile(r"pl(\d+)n\d+h\d+"), re.compile(r"paceline(\d+)-\w+")
_numbers = itertools.count()


@functools.cache
def missing() -> str | None:
    """Return what this machine lacks for `Hosts`, or None if it lacks nothing."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command; install iproute2"
    if _compiler() is None:
        return "there is no C compiler; install gcc"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be opened: {error.strerror}"
    name = f"pl{os.getpid()}n{next(_numbers)}h0"
    try:
        _ip("netns", "add", name)
    except RuntimeError as error:
        return f"network namespaces are refused: {error}"
    _ip("netns", "del", name)
    return None


class Hosts:
    """Hosts 0 to `count - 1`, each with a link of its own to one switch, while entered.

    `delay` is one-way seconds and `rate` bits per second of each link and direction. A message
    between two hosts and its answer cross four of them. `queue` is the bytes that may wait at
    either end of a link before the next frame is dropped.
    """

    def __init__(
        self,
        count: int,
        delay: float = 0.0,
        rate: float = math.inf,
        loss: float = 0.0,
        queue: int = 4 << 20,
        mtu: int = 1500,
        slow_start_after_idle: bool | None = None,
    ) -> None:
        if not 1 <= count <= _MOST:
            raise ValueError(f"count={count} is not within 1 and {_MOST}; try 4")
        if not 576 <= mtu <= 65500:
            raise ValueError(f"mtu={mtu} is not within 576 and 65500; try 1500, or 9000")
        if queue < mtu:
            raise ValueError(f"queue={queue} holds no frame of mtu={mtu}; try the default")
        self.count = count
        self._settings = (*_checked(delay, rate, loss).values(), queue, mtu)
        self._mtu = mtu
        self._slow_start_after_idle = slow_start_after_idle
        self._names: list[str] = []
        self._started: list[tuple[int, subprocess.Popen[Any]]] = []
        self._wire: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # one command to the wire at a time
        self._frozen: dict[int, Group] = {}
        self._node_options: tuple[float, int, Mapping[str, str] | None] = (1, 0, None)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if reason := missing():
            raise RuntimeError(
                f"{reason}; skip tests that need Hosts if missing() returns a reason"
            )
        if self._names:
            raise RuntimeError("these hosts are already entered; make others with Hosts(...)")
        prefix = f"pl{os.getpid()}n{next(_numbers)}h"
        _sweep(prefix)
        with ExitStack() as stack:  # undoes all of it if a line below raises
            self._folder = _made_folder()
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._token().touch(0o600)
            self._token().write_text(secrets.token_hex(32))
            stack.callback(self._names.clear)
            for name in [f"{prefix}{host}" for host in range(self.count)]:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
                self._names.append(name)
            command = [_compiled(), *map(repr, self._settings), *self._names]
            pipe = subprocess.PIPE
            self._wire = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            stack.enter_context(self._wire)
            stack.callback(self._wire.kill)
            stack.callback(self._end_processes)
            self._ask("stat")  # answered once the devices exist
            for host in range(self.count):
                self._configure(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ip(self, host: int) -> str:
        """Return the address of a host."""
        if not 0 <= host < self.count:
            raise ValueError(
                f"host={host} is none of these {self.count}; use 0 to {self.count - 1}"
            )
        return f"10.88.0.{host + 1}"

    def link(
        self,
        host: int,
        *,
        delay: float | None = None,
        rate: float | None = None,
        loss: float | None = None,
        up: bool | None = None,
    ) -> None:
        """Change the link of a host from now on; `up=False` cuts it and loses its frames."""
        self._name(host)
        for what, value in _checked(delay, rate, loss).items():
            self._ask(f"{what} {host} {value!r}")
        if up is not None:
            self._ask(f"up {host} {up:d}")

    def carried(self) -> dict[int, tuple[int, int]]:
        """Return the bytes sent so far out of and into each host, headers included."""
        return {host: (n[0], n[3]) for host, n in enumerate(self._counts())}

    def dropped(self) -> dict[int, tuple[int, int]]:
        """Return the frames dropped so far on the way out of and into each host."""
        return {host: (n[2], n[5]) for host, n in enumerate(self._counts())}

    def popen(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, with `env` added to the environment; exit kills it."""
        inside = ["ip", "netns", "exec", self._name(host), *command]
        token = {"RAY_AUTH_TOKEN_PATH": str(self._token())}
        everything = {**os.environ, **_ENVIRONMENT, **token, **(env or {})}
        process = subprocess.Popen(inside, env=everything, **options)
        self._started.append((host, process))
        return process

    def run(
        self,
        host: int,
        command: Sequence[str],
        timeout: float,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; return its exit code and its output."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(host, command, env, stdin=subprocess.DEVNULL, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def pids(self, host: int, begins: str = "") -> list[int]:
        """Return the processes on a host whose command line begins with `begins`."""
        found = []
        for pid in map(int, _ip("netns", "pids", self._name(host)).split()):
            with suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/cmdline").read_text().startswith(begins):
                    found.append(pid)
        return found

    def freeze(self, host: int) -> None:
        """Stop every process on a host, like a machine that hangs; its kernel still answers."""
        if host not in self._frozen:
            self._frozen[host] = Group().__enter__()
        self._frozen[host].add(*self.pids(host))
        self._frozen[host].freeze()

    def thaw(self, host: int) -> None:
        """Continue the processes on a host."""
        if (group := self._frozen.pop(host, None)) is not None:
            group.__exit__()

    def kill(self, host: int) -> None:
        """Kill every process on a host.

        The kernel closes its connections, so its peers notice at once. Cut the link first to
        simulate a machine that disappears silently.
        """
        name = self._name(host)
        self.thaw(host)
        for where, process in self._started:
            if where == host:
                process.kill()  # it may not have entered the namespace yet
        _kill(name)

    def start_ray(
        self,
        cpus: float = 1,
        object_store: int = 400_000_000,
        env: Mapping[str, str] | None = None,
        timeout: float = 90.0,
    ) -> str:
        """Start a head on host 0 and a node on each other host; return the address to join.

        Start as many at once as this machine has cores: Ray gives up a node that needs over 30 s.
        """
        until = time.monotonic() + timeout
        self._node_options = cpus, object_store, env
        cores = os.cpu_count() or 1
        rest = (range(1, self.count)[i : i + cores] for i in range(0, self.count - 1, cores))
        for group in ([0], *rest):
            started = [(host, self.start_node(host)) for host in group]
            for host, process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
                if process.returncode != 0:
                    raise RuntimeError(
                        f"ray start on host {host} "
                        + ("has failed" if process.returncode else f"took over {timeout:g} s")
                        + f"; the end of its log:\n{self._log(host).read_text()[-2000:]}"
                    )
        return self._address()

    def start_node(self, host: int) -> subprocess.Popen[Any]:
        """Begin to start Ray again on a lost host, as `start_ray` did; return the process."""
        cpus, object_store, env = self._node_options
        if host == 0:
            role = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--num-cpus=1"]
        else:
            role = [f"--address={self._address()}", f"--num-cpus={cpus:g}"]
        beside = Path(sys.executable).parent / "ray"
        command = str(beside) if beside.exists() else shutil.which("ray")
        if command is None:
            raise RuntimeError(f"there is no `ray` command: {INSTALL_RAY}")
        common = [
            f"--node-ip-address={self.ip(host)}",
            f"--object-store-memory={object_store}",
            f"--temp-dir={self._folder / f'h{host}'}",
            "--disable-usage-stats",
        ]
        # A file, not a pipe: the daemons that the command starts would hold a pipe open.
        with self._log(host).open("w") as log:
            return self.popen(host, [command, "start", *role, *common], env, stdout=log, stderr=log)

    def _address(self) -> str:
        return f"{self.ip(0)}:{_PORT}"

    def _token(self) -> Path:
        return self._folder / "token"

    def _log(self, host: int) -> Path:
        return self._folder / f"ray{host}.log"

    def _configure(self, host: int) -> None:
        """Set up the devices of a host, without IPv6, whose traffic would be counted."""
        lines = (
            "link set lo up",
            f"link set eth0 mtu {self._mtu} addrgenmode none up",
            f"addr add {self.ip(host)}/24 dev eth0",
        )
        _ip("-n", self._names[host], "-batch", "-", lines="\n".join(lines))
        # As most machines: links of this kind shared by several connections mislead BBR, which took
        # up to ten times as long as reno for the same transfers.
        control = "/proc/sys/net/ipv4/tcp_congestion_control"
        self.run(host, ["sh", "-c", f"echo cubic > {control} || echo reno > {control}"], timeout=10)
        if self._slow_start_after_idle is not None:
            file = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
            command = ["sh", "-c", f"echo {self._slow_start_after_idle:d} > {file}"]
            if (done := self.run(host, command, timeout=10)).returncode:
                raise RuntimeError(
                    f"slow_start_after_idle={self._slow_start_after_idle} cannot be set here: "
                    f"{done.stderr.strip()}; leave it None"
                )

    def _ask(self, command: str, seconds: float = 10.0) -> str:
        """Send a command to the wire; return its answer."""
        self._name(0)
        wire = self._wire
        if wire is None or wire.stdin is None or wire.stdout is None or wire.stderr is None:
            raise AssertionError("the wire is always started with pipes")
        with self._lock:
            with suppress(BrokenPipeError):  # the missing answer reports it
                wire.stdin.write(command + "\n")
                wire.stdin.flush()
            answer = wire.stdout.readline() if _readable(wire.stdout.fileno(), seconds) else ""
        if not answer:
            wire.kill()
            raise RuntimeError(f"the wire between the hosts has ended: {wire.stderr.read()}")
        return answer

    def _counts(self) -> list[list[int]]:
        """Return six numbers for each host, as wire.c describes them."""
        numbers = [int(number) for number in self._ask("stat").split()]
        return [numbers[start : start + 6] for start in range(0, len(numbers), 6)]

    def _end_processes(self) -> None:
        for host in range(self.count):
            self.kill(host)
        while self._started:
            self._started.pop()[1].wait(10)

    def _name(self, host: int) -> str:
        """Return the namespace of a host; refuse if the hosts are not up."""
        self.ip(host)
        if not self._names:
            raise RuntimeError("these hosts are not up; do this inside `with Hosts(...) as hosts:`")
        return self._names[host]


def _checked(delay: float | None, rate: float | None, loss: float | None) -> dict[str, float]:
    """Return the given settings of a link; refuse impossible values."""
    if delay is not None and not 0 <= delay <= 60:
        raise ValueError(f"delay={delay} is not within 0 and 60 seconds; try 0.005")
    if rate is not None and not rate >= 1000:
        raise ValueError(
            f"rate={rate} is not at least 1000 bits per second; try 100e6, math.inf for no limit, "
            f"or link(host, up=False) for nothing at all"
        )
    if loss is not None and not 0 <= loss <= 1:
        raise ValueError(f"loss={loss} is not a probability; try 0.01")
    given = {"delay": delay, "rate": rate, "loss": loss}
    return {what: float(value) for what, value in given.items() if value is not None}


def _ip(*arguments: str, lines: str | None = None) -> str:
    """Run `ip`; return its output."""
    done = subprocess.run(
        ["ip", *arguments], input=lines, capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        raise RuntimeError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def _kill(name: str) -> None:
    """Kill all processes in a namespace, new ones included, and wait until they have ended."""
    for _ in range(100):
        targets = []
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                targets.append(os.pidfd_open(int(pid)))
                signal.pidfd_send_signal(targets[-1], signal.SIGKILL)
        for target in targets:
            _readable(target, 5)
            os.close(target)
        if not targets:
            return
    raise RuntimeError(
        f"processes in {name} do not end although killed; see `ip netns pids {name}`"
    )


def _readable(file: int, seconds: float) -> bool:
    """Wait until a file is readable; a pidfd is when its process has ended."""
    poll = select.poll()  # select takes no number above 1023
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _made_folder() -> Path:
    """Make a folder near the root, since the sockets of Ray in it need short paths."""
    return Path(tempfile.mkdtemp(prefix=f"paceline{os.getpid()}-", dir="/tmp"))


def _sweep(prefix: str) -> None:
    """Remove the leftovers of killed processes, and namespaces that have our prefix by accident."""

    def is_left(match: re.Match[str] | None) -> bool:
        return match is not None and not Path(f"/proc/{match[1]}").exists()

    for name in (line.split()[0] for line in _ip("netns", "list").splitlines()):
        if name.startswith(prefix) or is_left(_NAMESPACE.fullmatch(name)):
            with suppress(RuntimeError):  # another process may remove it first
                _kill(name)
                _ip("netns", "del", name)
    for folder in Path("/tmp").glob("paceline*-*"):
        if is_left(_FOLDER.fullmatch(folder.name)):
            shutil.rmtree(folder, ignore_errors=True)


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


@functools.cache
def _compiled() -> str:
    """Compile the wire program, once for this process."""
    folder = _made_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, program = Path(__file__).with_name("wire.c"), folder / "wire"
    command = [_compiler() or "cc", "-O2", "-o", str(program), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile here: {done.stderr[-2000:]}")
    return str(program)
