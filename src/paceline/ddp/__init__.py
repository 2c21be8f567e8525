"""Tools for DistributedDataParallel scripts: batch shares by speed, and gradient compression."""

from paceline.ddp.hooks import CodecHook, TriggeredHook
from paceline.ddp.sampler import ProportionalSampler

__all__ = ["CodecHook", "ProportionalSampler", "TriggeredHook"]
