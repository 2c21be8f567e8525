"""The methods by their names in the literature: each is one setting of `Gather`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import wraps
from math import inf
from typing import Any, Literal, ParamSpec, TypeVar

from paceline.core.policy import Policy, Wrapper
from paceline.core.protocol import Work
from paceline.core.state import describe
from paceline.policies.choosers import Chooser
from paceline.policies.gather import Gather, mean, staleness_weighted
from paceline.policies.selection.indices import KL, Index
from paceline.policies.selection.selectors import Allocate, Bandit

P = ParamSpec("P")
R = TypeVar("R")


def _keywords_only(function: Callable[P, R]) -> Callable[P, R]:
    """Explain positional arguments; the signature stays that of the function."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if args:
            given = args[0]
            raise TypeError(
                f"sync() takes no positional argument, but got {given!r}; use "
                f"pl.sync(shares={given!r}) to cut the batch into that many shares, or "
                f"pl.k_sync({given!r}) to wait for the fastest {given!r} results"
            )
        return function(*args, **kwargs)

    return checked


@_keywords_only
def sync(*, shares: int | None = None) -> Gather:
    """Wait for all workers: the step is the gradient of the whole global batch.

    shares: the fixed number of shares of the batch; by default the number of workers.
    """
    return Gather() if shares is None else Gather(shares, spares=False)


def k_sync(k: int | Chooser, samples: int | None = None) -> Gather:
    """Wait for the fastest `k` results, cancel the rest (Dutta et al., 2018, arXiv 1803.01113).

    With a chooser for k this is adaptive k-sync (Kas Hanna et al., 2020, arXiv 2002.11005).
    samples: samples of each task, so a step uses k times as many; by default 1/k of the batch.
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
    """Give tasks to `k` workers only, and learn which workers are fast (arXiv 2202.08302).

    hedge: spare tasks beyond k; once k results are held, the rest is cancelled. With 0 no work is
        wasted and a step waits for its slowest worker; n - k is `k_sync` of n workers.
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
    """Cut the batch into `shares`; give fast workers several of them and slow workers none.

    Adaptive task allocation (Maranjyan et al., 2025, arXiv 2502.00775).
    samples: samples of each share, as in `k_sync`. The other arguments are those of `Allocate`.
    """
    select = Allocate(index, discount, window, seed)
    return Gather(shares, select=select, work=Work(samples=samples))


def k_async(k: int) -> Gather:
    """Step on every `k` results of any staleness; other tasks run on (Dutta et al., 2018)."""
    return Gather(k, max_staleness=inf, preempt=False)


def async_local_sgd(steps: int, max_staleness: float = inf) -> Gather:
    """Let each worker take `steps` local steps, and step along its change as soon as it arrives.

    No worker ever waits. Each local step of a worker uses `batch_size` samples, where `local_sgd`
    divides them among all workers. With `placement=BySpeed()`, tasks of all workers take about the
    same time; each change counts the same, however many samples it has.
    Use `outer=partial(pl.learners.DelayedNesterov, every=workers)`: the momentum of `SGD` counts
    stale changes several times (Liu et al. 2024, arXiv 2401.09135).
    """
    return Gather(1, max_staleness, refill=True, preempt=False, work=Work(steps=steps))


def asynchronous(max_staleness: float = inf, damping: bool = True) -> Gather:
    """Step on each result of staleness at most `max_staleness`; no worker ever waits.

    With `damping` a result of staleness d has weight 1 / (1 + d).
    """
    combine = staleness_weighted if damping else mean
    return Gather(1, max_staleness, refill=True, preempt=False, combine=combine)


def rennala(batch: int) -> Gather:
    """Collect `batch` results at one model version, several from fast workers, then step.

    Rennala SGD (Tyurin and Richtárik, 2023, arXiv 2305.12387).
    """
    return Gather(batch, refill=True)


