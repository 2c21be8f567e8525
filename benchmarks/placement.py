"""How similar the parts of a partition are, the time to cut it, and the gain of shares by speed.

Four questions; those that need Ray or torchrun are also separate scripts:
- MMD of the parts to the whole, times 1000, for every method, on handwritten digits and on
  Fashion-MNIST, with equal and unequal shares. The MMD uses features that no method used.
- CPU time for 60,000 and for 10^6 samples, given the features, over that of a calibration loop,
  and its growth.
- placement_guard.py: the accuracy lost on a slow worker's classes, without a guard and with it.
- placement_ray.py, placement_ddp.py: the time that shares by speed save, on 8 Ray workers and on
  4 ranks under torchrun.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import placement_guard
from _report import Pace, finish, machine, parser, table
from fashion_mnist import fashion_mnist
from paceline.data import partition as cut

BOUNDS = {
    "60k_over_loop": 40.0,
    "1m_over_loop": 500.0,
    "growth": 1.35,
    "stream_over_stratified": 1 / 1.5,
}
SHARES: dict[str, Sequence[float]] = {
    "x4": [1] * 4,
    "x8": [1] * 8,
    "x10": [1] * 10,
    "1:1:2:4": [1, 1, 2, 4],
}
Make = Callable[[int], cut.Partition]


def methods(z: Any, labels: Any, shares: Sequence[float], slow: bool) -> dict[str, Make]:
    """Return each method's partition as a function of the seed; slow: with the slow methods."""
    found: dict[str, Make] = {
        "sorted by label": lambda seed: cut.by_label(labels, shares),
        "random": lambda seed: cut.even(len(labels), shares, seed=seed),
        "stratified random": lambda seed: cut.stratified(labels, shares, seed=seed),
        "graph cut, the paper's rule": lambda seed: cut.graph_cut(
            z, shares, labels, faithful=True, seed=seed
        ),
        "graph cut, equal tiles": lambda seed: cut.graph_cut(z, shares, labels, seed=seed),
        "feature-based sqrt": lambda seed: cut.feature_based(z, shares, labels, seed=seed),
        "stream balancing": lambda seed: cut.balanced(z, shares, labels, seed=seed),
        "stream balancing, no labels": lambda seed: cut.balanced(z, shares, seed=seed),
        "stream balancing + swaps": lambda seed: cut.balanced(
            z, shares, labels, swaps=4, seed=seed
        ),
        "64 tiles, merged": lambda seed: merged(z, labels, shares, seed),
    }
    if slow:
        found |= {
            "facility location, the paper's rule": lambda seed: cut.facility_location(
                z, shares, labels, faithful=True, seed=seed
            ),
            "facility location, equal tiles": lambda seed: cut.facility_location(
                z, shares, labels, seed=seed
            ),
        }
    return found


def merged(z: Any, labels: Any, shares: Sequence[float], seed: int) -> cut.Partition:
    """Cut into 64 tiles, and give each worker tiles in proportion to its share."""
    tiles = cut.balanced(z, 64, labels, seed=seed)
    counts = np.round(64 * np.cumsum([0, *shares]) / sum(shares)).astype(int)
    return tiles.merged(np.searchsorted(counts[1:], np.arange(64), side="right").tolist())


def distances(
    name: str, z: Any, labels: Any, shares: Sequence[str], seeds: Sequence[int], slow: bool
) -> dict[str, dict[str, float]]:
    """Print and return the parts' root mean square MMD, times 1000, averaged over seeds."""
    found: dict[str, dict[str, float]] = {}
    for key in shares:
        for method, make in methods(z, labels, SHARES[key], slow).items():
            once = method.startswith(("sorted", "facility", "graph")) or method.endswith("swaps")
            values, began = [], time.process_time()
            parts = [make(seed) for seed in (seeds[:1] if once else seeds)]
            spent = (time.process_time() - began) / len(parts)
            for each in parts:
                certificate = cut.certify(each, z, labels, SHARES[key], seed=99)
                assert certificate.rms is not None
                values.append(1000 * certificate.rms)
            found.setdefault(method, {})[key] = round(statistics.mean(values), 3)
            found[method][f"{key} cpu s"] = round(spent, 2)
            if method == "stratified random":
                assert certificate.predicted is not None
                found.setdefault("(predicted for stratified)", {})[key] = round(
                    1000 * certificate.predicted, 3
                )
    columns = [column for key in shares for column in (key, f"{key} cpu s")]
    print(f"\n{name}: MMD of the parts to the whole x 1000, and CPU seconds")
    rows = [[m, *(f"{f[c]:g}" if c in f else "" for c in columns)] for m, f in found.items()]
    table(["method", *columns], rows)
    return found


