"""The methods by the names people know them by: each is one setting of `Gather`."""

from __future__ import annotations

from math import inf
from typing import Literal

from paceline.core.protocol import Work
from paceline.policies.choosers import Chooser
from paceline.policies.gather import Gather, faded, mean
from paceline.policies.indices import KL, Index
from paceline.policies.selectors import Allocate, Bandit


def sync(n: int | None = None) -> Gather:
    """Wait for everyone: the step is the gradient of the whole global batch.

    With `n` the batch is always cut into n shares; otherwise into as many as there are workers.
    """
    return Gather(n)


def k_sync(k: int | Chooser, samples: int | None = None) -> Gather:
    """Wait for the fastest `k`, cancel the rest (Dutta et al., 2018, arXiv 1803.01113).

    With a chooser for k this is adaptive k-sync (Kas Hanna et al., 2020, arXiv 2002.11005).
    samples: of each task, so that a step uses k times as many; by default 1/k of the batch.
    """
    return Gather(k, work=Work(samples=samples))


def bandit(
    k: int | Chooser,
    hedge: int = 0,
    samples: int | None = None,
    *,
    index: Index = KL(),
    discount: float = 1.0,
    window: int | None = None,
    minimize: Literal["time", "dollars"] = "time",
    seed: int = 0,
) -> Gather:
    """Give tasks to `k` workers only, and learn who is quick (arXiv 2202.08302).

    hedge: spare tasks beyond k; when k results are there, the rest is cancelled. 0 wastes
        nothing and waits for the slowest of the chosen; n - k is `k_sync` of n workers.
    samples: as in `k_sync`. The other arguments are those of `Bandit`.
    """
    select = Bandit(index, discount, window, seed, minimize=minimize)
    return Gather(k, select=select, hedge=hedge, work=Work(samples=samples))


def ata(
    shares: int | Chooser,
    samples: int | None = None,
    *,
    index: Index = KL(),
    discount: float = 1.0,
    window: int | None = None,
    seed: int = 0,
) -> Gather:
    """Cut the batch into `shares` and give quick workers several of them, slow ones none.

    Adaptive task allocation (Maranjyan et al., 2025, arXiv 2502.00775).
    samples: of each share, as in `k_sync`. The other arguments are those of `Allocate`.
    """
    select = Allocate(index, discount, window, seed)
    return Gather(shares, select=select, work=Work(samples=samples))


def k_async(k: int) -> Gather:
    """Step on every `k` results, however old; the others run on (Dutta et al., 2018)."""
    return Gather(k, max_delay=inf, preempt=False)


def asynchronous(max_delay: float = inf, damping: bool = True) -> Gather:
    """Step on each arrival at most `max_delay` versions old; nobody ever waits.

    With `damping` a result of delay d weighs 1 / (1 + d).
    """
    combine = faded if damping else mean
    return Gather(1, max_delay, refill=True, preempt=False, combine=combine)


def rennala(batch: int) -> Gather:
    """Collect `batch` results at one model from whoever is quick, then step.

    Rennala SGD (Tyurin and Richtárik, 2023, arXiv 2305.12387).
    """
    return Gather(batch, refill=True)


def ringmaster(threshold: int, stops: bool = True) -> Gather:
    """Step on each arrival whose delay is below `threshold`.

    Ringmaster ASGD (Maranjyan, Tyurin, Richtárik, 2025, arXiv 2501.16168). With `stops`, work
    that has grown too old is abandoned as soon as its worker can; without, its result is thrown
    away on arrival.

    >>> ringmaster(4).max_delay
    3
    """
    if threshold < 1:
        raise ValueError(f"threshold={threshold}: no result could be used; use threshold >= 1")
    return Gather(1, threshold - 1, refill=True, preempt=stops)


def local_sgd(steps: int, k: int | None = None) -> Gather:
    """Let each worker take `steps` local steps, then average their changes.

    Local SGD (Stich, 2019, arXiv 1805.09767). The learner's `outer` optimizer makes the step:
    with Nesterov momentum this is DiLoCo (Douillard et al., 2023, arXiv 2311.08105).
    """
    return Gather(k, work=Work(steps=steps))
