"""A learning rate that falls when evaluations stop improving, against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import paceline as pl
from paceline.core.protocol import LrScaled, Step
from paceline.training.evaluate import Evaluate
from paceline.training.plateau import Plateau, PlateauScale
from tests.conftest import flat, make_learner


def sequences() -> list[list[float]]:
    random = Random(0)
    found = [[1.0] * 30, [1 / (i + 1) for i in range(30)], [1.0, nan, 0.5, *[nan] * 12]]
    found += [[-1.0 - 1e-5 * i for i in range(40)], [0.0] * 9]
    found += [[random.gauss(5 / (i + 1), 0.3) for i in range(60)] for _ in range(20)]
    return found


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "settings", [Plateau(), Plateau(0.1, 0, 0.05, 0.0), Plateau(0.9, 2, 1e-9, 0.1)]
)
def test_the_scale_is_that_of_torch(mode: Any, settings: Plateau) -> None:
    changes = 0
    for values in sequences():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = ReduceLROnPlateau(
            optimizer, mode, settings.factor, settings.patience, settings.threshold,
            min_lr=settings.smallest,
        )  # fmt: skip
        mine = PlateauScale(settings, mode)
        for value in values:
            changes += mine.evaluate(value)
            theirs.step(value)
            assert mine.scale == optimizer.param_groups[0]["lr"]
    assert changes > 20


def trainer(
    evaluate: Evaluate, place: Path | None = None, every: int = 1000, **more: Any
) -> pl.Trainer:
    engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
    saves = None if place is None else pl.Checkpoints(place, every=every)
    options: dict[str, Any] = {"progress": False, "callbacks": [evaluate], "checkpoints": saves}
    return pl.Trainer(replace(make_learner(), **more), pl.sync(), engine, **options)


def worse(plateau: Plateau, **more: Any) -> Evaluate:
    """Evaluate at every second step, always with the same value."""
    return Evaluate(lambda model: 1.0, every=2, plateau=plateau, **more)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def test_the_journal_has_every_change() -> None:
    run = trainer(worse(Plateau(0.5, 1))).fit(steps=12)
    scaled = [entry.event for entry in run.journal if isinstance(entry.event, LrScaled)]
    assert [each.scale for each in scaled] == [0.5, 0.25]
    assert scaled[0].reason == "evaluation is on a plateau"
    steps = [c for entry in run.journal for c in entry.commands if isinstance(c, Step)]
    assert [each.lr_scale for each in steps] == [1.0] * 6 + [0.5] * 4 + [0.25] * 2
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_a_schedule_with_these_factors(name: str) -> None:
    """The same run with the factors in the learner's own schedule."""
    make = OPTIMIZERS[name]

    def factor(step: int) -> float:
        return 0.97**step * (1.0 if step < 6 else 0.5 if step < 10 else 0.25)

    schedules: list[Callable[[Any], Any]] = [
        partial(ExponentialLR, gamma=0.97),
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor),
    ]
    found = trainer(worse(Plateau(0.5, 1)), optimizer=make, scheduler=schedules[0]).fit(steps=12)
    other = trainer(Evaluate(lambda m: 1.0), optimizer=make, scheduler=schedules[1]).fit(steps=12)
    plain = trainer(Evaluate(lambda m: 1.0), optimizer=make, scheduler=schedules[0]).fit(steps=12)
    assert torch.allclose(flat(found.model), flat(other.model), atol=1e-6)
    assert not torch.allclose(flat(found.model), flat(plain.model), atol=1e-4)


def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Path) -> None:
    whole = trainer(worse(Plateau(0.5, 1)), tmp_path / "whole").fit(steps=20)
    trainer(worse(Plateau(0.5, 1)), tmp_path / "parts").fit(steps=11)
    resumed = trainer(worse(Plateau(0.5, 1))).resume(tmp_path / "parts").fit(steps=20)
    assert flat(whole.model).tolist() == flat(resumed.model).tolist()
    assert next(iter(resumed.journal)).event == LrScaled(0.25, "resumed")
    assert pl.protocol.replay(resumed.driven_policy, resumed.journal) == resumed.journal


def test_runs_in_which_workers_use_the_learning_rate_refuse_it() -> None:
    engine, callbacks = pl.Simulator(workers=3), [worse(Plateau())]

    def refused(match: str, learner: Any, policy: Any, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            pl.Trainer(learner, policy, engine, callbacks=callbacks, progress=False, **more)

    refused("decentralized run", make_learner(), pl.gossip.Gossip(pl.gossip.ring(3)))
    sgd = partial(torch.optim.SGD, lr=1.0)
    refused("local steps", make_learner(outer=sgd), pl.local_sgd(2))
    codec = pl.codecs.Feedback(pl.codecs.TopK(0.1))
    refused("error feedback", make_learner(), pl.sync(), codec=codec)

    class Own(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            progress.scale_lr(0.5)

    policy = pl.gossip.Gossip(pl.gossip.ring(3))
    late = pl.Trainer(make_learner(), policy, engine, callbacks=[Own()], progress=False)
    with pytest.raises(ValueError, match="give the learner a schedule"):
        late.fit(steps=2)


@pytest.mark.parametrize(
    ("more", "match"),
    [({"factor": 1.0}, "factor=1.0"), ({"patience": -1}, "patience=-1"),
     ({"smallest": 0.0}, "smallest=0.0"), ({"threshold": -1.0}, "threshold=-1.0")],
)  # fmt: skip
def test_settings_that_cannot_be(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Plateau(**more)
