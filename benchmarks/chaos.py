"""Fault injection: thousands of seeded simulations, planted bugs, and faults of real processes.

`storm` trains whole runs on a simulated Ray and checks the invariants after every event. Answers
are lost, duplicated, late, wrong or stray; workers crash or pause; the driver is killed. Every
eighth run is decentralized; with `gossip` all are. `planted` puts bugs into Paceline, and counts
the simulations until each is found. `ray` is chaos_ray.py: nodes and workers fail every few
seconds, beside the same run without faults. `resume` is chaos_resume.py: it kills the driver
repeatedly. `corrupted` damages checkpoints, and `security` attacks a cluster: both are tests, and
this benchmark counts them. The soak test is chaos_soak.py.

    python benchmarks/chaos.py [--quick] [--part NAME] [--seed N]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import chaos_ray
import chaos_resume
from _report import finish, machine, parser, table
from tests.storms import gossip_planted, gossip_storm
from tests.storms.planted import BUGS, SERVER_BUGS, planted
from tests.storms.storm import Outcome, Violation, play

STORMS = 10_000
FAULTS = 500_000
GOSSIP_STORMS = 1_500
FOUND_WITHIN = 2_000  # storms
GOSSIP_EVERY = 8  # simulations: the last of each group of so many is decentralized
QUICK = ("ray", "planted", "storm")  # the others take minutes, unless named
KILLS = 30  # of the driver
CASES = 12  # of security
CORRUPTED = 200  # checkpoints


# --- simulated -----------------------------------------------------------------------------------


def storm(seed: int) -> Outcome | str:
    """Return the outcome of one fault simulation, or the violation; the seed selects its kind."""
    return played(gossip_storm.play if seed % GOSSIP_EVERY == GOSSIP_EVERY - 1 else play, seed)


def gossip(seed: int) -> Outcome | str:
    """Return the outcome of one decentralized fault simulation, or the violation."""
    return played(gossip_storm.play, seed)


def played(kind: Callable[[int, Path], Outcome], seed: int) -> Outcome | str:
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        return kind(seed, folder)
    except Violation as error:
        return str(error)
    finally:
        shutil.rmtree(folder)


def storms(
    seeds: Sequence[int], processes: int, kind: Callable[[int], Outcome | str] = storm
) -> dict[str, Any]:
    """Count faults and violations over many fault simulations."""
    begin = time.perf_counter()
    faults: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    broken: list[str] = []
    kills = 0
    seconds = 0.0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, outcome in enumerate(pool.imap_unordered(kind, seeds, chunksize=8), 1):
            if done % 500 == 0:
                seconds_each = (time.perf_counter() - begin) / done
                print(f"{done} storms, {faults.total()} faults, {1 / seconds_each:.1f} a second")
            if isinstance(outcome, str):
                broken.append(outcome)
                print(outcome, flush=True)
                continue
            faults += outcome.faults
            cases[outcome.case.name] += 1
            kills += outcome.kills
            seconds += outcome.seconds
    took = time.perf_counter() - begin
    table(["fault", "times"], [[name, str(count)] for name, count in faults.most_common()])
    return {
        "storms": len(seeds),
        "faults": faults.total(),
        "driver_kills": kills,
        "violations": len(broken),
        "by_case": dict(cases),
        "virtual_hours": seconds / 3600,
        "seconds": took,
        "storms_per_second": len(seeds) / took,
    }


PLANTED: Sequence[tuple[Callable[[int, Path], Outcome], Mapping[str, Any]]] = (
    (play, BUGS),
    (partial(play, only="servers"), SERVER_BUGS),
    (gossip_storm.play, gossip_planted.BUGS),
)
"""Each kind of fault simulation, and the bugs that it must find."""


def found_after(bug: str, most: int) -> int | None:
    """Return the number of simulations until a planted bug was found; None: it was not found."""
    kind, bugs = next(each for each in PLANTED if bug in each[1])
    with planted(bug, bugs), np.errstate(all="ignore"):
        for seed in range(most):
            if isinstance(played(kind, seed), str):
                return seed + 1
    return None


def find_planted(bugs: Sequence[str], most: int, processes: int) -> dict[str, int | None]:
    """Return the number of simulations until each bug was found."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        counts = pool.starmap(found_after, [(bug, most) for bug in bugs], chunksize=1)
    found = dict(zip(bugs, counts, strict=True))
    table(["bug put in", "found after"], [[bug, str(count)] for bug, count in found.items()])
    return found


