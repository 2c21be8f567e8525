"""Checks the planner: number of workers, policies, learning rates, and times on Ray.

workers: asynchronous SGD at a fixed learning rate on a quadratic of two curvatures, with 1 to 90
    workers whose times follow one of five laws. Theory (the delay differential equation) gives
    the best number of workers. The simulated convergence rate there must be within 5 % of the
    best simulated one. The convergence rate is that of the slower mode.
fleets: random workers, laws, tails and bandwidths. A short run gives a profile, and the profile a
    plan. The plan's policy runs with its learning rate on the real fleet and learner. So do all
    other candidates of the grid, each with the learning rate that the planner gives it. The best
    candidate is chosen on some seeds and compared with the plan on others. The plan must be
    within 10 % in 90 % of the fleets. The learner is a quadratic, as the planner assumes for every
    loss. So this tests times and choices, not the model of the loss. With --quick only the ten
    best by forecast are compared. The planner was corrected after fleets 0 to 19 (it was wrong
    about local_sgd on fleet 14); `--first 20` uses other fleets.
rates, ray: see planner_rates.py and planner_ray.py; with --quick, ray runs only if it is named.

    python benchmarks/planner.py [--quick] [--part workers|fleets|rates|ray]
                                 [--fleets N] [--first N] [--figures FOLDER]
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import paceline as pl
import planner_rates
import planner_ray
from _report import OtherLoad, finish, machine, parser, plotting, table
from paceline.delays.models import Delay
from paceline.planner.forecast.quadratic import Modes, descend
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.search import Look
from paceline.planner.theory.asynchrony import Asynchrony
from paceline.planner.theory.kernels import Kernel, erlang, exponential, fixed, uniform
from paceline.planner.theory.responses import kernel_of
from paceline.planner.theory.workers import best_workers

RATE, STEEP, FLAT = 0.02, 1.0, 0.1
MOST = 90
CLOSE = 0.95  # of the best simulated rate, at the number that theory names
WITHIN = 1.10  # times the best of the grid
SHARE = 0.9  # of the fleets


# --- how many workers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Even:
    """Takes a time between two bounds, all equally likely."""

    least: float
    most: float

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return float(rng.uniform(self.least, self.most))


@dataclass(frozen=True)
class Underway:
    """Starts in the middle of a task, since workers with equal times would stay in step."""

    law: Delay

    @property
    def mean(self) -> float:
        return self.law.mean

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        seconds = self.law.sample(rng, now, memory)
        if "began" in memory:
            return seconds
        memory["began"] = 1.0
        return float(rng.random()) * seconds


HEAVY = pl.delays.LogNormal(math.exp(-0.5), 1.0)
LAWS: dict[str, tuple[Delay, Kernel]] = {
    "fixed": (pl.delays.Fixed(1.0), fixed(1.0)),
    "uniform 0.5-1.5": (Even(0.5, 1.5), uniform(0.5, 1.5)),
    "erlang 4": (pl.delays.Erlang(4, 1.0), erlang(4, 1.0)),
    "exponential": (pl.delays.Exponential(1.0), exponential(1.0)),
    "lognormal 1": (
        pl.delays.LogNormal(math.exp(-0.5), 1.0),
        kernel_of(pl.delays.LogNormal(math.exp(-0.5), 1.0)),
    ),
}


def simulated_rate(law: Delay, workers: int, seconds: float, seed: int) -> float:
    """Return the decay per second of the slower mode, without the first quarter of the time."""
    each = pl.planner.WorkerProfile(Underway(law))
    profile = pl.planner.Profile({f"w{i}": each for i in range(workers)}, 1)
    timeline = Timeline(pl.asynchronous(damping=False), profile, seed)
    timeline.reach(10**9, seconds)
    rates: list[float] = []
    for curvature in (STEEP, FLAT):
        modes = Modes(np.array([curvature]), np.ones(1), np.zeros(1), 0.0)
        losses = np.array([float(x[0]) for x in descend(modes, [RATE], timeline.reads, 0)])
        at = np.array([timeline.at(step)[0] for step in range(len(losses))])
        # Oscillations last for several delays, so losses are averaged over stretches of 3 s.
        edges = np.arange(seconds / 4, seconds, 3.0)
        parts = [(t, losses[(at >= t) & (at < t + 3.0)]) for t in edges[:-1]]
        means = [(t, float(part.mean())) for t, part in parts if part.size]
        seen = [(t, math.log(mean)) for t, mean in means if 1e-280 < mean < 1e280]
        if len(seen) < 3:
            return -math.inf
        slope = np.polyfit(*zip(*seen, strict=True), 1)[0]  # type: ignore[call-overload]
        rates.append(-float(slope) / 2)
    return min(rates)


def draw(path: Path, figures: dict[str, Any]) -> None:
    """Draw rates against the number of workers, and against the gain."""
    figure, (left, right) = plotting().subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    numbers = range(1, MOST + 1)
    for name, (_, kernel) in LAWS.items():
        rates = [
            min(Asynchrony(m, kernel, RATE, h).rate for h in (STEEP, FLAT)) for m in numbers
        ]  # fmt: skip
        (line,) = left.plot(numbers, rates, linewidth=1.6, label=name)
        seen = [(int(m), rate) for m, rate in figures[name]["rates"].items() if rate > -0.05]
        left.plot(*zip(*seen, strict=True), linestyle="none", marker="o", markersize=3.5,
                  color=line.get_color())  # fmt: skip
        gains = np.linspace(0.02, 2.2, 110)
        right.plot(
            gains, [Asynchrony(100, kernel, gain / 100).rate / gain for gain in gains],
            linewidth=1.6, label=name,
        )  # fmt: skip
    left.plot(numbers, [RATE * FLAT * m for m in numbers], color="gray", linewidth=0.8,
              linestyle="--", label="if nothing were stale")  # fmt: skip
    left.set(xlabel="workers", ylabel="decay of the slower mode, per second", ylim=(-0.03, 0.2))
    left.set_title(f"learning rate {RATE}, curvatures {STEEP:g} and {FLAT:g}", fontsize=10)
    right.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
    right.axvline(math.pi / 2, color="gray", linewidth=0.8, linestyle=":")
    right.set(xlabel="x = learning rate · curvature · workers", ylim=(-0.3, 2.9),
              ylabel="decay, over that of fresh gradients")  # fmt: skip
    right.set_title("one mode: small delays help, large ones diverge", fontsize=10)
    for axes in (left, right):
        axes.axhline(0.0, color="black", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def workers_part(quick: bool) -> tuple[dict[str, Any], bool]:
    numbers = (1, 10, 30, 50, 60, 65, 75, 90) if quick else (1, 5, *range(10, MOST + 1, 5))
    seconds, seeds = (30.0, 1) if quick else (60.0, 5)
    figures: dict[str, Any] = {}
    rows = []
    for name, (law, kernel) in LAWS.items():
        told = best_workers(kernel, RATE, STEEP, FLAT, most=MOST)
        tried = sorted({*numbers, told.workers})
        rates = {
            m: statistics.fmean(simulated_rate(law, m, seconds, seed) for seed in range(seeds))
            for m in tried
        }
        best = max(rates, key=lambda m: rates[m])
        share = rates[told.workers] / rates[best]
        fresh = min(RATE * FLAT, RATE * STEEP) * 10  # of 10 workers with fresh gradients
        figures[name] = {
            "best_by_theory": told.workers,
            "rate_by_theory": round(told.rate, 4),
            "best_simulated": best,
            "share_of_best_rate": round(share, 3),
            "rates": {str(m): round(rate, 4) for m, rate in rates.items()},
            "10_workers_over_fresh": round(rates[10] / fresh, 3),
        }
        rows.append(
            [
                name,
                str(told.workers),
                f"{told.rate:.4f}",
                str(best),
                *(f"{rates[m]:.4f}" for m in (1, 10, told.workers, best, MOST)),
                f"{share:.3f}",
            ]
        )
    print(f"asynchronous SGD, learning rate {RATE}, curvatures {STEEP} and {FLAT}, mean time 1 s")
    table(
        ["law", "theory's M", "its rate", "simulated", "M=1", "M=10", "at theory's", "best",
         f"M={MOST}", "share"],
        rows,
    )  # fmt: skip
    of_fixed = figures["fixed"]["rates"]
    print(
        f"more workers can be slower: of fixed times, {MOST} decay at {of_fixed[str(MOST)]} and "
        f"{figures['fixed']['best_by_theory']} at "
        f"{of_fixed[str(figures['fixed']['best_by_theory'])]} a second\n"
        "a little staleness does not hurt: 10 workers have "
        + ", ".join(f"{f['10_workers_over_fresh']:.2f}" for f in figures.values())
        + " times the rate of fresh gradients\n"
        f"much diverges: at fixed times by theory from {first_unstable():.0f} workers on"
    )
    ok = all(figure["share_of_best_rate"] >= CLOSE for figure in figures.values())
    slower = of_fixed[str(MOST)] < 0.5 * max(of_fixed.values())
    return figures, ok and slower


def first_unstable() -> float:
    """Return the least number of workers with fixed times for which it diverges."""
    workers = 1.0
    while Asynchrony(workers, fixed(1.0), RATE, STEEP).stable:
        workers += 1
    return workers


# --- which policy --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """Workers with their true delays and links."""

    text: str
    delays: Sequence[Delay]
    links: Sequence[pl.delays.Link]

    def engine(self) -> pl.Simulator:
        return pl.Simulator(len(self.delays), self.delays, self.links, unit=1)


LEARNER = pl.learners.Quadratic(
    tuple(np.geomspace(1.0, 0.03, 96).tolist()), noise=0.5, batch_size=48
)  # fmt: skip
TARGET = 0.04 * LEARNER.loss(np.ones(96))


def fleet(seed: int) -> Fleet:
    """Draw a fleet: 4 to 8 workers up to 8 times as slow as each other, near or far."""
    rng = np.random.Generator(np.random.PCG64([seed, 9]))
    n = int(rng.integers(4, 9))
    spread = float(rng.choice([1.0, 2.0, 8.0]))
    law = str(rng.choice(["shifted", "exponential", "lognormal", "erlang", "pareto"]))
    share = LEARNER.batch_size / n
    means = np.exp(rng.uniform(0, math.log(spread), n)) / share
    delays = [_law(law, float(mean)) for mean in means]
    way = float(np.exp(rng.uniform(math.log(0.01), math.log(2.0))))  # seconds, of a message
    speed = LEARNER.message_bytes / way
    links = [pl.delays.Link(0.01, 2 * speed, speed) for _ in range(n)]
    text = f"{n} {law}, slowest {max(means) / min(means):.1f}x, message {way:.2f} s"
    return Fleet(text, delays, links)


def _law(name: str, mean: float) -> Delay:
    match name:
        case "shifted":
            return pl.delays.ShiftedExponential(0.7 * mean, 0.3 * mean)
        case "exponential":
            return pl.delays.Exponential(mean)
        case "lognormal":
            return pl.delays.LogNormal(mean * math.exp(-0.32), 0.8)
        case "erlang":
            return pl.delays.Erlang(4, mean)
    return pl.delays.Pareto(mean * 1.5 / 2.5, 2.5)


def taken(look: Look, on: Fleet, seeds: Sequence[int], limit: float) -> float:
    """Return the mean seconds to the target in real runs; `inf` if one exceeds the limit."""
    total = 0.0
    for seed in seeds:
        learner = replace(LEARNER, lr=look.learning_rate)
        run = pl.Trainer(
            learner, look.candidate.policy, on.engine(), progress=False, seed=seed,
            codec=look.candidate.codec,
        ).fit(seconds=limit, until=lambda at: at.loss <= TARGET)  # fmt: skip
        if "condition" not in run.reason:
            return math.inf
        total += run.seconds
    return total / len(seeds)


def fleets_part(quick: bool, start: int, count: int) -> tuple[dict[str, Any], bool]:
    first, then = (range(1000, 1002), range(2000, 2003)) if quick else (
        range(1000, 1004), range(2000, 2010))  # fmt: skip
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for number in range(start, start + count):
        on = fleet(number)
        begin = time.perf_counter()
        profile = pl.profile(LEARNER, on.engine(), seconds=200.0, seed=number)
        made = time.perf_counter()
        found = pl.plan(profile, target=TARGET, patience=1.5 if quick else 8.0, seed=number)
        planned = time.perf_counter() - made
        chosen = next(look for look in found.looks if str(look.candidate) == found.entries[0].text)
        grid = [look for look in found.looks if look is not chosen]
        chosen = replace(chosen, learning_rate=found.learning_rate)
        limit = 4 * found.forecast.seconds
        real = {id(look): taken(look, on, first, limit) for look in (grid[:10] if quick else grid)}
        best = min((look for look in grid if id(look) in real), key=lambda look: real[id(look)])
        mine, other = taken(chosen, on, then, 4 * limit), taken(best, on, then, 4 * limit)
        times = mine / other
        told = found.forecast.seconds / mine
        results.append(
            {
                "fleet": on.text,
                "plan": found.entries[0].text,
                "seconds": round(mine, 2),
                "forecast": round(found.forecast.seconds, 2),
                "best_other": str(best.candidate),
                "best_seconds": round(other, 2),
                "times_best": round(times, 3),
                "grid": len(found.looks),
                "profile_seconds": round(made - begin, 2),
                "plan_seconds": round(planned, 2),
            }
        )
        rows.append(
            [on.text, found.entries[0].text, f"{mine:.1f}", f"{told:.2f}", str(best.candidate),
             f"{other:.1f}", f"{times:.2f}", f"{planned:.1f}"]
        )  # fmt: skip
        print(f"  fleet {number}: {rows[-1]}", flush=True)
    table(
        ["fleet", "plan", "took", "forecast/took", "best other", "took", "times", "planning s"],
        rows,
    )
    within = sum(result["times_best"] <= WITHIN for result in results) / len(results)
    factors = sorted(result["forecast"] / result["seconds"] for result in results)
    figures = {
        "fleets": results,
        "share_within_10_percent": round(within, 3),
        "median_times_best": round(statistics.median(r["times_best"] for r in results), 3),
        "forecast_over_taken": [round(factor, 2) for factor in factors],
    }
    print(
        f"{within:.0%} of {len(results)} plans are within 10 % of the best; forecasts are "
        f"{factors[0]:.2f} to {factors[-1]:.2f} of what it took"
    )
    return figures, within >= SHARE


def main() -> None:
    arguments = parser(__doc__)
    parts = ["workers", "fleets", "rates", "ray"]
    arguments.add_argument("--part", choices=parts, help="only this one")
    arguments.add_argument("--fleets", type=int, help="how many; by default 24, or 4 with --quick")
    arguments.add_argument("--first", type=int, default=0, help="the first fleet's number")
    arguments.add_argument("--figures", metavar="FOLDER", help="draw into this folder")
    given = arguments.parse_args()
    load = OtherLoad()
    figures: dict[str, Any] = {}
    ok = True
    if given.part in (None, "workers"):
        figures["workers"], fine = workers_part(given.quick)
        if given.figures is not None:
            draw(Path(given.figures) / "workers.svg", figures["workers"])
        ok = ok and fine
    if given.part in (None, "fleets"):
        count = given.fleets or (4 if given.quick else 24)
        figures["fleets"], fine = fleets_part(given.quick, given.first, count)
        ok = ok and fine
    if given.part in (None, "rates"):
        figures["rates"], fine = planner_rates.measure(given.quick)
        ok = ok and fine
    if given.part == "ray" or (given.part is None and not given.quick):
        figures["ray"], fine = planner_ray.measure(given.quick)
        ok = ok and fine
    bounds = {"share_of_best_rate": CLOSE, "times_best_of_grid": WITHIN, "share_of_fleets": SHARE}
    bounds |= {"factor_of_rates": planner_rates.FACTOR, "step_on_ray": planner_ray.WITHIN}
    bounds["plan_on_ray"] = planner_ray.CLOSE
    about = machine("numpy", "torch", "ray") | {"others": load.cores()}
    finish("planner", figures, bounds, ok, about, given)


if __name__ == "__main__":
    main()