def ringmaster(threshold: int, stops: bool = True) -> Gather:
    """Step on each result whose staleness is below `threshold`.

    Ringmaster ASGD (Maranjyan, Tyurin, Richtárik, 2025, arXiv 2501.16168). With `stops`, tasks
    that became too stale are cancelled; otherwise their results are discarded on arrival.

    >>> ringmaster(4).max_staleness
    3
    """
    if not isinstance(threshold, int) or threshold < 1:
        raise ValueError(f"threshold={threshold!r}: no result could be used; use threshold >= 1")
    return Gather(1, threshold - 1, refill=True, preempt=stops)


def local_sgd(steps: int, k: int | None = None, *, overlap: bool = False) -> Gather:
    """Let each worker take `steps` local steps, then average their changes.

    Local SGD (Stich, 2019, arXiv 1805.09767). The learner's `outer` optimizer makes the step:
    with Nesterov momentum this is DiLoCo (Douillard et al., 2023, arXiv 2311.08105).

    overlap: when all have computed, each worker goes on from its own model while changes and the
        new model travel. The steps taken meanwhile are added to the new model when it arrives. See
        CoCoD-SGD (Shen et al., 2019, arXiv 1906.12043).
    """
    return Gather(k, work=Work(steps=steps, overlap=overlap))


def written(policy: Policy) -> str:
    """Return a policy as its user writes it, by its name in this module where it has one.

    A placement follows as the Trainer's argument.

    >>> written(Gather(k=3))
    'k_sync(3)'
    """
    inner = policy.innermost
    placement = inner.placement if isinstance(inner, Gather) else None
    text = describe(policy, _name)
    return text if placement is None else f"{text}, placement={describe(placement)}"


def _name(thing: Any) -> str | None:
    """Return the text of a policy, a wrapper or a tuple; None for other objects."""
    if isinstance(thing, Wrapper) and is_dataclass(thing):
        names = inspect.signature(type(thing)).parameters
        return _text(type(thing), {name: getattr(thing, name) for name in names})
    if isinstance(thing, tuple):  # names of workers, which users give as a list
        return repr(list(thing))
    if type(thing) is not Gather:
        return None
    plain = describe(replace(thing, placement=None))
    calls = _calls(thing)
    return next((_text(*call) for call in calls if describe(call[0](**call[1])) == plain), None)


def _calls(policy: Gather) -> Iterator[tuple[Callable[..., Gather], dict[str, Any]]]:
    """Yield the functions above with the arguments that might make a policy, the simplest first."""
    k, work, select, stale = policy.k, policy.work, policy.select, policy.max_staleness
    given = work if isinstance(work, Work) else Work()
    yield sync, {}
    if isinstance(k, int):
        yield sync, {"shares": k}
    if k is not None:
        yield k_sync, {"k": k, "samples": given.samples}
        yield k_async, {"k": k}
        yield rennala, {"batch": k}
    if isinstance(stale, int):
        yield ringmaster, {"threshold": stale + 1, "stops": policy.preempt}
    yield asynchronous, {"max_staleness": stale, "damping": policy.combine is staleness_weighted}
    yield local_sgd, {"steps": given.steps, "k": k, "overlap": given.overlap}
    if isinstance(select, Bandit | Allocate):
        learned = {name: getattr(select, name) for name in ("index", "discount", "window", "seed")}
        learned["samples"] = given.samples
        if isinstance(select, Allocate):
            yield ata, {"shares": k, **learned}
        else:
            yield bandit, {"k": k, "hedge": policy.hedge, "minimize": select.minimize, **learned}


def _text(function: Callable[..., Policy], given: dict[str, Any]) -> str:
    """Return a call without its defaults; what has no default comes first, by position."""
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in given or given[name] == parameter.default:
            continue
        by_place = parameter.default is parameter.empty
        words.append(("" if by_place else f"{name}=") + describe(given[name], _name))
    return f"{function.__name__}({', '.join(words)})"
