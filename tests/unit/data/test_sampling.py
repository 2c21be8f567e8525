"""The stream of samples: shuffled epochs, the same for everyone who asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampling import SHARED, Stream, generator


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
        return Stream(50, seed, part).indices(0, 50).tolist()

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
    assert Stream(8, 0, part=1).indices(0, 4).tolist() == [7, 2, 5, 1]


def test_generators_differ_by_every_part_of_their_key() -> None:
    keys = [(0,), (1,), (0, SHARED), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, SHARED, 5), (0, 5, 0)]
    values = [generator(*key).random() for key in keys]
    assert len(set(values)) == len(keys) - 1  # (0,) and (0, SHARED) are one
    assert generator(3, 4).random() == generator(3, 4).random()


def test_a_stream_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="a stream needs at least one sample, got size=0"):
        Stream(0, 1)
