"""The overhead of paceline over Ray: `sync` on eight workers against a hand-written loop.

Both arms train the same perceptron on the same samples with the same optimizer on the same Ray.
Each has eight workers, with one torch thread per worker and torch's default in the main process.
Both end with the same model, which is checked. The hand-written loop is that of a competent
engineer. Parameters and gradients are views of flat buffers. The model is put into the object store
once per round. Gradients are added as they arrive. The loop imports nothing from paceline.

The arms take turns, round by round, in the order A B B A, and never run at the same time. The
hand-written rounds run while paceline pauses after a step. A ratio is that of two neighboring
rounds; the figure is their median, with the 95 % interval of the median.

    python benchmarks/overhead.py [--quick] [--profile]
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import Any, TypeAlias

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _fashion import loss
from _report import OtherLoad, finish, machine, parser, quantile, table
from paceline.core.protocol import Command, Step, WorkerId
from paceline.engines.ray.cluster.join import connect
from paceline.engines.ray.reducer import DriverReducer

WORKERS, SHARE, CPUS = 8, 16, 0.05
EXAMPLES, SEED, RATE = 4096, 0, 0.01
HIDDEN = {"1 MB": 314, "11 MB": 3459, "45 MB": 14151}  # 795 hidden + 10 numbers of 4 bytes
BOUNDS = {"1 MB": 1.15, "11 MB": 1.05, "45 MB": 1.05}
SAME = 1e-4  # models that differ by less took the same steps; rounding gives about 1e-8
WARM_UP = 2  # rounds of each arm that do not count, an even number

Vector: TypeAlias = NDArray[np.float32]
Spent: TypeAlias = defaultdict[str, float]  # seconds by activity


def perceptron(hidden: int) -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(SEED)
    labels = torch.randint(10, (EXAMPLES,), generator=random)
    return torch.randn(EXAMPLES, 784, generator=random), labels


# --- by hand: Ray and torch alone ----------------------------------------------------------------


def flatten(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a module's parameters and gradients into two flat buffers, and return these."""
    parameters = list(module.parameters())
    values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradients = torch.zeros_like(values)
    sizes = [parameter.numel() for parameter in parameters]
    for p, v, g in zip(
        parameters, torch.split(values, sizes), torch.split(gradients, sizes), strict=True
    ):
        p.data, p.grad = v.view_as(p), g.view_as(p)
    return values, gradients


class HandWorker:
    """Computes gradients of its share of each batch."""

    def set_up(self, hidden: int, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(1)
        self._images, self._labels = data
        self._module = perceptron(hidden)
        self._values, self._gradients = flatten(self._module)
        self._epoch, self._order = -1, torch.empty(0)

    def gradient(self, model: Vector, place: int) -> Vector:
        self._values.copy_(torch.from_numpy(model))
        self._gradients.zero_()
        epoch, start = divmod(place, EXAMPLES)
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([SEED, 0, epoch + 1]))
            self._epoch, self._order = epoch, torch.from_numpy(random.permutation(EXAMPLES))
        chosen = self._order[start : start + SHARE]
        outputs = self._module(self._images[chosen])
        nn.functional.cross_entropy(outputs, self._labels[chosen]).backward()
        return self._gradients.numpy()


class ByHand:
    """The loop of the main process."""

    def __init__(self, workers: list[Any], hidden: int) -> None:
        data = ray.put(examples())
        ray.get([worker.set_up.remote(hidden, data) for worker in workers])
        self._workers = workers
        self._module = perceptron(hidden)
        self.values, self._gradients = flatten(self._module)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=RATE)
        self._place = 0
        self.spent: Spent = defaultdict(float)

    def round(self) -> None:
        clock = [time.perf_counter()]
        model = ray.put(self.values.numpy())
        clock.append(time.perf_counter())
        pending = []
        for worker in self._workers:
            pending.append(worker.gradient.remote(model, self._place))
            self._place += SHARE
        clock.append(time.perf_counter())
        self._gradients.zero_()
        adding = 0.0
        while pending:
            (done,), pending = ray.wait(pending)
            vector = torch.from_numpy(ray.get(done))
            begin = time.perf_counter()
            self._gradients.add_(vector, alpha=1 / WORKERS)
            adding += time.perf_counter() - begin
            del vector, done  # frees it in the object store
        clock.append(time.perf_counter())
        self._optimizer.step()
        clock.append(time.perf_counter())
        put, submit, collect, update = (end - begin for begin, end in pairwise(clock))
        self.spent["publish"] += put
        self.spent["submit"] += submit
        self.spent["wait"] += collect - adding
        self.spent["reduce"] += adding + update


