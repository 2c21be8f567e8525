"""`paceline launch`: start a script several times, as the workers of one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from paceline.cli.scripts import SCRIPT
from paceline.cli.show import json_option, print_json, say

_LOOK = 0.1  # seconds between two looks at the processes
_PATIENCE = 20.0  # seconds that processes may take to end after a signal


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--workers", type=click.IntRange(1), required=True, help="Processes to start.")
@click.option("--run", "name", help="The name of the run; by default a new one.")
@click.option("--address", help="A Ray cluster to use; by default Ray is started here.")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Restarts of a process that fails.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch in each process.")
@json_option
@click.argument("script", type=SCRIPT)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: Path,
    args: tuple[str, ...],
    workers: int,
    name: str | None,
    address: str | None,
    restarts: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Start SCRIPT with ARGS several times on this machine, as the workers of one run.

    SCRIPT calls `paceline.session` or `paceline.local_steps`, which join the run. A process that
    fails is started again. Options go before SCRIPT; everything after SCRIPT belongs to the script.
    """
    from paceline.sessions.cluster import gcs_address, is_over, start_ray, tell_gone

    name = name or f"launch-{uuid.uuid4().hex[:8]}"
    start_ray(address or os.environ.get("RAY_ADDRESS"), workers)
    shared = {
        "RAY_ADDRESS": gcs_address(),
        "PACELINE_RUN": name,
        "PACELINE_WORKERS": str(workers),
        "OMP_NUM_THREADS": str(threads or max((os.cpu_count() or 1) // workers, 1)),
    }
    tell = partial(tell_gone, name)
    processes = Processes(
        [sys.executable, str(script), *args], shared, restarts, tell, partial(is_over, name)
    )
    for index in range(workers):
        processes.start(index)
    code = processes.wait()
    if as_json:
        print_json({"run": name, "exit_code": code, "restarts": processes.restarted})
    if code:
        say(f"run {name}: a process ended with exit code {code}")
        sys.exit(code)


class Processes:
    """The processes of a launch."""

    def __init__(
        self,
        command: list[str],
        shared: dict[str, str],
        restarts: int,
        gone: Callable[[int], None],
        over: Callable[[], bool],
    ) -> None:
        """gone: is called with the pid of a process that has ended; over: has the run ended?"""
        self._command, self._shared, self._gone, self._over = command, shared, gone, over
        self._left: dict[int, int] = {}  # restarts, by worker
        self._restarts, self.restarted = restarts, 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        """Start the process of a worker."""
        environment = {**os.environ, **self._shared, "PACELINE_WORKER": str(index)}
        self._running[index] = subprocess.Popen(self._command, env=environment)

    def wait(self) -> int:
        """Wait for all to end; return the exit code of the first that failed for good."""
        code = 0
        before = [signal.signal(n, self._end) for n in (signal.SIGINT, signal.SIGTERM)]
        try:
            while self._running:
                time.sleep(_LOOK)
                for index, process in list(self._running.items()):
                    if (ended := process.poll()) is None:
                        continue
                    del self._running[index]
                    self._gone(process.pid)
                    left = self._left.setdefault(index, self._restarts)
                    if ended and left and not self._ending and not self._over():
                        self._left[index] = left - 1
                        self.restarted += 1
                        say(f"worker {index} ended with exit code {ended}; it is started again")
                        self.start(index)
                    else:
                        code = code or ended
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)
        return 128 + self._ending if self._ending else abs(code)

    _ending = 0  # the signal that ends all

    def _end(self, number: int, frame: Any) -> None:
        """End all processes; kill those that stay."""
        self._ending = number
        for process in self._running.values():
            process.send_signal(signal.SIGINT)  # so that it leaves the run as at its end
        deadline = time.monotonic() + _PATIENCE
        for process in self._running.values():
            try:
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
