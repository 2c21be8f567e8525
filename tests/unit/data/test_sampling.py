"""The stream of samples: shuffled epochs, the same for everyone who asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.protocol import SHARED, Task, Work
from paceline.data.partition.base import Partition
from paceline.data.sampling import Samples, Stream
from paceline.data.seeding import generator


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_every_epoch_is_a_permutation(size: int) -> None:
    stream = Stream(size, seed=5)
    epochs = [stream.indices(epoch * size, size).tolist() for epoch in range(6)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(size))
    if size > 2:
        assert len({tuple(epoch) for epoch in epochs}) == 6  # each shuffled anew


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 30),
    stretches=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=8),
)
def test_any_stretch_agrees_with_the_whole(size: int, stretches: list[tuple[int, int]]) -> None:
    """In any order of asking, over any number of epoch borders."""
    whole = np.concatenate([Stream(size, 3).indices(i, 1) for i in range(290)])
    stream = Stream(size, 3)
    for start, count in stretches:
        assert stream.indices(start, count).tolist() == whole[start : start + count].tolist()


def test_it_is_a_pure_function_of_seed_and_part() -> None:
    def first(seed: int, part: int = SHARED) -> list[int]:
        found: list[int] = Stream(50, seed, part).indices(0, 50).tolist()
        return found

    assert first(1) == first(1)
    assert first(1, 4) == first(1, 4)
    streams = [first(seed, part) for seed in (0, 1, 2) for part in (SHARED, 0, 1, 2)]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_it_does_not_touch_global_randomness() -> None:
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    Stream(10, 1).indices(0, 100)
    generator(1, 2, 3).random()
    assert np.random.random() == expected


def test_old_epochs_are_forgotten_and_come_again_the_same() -> None:
    stream = Stream(10, 1)
    first = stream.indices(0, 10).tolist()
    stream.indices(10, 200)
    assert len(stream._epochs) <= 3
    assert stream.indices(0, 10).tolist() == first


def test_the_samples_of_today_are_those_of_yesterday() -> None:
    """Resumed runs and journals rely on it across versions of this library."""
    assert Stream(8, 0).indices(4, 8).tolist() == [6, 7, 2, 0, 5, 7, 6, 1]
    assert Stream(8, 0, tile=1).indices(0, 4).tolist() == [7, 2, 5, 1]


def test_generators_differ_by_every_part_of_their_key() -> None:
    keys = [(0,), (1,), (0, SHARED), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, SHARED, 5), (0, 5, 0)]
    values = [generator(*key).random() for key in keys]
    assert len(set(values)) == len(keys) - 1  # (0,) and (0, SHARED) are one
    assert generator(3, 4).random() == generator(3, 4).random()


def test_a_stream_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="a stream needs at least one sample, got size=0"):
        Stream(0, 1)


TILES = Partition([0, 1, 1, 0, 2, 1, 0, 1])


def task(tiled: tuple[int, ...] = (), offset: int = 0, samples: int = 4, **work: object) -> Task:
    return Task(0, "w0", Work(**work), 0, 0.0, samples, offset, 1, tiled)  # type: ignore[arg-type]


def test_a_tiles_epochs_are_permutations_of_its_own_samples() -> None:
    samples = Samples(Stream(8, 5), 5, TILES)
    drawn = [int(samples.of(task((i,), samples=1, tiles={1: 1}))[0]) for i in range(12)]
    for epoch in range(3):
        assert sorted(drawn[4 * epoch : 4 * epoch + 4]) == [1, 2, 5, 7]
    assert samples.of(task((2,), samples=6, tiles={1: 6})).tolist() == drawn[2:8]


def test_local_steps_go_on_in_each_tile() -> None:
    samples = Samples(Stream(8, 5), 5, TILES)
    both = task((0, 1), samples=3, tiles={0: 1, 1: 2}, steps=2)
    first, second = samples.of(both), samples.of(both, step=1)
    alone = [samples.of(task((d,), samples=n, tiles={t: n})).tolist()
             for t, d, n in ((0, 0, 1), (1, 1, 2), (0, 1, 1), (1, 3, 2))]  # fmt: skip
    assert sorted(first) == sorted(alone[0] + alone[1])
    assert sorted(second) == sorted(alone[2] + alone[3])


def test_any_beginning_of_a_task_is_of_all_its_tiles() -> None:
    tiles = Partition([i // 50 for i in range(200)])
    drawn = Samples(Stream(200, 0), 0, tiles).of(
        task((0, 0, 0), samples=40, tiles={0: 10, 1: 20, 3: 10})
    )
    for count in (4, 8, 20, 32):
        of = np.bincount(tiles.of[drawn[:count]], minlength=4)
        assert np.all(np.abs(of - np.array([0.25, 0.5, 0, 0.25]) * count) <= 1)


def test_shared_data_are_drawn_as_ever() -> None:
    assert (
        Samples(Stream(8, 3), 3).of(task(offset=5)).tolist() == Stream(8, 3).indices(5, 4).tolist()
    )
    assert (
        Samples(Stream(8, 3), 3).of(task(offset=5), 2).tolist()
        == Stream(8, 3).indices(13, 4).tolist()
    )
    draws = [Samples(Stream(8, 3), 3).generator(each).random() for each in
             (task(offset=5), task(offset=5, samples=1), task((5,), tiles={1: 4}))]  # fmt: skip
    assert draws[0] == draws[1] == generator(3, SHARED, 5).random() != draws[2]


def test_tiles_must_be_of_the_data() -> None:
    with pytest.raises(ValueError, match="have 8 samples together, and the dataset has 9"):
        Samples(Stream(9, 0), 0, TILES)
    with pytest.raises(ValueError, match="the learner has none"):
        Samples(Stream(8, 0), 0).of(task((0,), tiles={1: 4}))