# --- tests that count ----------------------------------------------------------------------------


def tested(file: str) -> int:
    """Run a file of tests; return how many passed, or 0 if any failed."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=root)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        print(done.stdout[-3000:], flush=True)
        return 0
    return int(passed[1])


# --- all -----------------------------------------------------------------------------------------


def storm_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    count = arguments.storms or (40 if arguments.quick else STORMS)
    seeds = range(arguments.first, arguments.first + count)
    found = storms(seeds, arguments.processes)
    least = FAULTS if count >= STORMS else FAULTS / STORMS * count / 2
    return found, found["violations"] == 0 and found["faults"] >= least


def gossip_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    count = arguments.storms or (20 if arguments.quick else GOSSIP_STORMS)
    seeds = range(arguments.first, arguments.first + count)
    found = storms(seeds, arguments.processes, gossip)
    return found, found["violations"] == 0 and found["faults"] >= 20 * count


def planted_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    bugs = [*BUGS, *(() if arguments.quick else (*SERVER_BUGS, *gossip_planted.BUGS))]
    found = find_planted(bugs, 100 if arguments.quick else FOUND_WITHIN, arguments.processes)
    return found, None not in found.values()


def ray_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    if arguments.quick:  # too short to say what it costs
        return chaos_ray.measure(4.0, 1.0, "rennala", count=2, turns=1, calm=0.5), True
    found = chaos_ray.measure(300.0, 5.0, "rennala")
    return found, chaos_ray.is_enough(found)


def resume_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    kills = 2 if arguments.quick else KILLS
    found = chaos_resume.kills(kills, "sync", 0)
    return found, found["kills"] == kills


def corrupted_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    passed = tested("tests/unit/training/checkpoint/test_corrupt.py")
    return passed, passed >= CORRUPTED


def security_part(arguments: argparse.Namespace) -> tuple[Any, bool]:
    passed = tested("tests/cluster/test_security.py")
    return passed, passed >= CASES


PARTS: dict[str, Callable[[argparse.Namespace], tuple[Any, bool]]] = {
    "storm": storm_part,
    "gossip": gossip_part,
    "planted": planted_part,
    "ray": ray_part,
    "resume": resume_part,
    "corrupted": corrupted_part,
    "security": security_part,
}


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.WARNING)
    if arguments.seed is not None:
        print((gossip if arguments.part == "gossip" else storm)(arguments.seed))
        return
    quick = arguments.quick
    parts = [arguments.part] if arguments.part else list(QUICK if quick else PARTS)
    # A measurement needs the whole machine, so the parts run one after the other. A quick look
    # measures nothing, so its parts overlap while Ray starts.
    with ThreadPoolExecutor(len(parts) if quick else 1) as pool:
        found = dict(zip(parts, pool.map(lambda part: PARTS[part](arguments), parts), strict=True))
    bounds = {
        "faults": FAULTS, "found_within": FOUND_WITHIN, "goodput": chaos_ray.GOODPUT,
        "kills": KILLS, "corrupted": CORRUPTED, "security": CASES,
    }  # fmt: skip
    figures = {part: figure for part, (figure, _) in found.items()}
    ok = all(good for _, good in found.values())
    finish("chaos", figures, bounds, ok, machine("ray", "torch"), arguments)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--part", choices=list(PARTS))
    options.add_argument("--seed", type=int, help="show one storm, and nothing else")
    options.add_argument("--storms", type=int, help="how many")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return options.parse_args()


if __name__ == "__main__":
    main()
