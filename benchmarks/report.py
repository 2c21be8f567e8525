"""The time to make the report of a long run, and the size of its page.

The simulator makes a run of 10,000 steps by 64 unequal workers, under `k_sync(48)` and under
`sync`. Then `paceline report JOURNAL -o PAGE` runs in its own process, which is timed as a whole.
A second process only reads and counts the same entries; the difference is the cost of the page.
A third one only parses each line as JSON. It is the measure of the machine: the bound is the ratio
of processor seconds to it.

    python benchmarks/report.py [--quick]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paceline as pl
from _report import OtherLoad, finish, machine, parser, table
from paceline.delays.models import Delay

WORKERS, STEPS = 64, 10_000
BOUNDS = {"to_parsing": 2.5, "bytes": 1_000_000.0}  # 10 s where parsing takes 4 s
POLICIES = {"k_sync(48)": pl.k_sync(48), "sync()": pl.sync()}
PARSE = """
import json, sys

for line in open(sys.argv[1], encoding="utf-8"):
    json.loads(line)
"""
COUNT = """
import sys
from paceline.core.journal import read_entries, read_header
from paceline.report.metrics import Meter

meter = Meter.begin(read_header(sys.argv[1]))
for entry in read_entries(sys.argv[1]):
    meter.observe(entry)
"""


def write_journal(path: Path, policy: pl.protocol.Policy, steps: int) -> int:
    """Make a run, and return its number of entries."""
    delays: list[Delay] = [
        pl.delays.ShiftedExponential(0.08 * (1 + i % 5), 0.02) for i in range(WORKERS - 1)
    ]
    delays.append(pl.delays.Scaled(pl.delays.ShiftedExponential(0.08, 0.02), 10))
    absence: list[tuple[float, pl.protocol.Left | pl.protocol.Joined]] = [
        (100.0, pl.protocol.Left("w3")),
        (300.0, pl.protocol.Joined("w3")),
    ]
    engine = pl.Simulator(WORKERS, delays, schedule=absence)
    learner = pl.learners.Quadratic(
        tuple(1 / (1 + i) for i in range(20)), 2.0, lr=0.05, batch_size=1024
    )
    prices = pl.Prices(per_hour=0.5, per_gigabyte=0.1)
    trainer = pl.Trainer(learner, policy, engine, journal=path, progress=False, prices=prices)
    return len(trainer.fit(steps=steps).journal)


def timed(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its seconds, its CPU seconds and the peak memory in MB.

    The peak is that of all processes so far, so the larger ones must come last.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used, after.ru_maxrss / 1000


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--keep", type=Path, help="a folder for the pages, to look at them")
    given = arguments.parse_args()
    steps = STEPS // 10 if given.quick else STEPS
    rows: list[list[str]] = []
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        keep = given.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        for name, policy in POLICIES.items():
            path = Path(folder) / "run.jsonl"
            path.unlink(missing_ok=True)
            entries = write_journal(path, policy, steps)
            page = keep / f"{name.partition('(')[0]}.html"
            load = OtherLoad()
            _, parsing, _ = timed([sys.executable, "-c", PARSE, str(path)])
            _, counting, _ = timed([sys.executable, "-c", COUNT, str(path)])
            command = [sys.executable, "-m", "paceline", "report", str(path), "-o", str(page)]
            seconds, used, memory = timed(command)
            figures[name] = {
                "entries": entries,
                "journal_bytes": path.stat().st_size,
                "seconds": round(seconds, 2),
                "processor_seconds": round(used, 2),
                "processor_seconds_of_counting": round(counting, 2),
                "processor_seconds_of_parsing": round(parsing, 2),
                "to_parsing": round(used / parsing, 2),
                "megabytes": round(memory),
                "bytes": page.stat().st_size,
                "other_load": load.cores(),
            }
            rows.append(
                [
                    name,
                    f"{entries:,}",
                    f"{path.stat().st_size / 1e6:.0f} MB",
                    f"{seconds:.2f}",
                    f"{used:.2f}",
                    f"{counting:.2f}",
                    f"{used / parsing:.2f}",
                    f"{memory:.0f}",
                    f"{page.stat().st_size / 1e3:.0f} kB",
                ]
            )
    head = ["policy", "entries", "journal", "seconds", "processor", "counting alone", "to parsing"]
    head += ["MB", "page"]
    table(head, rows)
    ok = all(
        each["to_parsing"] < BOUNDS["to_parsing"] and each["bytes"] < BOUNDS["bytes"]
        for each in figures.values()
    )
    finish("report", figures, BOUNDS, ok, machine("paceline", "numpy", "jinja2"), given)


if __name__ == "__main__":
    main()
