"""Exchange of a few numbers between the ranks, over the default process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist

Gather: TypeAlias = Callable[[Sequence[float]], list[list[float]]]
"""Takes a rank's row of numbers, and returns the rows of all ranks, in the order of ranks."""


def is_grouped() -> bool:
    """Return whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def launched() -> tuple[int, int]:
    """Return rank and number of ranks, from the process group or else from torchrun."""
    if is_grouped():
        return dist.get_rank(), dist.get_world_size()
    rank, ranks = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or ranks is None:
        return 0, 1
    if not (rank.isdecimal() and ranks.isdecimal()):
        raise ValueError(
            f"RANK={rank!r} and WORLD_SIZE={ranks!r} in the environment are not whole numbers; "
            "unset them, or start the script with torchrun"
        )
    return int(rank), int(ranks)


def all_gather(row: Sequence[float]) -> list[list[float]]:
    """Exchange rows on a device that the backend of the process group can send from."""
    backends = str(dist.get_backend_config())  # "cpu:gloo,cuda:nccl" or the like
    device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [each.tolist() for each in rows]


def agreed(gather: Gather, row: Sequence[float], about: str) -> list[list[float]]:
    """Return the rows of all ranks; refuse if the text `about` differs between ranks."""
    rows = gather([*row, crc32(about.encode())])
    others = [rank for rank, found in enumerate(rows) if found[-1] != rows[0][-1]]
    if others:
        raise RuntimeError(
            f"rank 0 and ranks {others} would split the batches differently; this rank has "
            f"{about}. Give all ranks the same dataset size, arguments, epoch and loaded state"
        )
    return [found[:-1] for found in rows]
