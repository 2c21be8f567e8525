"""Hosts on this machine with links and cores for training processes, and the faults of a run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from paceline.testing.groups import Group
from paceline.testing.hosts import Hosts

RATE, DELAY, QUEUE, SLOW = 100e6, 0.005, 1 << 20, 0.1
STALL, EVERY = 2.0, 10.0  # seconds


class Testbed:
    """Hosts, and a limit of cores for the training processes of each."""

    def __init__(self, count: int, cores: float, stack: ExitStack) -> None:
        self.count, self._cores = count, cores
        self.hosts = stack.enter_context(Hosts(count, delay=DELAY, rate=RATE, queue=QUEUE))
        self._groups = [stack.enter_context(Group(cores=cores / count)) for _ in range(count)]

    def limit(self, host: int, *pids: int) -> None:
        """Count processes as training processes of a host."""
        self._groups[host].add(*pids)

    def marked(self, host: int, mark: str) -> list[int]:
        """Return the processes on a host whose command line contains one of several texts."""
        found = []
        for pid in self.hosts.pids(host):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if any(each in command for each in mark.split("|")):
                    found.append(pid)
        return found

    def limit_all(self, mark: str) -> None:
        """Count the processes on all hosts whose command line contains a text."""
        for host in range(self.count):
            self.limit(host, *self.marked(host, mark))

    def speeds(self, speeds: Sequence[float] = ()) -> None:
        """Divide the cores among the hosts, equally by default."""
        shares = list(speeds or [1] * self.count)[: self.count]
        for group, speed in zip(self._groups, shares, strict=True):
            group.limit(self._cores * speed / sum(shares))

    def links(self, rate: float = RATE, delay: float = DELAY, slow: bool = False) -> None:
        """Set all links; slow: the last host but one has a tenth of the rate."""
        for host in range(self.count):
            own = rate * SLOW if slow and host == self.count - 2 else rate
            self.hosts.link(host, rate=own, delay=delay)

    @contextmanager
    def stalls(self, seed: int) -> Iterator[None]:
        """Stop all processes of a random host other than the first for 2 s, every 10 s."""
        ended = threading.Event()
        thread = threading.Thread(target=self._stall, args=(ended, seed))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _stall(self, ended: threading.Event, seed: int) -> None:
        rng, begin, count = random.Random(seed), time.monotonic(), 0
        while not ended.wait(
            max(0.0, begin + EVERY * count + rng.uniform(2, 6) - time.monotonic())
        ):
            count += 1
            pids = self.hosts.pids(rng.randrange(1, self.count))
            for sign in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, sign)
                if sign == signal.SIGSTOP:
                    ended.wait(STALL)
