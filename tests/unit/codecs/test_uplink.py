"""Results on their way: cut into slices, with what is not trained behind, and given back."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.codecs.base import Codec
from paceline.codecs.uplink import Uplink, received
from paceline.learners.optimize import Rates
from tests.conftest import flat, make_learner


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.lists(st.integers(0, 60), max_size=3))
def test_slices_arrive_as_they_were_cut(size: int, trained: int, cuts: list[int]) -> None:
    trained = min(trained, size)
    ends = sorted({0, size, *(cut for cut in cuts if cut < size)})
    spans = list(pairwise(ends))
    vector = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    codec = pl.codecs.TopK(1.0)
    packed = Uplink(codec, trained).send(vector, 3, 0.1, spans)
    pieces = [received(p, codec, s, trained) for p, s in zip(packed, spans, strict=True)]
    assert np.array_equal(np.concatenate(pieces), vector)


def test_what_is_not_trained_goes_as_it_is() -> None:
    vector = np.arange(1.0, 11.0, dtype=np.float32)
    codec = pl.codecs.TopK(0.25)
    (packed,) = Uplink(codec, 8).send(vector, 0, 1.0, [(0, 10)])
    assert received(packed, codec, (0, 10), 8).tolist() == [0, 0, 0, 0, 0, 0, 7, 8, 9, 10]


def test_an_unused_message_goes_into_the_next() -> None:
    codec, first = pl.codecs.Feedback(pl.codecs.TopK(0.5)), np.array([4.0, 1.0])
    kept, lost = Uplink(codec, 2), Uplink(codec, 2)
    for uplink in (kept, lost):
        uplink.send(first, 7, 0.5, [(0, 2)])
    kept.refund([7, 99])
    zero = np.zeros(2)
    told = [received(u.send(zero, 8, 0.5, [(0, 2)])[0], codec, (0, 2), 2) for u in (kept, lost)]
    assert [each.tolist() for each in told] == [[4.0, 0.0], [0.0, 1.0]]


def test_messages_of_senders_without_a_memory_are_not_kept() -> None:
    for codec, kept in ((pl.codecs.BFloat16(), None), (pl.codecs.Feedback(pl.codecs.Int8()), 1)):
        uplink = Uplink(codec, 2)
        uplink.send(np.ones(2), 0, 1.0, [(0, 2)])
        uplink.refund([])
        ((message,),) = uplink._sent.values()
        assert (message is None) == (kept is None)


def test_a_cast_is_read_only_and_decoded_once() -> None:
    vector = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    (packed,) = Uplink(pl.codecs.BFloat16(), 1000).send(vector, 0, 1.0, [(0, 1000)])
    assert not packed.flags.writeable  # so that a process can hold it without a copy
    found = received(packed, pl.codecs.BFloat16(), (0, 1000), 1000)
    assert np.array_equal(found, torch.from_numpy(vector).bfloat16().float().numpy())


def test_cut_otherwise_memories_begin_anew() -> None:
    codec = pl.codecs.Feedback(pl.codecs.TopK(0.5))
    uplink = Uplink(codec, 4)
    uplink.send(np.array([4.0, 1.0, 2.0, 3.0]), 0, 1.0, [(0, 4)])
    two = uplink.send(np.zeros(4), 1, 1.0, [(0, 2), (2, 4)])
    spans = [(0, 2), (2, 4)]
    assert not any(received(p, codec, s, 4).any() for p, s in zip(two, spans, strict=True))


def test_a_message_of_another_cut_is_refused() -> None:
    (packed,) = Uplink(pl.codecs.TopK(1.0), 2).send(np.zeros(4), 0, 1.0, [(0, 4)])
    with pytest.raises(ValueError, match="the message has 2 values after the trained ones"):
        received(packed, pl.codecs.TopK(1.0), (0, 5), 2)


def test_rates_are_those_of_the_schedule() -> None:
    make = partial(torch.optim.SGD, lr=0.4)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    rates = Rates(make, schedule, {"weight": (3, 2)})
    assert [rates.at(version) for version in (0, 1, 2, 5, 1)] == [0.4, 0.4, 0.2, 0.1, 0.4]
    assert Rates(make, None, {"weight": (3, 2)}).at(1000) == 0.4


def trainer(codec: Codec, saves: Path | None = None) -> pl.Trainer:
    checkpoints = None if saves is None else pl.Checkpoints(saves, every=10)
    engine = pl.Simulator(4, pl.delays.Exponential(0.05), interruptible=False)
    return pl.Trainer(
        make_learner(), pl.k_async(2), engine, progress=False, codec=codec, checkpoints=checkpoints
    )


@pytest.mark.parametrize(
    "codec",
    [pl.codecs.Feedback(pl.codecs.TopK(0.1)), pl.codecs.DeepGradient(0.1, momentum=0.5)],
    ids=["EF", "DGC"],
)
def test_resumed_it_goes_on_the_same(tmp_path: Path, codec: Codec) -> None:
    """Memories are part of a simulator's checkpoint."""
    whole = trainer(codec).fit(steps=30)
    trainer(codec, tmp_path).fit(steps=20)
    rest = trainer(codec).resume(tmp_path).fit(steps=30)
    assert torch.equal(flat(rest.model), flat(whole.model))
    with pytest.raises(pl.errors.CheckpointError, match="codec was"):
        trainer(pl.codecs.BFloat16()).resume(tmp_path)


def test_feedback_is_what_makes_a_few_numbers_enough() -> None:
    def loss(codec: object) -> float:
        engine = pl.Simulator(4, pl.delays.Fixed(1.0))
        run = pl.Trainer(make_learner(), pl.sync(), engine, progress=False, codec=codec)  # type: ignore[arg-type]
        return float(run.fit(steps=80).metrics["loss"][-10:].mean())

    dense, kept, forgotten = (
        loss(None),
        loss(pl.codecs.Feedback(pl.codecs.TopK(0.05))),
        loss(pl.codecs.TopK(0.05)),
    )
    assert kept < dense + 0.03 < forgotten


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueError, match="a gradient code decodes from results as they are"):
        pl.Trainer(make_learner(), pl.coded(1), pl.Simulator(4), codec=pl.codecs.BFloat16())
    timing = pl.Trainer(
        pl.learners.TimingOnly(2, message_bytes=8),
        pl.sync(),
        pl.Simulator(2),
        progress=False,
        codec=pl.codecs.BFloat16(),
    )
    with pytest.raises(ValueError, match="TimingOnly has no values to encode"):
        timing.fit(steps=1)
