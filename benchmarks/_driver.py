"""Runs a driver in its own process on a host of the testbed, and checks its runs."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import paceline as pl
from paceline.testing.hosts import Hosts


def say(**things: Any) -> None:
    """Print a line of JSON for the process that started this one."""
    sys.stdout.write(json.dumps(things) + "\n")
    sys.stdout.flush()


def exactly_once(run: pl.Run) -> None:
    """Raise if the journal does not replay, or if a sample is missing or used twice."""
    again = pl.protocol.replay(run.driven_policy, run.journal)
    assert again == run.journal, "the journal does not replay"
    place = 0
    for stretch in run.samples():
        assert stretch.offset == place, f"sample {place} is missing or doubled"
        place += stretch.samples


def resident(kind: str = "VmRSS") -> float:
    """Return the resident memory of this process in megabytes; RssAnon: without shared pages."""
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{kind}:")[1].split()[0]) / 1024


def say_pids(engine: pl.Ray, ended: threading.Event, every: float) -> None:
    """Print the process ids of the workers whenever they change; look every `every` seconds."""
    said: dict[str, int] = {}
    while not ended.wait(every):
        members = [] if engine._pool is None else list(engine._pool.members.values())
        pids = {m.name: m.place.pid for m in members if m.joined and m.place is not None}
        if pids != said:
            said = pids
            say(pids=pids)


class Driver:
    """A process on a host, 0 unless told; it reads orders and writes answers as lines of JSON."""

    def __init__(
        self,
        hosts: Hosts,
        script: str,
        arguments: Sequence[str],
        folder: Path,
        host: int = 0,
        python: str = sys.executable,
    ) -> None:
        paths = [str(Path(pl.__file__).parents[1]), str(Path(__file__).parent)]
        self._log = open(folder / "driver.log", "w+")  # noqa: SIM115
        self.process = hosts.popen(
            host, [python, script, *arguments],
            env={"PYTHONPATH": os.pathsep.join(paths)}, stdin=PIPE, stdout=PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put({"gone": True})

    def order(self, **things: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(things) + "\n")
        self.process.stdin.flush()

    def heard(self, seconds: float) -> dict[str, Any]:
        """Return the driver's next message; an empty one if none arrives in time."""
        try:
            said = self._lines.get(timeout=seconds)
        except queue.Empty:
            return {}
        if "gone" in said:
            self._log.seek(0)
            raise RuntimeError(f"the driver has ended:\n{self._log.read()[-4000:]}")
        return said

    def losses(self) -> Counter[str]:
        """Count the reasons that the driver logged for lost workers."""
        self._log.flush()
        text = Path(self._log.name).read_text()
        return Counter(
            " ".join(word for word in line.split(" is lost: ")[1].split() if word.isalpha())
            for line in text.splitlines()
            if " is lost: " in line
        )