def times(sizes: Sequence[int]) -> dict[str, Any]:
    """Print and return the seconds of stream balancing, for 64 features and 10 classes."""
    rows, found, pace = [], {}, Pace()
    cut.balanced(np.random.default_rng(0).standard_normal((5000, 64), np.float32), 8)
    for size in sizes:
        random = np.random.default_rng(size)
        labels = random.integers(0, 10, size)
        z = random.standard_normal((size, 64), np.float32) + labels[:, None] / 10
        began, cpu = time.perf_counter(), time.process_time()
        parts = cut.balanced(z, 8, labels)
        wall, spent = time.perf_counter() - began, time.process_time() - cpu
        pace.look()
        assert abs(int(parts.sizes.max()) - size / 8) <= 1
        found[size] = {"wall": round(wall, 3), "cpu": round(spent, 3)}
        rows.append([f"{size:,}", f"{wall:.2f}", f"{spent:.2f}", f"{1e6 * spent / size:.2f}"])
    print("\nstream balancing into 8 parts, once features are there")
    table(["samples", "wall s", "CPU s", "µs a sample"], rows)
    first, last = sizes[0], sizes[-1]
    growth = math.log(found[last]["cpu"] / found[first]["cpu"]) / math.log(last / first)
    print(f"time grows as samples to the power of {growth:.2f}")
    over = {size: round(each["cpu"] / pace.seconds(), 1) for size, each in found.items()}
    print(f"CPU time over that of the calibration loop: {over}")
    return {"seconds": found, "over_loop": over, "growth": round(growth, 3)}


def script(name: str, quick: bool) -> dict[str, Any]:
    """Run a benchmark in its own process; print its table, return its last line."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    *shown, last = done.stdout.strip().splitlines() or [""]
    try:
        found: dict[str, Any] = json.loads(last)
    except ValueError:
        raise RuntimeError(f"{name} failed:\n{done.stdout}\n{done.stderr}") from None
    print("\n".join(["", *(line for line in shown if "(raylet" not in line)]), flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=["parts", "times", "guard", "ray", "ddp"])
    options = arguments.parse_args()
    wanted = {options.only} if options.only else {"parts", "times", "guard", "ray", "ddp"}
    if options.quick and not options.only:
        wanted -= {"ray", "ddp"}  # for a quick run of these: --quick --only ray
    figures: dict[str, Any] = {}
    held: list[bool] = []
    if "parts" in wanted:
        figures["digits"], figures["fashion"] = parts(options.quick)
        for found in (figures["digits"], figures["fashion"]):
            stream, stratified = found["stream balancing"], found["stratified random"]
            held += [
                stream[key] <= BOUNDS["stream_over_stratified"] * stratified[key]
                for key in SHARES
                if key in stream
            ]
    if "times" in wanted:
        sizes = [60_000, 250_000] if options.quick else [60_000, 250_000, 1_000_000]
        figures["times"] = times(sizes)
        over = figures["times"]["over_loop"]
        held += [over[60_000] <= BOUNDS["60k_over_loop"]]
        held += [figures["times"]["growth"] <= BOUNDS["growth"]]
        if not options.quick:
            held += [over[1_000_000] <= BOUNDS["1m_over_loop"]]
    if "guard" in wanted:
        seeds, steps = ([0], 100) if options.quick else ([0, 1, 2], 1500)
        figures["guard"] = placement_guard.measure(seeds, steps)
        held += [placement_guard.holds(figures["guard"], options.quick)]
    for name in ("ray", "ddp"):
        if name in wanted:
            figures[name] = script(f"placement_{name}.py", options.quick)
            held += [figures[name]["ok"]]
    about = machine("numpy", "torch", "paceline")
    finish("placement", figures, BOUNDS, all(held), about, options)


def parts(quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    seeds = [0, 1] if quick else list(range(10))
    small = distances(
        "digits (1,797)", digits.data, digits.target, ["x4", "x10", "1:1:2:4"], seeds, True
    )
    data = fashion_mnist()
    some = 10_000 if quick else 60_000
    z, labels = cut.pca(data.train_images[:some]), data.train_labels[:some]
    large = distances(
        f"Fashion-MNIST ({some:,}, PCA-64)", z, labels, ["x8", "1:1:2:4"], seeds[:3], not quick
    )
    return small, large


if __name__ == "__main__":
    main()
