"""Training with loader processes, and on data in shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.protocol import Joined, Left
from paceline.data.shards import Shards, ShardStream
from paceline.delays import Exponential
from tests.conftest import flat

SGD = partial(torch.optim.SGD, lr=0.05)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise of torch and of numpy to every sample."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor([index / 120, 1.0]) + 0.1 * torch.randn(2)
        return value + 0.1 * float(np.random.rand()), value[:1].clone()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))


def squared(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def fitted(policy: Policy, data: Any, workers: int = 3, **more: Any) -> pl.Run:
    learner = pl.TorchLearner(network(), squared, SGD, data, 24, **more)
    engine = pl.Simulator(workers=workers, delays=Exponential(1.0))
    return pl.Trainer(learner, policy, engine, progress=False).fit(steps=8)


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        (pl.sync(), {}),
        (pl.k_sync(2), {"micro_batch": 5}),
        (pl.coded(1), {}),
        (pl.local_sgd(3), {"outer": partial(torch.optim.SGD, lr=1.0), "micro_batch": 4}),
    ],
)
def test_loader_processes_change_no_bit(policy: Policy, more: dict[str, Any]) -> None:
    own, loaded = (fitted(policy, Augmented(), num_workers=n, **more) for n in (0, 2))
    assert torch.equal(flat(own.model), flat(loaded.model))
    assert not torch.equal(flat(own.model), flat(network()))


def test_numbers_that_no_loader_has() -> None:
    with pytest.raises(ValueError, match="num_workers=-1"):
        pl.TorchLearner(network(), squared, SGD, Augmented(), 24, num_workers=-1)


# --- shards --------------------------------------------------------------------------------------


def opened(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
    for place in range(20 + shard):
        yield torch.tensor([shard / 10, place / 20]), torch.tensor([float(shard)])


LENGTHS = [20 + shard for shard in range(10)]


def shards() -> Shards:
    return Shards(range(10), opened, LENGTHS, lanes=4, window=6)


def test_training_on_shards_uses_every_sample_once_an_epoch(tmp_path: Path) -> None:
    """Of eight workers three are lost and come back; the driver begins anew in between."""
    data = shards()
    learner = pl.TorchLearner(network(), squared, SGD, shards, 24)
    schedule: list[tuple[float, Joined | Left]] = []
    for worker, at in (("w1", 2.5), ("w4", 3.1), ("w6", 4.7)):
        schedule += [(at, Left(worker)), (at + 6.0, Joined(worker))]

    def trainer() -> pl.Trainer:
        return pl.Trainer(
            learner,
            pl.sync(),
            pl.Simulator(workers=8, delays=Exponential(1.0), schedule=schedule),
            progress=False,
            checkpoints=pl.Checkpoints(tmp_path, every=3),
        )

    first = trainer().fit(steps=7)
    second = trainer().resume(tmp_path).fit(steps=22)
    events = [type(entry.event) for run in (first, second) for entry in run.journal]
    assert events.count(Left) >= 3 and events.count(Joined) >= 11
    stream, used = ShardStream(data, 0, 24), list[int]()
    fates = [*first.samples(), *second.samples()]
    for each in fates:
        if each.fate == "used":
            used += stream.indices(each.offset, each.samples).tolist()
    epoch = len(data)
    assert len(used) >= 2 * epoch
    offsets = sorted(
        offset
        for each in fates
        if each.fate == "used"
        for offset in range(each.offset, each.offset + each.samples)
    )
    assert offsets == list(range(len(offsets)))
    for number in range(2):
        part = [stream.indices(at, 1)[0] for at in offsets[number * epoch : (number + 1) * epoch]]
        assert sorted(part) == list(range(epoch))


def test_what_shards_cannot_do() -> None:
    class Streaming(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ValueError, match=r"data\.shards\.Shards"):
        pl.TorchLearner(network(), squared, SGD, Streaming(), 24)
    tiles = pl.partition.Partition(np.arange(sum(LENGTHS)) % 3)
    placed = pl.policies.Gather(placement=pl.policies.Placed(tiles))
    with pytest.raises(ValueError, match="read in their own order"):
        fitted(placed, shards())


def test_a_streaming_dataset_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")

    def rows(numbers: list[int]) -> Iterator[dict[str, int]]:
        for number in numbers:
            for place in range(5):
                yield {"id": 5 * number + place}

    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": [*range(6)]})
    data = Shards.from_datasets(stream, [5] * 6, window=2)
    order = ShardStream(data, 0, 8).indices(0, 30).tolist()
    assert [row["id"] for row in data.__getitems__(order)] == order
