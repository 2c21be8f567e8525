"""Settings that decentralized training cannot be combined with, each refused with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.policy import Policy
from paceline.core.state import describe
from paceline.gossip.node import tensors_of
from paceline.gossip.policy import Gossip
from paceline.learners.base import Learner
from paceline.policies.placement.tiles import Placed

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


def check_gossip(policy: Policy, learner: Learner, codec: Codec | None) -> Gossip:
    """Refuse a wrapped policy, a learner with an outer step, and an unsuitable codec."""
    if not isinstance(policy, Gossip):
        raise ValueError(
            "give the Gossip policy itself, not inside another policy; fit(steps=…, seconds=…) "
            "ends the run"
        )
    if getattr(learner, "outer", None) is not None:
        raise ValueError(
            "a decentralized run has no outer step: leave outer= out, and use "
            "Gossip(local_steps=…) for steps between messages"
        )
    if codec is not None:
        from paceline.codecs.downlink import check_memoryless
        from paceline.codecs.lazy import check_partial
        from paceline.gossip.messages import sizes_in

        check_memoryless(codec, "codec")
        sizes = sizes_in(codec)
        if sizes is None or sizes != tensors_of(learner.server().layout):
            check_partial(codec, policy.trigger)
    return policy


def check_gossip_settings(
    policy: Gossip,
    *,
    placement: object,
    model_codec: object,
    checkpoints: object,
    robust: object,
    on_not_finite: str,
    all_join: bool,
) -> None:
    """Refuse settings that need a central coordinator.

    all_join: whether the run waits for all workers before it begins.
    """
    if placement is not None and not (isinstance(placement, Placed) and not placement.move):
        raise ValueError(
            "in a decentralized run data stay with the nodes: use placement=Placed(tiles, "
            "move=False) with one data shard for each node, or leave placement= out for equal "
            "shards"
        )
    if model_codec is not None:
        raise ValueError(
            "model_codec= needs a central coordinator: nodes send models to neighbors only, and "
            "codec= encodes these messages"
        )
    if getattr(checkpoints, "is_remote", False):
        raise ValueError(
            "checkpoints of a decentralized run are written to a folder, not to a store yet; use "
            "Checkpoints(folder), and copy the folder to the store"
        )
    if not all_join:
        raise ValueError("all nodes of a decentralized run start together: leave min_workers= out")
    if robust is not None:
        raise ValueError(
            "robust= needs a central coordinator, and nodes average with their neighbors; leave "
            "it out"
        )
    if on_not_finite == "skip":
        raise ValueError(
            f'on_not_finite="skip": {describe(policy)} cannot do without the results of skipped '
            "samples; leave it out, or use a policy that averages, such as sync or k_sync"
        )
