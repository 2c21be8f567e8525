"""DistributedDataParallel on gloo over the samples that Paceline's sync would draw.

Run once per rank: python ddp_reference.py RANK RANKS STEPS RENDEZVOUS_FILE OUT
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from paceline.data.sampling import Stream
from tests.conftest import MOMENTUM, cross_entropy, flat, make_learner


def main(rank: int, ranks: int, steps: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{rendezvous}", patience, ranks, rank)
    learner = make_learner()
    assert isinstance(learner.dataset, TensorDataset)
    inputs, labels = learner.dataset.tensors
    model = DistributedDataParallel(learner.model)
    optimizer = MOMENTUM(model.parameters())
    stream = Stream(len(labels), seed=0)
    share = learner.batch_size // ranks
    for step in range(steps):
        chosen = torch.from_numpy(stream.indices((step * ranks + rank) * share, share))
        optimizer.zero_grad()
        cross_entropy(model, [inputs[chosen], labels[chosen]]).backward()
        optimizer.step()
    if rank == 0:
        torch.save(flat(model.module), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, steps = map(int, sys.argv[1:4])
    main(rank, ranks, steps, *sys.argv[4:])
