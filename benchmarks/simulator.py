"""Events per second of the simulator without arithmetic, from ten to a hundred thousand workers.

An event counts after the engine delivered it, the policy decided, and the commands were executed.
The clock starts when all workers have joined. It stops after whole steps, since a step of `sync`
starts a task on every worker at once. Each figure is the best CPU time of several repeats, in turns
over all policies: other load can only add time. The bound is a ratio to a calibration loop.

    python benchmarks/simulator.py [--quick]
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import paceline as pl
from _report import OtherLoad, Pace, finish, machine, parser, table
from paceline.core.coordinator import drive
from paceline.core.policy import Policy
from paceline.core.protocol import MAIN
from paceline.engines.base import Job

POLICIES: dict[str, Callable[[int], Policy]] = {
    "sync": lambda n: pl.sync(),
    "k_sync(0.9 n)": lambda n: pl.k_sync(n * 9 // 10),
    "rennala(n)": pl.rennala,
    "ringmaster(n)": pl.ringmaster,
    "ringmaster(n / 2), no stops": lambda n: pl.ringmaster(max(n // 2, 1), stops=False),
    "k_async(n / 10)": lambda n: pl.k_async(n // 10),
}
SIZES = (10, 1_000, 100_000)
EVENT = 0.01  # at most, with 1,000 workers, over the calibration loop
GROWTH = 3.0  # at most, of the cost per event from 1,000 to 100,000 workers


def seconds_per_event(policy: Policy, workers: int, least: int) -> float:
    """Return the mean CPU seconds of an event, over whole steps and at least `least` events."""
    learner = pl.learners.TimingOnly(batch_size=8 * workers)
    engine = pl.Simulator(workers, pl.delays.Exponential(1.0))
    engine.open(Job(learner=learner, server=learner.server()))
    started = pl.policies.MinWorkers(workers, policy)
    coordinator = pl.protocol.Coordinator(started, learner.batch_size, pl.Journal(keep=False))
    entries = drive({MAIN: coordinator}, engine)
    while len(coordinator.ledger.workers) < workers:
        next(entries)
    gc.collect()  # frees the objects of earlier measurements
    ledger = coordinator.ledger
    events, version = 0, ledger.version
    begin = time.thread_time()
    for _ in entries:
        events += 1
        if ledger.version != version:
            version = ledger.version
            if events >= least:
                break
    return (time.thread_time() - begin) / events


def main() -> None:
    arguments = parser(__doc__).parse_args()
    load, pace = OtherLoad(), Pace()
    least = 10_000 if arguments.quick else 60_000
    repeats = {10: 2, 1_000: 3, 100_000: 1} if arguments.quick else dict.fromkeys(SIZES, 5)
    costs: dict[str, dict[int, list[float]]] = {name: {n: [] for n in SIZES} for name in POLICIES}
    for repeat in range(max(repeats.values())):
        for n in (n for n in SIZES if repeat < repeats[n]):
            for name, policy in POLICIES.items():
                costs[name][n].append(seconds_per_event(policy(n), n, max(least, n // 2)))
                pace.look()

    figures, rows = {}, []
    for name, by_size in costs.items():
        best = {n: min(values) for n, values in by_size.items()}
        growth = best[100_000] / best[1_000]
        spread = max(max(values) / min(values) for values in by_size.values())
        figures[name] = {
            "events_per_second": {str(n): round(1 / cost) for n, cost in best.items()},
            "event_over_loop": round(best[1_000] / pace.seconds(), 5),
            "growth": round(growth, 2),
            "worst_to_best": round(spread, 2),
            "ok": best[1_000] <= EVENT * pace.seconds() and growth <= GROWTH,
        }
        rates = [f"{1 / cost:,.0f} ({cost * 1e6:.1f} µs)" for cost in best.values()]
        rows.append([name, *rates, f"{growth:.2f}", f"{spread:.2f}"])
    print("events per second, and the cost of one:")
    table(["policy", *(f"{n:,} workers" for n in SIZES), "growth", "worst/best"], rows)
    ok = all(figure["ok"] for figure in figures.values())
    bounds = {"event_over_loop_at_1000": EVENT, "growth_to_100000": GROWTH}
    about = machine("numpy") | {"others": load.cores()}
    finish("simulator", figures, bounds, ok, about, arguments)


if __name__ == "__main__":
    main()
