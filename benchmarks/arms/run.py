"""One run of an arm in a scenario, followed from its order until its loss is reached."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _bench_hosts import DELAY, RATE, Testbed
from arms.families import Family
from arms.rates import Judge, Smoothed
from arms.task import LOCAL, Order, kept, reported

HOSTS = 4
LIMIT, START = 180.0, 180.0  # seconds of a run, and of its beginning
KILLED, BACK, FIRST = 60.0, 20.0, 5.0  # seconds between kills, until a host is back, to the first


@dataclass(frozen=True)
class Scenario:
    speeds: tuple[int, ...] = ()
    rate: float = RATE
    delay: float = DELAY
    slow: bool = False
    stalls: bool = False
    leaves: float | None = None  # seconds until a host is killed the first time
    added: bool = False  # a host is not there at first

    @property
    def elastic(self) -> bool:
        return self.added or self.leaves is not None


SCENARIOS = {
    "calm": Scenario(),
    "speeds": Scenario(speeds=(1, 1, 2, 4)),
    "stalls": Scenario(stalls=True),
    "slow link": Scenario(slow=True),
    "far": Scenario(rate=20e6, delay=0.0125),
    "killed": Scenario(leaves=FIRST),
    "added": Scenario(added=True),
}


def changes(scenario: Scenario, begin: float) -> Iterator[tuple[float, str, int]]:
    """Yield when a host goes or comes, which of both, and the host: never the first one."""
    if scenario.added:
        yield begin + FIRST, "back", HOSTS - 1
    if scenario.leaves is not None:
        for number in count():
            at, host = begin + scenario.leaves + KILLED * number, HOSTS - 1 - number % (HOSTS - 1)
            yield at, "kill", host
            yield at + BACK, "back", host


class Run:
    """One run, followed from its order to its end."""

    def __init__(
        self,
        bed: Testbed,
        family: Family,
        order: Order,
        scenario: Scenario,
        judge: Judge,
        gone: set[int],
        limit: float = LIMIT,
    ) -> None:
        self._limit = limit
        self._bed, self._family, self._order, self._scenario = bed, family, order, scenario
        self._judge, self._gone, self._folder = judge, gone, Path(order.folder)
        self._smoothed, self._judged = Smoothed(order.target), set[Path]()
        self._steps: list[tuple[float, int, int]] = []  # time, step and samples of each report
        self._losses: list[tuple[float, float]] = []
        self._sent: list[tuple[float, int]] = []  # time, and bytes out of all hosts

    def follow(self) -> dict[str, Any]:
        """Wait for the first step, then for the loss; return what came of it."""
        begin = self._begun()
        self._bed.limit_all(self._family.mark)
        with self._bed.stalls(self._order.seed) if self._scenario.stalls else nullcontext():
            reached = self._reached(begin)
        found: dict[str, Any] = {"MB": round(self._megabytes(begin, reached), 1)}
        self._steps = reported(self._folder)
        last = max((step for _, step, _ in self._steps), default=0)
        margin = 2 * LOCAL if "local" in self._order.arm or "diloco" in self._order.arm else 4
        Path(self._order.folder, "last.part").write_text(str(last + margin))
        os.replace(self._folder / "last.part", self._folder / "last")
        if reached is None:
            self._family.end()
            found |= {"failed": f"did not reach the loss in {self._limit:g} s"}
        else:
            found |= {"seconds": round(reached - begin, 2), **self._counted(begin, reached)}
            found |= {k: v for k, v in self._family.finish(90).items() if k != "end"}
        found["losses"] = [(round(at - begin, 1), round(loss, 3)) for at, loss in self._losses]
        return found

    def _begun(self) -> float:
        until = time.monotonic() + START
        limited = -inf
        self._check()
        while not (models := kept(self._folder)):
            self._check()
            if time.monotonic() > limited + 0.5:  # processes that the order has started
                self._bed.limit_all(self._family.mark)
                limited = time.monotonic()
            if time.monotonic() > until:
                raise RuntimeError(f"no step has begun in {START:g} s")
            time.sleep(0.05)
        if models[0][0] > 0:
            raise RuntimeError("host 0 joined the run late, so its beginning is not known")
        return models[0][1]

    def _reached(self, begin: float) -> float | None:
        """Return when the loss was reached; None if it was not in time."""
        due = changes(self._scenario, begin)
        change = next(due, None)
        limited = time.monotonic()
        while time.monotonic() - begin < self._limit:
            if change is not None and time.monotonic() >= change[0]:
                self._change(change[1], change[2])
                change = next(due, None)
            if self._scenario.elastic and time.monotonic() > limited + 1:
                self._bed.limit_all(self._family.mark)  # processes that were started again
                limited = time.monotonic()
            self._check()
            for _, at, file in kept(self._folder):
                if file not in self._judged:
                    self._judged.add(file)
                    loss = self._judge(torch.from_numpy(np.fromfile(file, np.float32)))
                    self._losses.append((at, loss))
                    if (found := self._smoothed.add(at, loss)) is not None:
                        return found
            time.sleep(0.1)
        return None

    def _change(self, what: str, host: int) -> None:
        if what == "kill":
            self._family.loses(host)
            self._bed.hosts.kill(host)
            self._gone.add(host)
            return
        if self._order.address:
            started = self._bed.hosts.start_node(host)
            if self._family.on_each and started.wait(60):
                raise RuntimeError(f"Ray does not start again on host {host}")
        self._gone.discard(host)
        self._family.comes_back(host, self._order)

    def _check(self) -> None:
        """Count bytes; raise if a process has ended, or ended the run."""
        sent = sum(out for out, _ in self._bed.hosts.carried().values())
        self._sent.append((time.monotonic(), sent))
        for line in self._family.said():
            if "end" in line:
                raise RuntimeError("the run ended before its loss")

    def _megabytes(self, begin: float, reached: float | None) -> float:
        """Return what all hosts have sent in the run, until its loss was reached."""
        times, sent = zip(*self._sent, strict=True)
        first, last = np.interp([begin, reached or times[-1]], times, sent)
        return float(last - first) / 1e6

    def _counted(self, begin: float, reached: float) -> dict[str, Any]:
        """Return steps, samples, those computed twice, and the longest time between two steps."""
        inside = [each for each in self._steps if begin <= each[0] <= reached]
        times = [begin, *(at for at, _, _ in inside), reached]
        steps = [step for _, step, _ in inside]
        again = len(steps) - len(set(steps))  # after a restart from a checkpoint
        return {
            "steps": max(steps, default=0),
            "samples": max((samples for _, _, samples in inside), default=0),
            "repeated": again * self._order.batch,
            "longest": round(max(b - a for a, b in pairwise(times)), 2),
        }