# --- paceline ------------------------------------------------------------------------------------


class TakingTurns(pl.Ray):
    """Paceline's engine, with a pause after each step for the other arm."""

    pause: Callable[[], None]

    def execute(self, node: WorkerId, command: Command) -> None:
        super().execute(node, command)
        if isinstance(command, Step):
            self.pause()


class Stopwatch:
    """Measures the time of the main process by activity; each second counts once."""

    def __init__(self) -> None:
        self.spent: Spent = defaultdict(float)
        self._stack = ["other"]
        self._since = time.perf_counter()

    def turn(self) -> None:
        """Add the time until now to the current activity."""
        now = time.perf_counter()
        self.spent[self._stack[-1]] += now - self._since
        self._since = now

    def forget(self) -> None:
        """Exclude the time since the last turn, which the other arm used."""
        self._since = time.perf_counter()

    @contextmanager
    def watching(self, methods: dict[tuple[type, str], str]) -> Iterator[None]:
        """Count the time in these methods; nested calls count for the inner method only."""
        originals = {(owner, name): owner.__dict__.get(name) for owner, name in methods}
        for (owner, name), label in methods.items():
            setattr(owner, name, self._watched(getattr(owner, name), label))
        try:
            yield
        finally:
            for (owner, name), original in originals.items():
                if original is None:  # it was inherited
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def _watched(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self._stack.append(label)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self._stack.pop()

        return watched


METHODS: dict[tuple[type, str], str] = {
    (pl.protocol.Coordinator, "handle"): "decide",
    (DriverReducer, "publish"): "publish",
    (DriverReducer, "step"): "reduce",
    (pl.Ray, "_ship"): "submit",
    (pl.Ray, "next_event"): "wait",
    (pl.Ray, "_finished"): "take",
}
PARTS = ("decide", "publish", "submit", "wait", "take", "reduce", "other")


# --- both ----------------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds of the rounds of both arms; entries with the same index are neighbors."""

    hand: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    hand_spent: Spent = field(default_factory=lambda: defaultdict(float))
    ours_spent: Spent = field(default_factory=lambda: defaultdict(float))
    apart: float = 0.0  # the largest difference between the two models at the end

    def ratios(self) -> list[float]:
        return [ours / hand for ours, hand in zip(self.ours, self.hand, strict=True)]

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the median ratio, by the binomial law of its rank."""
        ordered, n = sorted(self.ratios()), len(self.hand)
        below = max(int(n / 2 - 0.98 * sqrt(n)), 0)
        return ordered[below], ordered[n - 1 - below]


def measure(
    times: Times, hidden: int, rounds: int, engine: TakingTurns, workers: list[Any], profile: bool
) -> None:
    """Train both arms for `rounds` rounds, an even number, and add their times."""
    by_hand = ByHand(workers, hidden)
    watch = Stopwatch()
    hand: list[float] = []
    ours: list[float] = []
    resumed = time.perf_counter()

    def pause() -> None:
        nonlocal resumed
        ours.append(time.perf_counter() - resumed)
        watch.turn()
        if len(ours) == WARM_UP:
            watch.spent.clear()
        if len(ours) % 2:  # ours, by hand, by hand, ours, …
            for _ in range(2):
                begin = time.perf_counter()
                by_hand.round()
                hand.append(time.perf_counter() - begin)
        if len(hand) == WARM_UP == len(ours):
            by_hand.spent.clear()
        watch.forget()
        resumed = time.perf_counter()

    engine.pause = pause
    learner = pl.TorchLearner(
        perceptron(hidden),
        loss,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        dataset=TensorDataset(*examples()),
        batch_size=WORKERS * SHARE,
    )
    trainer = pl.Trainer(learner, pl.sync(), engine, seed=SEED, progress=False)
    with watch.watching(METHODS if profile else {}):
        run = trainer.fit(steps=WARM_UP + rounds)
    times.hand += hand[WARM_UP:]
    times.ours += ours[WARM_UP:]
    for total, spent in ((times.hand_spent, by_hand.spent), (times.ours_spent, watch.spent)):
        for part, seconds in spent.items():
            total[part] += seconds
    values, _ = flatten(copy.deepcopy(run.model))
    times.apart = max(times.apart, float((values - by_hand.values).abs().max()))


def report(all_times: dict[str, Times], profile: bool) -> dict[str, dict[str, Any]]:
    """Print the tables; return the figures by size."""
    figures: dict[str, dict[str, Any]] = {}
    rows = []
    for size, times in all_times.items():
        ratio, (low, high) = quantile(times.ratios(), 0.5), times.interval()
        spread = [quantile(times.ratios(), q) for q in (0.1, 0.9)]
        arms = {
            arm: [1e3 * quantile(values, q) for q in (0.5, 0.1, 0.9)]
            for arm, values in (("hand", times.hand), ("ours", times.ours))
        }
        figures[size] = {
            "ratio": round(ratio, 4),
            "interval": [round(low, 4), round(high, 4)],
            "p10_p90": [round(value, 4) for value in spread],
            "bare_ms": [round(value, 2) for value in arms["hand"]],
            "paceline_ms": [round(value, 2) for value in arms["ours"]],
            "pairs": len(times.hand),
            "models_apart": times.apart,
            "ok": ratio <= BOUNDS[size] and times.apart < SAME,
        }
        rows.append(
            [
                size,
                str(len(times.hand)),
                *("{:.1f} [{:.1f}–{:.1f}]".format(*arms[arm]) for arm in ("hand", "ours")),
                f"{ratio:.3f} [{low:.3f}–{high:.3f}]",
                "{:.2f}–{:.2f}".format(*spread),
                f"{BOUNDS[size]:.2f}",
            ]
        )
    head = ["gradient", "pairs", "bare Ray, ms [p10–p90]", "paceline, ms [p10–p90]"]
    table([*head, "median ratio [95 %]", "p10–p90", "bound"], rows)
    if profile:
        print("\nms per round in the main process:")
        rows = []
        for size, times in all_times.items():
            for arm, spent in (("bare", times.hand_spent), ("paceline", times.ours_spent)):
                per_round = {part: 1e3 * spent[part] / len(times.hand) for part in PARTS}
                rows.append([f"{size} {arm}", *(f"{ms:.2f}" for ms in per_round.values())])
                figures[size][f"{arm}_parts_ms"] = {p: round(v, 3) for p, v in per_round.items()}
        table(["", *PARTS], rows)
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--profile", action="store_true", help="say where the time goes")
    arguments.add_argument("--threads", type=int, help="of torch in the main process, both arms")
    given = arguments.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    passes, rounds = (1, (40, 16, 6)) if given.quick else (4, (80, 40, 20))
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    all_times: defaultdict[str, Times] = defaultdict(Times)
    connect(None, 2 * WORKERS, 4 * 795 * max(HIDDEN.values()))
    try:
        load = OtherLoad()
        hand = ray.remote(num_cpus=CPUS)(HandWorker)
        workers = [hand.remote() for _ in range(WORKERS)]
        engine = TakingTurns(WORKERS, cpus=CPUS)
        with engine:
            for _ in range(passes):
                for (size, hidden), count in zip(HIDDEN.items(), rounds, strict=True):
                    measure(all_times[size], hidden, count, engine, workers, given.profile)
        about = machine("torch", "ray", "numpy") | {"others": load.cores(), "workers": WORKERS}
        about["main_threads"] = torch.get_num_threads()
    finally:
        ray.shutdown()
    figures = report(all_times, given.profile)
    ok = all(figure["ok"] for figure in figures.values())
    finish("overhead", figures, BOUNDS, ok, about, given)


if __name__ == "__main__":
    main()
