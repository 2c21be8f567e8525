"""What goes together: a policy with a learner, an engine, a placement, prices and the rest.

What does not is refused before anything is started, with a sentence that says what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING

from paceline.callbacks import Callback
from paceline.checkpoint import Checkpoints
from paceline.core.logs import logger_of
from paceline.core.protocol import Policy, Prices, Work
from paceline.core.state import describe
from paceline.data.partition.base import Partition
from paceline.learners.base import Learner
from paceline.learners.robust import Robust
from paceline.policies.gossip import Gossip
from paceline.policies.placed import Placed
from paceline.policies.placement import Placement
from paceline.policies.wrappers import Among

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

logger = logger_of(__name__)


def check_policy(policy: Policy, learner: Learner, workers: int) -> None:
    """Refuse what cannot work, before anything is started. Wrappers are looked into."""
    if check := getattr(policy, "check", None):
        check(workers, learner.batch_size)
    if isinstance(work := getattr(policy, "work", None), Work):
        learner.check(work)
    if inner := getattr(policy, "inner", None):
        check_policy(inner, learner, len(policy.workers) if isinstance(policy, Among) else workers)


def with_placement(policy: Policy, placement: Placement, workers: int) -> Policy:
    """Return a policy whose tasks are sized and placed so."""
    if (inner := getattr(policy, "inner", None)) is not None:
        return replace(policy, inner=with_placement(inner, placement, workers))  # type: ignore[type-var]
    if (
        isinstance(placement, type)
        or not hasattr(placement, "sizes")
        or isinstance(placement, Partition)
    ):
        raise ValueError(
            f"placement={placement!r}: give an object, pl.BySpeed() or pl.Placed(partition)"
        )
    if isinstance(placement, Placed) and placement.move and placement.tiles.parts < 4 * workers:
        logger.warning(
            "%d tiles for %d workers are too few to move about: cut the data into some 16 for "
            "each worker, or use Placed(…, move=False) to size tasks by speed",
            placement.tiles.parts, workers,
        )  # fmt: skip
    if not hasattr(policy, "placement"):
        raise ValueError(
            f"{describe(policy)} decides itself what everyone computes, and takes no placement; "
            "leave placement= out, or use a policy of Gather's, such as sync, k_sync or bandit"
        )
    if for_workers := getattr(placement, "for_workers", None):
        placement = for_workers([f"w{i}" for i in range(workers)])
    return replace(policy, placement=placement)  # type: ignore[type-var]


def check_gossip(
    policy: Policy,
    placement: Placement | None,
    down: Codec | None,
    checkpoints: Checkpoints | None,
    min_workers: int | None,
    workers: int,
) -> None:
    """Refuse what a run without a main node cannot be combined with."""
    if not isinstance(policy, Gossip):
        raise ValueError("give Gossip as it is: fit(…) says when to end")
    if placement is not None and not (isinstance(placement, Placed) and not placement.move):
        raise ValueError(
            "without a main node data stay with the nodes: use placement=Placed(tiles, move=False) "
            "with a tile for each, or leave it out for equal ones"
        )
    if down is not None:
        raise ValueError("without a main node models go nowhere but to neighbors: codec= is theirs")
    if checkpoints is not None:
        raise ValueError(
            "a run without a main node has no checkpoints yet; save run.model when it has ended, "
            "or progress.model() in a callback"
        )
    if min_workers not in (None, workers):
        raise ValueError("without a main node all nodes begin together: leave min_workers out")


def check_letters(policy: Policy, learner: Learner, codec: Codec | None) -> None:
    """Refuse what letters to peers cannot be of."""
    if getattr(learner, "outer", None) is not None:
        raise ValueError(
            "without a main node there is no outer step: leave outer= out, and use "
            "Gossip(local_steps=…) for steps between letters"
        )
    if codec is None:
        return
    from paceline.codecs.downlink import check_memoryless
    from paceline.codecs.lazy import check_partial

    check_memoryless(codec, "codec")
    assert isinstance(policy, Gossip)
    check_partial(codec, policy.trigger)


def check_robust(robust: Robust, policy: Policy, workers: int) -> None:
    """Refuse what cannot outvote the bad ones, as far as it is known."""
    inner = innermost(policy)
    if isinstance(inner, Gossip):
        raise ValueError("robust= is for a main node; without one every node averages as it can")
    if hasattr(inner, "code"):
        raise ValueError(
            "a gradient code decodes from all results together; use coded(…, verify=1) to find "
            "wrong ones, or robust= with a policy that averages"
        )
    k = getattr(inner, "k", None)
    robust.check(k if isinstance(k, int) else workers)


def tiles_of(placement: Placement | None, learner: Learner) -> Partition | None:
    """Return how placed data are cut, if they are those of the learner."""
    tiles: Partition | None = getattr(placement, "tiles", None)
    if tiles is not None and len(tiles) != learner.examples:
        raise ValueError(
            f"the tiles are of {len(tiles)} samples, and this learner has "
            f"{'no dataset' if learner.examples is None else f'{learner.examples} samples'}; "
            "cut the data that is trained on"
        )
    return tiles


def innermost(policy: Policy) -> Policy:
    """Return what wrappers are around."""
    while inner := getattr(policy, "inner", None):
        policy = inner
    return policy


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse those that cannot be told of a beginning as they are now."""
    for callback in callbacks:
        try:
            signature(callback.started).bind(None)
        except TypeError:
            raise ValueError(
                f"{type(callback).__name__}.started takes no Live: write started(self, live)"
            ) from None


def check_prices(prices: Prices, policy: Policy, learner: Learner, workers: int) -> None:
    """Refuse prices that some worker has none of, and policies that need others."""
    if check := getattr(getattr(innermost(policy), "select", None), "check_prices", None):
        check(prices, learner.message_bytes)
    for name in ("per_hour", "per_gigabyte"):
        given = getattr(prices, name)
        if not isinstance(given, Mapping):
            continue
        if missing := [f"w{i}" for i in range(workers) if f"w{i}" not in given]:
            told = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            raise ValueError(
                f"prices: {name} names no price for {told}; this engine has the {workers} workers "
                f"w0 to w{workers - 1}: name each of them, or give one number for all"
            )
