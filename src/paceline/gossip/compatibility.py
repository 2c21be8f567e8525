"""Settings that decentralized training cannot be combined with, each refused with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.policy import Policy
from paceline.core.state import describe
from paceline.gossip.policy import Gossip
from paceline.learners.base import Learner
from paceline.policies.placement.tiles import Placed

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


def check_gossip(policy: Policy, learner: Learner, codec: Codec | None) -> Gossip:
    """Refuse a wrapped policy, a learner with an outer step, and an unsuitable codec."""
    if not isinstance(policy, Gossip):
        raise ValueError("give Gossip as it is: fit(…) says when to end")
    if getattr(learner, "outer", None) is not None:
        raise ValueError(
            "a decentralized run has no outer step: leave outer= out, and use "
            "Gossip(local_steps=…) for steps between messages"
        )
    if codec is not None:
        from paceline.codecs.downlink import check_memoryless
        from paceline.codecs.lazy import check_partial

        check_memoryless(codec, "codec")
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
            "move=False) with a tile for each, or leave it out for equal ones"
        )
    if model_codec is not None:
        raise ValueError("nodes send their models to neighbors alone: codec= encodes those")
    if checkpoints is not None:
        raise ValueError(
            "a decentralized run has no checkpoints yet; save run.model when it has ended, or "
            "progress.model() in a callback"
        )
    if not all_join:
        raise ValueError("all nodes of a decentralized run begin together: leave min_workers out")
    if robust is not None:
        raise ValueError("robust= needs a central coordinator; nodes average with their neighbors")
    if on_not_finite == "skip":
        raise ValueError(
            f'on_not_finite="skip": {describe(policy)} needs the results of given samples; leave '
            "it out, or use a policy that averages, such as sync or k_sync"
        )
