"""What a plan is chosen from: policies with their knobs, who takes part, and codecs.

With n workers, of whom m are the quickest, or the cheapest per sample if money is to be saved:

    sync()
    k_sync(k), bandit(k)                     k = n - 1, 3/4 n, 1/2 n
    Gather(placement=BySpeed())
    both with all, among m                   m = n - 1, 3/4 n, 1/2 n, 1/4 n, 1, and before a gap
    ata(n)
    rennala(B)                               B = 1/2 n, n, 2 n
    ringmaster(R), asynchronous()            R = 1/2 n, n, 2 n, 4 n
    k_async(k)                               k = 1/4 n, 1/2 n
    local_sgd(H), and among m                H = 2, 4, 8, 16, if the learner can
    coded(s, m)                              if `coded.advise` finds that it pays

The simplest come first: of what is equally good, the first is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.protocol import Policy, WorkerId
from paceline.core.state import describe
from paceline.delays.compound import Scaled
from paceline.delays.models import Delay
from paceline.planner.coding import advise
from paceline.planner.profile import Profile
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
)
from paceline.policies.placement import BySpeed
from paceline.policies.wrappers import Among

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

LOCAL = 16  # local steps, at most
NAMED = 8  # workers, up to which a table names them
GAP = 1.5  # times slower than the one before: a gap


@dataclass(frozen=True, eq=False)
class Candidate:
    """A policy, as its user writes it, and the codec of its results."""

    text: str
    policy: Policy
    codec: Codec | None = None

    def __str__(self) -> str:
        return self.text if self.codec is None else f"{self.text}, codec={describe(self.codec)}"


def candidates(profile: Profile, by_price: bool = False, seed: int = 0) -> list[Candidate]:
    """Return the grid for a profile."""
    n = profile.size
    plain = Candidate("sync()", sync())
    placed = Candidate("Gather(placement=BySpeed())", replace(sync(), placement=BySpeed()))
    found = [plain]
    subsets = list(_subsets(profile, by_price))
    if n > 1:
        fewer = _sizes(n - 1, n - 1, 3 * n // 4, n // 2)
        found += [Candidate(f"k_sync({k})", k_sync(k)) for k in fewer]
        found += [Candidate(f"bandit({k})", bandit(k, seed=seed)) for k in fewer]
        found.append(placed)
    found += [_among(subset, plain) for subset in subsets]
    found += [_among(subset, placed) for subset in subsets if len(subset) > 1]
    if n > 1:
        found.append(Candidate(f"ata({n})", ata(n, seed=seed)))
        found += [Candidate(f"rennala({b})", rennala(b)) for b in _sizes(2 * n, n // 2, n, 2 * n)]
        found += [
            Candidate(f"ringmaster({r})", ringmaster(r))
            for r in _sizes(4 * n, n // 2, n, 2 * n, 4 * n)
        ]
        found.append(Candidate("asynchronous()", asynchronous()))
        found += [Candidate(f"k_async({k})", k_async(k)) for k in _sizes(n, n // 4, n // 2)]
    for steps in (2, 4, 8, LOCAL) if profile.local_steps else ():
        each = Candidate(f"local_sgd({steps})", local_sgd(steps))
        found.append(each)
        found += [_among(subset, each) for subset in subsets if steps in (4, LOCAL)]
    if (coded := _coded(profile, seed)) is not None:
        found.append(coded)
    return [each for each in found if _works(each.policy, profile)]


def codecs() -> list[Codec]:
    """Return the codecs that are tried where messages take long."""
    from paceline.codecs.feedback import Feedback
    from paceline.codecs.quantize import BFloat16, Int8
    from paceline.codecs.sparse import TopK

    return [BFloat16(), Int8(), Feedback(TopK(0.1))]


def messages_share(profile: Profile) -> float:
    """Return which part of a step's time the quicker half of workers spends on results' way up."""
    share, size = profile.batch_size / profile.size, profile.message_bytes
    parts = sorted(
        size / worker.link.up / worker.seconds(share, size, size)
        for worker in profile.workers.values()
        if worker.seconds(share, size, size) > 0
    )
    return parts[len(parts) // 2] if parts else 0.0


def _subsets(profile: Profile, by_price: bool) -> Iterator[tuple[WorkerId, ...]]:
    """Yield groups of the best workers, the largest first."""
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


def _among(workers: Sequence[WorkerId], each: Candidate) -> Candidate:
    named = ", ".join(repr(name) for name in workers[:NAMED])
    named += f", … {len(workers)} in all" if len(workers) > NAMED else ""
    return Candidate(f"Among([{named}], {each.text})", Among(workers, each.policy))


def _coded(profile: Profile, seed: int) -> Candidate | None:
    if not profile.codes or not 3 <= profile.size <= 64:  # beyond, codes take long to try
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


def _works(policy: Policy, profile: Profile) -> bool:
    try:
        if check := getattr(policy, "check", None):
            check(profile.size, profile.batch_size)
    except ValueError:  # a share of the batch would be less than a sample
        return False
    return True


def _sizes(most: int, *numbers: int) -> list[int]:
    """Return the numbers from 1 to `most`, each once, the largest first."""
    return sorted({number for number in numbers if 1 <= number <= most}, reverse=True)
