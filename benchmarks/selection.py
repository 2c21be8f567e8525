"""Benefits and costs of worker selection: regret, tasks, bytes, busy seconds and time.

1. Regret of the indices on two oracles, in virtual time with exponential response times.
2. The cost of forgetting while speeds are constant, and the rounds until it detects a change.
3. Costs until the same error, for adaptive k-sync, Rennala, the bandit with more and more spare
   tasks (hedge) and ATA. The problems are linear regression and Fashion-MNIST, in simulated time
   with real arithmetic. All follow the same schedule of k, with 40 or 32 samples a task. Every arm
   may cut its tasks into halves or quarters: the fastest of the three on another seed counts
   (_tuning.py). The learning rate is the same for all: steps of all arms have the same number of
   samples and no staleness, so they need equally many steps. There are two fleets. The first has
   50 workers whose exponential times have means from 0.1 to 1 s. The second has 24 workers: 8 take
   0.08 s + Exponential(0.02 s), and 16 take ten times as long.
4. The time of one choice among 100,000 workers, over that of a calibration loop.
5. Regret under light and heavy tails, for the laws that the bounds assume (selection_laws.py).

    python benchmarks/selection.py [--quick] [--only PART] [--figures FOLDER]
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores

import numpy as np

import paceline as pl
from _report import OtherLoad, Pace, finish, interval, machine, parser, plotting, table, told
from _tuning import SEED, Trial, Tuned, tune
from paceline.core.coordinator import drive
from paceline.core.policy import Policy
from paceline.core.protocol import MAIN, Finished, Joined, Start, Step, Stepped, Work
from paceline.engines.base import Job
from selection_laws import measure_laws
from tests.oracles.orders import slowest

MEANS = [round(0.1 * i, 1) for i in range(1, 11)]
INDICES: dict[str, pl.selection.Index] = {
    "KL": pl.selection.KL(),
    "KL, caution 3": pl.selection.KL(caution=3),
    "Thompson": pl.selection.Thompson(),
    "LCB": pl.selection.LCB(),
    "Greedy": pl.selection.Greedy(),
}
BOUNDS = {
    "S1_KL": 120.0,
    "S1_Thompson": 60.0,
    "S1_LCB_least": 1200.0,
    "S1_LCB_most": 1800.0,
    "S2_KL": 0.04,
    "S2_Thompson": 0.02,
    "log_growth": 2.0,
    "linear_growth": 3.0,
    "hedged_tasks": 0.5,
    "hedged_time": 1.25,
    "choice_over_loop": 0.05,
}

# --- 1. regret -----------------------------------------------------------------------------------


@cache
def expected(chosen: tuple[str, ...]) -> float:
    return slowest([MEANS[int(worker[1:])] for worker in chosen])


def rounds_of(policy: Policy, rounds: int, batch: int, seed: int) -> Iterable[tuple[str, ...]]:
    """Yield the workers chosen in each round."""
    learner = pl.learners.TimingOnly(batch)
    engine = pl.Simulator(len(MEANS), [pl.delays.Exponential(mean) for mean in MEANS], unit=1)
    engine.open(Job(learner=learner, server=learner.server(), seed=seed))
    started = pl.policies.MinWorkers(len(MEANS), pl.policies.Until(policy, steps=rounds))
    coordinator = pl.protocol.Coordinator(started, batch, pl.Journal(keep=False))
    for _, entry in drive({MAIN: coordinator}, engine):
        chosen = [c.task.worker for c in entry.commands if isinstance(c, Start)]
        if chosen:
            yield tuple(sorted(chosen))


def regret_s1(name: str, rounds: int, seed: int) -> dict[int, float]:
    """Return the regret in expected seconds against the three fastest of ten, at some rounds."""
    marks, lost, found = (100, 1_000, 10_000, 30_000), 0.0, {}
    best = expected(("w0", "w1", "w2"))
    policy = pl.bandit(3, index=INDICES[name], seed=seed)
    for round, chosen in enumerate(rounds_of(policy, rounds, 3, seed), start=1):
        lost += expected(chosen) - best
        if round in marks:
            found[round] = lost
    return found


def overhead_s2(name: str, each: int, seed: int) -> float:
    """Return the extra time for k = 1 to 5, as a fraction of the time with the best workers."""
    plan = {each * (k - 1): k for k in range(1, 6)}
    policy = pl.bandit(pl.policies.Schedule(plan), samples=1, index=INDICES[name], seed=seed)
    taken = oracle = 0.0
    for chosen in rounds_of(policy, 5 * each, 1, seed):
        taken += expected(chosen)
        oracle += expected(tuple(f"w{i}" for i in range(len(chosen))))
    return taken / oracle - 1


# --- 2. speeds that change -----------------------------------------------------------------------


@dataclass(frozen=True)
class Changed:
    """A delay that changes at a given time; both values vary by 10 %."""

    before: float
    after: float
    at: float
    mean: float = 1.0

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return (self.before if now < self.at else self.after) * rng.uniform(0.9, 1.1)


CHANGE = 200.0  # virtual seconds: some 1,800 rounds
MEMORIES: dict[str, dict[str, Any]] = {
    "KL": {"index": pl.selection.KL()},
    "KL, discount 0.97": {"index": pl.selection.KL(), "discount": 0.97},
    "KL(shape=4)": {"index": pl.selection.KL(shape=4)},
    "KL(shape=4), discount 0.97": {"index": pl.selection.KL(shape=4), "discount": 0.97},
    "Thompson, discount 0.97": {"index": pl.selection.Thompson(), "discount": 0.97},
    "KL(shape=4), window 60": {"index": pl.selection.KL(shape=4), "window": 60},
}


def changing(name: str, seed: int) -> tuple[int, int | None]:
    """Return the rounds before the change, and the rounds until it is detected.

    Three workers take 0.1 s, three 0.4 s; then the latter take 0.03 s. The change is detected when
    they get 80 % of the tasks of 20 rounds in a row; None: not within 600 rounds.
    """
    delays = [*[Changed(0.1, 0.1, CHANGE)] * 3, *[Changed(0.4, 0.03, CHANGE)] * 3]
    engine, learner = pl.Simulator(6, delays, unit=1), pl.learners.TimingOnly(3)
    engine.open(Job(learner=learner, server=learner.server(), seed=seed))
    policy = pl.policies.MinWorkers(6, pl.bandit(3, seed=seed, **MEMORIES[name]))
    before, after = 0, list[bool]()
    for _, entry in drive(
        {MAIN: pl.protocol.Coordinator(policy, 3, pl.Journal(keep=False))}, engine
    ):
        chosen = [c.task.worker in ("w3", "w4", "w5") for c in entry.commands
                  if isinstance(c, Start)]  # fmt: skip
        if chosen and entry.now < CHANGE:
            before += 1
        elif chosen:
            after += chosen
            if len(after) >= 60 and sum(after[-60:]) >= 48:
                return before, len(after) // 3
            if len(after) >= 1800:
                break
    return before, None


# --- 3. costs until the same error ---------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """Workers, how far k grows in which steps, and the hedges to try."""

    delays: Sequence[pl.delays.Exponential | pl.delays.ShiftedExponential]
    most: int
    hedges: tuple[int, ...]

    def plan(self, steps: int) -> dict[int, int]:
        return {steps * (k - 1) // self.most: k for k in range(1, self.most + 1)}


QUICK = pl.delays.ShiftedExponential(0.08, 0.02)
SLOW = pl.delays.ShiftedExponential(0.8, 0.2)
FLEETS = {
    "spread": Fleet(
        [pl.delays.Exponential(m) for m in np.linspace(0.1, 1.0, 50)], 20, (0, 5, 10, 30)
    ),
    "tiers": Fleet([*[QUICK] * 8, *[SLOW] * 16], 6, (0, 1, 4)),
}
COSTS = ("seconds", "started", "busy_seconds", "down_bytes")


@dataclass(frozen=True)
class Problem:
    """A learning problem, and its target error."""

    samples: int  # of a task
    steps: int
    every: int  # steps between two measurements of the error
    target: float
    make: Callable[[], tuple[Any, Callable[[Any], float]]]  # the learner, and a model's error


@cache
def regression() -> tuple[pl.learners.LeastSquares, Callable[[Any], float]]:
    rng = np.random.default_rng(0)
    features = rng.integers(1, 11, size=(2000, 100)).astype(float)
    targets = features @ rng.integers(1, 101, size=100) + rng.standard_normal(2000)
    learner = pl.learners.LeastSquares(features, targets, lr=2e-4, batch_size=40)
    solution = np.linalg.lstsq(features, targets, rcond=None)[0]

    def loss(x: Any) -> float:
        return float(0.5 * np.mean((features @ x - targets) ** 2))

    least = loss(solution)
    return learner, lambda x: loss(x) - least


@cache
def fashion() -> tuple[Any, Callable[[Any], float]]:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from fashion_mnist import fashion_mnist

    torch.set_num_threads(1)
    data = fashion_mnist()
    images = torch.from_numpy(data.train_images).reshape(-1, 784)[:20_000].float() / 255
    labels = torch.from_numpy(data.train_labels).long()[:20_000]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    sgd = partial(torch.optim.SGD, lr=0.05)
    learner = pl.TorchLearner(model, loss, sgd, TensorDataset(images, labels), 32)

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            return loss(model, (images[:4000], labels[:4000])).item()

    return learner, error


PROBLEMS = {
    "regression": Problem(40, 8000, 50, 2e-3, regression),
    "fashion": Problem(32, 2000, 20, 0.45, fashion),
}


def policies(fleet: Fleet, samples: int, steps: int, pieces: int = 1) -> dict[str, Policy]:
    """Return all arms; each of k tasks is cut into some pieces.

    Without `refill` a worker gets one piece of a step. So k-sync and the bandit cut their tasks
    into at most as many pieces as there are workers.
    """

    def cut(pieces: int) -> tuple[pl.policies.Schedule, int]:
        plan = {at: pieces * k for at, k in fleet.plan(steps).items()}
        return pl.policies.Schedule(plan), samples // pieces

    shares, each = cut(pieces)
    once, size = cut(min(pieces, len(fleet.delays) // fleet.most))
    spare = len(fleet.delays) - once.most
    return {
        "k_sync": pl.k_sync(once, size),
        "rennala": pl.policies.Gather(shares, refill=True, work=Work(samples=each)),
        **{f"bandit, hedge {h}": pl.bandit(once, min(h, spare), size) for h in fleet.hedges},
        "ata": pl.ata(shares, each),
    }


Case: TypeAlias = tuple[str, str, str]  # problem, fleet and policy
PIECES = (2, 4)  # to try beside whole tasks


class Looking(pl.Callback):
    """Measures the error of the model every `every` steps."""

    def __init__(self, every: int, error: Callable[[Any], float]) -> None:
        self._every, self._error = every, error
        self.steps: list[int] = []
        self.errors: list[float] = []

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step % self._every == 0:
            self.steps.append(progress.step)
            self.errors.append(self._error(progress.model()))


def learn(case: Case, steps: int, seed: int, pieces: int = 1) -> dict[str, Any]:
    """Train; return the error and the costs as they grew, and the costs at the target."""
    problem, fleet, policy = case
    about, workers = PROBLEMS[problem], FLEETS[fleet]
    learner, error = about.make()
    looking = Looking(about.every * steps // about.steps or 1, error)
    run = pl.Trainer(
        learner,
        policies(workers, about.samples, steps, pieces)[policy],
        pl.Simulator(len(workers.delays), workers.delays, unit=about.samples),
        seed=seed,
        callbacks=[looking],
        progress=False,
    ).fit(steps=steps)
    rows = np.array(looking.steps) - 1
    curve = {cost: run.metrics[cost][rows].tolist() for cost in COSTS}
    # The target counts as reached after three measurements in a row; one may be chance.
    smooth = [max(looking.errors[i : i + 3]) for i in range(len(looking.errors) - 2)]
    at = next((i for i, value in enumerate(smooth) if value <= about.target), None)
    return {
        "errors": looking.errors,
        "curve": curve,
        "reached": None if at is None else {cost: curve[cost][at] for cost in COSTS},
        "end": {cost: float(run.metrics[cost][-1]) for cost in COSTS},
        "last": looking.errors[-1],
    }


# --- 4. the time of a choice ---------------------------------------------------------------------


def choice_seconds(
    selector: pl.selection.Bandit | pl.selection.Allocate, tried: bool, rounds: int
) -> float:
    """Return the mean CPU seconds to learn and choose in a round: 10 of 100,000 workers.

    tried: whether all workers have been observed before; otherwise all are new.
    """
    n, k = 100_000, 10
    policy = pl.policies.MinWorkers(n, pl.policies.Gather(k, select=selector))
    coordinator = pl.protocol.Coordinator(policy, k, pl.Journal(keep=False))
    rng = np.random.default_rng(0)
    means = rng.uniform(0.1, 1.0, n)
    inner = coordinator.policy.inner.select  # type: ignore[attr-defined]
    spent, steps = 0.0, 0
    if tried:
        inner._ranking.arms.admit(f"w{i}" for i in range(n))
        for i in range(n):
            inner._ranking.observe(f"w{i}", means[i] * rng.exponential(), ended=True)

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*arguments: Any) -> Any:
            nonlocal spent
            begin = time.thread_time()
            answer = call(*arguments)
            spent += time.thread_time() - begin
            return answer

        return timing

    running: list[tuple[float, int]] = []

    def handle(now: float, event: Joined | Finished | Stepped) -> None:
        nonlocal steps
        for command in coordinator.handle(now, event).commands:
            if isinstance(command, Start):
                seconds = rng.exponential(means[int(command.task.worker[1:])])
                heapq.heappush(running, (now + seconds, command.task.id))
            elif isinstance(command, Step):
                steps += 1
                handle(now, Stepped(steps))

    for i in range(n):
        handle(0.0, Joined(f"w{i}"))
    inner.choose, inner.learn = timed(inner.choose), timed(inner.learn)
    while steps < rounds:
        now, id = heapq.heappop(running)
        handle(now, Finished(id, 1))
    return spent / rounds


# --- how figures are shown -----------------------------------------------------------------------


def digits(values: Sequence[float]) -> str:
    """Format the mean to three digits."""
    return told(values, ".3g", ".2g")


def growth(marks: dict[int, float]) -> float:
    """Return the slope against ln(rounds) from 10,000 on over the slope before: 1 if logarithmic.

    Linear regret has 4.7.
    """
    late = (marks[30_000] - marks[10_000]) / math.log(3)
    early = (marks[10_000] - marks[1_000]) / math.log(10)
    return late / early if early > 0 else math.inf


def compare(
    results: dict[str, list[dict[str, Any]]], which: str
) -> dict[str, dict[str, list[float]]]:
    """Return each policy's costs over those of k_sync with the same seed."""
    base = results["k_sync"]
    return {
        name: {
            cost: [a[which][cost] / b[which][cost] for a, b in zip(runs, base, strict=True)]
            for cost in COSTS
        }
        for name, runs in results.items()
        if all(run[which] for run in (*runs, *base))
    }


