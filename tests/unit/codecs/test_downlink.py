"""Models as changes: both ends hold the same copy, whatever a worker has missed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import paceline as pl
from paceline.codecs.base import Codec, Elementwise
from paceline.codecs.downlink import (
    Downlink,
    Values,
    downlink,
    moved,
    opened,
    rounded,
    rounded_bytes,
)
from tests.conftest import flat, make_learner


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from([0.05, 0.3, 1.0]))
def test_a_worker_that_misses_versions_has_the_same_copy(takes: list[bool], part: float) -> None:
    codec, random = pl.codecs.TopK(part), np.random.default_rng(0)
    vector = random.standard_normal(40).astype(np.float32)
    downlink = Downlink(codec, vector, trained=36)
    mine, known = None, None
    for version, taken in enumerate(takes):
        copy = downlink.publish(version, vector)
        assert downlink.publish(version, vector) is copy  # once per version
        assert np.array_equal(copy[36:], vector[36:])
        if taken:
            changes = downlink.since(known, version)
            mine = np.array(copy) if changes is None else moved(mine, changes, codec, 36)  # type: ignore[arg-type]
            known = version
            assert np.array_equal(mine, copy)
        vector = vector + random.standard_normal(40).astype(np.float32)


def test_what_is_left_out_comes_later() -> None:
    vector = np.zeros(4, np.float32)
    downlink = Downlink(pl.codecs.TopK(0.25), vector, 4)
    downlink.publish(0, vector)
    vector = np.array([4.0, 3.0, 2.0, 1.0], np.float32)
    found = [downlink.publish(version, vector).tolist() for version in range(1, 5)]
    assert found == [[4, 0, 0, 0], [4, 3, 0, 0], [4, 3, 2, 0], [4, 3, 2, 1]]


def test_what_is_longer_than_the_model_is_sent_whole() -> None:
    vector = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    downlink = Downlink(pl.codecs.TopK(0.5), vector, 100)
    for version in range(10):
        downlink.publish(version, vector + version)
    assert downlink.since(None, 9) is None  # it has nothing yet
    assert downlink.since(2, 9) is None and len(downlink.since(8, 9) or []) == 1
    assert downlink.since(9, 9) == []


def test_a_memory_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="give the codec without error feedback"):
        Downlink(pl.codecs.Feedback(pl.codecs.TopK(0.1)), np.zeros(4), 4)


CASTS = [pl.codecs.BFloat16(), pl.codecs.Half()]
OTHERS = [
    *(pl.codecs.Int8(), pl.codecs.Sign(), pl.codecs.TopK(0.1), pl.codecs.RandomK(0.5)),
    *(pl.codecs.Feedback(pl.codecs.BFloat16()), pl.codecs.Lazy()),
    pl.codecs.Chain(pl.codecs.TopK(0.5), pl.codecs.BFloat16()),
]


def test_only_casts_are_elementwise() -> None:
    assert all(isinstance(codec, Elementwise) for codec in CASTS)
    assert not any(isinstance(codec, Elementwise) for codec in OTHERS)


@pytest.mark.parametrize("codec", CASTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.lists(st.integers(0, 60), max_size=3))
def test_a_rounded_model_is_the_same_however_it_is_cut(
    codec: Elementwise, dtype: type, size: int, trained: int, cuts: list[int]
) -> None:
    trained = min(trained, size)
    ends = sorted({0, size, *(cut for cut in cuts if cut < size)})
    vector: NDArray[Any] = np.random.default_rng(0).standard_normal(size).astype(dtype)
    pieces = []
    for span in pairwise(ends):
        packed = rounded(codec, vector[slice(*span)], span, trained)
        assert packed.nbytes == rounded_bytes(codec, span, trained, vector.itemsize)
        pieces.append(opened(packed, codec, span, trained))
    found = np.concatenate(pieces)
    assert found.dtype == dtype and np.array_equal(found[trained:], vector[trained:])
    short = torch.from_numpy(vector[:trained]).to(codec.dtype).to(torch.from_numpy(vector).dtype)
    assert np.array_equal(found[:trained], short.numpy())


def test_an_elementwise_codec_keeps_nothing() -> None:
    vector = np.array([1.001, 2.0, 3.001], np.float32)
    values = downlink(pl.codecs.BFloat16(), vector, 2)
    assert isinstance(values, Values) and values.state_dict() == {}
    for version in (0, 5, 3):
        packed = values.publish(version, vector + version)
        assert packed.nbytes == values.whole_bytes
        read = opened(packed, pl.codecs.BFloat16(), (0, 3), 2)
        assert np.allclose(read, vector + version, rtol=2**-8) and read[2] == vector[2] + version
    assert isinstance(downlink(pl.codecs.Int8(), vector, 2), Downlink)


def test_the_simulator_counts_the_bytes_of_rounded_models() -> None:
    def fit(codec: pl.codecs.BFloat16 | None) -> pl.Run:
        engine = pl.Simulator(4, pl.delays.Fixed(0.1), pl.delays.Link(0.01, 1e4, 1e4))
        learner = make_learner()
        trainer = pl.Trainer(
            learner, pl.sync(), engine, progress=False, codec=codec, model_codec=codec
        )
        return trainer.fit(steps=8)

    plain, half = fit(None), fit(pl.codecs.BFloat16())
    size = plain.meter.message_bytes
    assert half.meter.down_bytes == half.meter.started * (size / 2 + 40)
    assert half.meter.up_bytes == 4 * 8 * (size / 2 + 40)
    assert half.seconds < 0.7 * plain.seconds
    assert torch.allclose(flat(half.model), flat(plain.model), atol=0.02)


@pytest.mark.parametrize("down", [pl.codecs.TopK(0.2), pl.codecs.BFloat16()])
def test_resumed_it_goes_on_the_same(tmp_path: Path, down: Codec) -> None:
    def trainer(saves: Path | None = None) -> pl.Trainer:
        checkpoints = None if saves is None else pl.Checkpoints(saves, every=10)
        engine = pl.Simulator(4, pl.delays.Exponential(0.05), pl.delays.Link(0.01, 1e6, 1e6))
        return pl.Trainer(
            make_learner(), pl.k_async(2), engine, progress=False, checkpoints=checkpoints,
            codec=pl.codecs.Feedback(pl.codecs.TopK(0.1)), model_codec=down,
        )  # fmt: skip

    whole = trainer().fit(steps=30)
    trainer(tmp_path).fit(steps=20)
    rest = trainer().resume(tmp_path).fit(steps=30)
    assert torch.equal(flat(rest.model), flat(whole.model))
    assert rest.seconds == whole.seconds
