"""The candidates of a plan: policies with their settings, subsets of workers, and codecs.

With n workers, of which m are the fastest, or the cheapest per sample if dollars are minimized:

    sync()
    k_sync(k), bandit(k)                     k = n - 1, 3/4 n, 1/2 n
    sync(), placement=BySpeed()
    sync() and BySpeed() among m             m = n - 1, 3/4 n, 1/2 n, 1/4 n, 1, and before a gap
    ata(n)
    rennala(B)                               B = 1/2 n, n, 2 n
    ringmaster(R), asynchronous()            R = 1/2 n, n, 2 n, 4 n
    k_async(k)                               k = 1/4 n, 1/2 n
    local_sgd(H), and among m                H = 2, 4, 8, 16, if the learner can
    coded(s, m)                              if `coded.advise` finds that it pays

The simplest come first: the planner takes the first of equally good candidates. This grid is the
same for every loss and learning rate; `proposals` adds the candidates that theory names for them.

If the number of local steps H is given, as with an inner optimizer whose state is kept:

    local_sgd(H), and among m                with equal shares, and by speed
    local_sgd(H, k)                          k = n - 1, 3/4 n, 1/2 n
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.policy import Policy
from paceline.core.protocol import WorkerId
from paceline.core.state import describe
from paceline.delays.compound import Scaled
from paceline.delays.models import Delay
from paceline.planner.coding import advise
from paceline.planner.measure.profile import Profile
from paceline.policies.named import (
    asynchronous,
    ata,
    bandit,
    k_async,
    k_sync,
    local_sgd,
    rennala,
    ringmaster,
    sync,
    written,
)
from paceline.policies.placement.base import BySpeed
from paceline.policies.wrappers import OnlyWorkers

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

LOCAL = 16  # limit of local steps
NAMED = 8  # limit of worker names in a table
GAP = 1.5  # factor between the times of two workers in order that makes a gap


@dataclass(frozen=True, eq=False)
class Candidate:
    """A policy, its text as the user would write it, and the codec of its results.

    origin: why theory proposed it; "" for a candidate of the fixed grid.
    """

    text: str
    policy: Policy
    codec: Codec | None = None
    origin: str = ""

    @classmethod
    def of(cls, policy: Policy) -> Candidate:
        return cls(written(policy), policy)

    def __str__(self) -> str:
        return self.text if self.codec is None else f"{self.text}, codec={describe(self.codec)}"


def candidates(profile: Profile, by_price: bool = False, seed: int = 0) -> list[Candidate]:
    """Return the grid for a profile."""
    n = profile.size
    plain = Candidate.of(sync())
    placed = Candidate.of(replace(sync(), placement=BySpeed()))
    found = [plain]
    subsets = list(_subsets(profile, by_price))
    if n > 1:
        fewer = _sizes(n - 1, n - 1, 3 * n // 4, n // 2)
        found += [Candidate.of(k_sync(k)) for k in fewer]
        found += [Candidate(f"bandit({k})", bandit(k, seed=seed)) for k in fewer]
        found.append(placed)
    found += [among(subset, plain) for subset in subsets]
    found += [among(subset, placed) for subset in subsets if len(subset) > 1]
    if n > 1:
        found.append(Candidate(f"ata({n})", ata(n, seed=seed)))
        found += [Candidate.of(rennala(b)) for b in _sizes(2 * n, n // 2, n, 2 * n)]
        found += [Candidate.of(ringmaster(r)) for r in _sizes(4 * n, n // 2, n, 2 * n, 4 * n)]
        found.append(Candidate.of(asynchronous()))
        found += [Candidate.of(k_async(k)) for k in _sizes(n, n // 4, n // 2)]
    for steps in (2, 4, 8, LOCAL) if profile.local_steps else ():
        each = Candidate.of(local_sgd(steps))
        found.append(each)
        found += [among(subset, each) for subset in subsets if steps in (4, LOCAL)]
    if (coded := _coded(profile, seed)) is not None:
        found.append(coded)
    return [each for each in found if works(each.policy, profile)]


def of_local_steps(profile: Profile, steps: int, by_price: bool = False) -> list[Candidate]:
    """Return the candidates whose tasks are so many local steps."""
    n = profile.size
    plain = Candidate.of(local_sgd(steps))
    placed = Candidate.of(replace(local_sgd(steps), placement=BySpeed()))
    subsets = list(_subsets(profile, by_price))
    found = [plain]
    if n > 1:
        found += [
            Candidate.of(local_sgd(steps, k)) for k in _sizes(n - 1, n - 1, 3 * n // 4, n // 2)
        ]
        found.append(placed)
    found += [among(subset, plain) for subset in subsets]
    found += [among(subset, placed) for subset in subsets if len(subset) > 1]
    return [each for each in found if works(each.policy, profile)]


def codecs() -> list[Codec]:
    """Return the codecs to try if messages take long."""
    from paceline.codecs.feedback import Feedback
    from paceline.codecs.quantize import BFloat16, Int8
    from paceline.codecs.sparse import TopK

    return [BFloat16(), Int8(), Feedback(TopK(0.1))]


def messages_share(profile: Profile) -> float:
    """Return the share of a step's time that the median worker spends on sending its result."""
    share, size = profile.batch_size / profile.size, profile.message_bytes
    parts = sorted(
        size / worker.link.up / worker.seconds(share, size, size)
        for worker in profile.workers.values()
        if worker.seconds(share, size, size) > 0
    )
    return parts[len(parts) // 2] if parts else 0.0


def _subsets(profile: Profile, by_price: bool) -> Iterator[tuple[WorkerId, ...]]:
    """Yield subsets of the best workers, the largest first."""
    n, size, prices = profile.size, profile.message_bytes, profile.prices
    seconds = {
        name: worker.seconds(profile.batch_size / n, size, size)
        for name, worker in profile.workers.items()
    }
    ranks = [seconds]
    if by_price:
        dollars = {w: s * prices.second(w) + 2 * size * prices.byte(w) for w, s in seconds.items()}
        ranks.insert(0, dollars)
    seen = set()
    for figures in ranks:
        ordered = sorted(figures, key=lambda name: figures[name])  # ties keep their order
        gaps = [
            place
            for place in range(1, n)
            if figures[ordered[place]] > GAP * figures[ordered[place - 1]]
        ]
        for count in _sizes(n - 1, n - 1, 3 * n // 4, n // 2, n // 4, 1, *gaps):
            chosen = tuple(sorted(ordered[:count], key=lambda name: (len(name), name)))
            if chosen not in seen:
                seen.add(chosen)
                yield chosen


def among(workers: Sequence[WorkerId], each: Candidate) -> Candidate:
    """Return a candidate of some workers only."""
    named = ", ".join(repr(name) for name in workers[:NAMED])
    named += f", … {len(workers)} in all" if len(workers) > NAMED else ""
    policy, comma, placement = each.text.partition(", placement=")
    text = f"OnlyWorkers([{named}], {policy}){comma}{placement}"
    return replace(each, text=text, policy=OnlyWorkers(workers, each.policy))


def _coded(profile: Profile, seed: int) -> Candidate | None:
    if not profile.codes or not 3 <= profile.size <= 64:  # with more, codes take long to try
        return None
    share = profile.batch_size / profile.size
    delays: list[Delay] = [Scaled(w.compute, share) for w in profile.workers.values()]
    links = [worker.link for worker in profile.workers.values()]
    if all(delay.mean == 0 for delay in delays):
        return None
    advice = advise(
        delays,
        profile.size,
        message_bytes=profile.message_bytes,
        link=links,
        stragglers=range(4),
        steps=30,
        seed=seed,
    )
    return Candidate(str(advice.best), advice.best.policy) if advice.pays else None


def works(policy: Policy, profile: Profile) -> bool:
    """Return whether a policy can run on these workers with this batch."""
    try:
        policy.check([*profile.workers], profile.batch_size)
    except ValueError:  # a share of the batch would be below one sample
        return False
    return True


def _sizes(most: int, *numbers: int) -> list[int]:
    """Return the numbers from 1 to `most`, each once, the largest first."""
    return sorted({number for number in numbers if 1 <= number <= most}, reverse=True)
