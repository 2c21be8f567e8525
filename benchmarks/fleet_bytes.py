"""Bytes and time of a step with several workers on each host, with and without sums on nodes.

64 workers on eight hosts (network namespaces with a Ray node each; needs Linux and root), links of
100 Mbit/s. `sync` on a quadratic function, servers on all hosts. The bytes that leave each host are
counted on its link, headers included, and compared with the formulas of docs/scale.md for w workers
on each of N hosts and a model of S bytes:

- results leave one by one: (w + 1) (N - 1) / N S,
- results are added up on their node first (`sum_on_nodes=True`): 2 (N - 1) / N S.

Both run on the same workers, in turns. `--quick`: 6 workers on 3 hosts.

    python benchmarks/fleet_bytes.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paceline as pl
from _driver import Driver, exactly_once, say
from _report import OtherLoad, finish, machine, parser, table
from fleet import START_TIMEOUT, Bowl
from paceline.testing.hosts import Hosts, missing

RATE, DELAY = 100e6, 0.0005
WARM_UP = 3  # steps of a block that do not count
BOUNDS = {"to_formula": 1.1}


class Counted(pl.Callback):
    """Says when the steps begin that count, and when they end: before the model is gathered."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == WARM_UP:
            say(begun=True)
        elif progress.step == WARM_UP + self._steps:
            say(ended=True)


def drive(address: str, workers: int, values: int, cpus: float) -> None:
    """Train a block of steps for each line of JSON on standard input."""
    learner = Bowl(batch_size=workers, size=values)
    options: dict[str, Any] = {"cpus": cpus, "timeout": 120.0, "start_timeout": START_TIMEOUT}
    with pl.Ray(workers, address=address, servers="spread", **options) as engine:
        for line in sys.stdin:
            order = json.loads(line)
            engine.sum_on_nodes = order["sums"]
            callbacks = [Counted(order["steps"])]
            trainer = pl.Trainer(learner, pl.sync(), engine, progress=False, callbacks=callbacks)
            run = trainer.fit(steps=WARM_UP + order["steps"])
            exactly_once(run)
            times = [float(each) for each in run.metrics["seconds"]]
            say(seconds=(times[-1] - times[WARM_UP - 1]) / order["steps"])


def block(hosts: Hosts, driver: Driver, sums: bool, steps: int) -> tuple[list[float], float]:
    """Train a block; return the bytes of a step out of each host but the driver's, and seconds."""
    driver.order(sums=sums, steps=steps)
    assert driver.heard(2 * START_TIMEOUT).get("begun"), "the block did not begin"
    before = hosts.carried()
    assert driver.heard(1200.0).get("ended"), "the block did not end"
    after = hosts.carried()
    seconds = driver.heard(120.0)["seconds"]
    sent = [(after[host][0] - before[host][0]) / steps for host in range(1, hosts.count)]
    return sent, seconds


def main() -> None:
    options = parser(__doc__, 150)
    options.add_argument("--blocks", type=int, default=2, help="of each of the two ways")
    options.add_argument("--drive", nargs=4, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.drive:
        address, workers, values, cpus = given.drive
        drive(address, int(workers), int(values), float(cpus))
        return
    about = machine("ray", "numpy")
    if reason := missing():
        finish("fleet, bytes", {"not_run": reason}, BOUNDS, False, about, given)
    count, workers, steps = (3, 6, 5) if given.quick else (8, 64, 8)
    values, each = 2**19, workers // count  # a model of 4 MiB
    load, began = OtherLoad(), time.monotonic()
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet")))
        hosts = stack.enter_context(Hosts(count, delay=DELAY, rate=RATE))
        address = hosts.start_ray(cpus=1, object_store=300_000_000, timeout=240.0)
        plan = [address, str(workers), str(values), str(0.9 / each)]
        driver = Driver(hosts, __file__, ["--drive", *plan], folder)
        for index in range(given.blocks):
            for sums in (False, True) if index % 2 == 0 else (True, False):
                sent, took = block(hosts, driver, sums, steps)
                found[sums].append(sent)
                seconds[sums].append(took)
                print(f"sums={sums}: {max(sent) / 1e6:.1f} MB, {took:.2f} s a step", flush=True)
    size = 8 * values
    formula = {False: (each + 1) * (count - 1) / count, True: 2 * (count - 1) / count}
    rows: list[list[str]] = []
    figures: dict[str, dict[str, Any]] = {}
    for sums, name in ((False, "one by one"), (True, "sums on nodes")):
        models = [sent / size for one in found[sums] for sent in one]
        ratio = statistics.median(models) / formula[sums]
        figures[name] = {
            "models_out_of_a_host": round(statistics.median(models), 3),
            "range": [round(min(models), 3), round(max(models), 3)],
            "formula": round(formula[sums], 3),
            "to_formula": round(ratio, 3),
            "seconds": round(statistics.median(seconds[sums]), 2),
        }
        told = figures[name]
        spread = f"[{told['range'][0]:.2f}–{told['range'][1]:.2f}]"
        rows.append(
            [
                name,
                f"{told['models_out_of_a_host']:.2f} {spread}",
                f"{formula[sums]:.2f}",
                f"{ratio:.2f}",
                f"{told['seconds']:.2f}",
            ]
        )
    table(["results leave", "models out of a host", "formula", "ratio", "seconds a step"], rows)
    about |= {"others": load.cores(), "seconds": round(time.monotonic() - began)}
    about |= {"hosts": count, "workers": workers, "model_bytes": size}
    ok = figures["sums on nodes"]["to_formula"] <= BOUNDS["to_formula"]
    finish("fleet, bytes", figures, BOUNDS, ok, about, given)


if __name__ == "__main__":
    main()
