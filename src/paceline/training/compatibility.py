"""Checks that the parts of a run fit together: policy, learner, engine, prices and the rest.

A combination that cannot work raises before anything starts; the error says what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from paceline.core.logs import logger_of
from paceline.core.policy import Policy, Wrapper
from paceline.core.protocol import Prices, Work, WorkerId, some_names
from paceline.data.partition.base import Partition
from paceline.engines.kinds import Fleet
from paceline.learners.base import Learner
from paceline.learners.robust import Robust
from paceline.policies.gather import Gather
from paceline.policies.named import written
from paceline.policies.placement.base import BySpeed, Placement, check_known
from paceline.policies.placement.tiles import Placed
from paceline.policies.selection.selectors import Allocate
from paceline.policies.wrappers import OnlyWorkers

if TYPE_CHECKING:  # needs torch
    from paceline.codecs.base import Codec

logger = logger_of(__name__)


def check_arguments(learner: object, policy: object, engine: object) -> None:
    """Refuse arguments of wrong types, such as arguments in the wrong order."""
    right = (
        hasattr(learner, "replica") and hasattr(learner, "batch_size"),
        isinstance(policy, str | Policy) or _is_plan(policy),
        hasattr(engine, "next_event") and hasattr(engine, "size"),
    )
    given = learner, policy, engine
    if all(right) and not any(isinstance(each, type) for each in given):
        return
    told = ", ".join(getattr(each, "__name__", type(each).__name__) for each in given)
    raise ValueError(
        f"Trainer({told}): give a learner such as pl.TorchLearner(…), a policy such as pl.sync(), "
        "and an engine such as pl.Simulator(4) or pl.Ray(4), in this order and each made by a "
        "call; a policy of your own derives from paceline.protocol.Policy"
    )


def _is_plan(given: object) -> bool:
    from paceline.planner.choose import Plan  # needs scipy

    return isinstance(given, Plan)


def check_policy(policy: Policy, learner: Learner, workers: Sequence[WorkerId]) -> None:
    """Refuse a policy that this learner, or these workers, cannot serve."""
    policy.check(workers, learner.batch_size)
    for work in policy.works():
        learner.check(work)


def with_placement(policy: Policy, placement: object, workers: Sequence[WorkerId]) -> Policy:
    """Return the policy with its tasks sized and placed for these workers."""
    if isinstance(placement, BySpeed | Placed):
        check_known(placement.max_samples, workers)
    if isinstance(placement, Placed):
        if placement.move and placement.tiles.parts < 4 * len(workers):
            logger.warning(
                "%d data shards (tiles) are too few for %d workers if shards move: use about 16 "
                "for each worker, or Placed(…, move=False) to size tasks by speed",
                placement.tiles.parts, len(workers),
            )  # fmt: skip
        placement = placement.for_workers(workers)
    return policy.placed(placement)


def with_limits(placement: object, fleet: Fleet) -> object:
    """Return the placement with the limits of the workers' kinds of machine."""
    limits = fleet.max_samples()
    if not limits or not isinstance(placement, BySpeed | Placed):
        return placement
    own = placement.max_samples
    if own is not None and not isinstance(own, Mapping):
        own = dict.fromkeys(fleet.workers, own)
    for worker, limit in (own or {}).items():
        limits[worker] = min(limit, limits.get(worker, limit))
    return replace(placement, max_samples=limits)


def check_limits(policy: Policy, learner: Learner, fleet: Fleet, least: int) -> None:
    """Refuse a kind of machine whose memory is too small for the tasks of a policy.

    least: the number of workers that training begins with.
    """
    limits, used = fleet.max_samples(), policy
    while isinstance(used, Wrapper):
        if isinstance(used, OnlyWorkers):
            limits = {worker: limits[worker] for worker in used.workers if worker in limits}
        used = used.inner
    if not limits or isinstance(policy.placement, BySpeed | Placed):
        return
    largest = learner.batch_size  # a policy that sizes tasks itself may give it all to one worker
    if isinstance(used, Gather) and not isinstance(used.select, Allocate):
        own = used.work.samples if isinstance(used.work, Work) else None
        largest = own or ceil(learner.batch_size / policy.results_per_step(least))
    elif policy.decentralized:
        largest = ceil(learner.batch_size / least)
    if small := [worker for worker, limit in limits.items() if limit < largest]:
        kind = fleet.kinds[small[0]]
        raise ValueError(
            f"Kind {kind.name} has max_samples={kind.max_samples}, and {written(used)} gives a "
            f"worker up to {largest} samples; use placement=BySpeed(), with a policy such as "
            "sync or k_sync, or a smaller batch"
        )


def check_robust(robust: Robust, policy: Policy, workers: int) -> None:
    """Refuse a robust mean that needs more results in a step than the policy is known to have."""
    if policy.needs_exact_results:
        raise ValueError(
            "a gradient code decodes from all results together; use coded(…, verify=1) to find "
            "wrong ones, or robust= with a policy that averages"
        )
    robust.check(policy.results_per_step(workers))


def check_not_finite(what: str, limit: int, policy: Policy) -> None:
    """Refuse to skip results if the policy's steps need all of them."""
    if what not in ("stop", "skip"):
        raise ValueError(
            f'on_not_finite={what!r}: use "stop" to end the run, or "skip" to continue without '
            "the samples of such a result"
        )
    if limit < 1:
        raise ValueError(
            f'skip_limit={limit}: use at least 1, or on_not_finite="stop" to skip none'
        )
    if what == "skip" and policy.needs_exact_results:
        raise ValueError(
            f'on_not_finite="skip": {written(policy.innermost)} cannot do without the results of '
            "skipped samples; leave it out, or use a policy that averages, such as sync or k_sync"
        )


def check_scaling(policy: Policy, learner: Learner, codec: Codec | None) -> None:
    """Refuse to scale the learning rate where workers use it too: they know its schedule only."""
    told = "Evaluate(plateau=…) and progress.scale_lr change the learning rate of servers only"
    if policy.decentralized:
        raise ValueError(f"{told}, and a decentralized run has none; leave it out")
    if getattr(learner, "outer", None) is not None or any(w.steps > 1 for w in policy.works()):
        raise ValueError(f"{told}, and local steps use that of workers; leave it out")
    if codec is not None:
        from paceline.codecs.downlink import has_memory

        if has_memory(codec):
            raise ValueError(
                f"{told}, and error feedback uses that of workers; give a codec without it"
            )


def tiles_of(placement: object, learner: Learner) -> Partition | None:
    """Return the tiles (data shards) of placed data; refuse tiles of another dataset."""
    tiles = placement.tiles if isinstance(placement, Placement) else None
    if tiles is not None and len(tiles) != learner.examples:
        raise ValueError(
            f"the data shards (tiles) have {len(tiles)} samples together, and this learner has "
            f"{'no dataset' if learner.examples is None else f'{learner.examples} samples'}; "
            "partition the dataset that you train on"
        )
    return tiles


def check_prices(
    prices: Prices, policy: Policy, learner: Learner, workers: Sequence[WorkerId]
) -> None:
    """Refuse prices that leave out a worker, and policies that need other prices."""
    policy.check_prices(prices, learner.message_bytes)
    for name in ("per_hour", "per_gigabyte"):
        given = getattr(prices, name)
        if not isinstance(given, Mapping):
            continue
        if missing := [worker for worker in workers if worker not in given]:
            raise ValueError(
                f"prices: {name} names no price for {some_names(missing)}; this engine has the "
                f"{len(workers)} workers {some_names(workers)}: name each of them, or give one "
                "number for all"
            )
