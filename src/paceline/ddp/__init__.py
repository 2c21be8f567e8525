"""For torchrun scripts with DistributedDataParallel: shares by speed, and what is sent."""

from paceline.ddp.hooks import CodecHook, TriggeredHook
from paceline.ddp.sampler import ProportionalSampler

__all__ = ["CodecHook", "ProportionalSampler", "TriggeredHook"]
