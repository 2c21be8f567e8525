"""Candidates that theory names for a profile and a learning rate, beside those of the fixed grid.

    k_sync(k), local_sgd(H, k)       k with the least expected E X_(k:n), for any optimizer
    asynchronous SGD among m         m fastest workers, with the fastest decay of the slowest mode
    ringmaster(R)                    R from the staleness beyond which gradients are dropped

The last two need a measured curvature, with room for one half as large again. They hold near a
minimum, and without momentum. So they are proposals: simulation ranks them among all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paceline.core.policy import Policy
from paceline.core.state import describe
from paceline.planner import grid
from paceline.planner.forecast.forecast import STEEPER
from paceline.planner.forecast.predict import fewest_steps
from paceline.planner.forecast.quadratic import Modes, modes_of
from paceline.planner.grid import Candidate, among, works
from paceline.planner.measure.profile import Profile, WorkerProfile
from paceline.planner.theory.kernels import Atoms, Real
from paceline.planner.theory.responses import measured, rate_weighted
from paceline.planner.theory.workers import (
    best_fastest,
    best_threshold,
    best_workers,
    fastest_workers,
)
from paceline.policies.named import asynchronous, k_sync, local_sgd, ringmaster

_DRAWN = 64  # response times for a kernel, of all different workers together
_LEAST = 4  # of each worker
_POOLED = 128  # of all workers
_SORTED = 20_000  # seconds that are sorted for each k


def candidates(
    profile: Profile,
    by_price: bool,
    target: float,
    learning_rate: float | None = None,
    local_steps: int | None = None,
    seed: int = 0,
) -> list[Candidate]:
    """Return the grid for a profile, and then the proposals that it lacks.

    learning_rate: None for that at which fresh gradients need the fewest steps.
    local_steps: of all candidates; None for any number.
    """
    if local_steps is None:
        fixed = grid.candidates(profile, by_price, seed)
    else:
        fixed = grid.of_local_steps(profile, local_steps, by_price)
    known = {describe(each.policy) for each in fixed}
    more = target, learning_rate, local_steps, seed
    proposed = _proposals(profile, *more) if profile.size > 1 else ()
    return [
        *fixed,
        *(
            each
            for each in proposed
            if describe(each.policy) not in known and works(each.policy, profile)
        ),
    ]


def _proposals(
    profile: Profile,
    target: float,
    learning_rate: float | None,
    local_steps: int | None,
    seed: int,
) -> Iterator[Candidate]:
    yield from _waiting(profile, local_steps, seed)
    if not profile.unknown and local_steps is None:
        modes = modes_of(profile.known(), target)
        rate = _fastest_rate(profile, modes, target) if learning_rate is None else learning_rate
        yield from _stale(profile, modes, target, rate, seed)


def _waiting(profile: Profile, local_steps: int | None, seed: int) -> Iterator[Candidate]:
    """Yield the policy that waits for the best k, unless these are all: the grid has that one."""
    rng = np.random.Generator(np.random.PCG64([seed, 4]))
    workers = [*profile.workers.values()]
    share, count = profile.batch_size / profile.size, max(_SORTED // profile.size, 8)
    times = np.array([_drawn(w, count, share * (local_steps or 1), rng) for w in workers])
    ways = np.array([_way(w, profile) for w in workers])
    k = best_fastest(times.T * (local_steps or 1), ways, profile.batch_size)
    if k == profile.size:
        return
    policy = k_sync(k) if local_steps is None else local_sgd(local_steps, k)
    yield _named(policy, f"the expected time of the k fastest results is the least at k = {k}")


def _stale(
    profile: Profile, modes: Modes, target: float, rate: float, seed: int
) -> Iterator[Candidate]:
    """Yield asynchronous policies; a result is the gradient of a whole batch."""
    n, top = profile.size, profile.known().top
    different = len({str(worker) for worker in profile.workers.values()})
    count = max(_DRAWN // different, _LEAST)
    kernels = {name: _kernel(w, profile, count, seed) for name, w in profile.workers.items()}
    if any(not kernel.mean > 0 for kernel in kernels.values()):
        return
    ends = STEEPER[-1] * top, _flattest(modes, target)
    if len({*kernels.values()}) == 1:
        chosen = best_workers(next(iter(kernels.values())), rate, *ends, most=n)
    else:
        chosen = fastest_workers([*kernels.values()], rate, *ends)
    fastest = sorted(kernels, key=lambda name: kernels[name].mean)[: chosen.workers]
    fastest.sort(key=lambda name: (len(name), name))
    at = f"at lr * curvature = {rate * top:.2g} the flattest direction falls fastest"
    plain = _named(asynchronous(damping=False), f"{at} with {chosen.workers} workers")
    yield plain if chosen.workers == n else among(fastest, plain)
    threshold = best_threshold(rate_weighted([*kernels.values()], _POOLED), n, rate, *ends)
    yield _named(ringmaster(threshold + 1), f"{at} with a staleness of up to {threshold}")


def _named(policy: Policy, origin: str) -> Candidate:
    return replace(Candidate.of(policy), origin=origin)


def _fastest_rate(profile: Profile, modes: Modes, target: float) -> float:
    """Return the learning rate at which fresh gradients of whole batches need the fewest steps."""
    rates = [2 / profile.known().top / 2 ** (place / 2) for place in range(1, 33)]
    return min(rates, key=lambda rate: fewest_steps(modes, profile.batch_size, rate, target))


def _flattest(modes: Modes, target: float) -> float:
    """Return the smallest curvature whose loss must fall for the target.

    Flatter directions together have at most as much loss as is left at the target.
    """
    order = np.argsort(modes.curvature)
    loss = np.cumsum(0.5 * (modes.curvature * modes.start**2)[order])
    place = int(np.searchsorted(loss, target - modes.floor))
    return float(modes.curvature[order[min(place, order.size - 1)]])


def _kernel(worker: WorkerProfile, profile: Profile, count: int, seed: int) -> Atoms:
    """Return the kernel of a worker's response times; equal workers have equal ones."""
    rng = np.random.Generator(np.random.PCG64([seed, 5]))
    drawn = _drawn(worker, count, profile.batch_size, rng) * profile.batch_size
    values, counts = np.unique(drawn, return_counts=True)
    return measured((values + _way(worker, profile)).tolist(), weights=counts.tolist())


def _drawn(worker: WorkerProfile, count: int, samples: float, rng: np.random.Generator) -> Real:
    """Return seconds per sample, of tasks of so many samples one after the other."""
    memory, now = dict[str, float](), 0.0
    found = np.empty(count)
    for place in range(count):
        found[place] = worker.compute.sample(rng, now, memory)
        now += samples * float(found[place])
    return found


def _way(worker: WorkerProfile, profile: Profile) -> float:
    return worker.seconds(0, profile.message_bytes, profile.message_bytes)
