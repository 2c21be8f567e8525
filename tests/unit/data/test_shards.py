"""Data in shards: their order, and how they are read."""

from __future__ import annotations

import copy
import io
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.shards import Shards, ShardStream, count, stream_of, tar_samples

LENGTHS = [30, 7, 0, 41, 22, 13, 55, 1]


class Files:
    """Opens shards of numbers, and counts what is read."""

    def __init__(self, lengths: list[int]) -> None:
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.lengths, self.opened, self.read = lengths, Counter[int](), 0

    def __call__(self, shard: int) -> Iterator[int]:
        self.opened[shard] += 1
        for place in range(self.lengths[shard]):
            self.read += 1
            yield self.starts[shard] + place


def shards_of(files: Files, **more: int) -> Shards:
    return Shards(range(len(files.lengths)), files, files.lengths, **more)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum),
    *(st.integers(1, 9), st.integers(1, 12), st.integers(1, 30), st.integers(0, 9)),
)
def test_an_epoch_has_every_sample_once(
    lengths: list[int], lanes: int, window: int, batch: int, seed: int
) -> None:
    data = Shards(range(len(lengths)), list, lengths, lanes=lanes, window=window)
    stream = ShardStream(data, seed, batch)
    for epoch in range(2):
        found = stream.indices(epoch * len(data), len(data))
        assert sorted(found.tolist()) == list(range(len(data)))
        pieces = [stream.indices(epoch * len(data) + at, 1)[0] for at in range(len(data))]
        assert pieces == found.tolist()  # any part is computed directly


def test_samples_come_by_their_number() -> None:
    data = shards_of(Files(LENGTHS), window=8)
    assert len(data) == sum(LENGTHS) and data[0] == 0
    order = stream_of(data, 0, 16).indices(0, len(data)).tolist()
    assert data.__getitems__(order) == order
    again = copy.deepcopy(data)  # as it is sent
    assert again.__getitems__(order[:20]) == order[:20]
    with pytest.raises(IndexError, match="sample 169"):
        data[sum(LENGTHS)]


def test_workers_with_the_same_shares_read_every_shard_about_once() -> None:
    """Eight workers, each with its part of every batch: together they read little twice."""
    lengths = [200] * 64
    files = [Files(lengths) for _ in range(8)]
    workers = [shards_of(each, lanes=8, window=16) for each in files]
    stream, batch = ShardStream(workers[0], 3, 64), 64
    for step in range(sum(lengths) // batch):
        for turn, worker in enumerate(workers):
            worker.__getitems__(stream.indices(step * batch + 8 * turn, 8).tolist())
    assert sum(each.read for each in files) <= 1.15 * sum(lengths)
    assert sum(sum(each.opened.values()) for each in files) <= 64 + 2 * 8


def test_a_worker_that_goes_on_reads_at_most_one_shard_of_its_lane_again() -> None:
    lengths = [200] * 64
    before, after = Files(lengths), Files(lengths)
    stream = ShardStream(shards_of(before, window=16), 3, 64)
    one, other = shards_of(before, window=16), shards_of(after, window=16)
    for step in range(60):
        one.__getitems__(stream.indices(step * 64, 8).tolist())
    other.__getitems__(stream.indices(60 * 64, 8).tolist())
    assert after.read <= 200 and sum(after.opened.values()) == 1


def test_the_order_differs_by_epoch_and_seed_and_is_shuffled() -> None:
    data = shards_of(Files([100] * 20), window=32)
    stream, size = ShardStream(data, 0, 32), 2000
    first, second = stream.indices(0, size), stream.indices(size, size)
    assert np.mean(first == second) < 0.05
    assert np.mean(first == ShardStream(data, 1, 32).indices(0, size)) < 0.05
    assert np.mean(np.diff(first) == 1) < 0.1
    plain = ShardStream(shards_of(Files([100] * 20), window=1, lanes=1), 0, 32).indices(0, size)
    assert np.mean(np.diff(plain) == 1) > 0.98  # each shard as it is


def test_a_shard_that_is_shorter_than_told() -> None:
    data = Shards(["a.txt"], lambda _: iter([1, 2]), [5])
    with pytest.raises(ValueError, match=r"'a\.txt' has fewer samples"):
        data[0]
    with pytest.raises(ValueError, match="2 shards and 1 lengths"):
        Shards(["a", "b"], list, [1])


def test_samples_are_counted() -> None:
    assert count([3, 0, 5], range) == [3, 0, 5]


def test_tar_archives(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a/1.jpg", "a/1.cls", "a/2.seg.png", "a/2.cls"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    assert list(tar_samples(path)) == [
        {"__key__": "a/1", "jpg": b"a/1.jpg", "cls": b"a/1.cls"},
        {"__key__": "a/2", "seg.png": b"a/2.seg.png", "cls": b"a/2.cls"},
    ]
