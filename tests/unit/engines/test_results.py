"""The reducer that the simulator and the driver on Ray share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.codecs.uplink import Uplink
from paceline.core.protocol import Task
from paceline.engines.results import Refused, Results
from paceline.learners.base import Outcome
from tests.conftest import vector_of


def results(**more: Any) -> Results:
    return Results(pl.learners.Quadratic((1.0, 2.0), lr=0.5).server(), frozenset(), **more)


def test_a_step_weighs_what_is_held_and_forgets_it() -> None:
    held = results()
    held.hold(3, np.array([1.0, 0.0]), {"loss": 2.0})
    held.hold(4, np.array([0.0, 1.0]), {"loss": 4.0})
    before = held.publish().copy()
    assert held.step({3: 0.5, 4: 0.5}, keep=True)["loss"] == 3.0
    assert held.version == 1
    assert (before - held.publish()).tolist() == [0.25, 0.25]
    held.step({3: 1.0}, keep=False)
    with pytest.raises(RuntimeError, match=r"results of tasks \[3\] are missing"):
        held.step({3: 1.0}, keep=False)
    held.drop(4)
    held.drop(4)


def test_messages_are_decoded_and_damaged_ones_refused() -> None:
    held = results(codec=pl.codecs.TopK(0.5))
    packed = Uplink(pl.codecs.TopK(0.5), 2).send(np.array([3.0, 1.0]), 0, 1.0, [(0, 2)])[0]
    vector = held.read("w0", packed)
    assert vector is not None and vector.tolist() == [3.0, 0.0]
    assert held.read("w0", packed, wanted=False) is None  # later messages do not build on it
    with pytest.raises(Refused, match="its message cannot be read"):
        held.read("w0", packed[:-1])


def test_a_two_ended_codec_has_every_message_read() -> None:
    codec = pl.codecs.Lazy()
    held, uplink = results(codec=codec), Uplink(codec, 2)
    first, second = (
        uplink.send(np.array([v, v]), i, 1.0, [(0, 2)])[0] for i, v in ((0, 1.0), (1, 3.0))
    )
    assert held.read("w0", first, wanted=False) is not None
    vector = held.read("w0", second)
    assert vector is not None and vector.tolist() == [3.0, 3.0]
    with pytest.raises(
        Refused, match="arrived after"
    ):  # another life begins with the first message
        held.read("w0", first)
    held.forget("w0")
    assert held.read("w0", first) is not None


def test_the_public_copy_is_what_workers_get() -> None:
    held = results(model_codec=pl.codecs.TopK(0.5))
    begun = held.publish().copy()
    held.hold(0, np.array([1.0, 4.0]), {})
    held.step({0: 1.0}, keep=False)
    assert (begun - held.publish()).tolist() == [0.0, 2.0]  # the larger change of two
    assert len(held.changes(0, 1) or ()) == 1
    assert held.changes(None, 1) is None


def test_a_rounded_model_is_sent_as_its_message() -> None:
    held = results(model_codec=pl.codecs.BFloat16())
    sent = held.publish()
    assert sent.dtype == np.uint8 and sent.nbytes == held.whole_bytes
    assert held.changes(0, 1) is None and held.opened(sent).tolist() == [1.0, 1.0]
    held.hold(0, np.array([2e-3, 1.0]), {})
    held.step({0: 1.0}, keep=False)
    assert held.opened(held.publish()).tolist() == [1.0, 0.5]  # 0.999 is rounded to 1
    assert results().whole_bytes is None


class Wrong(pl.learners.Quadratic):
    """Computes vectors of a wrong shape."""

    def replica(self, seed: int, tiles: Any = None) -> Any:
        class Replica:
            def compute(self, model: Any, task: Task, proceed: Any) -> Outcome:
                return Outcome(np.zeros(5), task.samples, {"loss": 1.0})

        return Replica()


def test_the_simulator_checks_results() -> None:
    trainer = pl.Trainer(Wrong((1.0, 1.0)), pl.sync(), pl.Simulator(2), progress=False)
    with pytest.raises(RuntimeError, match=r"wrong result .* shape \(5,\) instead of \(2,\)"):
        trainer.fit(steps=1)


class Jumping(pl.learners.Quadratic):
    """Has a gradient that is a million times as large from the eighth step on."""

    def replica(self, seed: int, tiles: Any = None) -> Any:
        whole = super().replica(seed, tiles)

        class Replica:
            def compute(self, model: Any, task: Task, proceed: Any) -> Outcome:
                found = whole.compute(model, task, proceed)
                factor = 1e6 if task.version >= 8 else 1.0
                return Outcome(factor * vector_of(found), found.samples, found.stats)

        return Replica()


def test_a_large_result_counts_in_the_simulator() -> None:
    """Another worker would compute the same, so that no worker is at fault."""
    learner = Jumping((1.0,), lr=1e-9, batch_size=2)
    trainer = pl.Trainer(learner, pl.sync(), pl.Simulator(2), progress=False)
    assert trainer.fit(steps=12).steps == 12