Learned: TypeAlias = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]


def draw_errors(folder: Path, learned: Learned) -> None:
    """Draw the error against each of the costs, among quick and slow workers."""
    pyplot = plotting()
    labels = {
        "seconds": "seconds",
        "started": "tasks started",
        "busy_seconds": "busy worker-seconds",
        "down_bytes": "bytes of models sent",
    }
    shown = {"k_sync": "adaptive k-sync", "bandit, hedge 0": "bandit",
             "bandit, hedge 1": "bandit, hedge 1", "rennala": "Rennala",
             "ata": "ATA"}  # fmt: skip
    figure, grid = pyplot.subplots(2, 4, figsize=(11, 5), layout="constrained", sharey="row")
    for axes_row, problem in zip(grid, PROBLEMS, strict=True):
        for axes, cost in zip(axes_row, COSTS, strict=True):
            for name, label in shown.items():
                runs = learned[problem, "tiers"][name]
                xs = np.mean([run["curve"][cost] for run in runs], axis=0)
                ys = np.array([run["errors"] for run in runs])
                (line,) = axes.plot(xs, ys.mean(axis=0), label=label, linewidth=1.6)
                axes.fill_between(
                    xs, ys.min(axis=0), ys.max(axis=0), color=line.get_color(), alpha=0.15
                )
            axes.axhline(PROBLEMS[problem].target, color="gray", linewidth=0.8, linestyle="--")
            axes.set(xlabel=labels[cost], yscale="log")
            axes.spines[["top", "right"]].set_visible(False)
        name = {"regression": "excess loss", "fashion": "training loss"}[problem]
        axes_row[0].set_ylabel(f"{problem}: {name}")
    grid[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(folder / "selection.svg", metadata={"Date": None})


def draw_hedges(folder: Path, learned: Learned) -> None:
    """Draw tasks against time as the hedge grows, both relative to k-sync."""
    pyplot = plotting()
    figure, grid = pyplot.subplots(1, 2, figsize=(8.5, 3.4), layout="constrained", sharey=True)
    for axes, fleet in zip(grid, FLEETS, strict=True):
        for problem in PROBLEMS:
            ratios = compare(learned[problem, fleet], "reached")
            hedges = [h for h in FLEETS[fleet].hedges if f"bandit, hedge {h}" in ratios]
            points = [
                [statistics.fmean(ratios[f"bandit, hedge {h}"][c]) for c in ("seconds", "started")]
                for h in hedges
            ]
            (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=problem)
            color = line.get_color()
            if problem == "regression":
                for h, (x, y) in zip(hedges, points, strict=True):
                    axes.annotate(f"h={h}", (x, y), (4, 4), textcoords="offset points", fontsize=8)
            ata = [statistics.fmean(ratios["ata"][cost]) for cost in ("seconds", "started")]
            axes.plot(*ata, marker="s", color=color, linestyle="none", label=f"{problem}, ATA")
        axes.axhline(0.5, color="gray", linewidth=0.8, linestyle="--")
        axes.axvline(1.25, color="gray", linewidth=0.8, linestyle="--")
        axes.plot(1, 1, marker="*", color="black", markersize=9, linestyle="none", label="k-sync")
        axes.set(xlabel="seconds to the same error, over k-sync")
        axes.set_title({"spread": "50 workers, exponential times",
                        "tiers": "8 quick and 16 slow workers"}[fleet], fontsize=10)  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("tasks, over k-sync")
    grid[1].legend(frameon=False, fontsize=8)
    figure.savefig(folder / "hedge.svg", metadata={"Date": None})


# --- all of it -----------------------------------------------------------------------------------


def measure_regret(pool: Executor, quick: bool) -> tuple[dict[str, Any], dict[str, bool]]:
    names = [name for name in INDICES if not quick or name != "KL, caution 3"]
    seeds_1, seeds_2, each = (range(2), range(1), 1000) if quick else (range(30), range(10), 4000)
    one = {(n, s): pool.submit(regret_s1, n, 30_000, s) for s in seeds_1 for n in names
           if not quick or s == 0 or n in ("KL", "Thompson")}  # fmt: skip
    two = {(n, s): pool.submit(overhead_s2, n, each, s) for s in seeds_2 for n in names}
    regrets = {n: [one[n, s].result() for s in seeds_1 if (n, s) in one] for n in names}
    overheads = {n: [two[n, s].result() for s in seeds_2] for n in names}
    means = {n: {m: statistics.fmean(r[m] for r in runs) for m in runs[0]}
             for n, runs in regrets.items()}  # fmt: skip
    print(f"S1: regret in seconds, {len(seeds_1)} seeds; S2: overhead, {len(seeds_2)} seeds")
    table(
        ["index", *(f"at {m:,}" for m in means["KL"]), "growth", "S2"],
        [
            [n, *(digits([r[m] for r in regrets[n]]) for m in means[n]), f"{growth(means[n]):.2f}",
             f"{100 * statistics.fmean(overheads[n]):.2f} %"]
            for n in names
        ],
    )  # fmt: skip
    slopes = {n: round(growth(by), 2) for n, by in means.items()}
    extra = {n: round(statistics.fmean(values), 4) for n, values in overheads.items()}
    last = {n: by[30_000] for n, by in means.items()}
    held = {
        "S1_KL": last["KL"] <= BOUNDS["S1_KL"],
        "S1_Thompson": last["Thompson"] <= BOUNDS["S1_Thompson"],
        "S1_LCB": BOUNDS["S1_LCB_least"] <= last["LCB"] <= BOUNDS["S1_LCB_most"],
        "log": quick  # two seeds are too few
        or all(slopes[n] <= BOUNDS["log_growth"] for n in ("KL", "Thompson")),
        "linear": slopes["Greedy"] >= BOUNDS["linear_growth"],
        "S2_KL": quick or extra["KL"] <= BOUNDS["S2_KL"],
        "S2_Thompson": quick or extra["Thompson"] <= BOUNDS["S2_Thompson"],
    }
    marks = {n: {str(m): round(v, 1) for m, v in by.items()} for n, by in means.items()}
    return {"S1": marks, "S1_growth": slopes, "S2": extra}, held


def measure_change(pool: Executor, seeds: Sequence[int]) -> dict[str, Any]:
    """Print the rounds until a change of speeds is detected."""
    print(f"\nspeeds that change after {CHANGE:g} s, {len(seeds)} seeds")
    coming = {n: [pool.submit(changing, n, seed) for seed in seeds] for n in MEMORIES}
    rows, figures = [], {}
    for name, futures in coming.items():
        ends = [future.result() for future in futures]
        before = statistics.median(rounds for rounds, _ in ends)
        found = sorted(math.inf if rounds is None else rounds for _, rounds in ends)
        median = statistics.median(found)
        figures[name] = {"rounds_before": before, "noticed": [
            None if rounds == math.inf else rounds for rounds in found]}  # fmt: skip
        noticed = "not in 600" if median == math.inf else f"{median:g}"
        rows.append([name, f"{before:g}", f"{noticed} ({found[0]:g} - {found[-1]:g})"])
    table(["bandit", "rounds before", "rounds until noticed"], rows)
    return figures


def tune_pieces(pool: Executor, cases: Sequence[Case], short: bool) -> dict[Case, Tuned]:
    """Return the pieces with the least time, each arm tried three times."""
    arms = {str(case): case for case in cases}

    def scores(trials: Sequence[Trial]) -> list[float]:
        coming = []
        for each in trials:
            case = arms[each.arm]
            steps = PROBLEMS[case[0]].steps // (5 if short else 1)
            coming.append(pool.submit(learn, case, steps, SEED, int(each.knob or 1)))
        runs = [future.result()["end" if short else "reached"] for future in coming]
        return [-run["seconds"] if run else -math.inf for run in runs]

    found = tune(arms, scores, dict.fromkeys(arms, PIECES), factors=(1.0,))
    return {arms[name]: best for name, best in found.items()}


def measure_costs(pool: Executor, options: argparse.Namespace) -> tuple[dict[str, Any], Learned]:
    """Print the costs of all arms until the same error, each with the pieces that suit it."""
    quick, short = options.quick, options.quick or options.short
    tuned: dict[Case, Tuned] = {}
    if quick:
        cases = [("regression", "tiers", policy)
                 for policy in ("k_sync", "rennala", "bandit, hedge 0", "bandit, hedge 4", "ata")
                 ]  # fmt: skip
    else:
        fleets = [options.fleet] if options.fleet else list(FLEETS)
        problems = [options.problem] if options.problem else list(PROBLEMS)
        cases = [(problem, fleet, policy) for problem in problems for fleet in fleets
                 for policy in policies(FLEETS[fleet], 4, 100)]  # fmt: skip
        tuned = tune_pieces(pool, cases, short)
    seeds, which = [0] if quick else [0, 1, 2, 3, 4], "end" if short else "reached"
    pieces = {case: int(tuned[case].best.knob or 1) if case in tuned else 1 for case in cases}
    coming = {
        (case, seed): pool.submit(
            learn, case, PROBLEMS[case[0]].steps // (5 if short else 1), seed, pieces[case]
        )
        for seed in seeds
        for case in cases
    }
    learned: Learned = {}
    for case in cases:
        runs = [coming[case, seed].result() for seed in seeds]
        learned.setdefault(case[:2], {})[case[2]] = runs
    figures: dict[str, Any] = {}
    for (problem, fleet), results in learned.items():
        at = f"error {PROBLEMS[problem].target:g}" if which == "reached" else "the end"
        trials = next((each.trials for each in tuned.values()), 0)
        print(f"\n{problem}, {fleet}: costs at {at}, and times those of k_sync, {len(seeds)} "
              f"seeds, {trials} trials of the pieces of a task for each arm")  # fmt: skip
        ratios = compare(results, which)
        rows = []
        for name, runs in results.items():
            cut = pieces[problem, fleet, name]
            if name not in ratios:
                rows.append(
                    [name, str(cut), *["not reached"] * 4, digits([r["last"] for r in runs])]
                )
                continue
            cells = [f"{digits([run[which][cost] for run in runs])} ({digits(ratios[name][cost])})"
                     for cost in COSTS]  # fmt: skip
            rows.append([name, str(cut), *cells, digits([run["last"] for run in runs])])
            figures.setdefault(f"{problem}, {fleet}", {})[name] = {
                **{cost: round(statistics.fmean(ratios[name][cost]), 3) for cost in COSTS},
                "interval": None if quick else round(interval(ratios[name]["seconds"])[1], 3),
                "total": {cost: round(statistics.fmean(run[which][cost] for run in runs))
                          for cost in COSTS},
                "pieces": cut, "trials": trials, "seeds": len(seeds),
            }  # fmt: skip
        table(["policy", "pieces", *COSTS, "error at the end"], rows)
    return figures, learned


def hedged(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the hedged bandit with the least time at no more than half the tasks of k-sync."""
    paying = {
        f"{where}, {name}": (costs["seconds"], costs["started"])
        for where, arms in figures.items()
        for name, costs in arms.items()
        if "hedge" in name and not name.endswith(" 0")
        and costs["started"] <= BOUNDS["hedged_tasks"]
    }  # fmt: skip
    best = min(paying, key=lambda name: paying[name][0], default="nowhere")
    seconds, tasks = paying.get(best, (math.inf, math.inf))
    print(f"\nhedged at no more than half the tasks, least time: {best}: {seconds:.3g} x the time")
    return {"where": best, "seconds": seconds, "tasks": tasks}


def measure_choice(quick: bool) -> dict[str, Any]:
    """Print the time of a choice, over that of the calibration loop, which runs in between."""
    selectors: dict[str, Callable[[], pl.selection.Bandit | pl.selection.Allocate]] = {
        "KL": pl.selection.Bandit,
        "Thompson": lambda: pl.selection.Bandit(pl.selection.Thompson()),
        "KL, discount": lambda: pl.selection.Bandit(discount=0.999),
        "ATA": pl.selection.Allocate,
    }
    pace, found = Pace(), {}
    for name, make in selectors.items():
        for tried in (False, True):
            seconds = choice_seconds(make(), tried, 1000 if quick else 5000)
            pace.look()
            found[f"{name}, {'all tried' if tried else 'all new'}"] = seconds
    print("\na round's learning and choosing, 10 of 100,000 workers")
    ratios = {name: seconds / pace.seconds() for name, seconds in found.items()}
    rows = [[name, f"{1e3 * found[name]:.2f}", f"{ratios[name]:.4f}"] for name in found]
    table(["selector", "ms", "over the calibration loop"], rows)
    return {name: round(ratio, 5) for name, ratio in ratios.items()}


PARTS = ("regret", "change", "laws", "costs", "choice")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS)
    arguments.add_argument("--problem", choices=tuple(PROBLEMS), help="costs of one only")
    arguments.add_argument("--fleet", choices=tuple(FLEETS), help="costs on one fleet only")
    fifth = "costs of a fifth of the steps, instead of those until the error is reached"
    arguments.add_argument("--short", action="store_true", help=fifth)
    arguments.add_argument("--figures", metavar="FOLDER", help="draw into this folder")
    options = arguments.parse_args()
    quick, load = options.quick, OtherLoad()
    wanted = [options.only] if options.only else PARTS
    figures: dict[str, Any] = {}
    held: dict[str, bool] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        if "regret" in wanted:
            found, held = measure_regret(pool, quick)
            figures |= found
        if "change" in wanted:
            figures["change"] = measure_change(pool, range(1 if quick else 5))
        if "laws" in wanted:
            figures["laws"] = measure_laws(pool, quick)
        if "costs" in wanted:
            costs, learned = measure_costs(pool, options)
            figures |= costs
            figures["hedged"] = hedged(costs)
            held["hedged"] = figures["hedged"]["seconds"] <= BOUNDS["hedged_time"]
            if options.figures:
                draw_errors(Path(options.figures), learned)
                draw_hedges(Path(options.figures), learned)
    if "choice" in wanted:
        figures["choice_over_loop"] = measure_choice(quick)
        slowest_choice = max(figures["choice_over_loop"].values())
        held["choice"] = slowest_choice <= BOUNDS["choice_over_loop"]
    figures["held"] = held
    about = machine("numpy", "paceline") | {"other_load_cores": load.cores()}
    finish("selection", figures, BOUNDS, all(held.values()), about, options)


if __name__ == "__main__":
    main()
