"""Shared by all benchmarks: arguments, the machine's description, tables and the last line."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

# Some benchmarks use the fault simulation and the oracles of the tests, or the examples' data.
_ROOT = Path(__file__).parents[1]
sys.path.extend([str(_ROOT), str(_ROOT / "examples")])

_MARK = "PACELINE_BENCHMARK"
os.environ.setdefault(_MARK, str(os.getpid()))  # all processes that a benchmark starts inherit it


def parser(description: str | None, seconds: int = 50) -> argparse.ArgumentParser:
    """Return a parser with `--quick` and `--save`, to which a benchmark adds its own arguments."""
    arguments = argparse.ArgumentParser(description=description)
    about = f"a short look, under {seconds} seconds"
    arguments.add_argument("--quick", action="store_true", help=about)
    about = "also write the last line of JSON here, for benchmarks/results"
    arguments.add_argument("--save", type=Path, metavar="FILE.json", help=about)
    return arguments


def machine(*packages: str) -> dict[str, Any]:
    """Describe the machine: cores, processor, versions."""
    about: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    return about | {package: metadata.version(package) for package in packages}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile, between the nearest two values."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * q) - 1]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their header, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]), flush=True)


def plotting() -> Any:
    """Return matplotlib's pyplot, set up to draw identical files from identical data."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"
    from matplotlib import pyplot

    return pyplot


class Lines:
    """Prints rows under their header as they come, the first column to the left."""

    def __init__(self, header: Sequence[str], first: int, least: int = 14) -> None:
        self._widths = [first, *(max(len(cell), least) for cell in header[1:])]
        self.add(header)
        self.add(["-" * width for width in self._widths])

    def add(self, row: Sequence[str]) -> None:
        first, *others = zip(row, self._widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        print("  ".join(cells), flush=True)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t); nan for one value."""
    from scipy import stats

    if len(values) < 2:
        return values[0], math.nan
    width = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(width)


def told(values: Sequence[float], form: str = ".1f", half: str | None = None) -> str:
    """Format the mean and, for several values, half the width of its interval."""
    mean, width = interval(values)
    return f"{mean:{form}}" + ("" if math.isnan(width) else f" ± {width:{half or form}}")


class OtherLoad:
    """Measures the cores that others used meanwhile; above 0.2, measure again.

    Others are processes that this one has not started, directly or not, and other tenants of the
    processor (steal). Processes that have ended since the beginning are not seen.
    """

    def __init__(self) -> None:
        self._begin = _others()

    def cores(self) -> float | None:
        """Return the mean since the beginning; None if the system does not report it."""
        end = _others()
        if self._begin is None or end is None:
            return None
        (uptime, stolen, seconds), (uptime_0, stolen_0, seconds_0) = end, self._begin
        busy = sum(max(each - seconds_0.get(pid, 0.0), 0.0) for pid, each in seconds.items())
        return round((stolen - stolen_0 + busy) / max(uptime - uptime_0, 1e-9), 2)


def _others() -> tuple[float, float, dict[int, float]] | None:
    """Return uptime, stolen time, and the processor time of each process that is not ours."""
    if sys.platform != "linux":
        return None
    tick = os.sysconf("SC_CLK_TCK")
    stolen = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    ours, mark = our_processes(), f"{_MARK}={os.environ[_MARK]}".encode()
    seconds: dict[int, float] = {}
    for pid, fields in _stats().items():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            # Daemons are no longer descendants, and have the variable.
            if pid in ours or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
        seconds[pid] = sum(map(int, fields[11:13])) / tick
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime, stolen / tick, seconds


def our_processes() -> dict[int, list[str]]:
    """Return this process and its descendants, each with the fields of its stat after the name."""
    fields = _stats()
    ours = {os.getpid()}
    while more := {pid for pid, found in fields.items() if int(found[1]) in ours} - ours:
        ours |= more
    return {pid: fields[pid] for pid in ours}


def _stats() -> dict[int, list[str]]:
    """Return the fields of each process after its name."""
    found: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line = (folder / "stat").read_text()
                found[int(folder.name)] = line.rpartition(")")[2].split()
    return found


class Pace:
    """Measures how fast this machine is now, by a fixed loop of Python and NumPy.

    Bounds on time are ratios of CPU time to this loop, so that they hold on slower and on busy
    machines. Call `look` between the measurements.
    """

    def __init__(self) -> None:
        self._found: list[float] = []
        self.look()

    def look(self) -> None:
        """Time the loop once more."""
        begin = time.thread_time()
        values, held = np.arange(1000.0), dict[int, float]()
        for i in range(50_000):
            held[i % 1000] = held.get(i % 1000, 0.0) + i / 3
            if i % 50 == 0:
                values = np.sort(values[::-1] * 0.999)
        assert len(held) == 1000 and math.isfinite(values[-1])
        self._found.append(time.thread_time() - begin)

    def seconds(self) -> float:
        """Return the median CPU time of all looks."""
        return statistics.median(self._found)


def finish(
    benchmark: str,
    figures: Any,
    bounds: dict[str, float],
    ok: bool,
    about: dict[str, Any],
    options: argparse.Namespace,
) -> NoReturn:
    """Print and save the last line as JSON; exit with 1 if a bound does not hold."""
    line = {
        "benchmark": benchmark,
        "ok": ok,
        "quick": options.quick,
        "bounds": bounds,
        "figures": figures,
        "machine": about,
    }
    print(json.dumps(line), flush=True)
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(line, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0 if ok else 1)
