"""For torchrun scripts with DistributedDataParallel: each rank's part of a batch by its speed."""

from paceline.ddp.sampler import ProportionalSampler

__all__ = ["ProportionalSampler"]
