"""Models as changes: both ends hold the same copy, whatever a worker has missed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.codecs.downlink import Downlink, moved
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


def test_resumed_it_goes_on_the_same(tmp_path: Path) -> None:
    def trainer(saves: Path | None = None) -> pl.Trainer:
        checkpoints = None if saves is None else pl.Checkpoints(saves, every=10)
        engine = pl.Simulator(4, pl.delays.Exponential(0.05), pl.delays.Link(0.01, 1e6, 1e6))
        return pl.Trainer(
            make_learner(), pl.k_async(2), engine, progress=False, checkpoints=checkpoints,
            codec=pl.codecs.Feedback(pl.codecs.TopK(0.1)), model_codec=pl.codecs.TopK(0.2),
        )  # fmt: skip

    whole = trainer().fit(steps=30)
    trainer(tmp_path).fit(steps=20)
    rest = trainer().resume(tmp_path).fit(steps=30)
    assert torch.equal(flat(rest.model), flat(whole.model))
    assert rest.seconds == whole.seconds
