"""What every engine promises, on the engine of sessions: four loops in processes of their own."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import paceline as pl
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter
from paceline.report.samples import sample_fates
from tests.conftest import MOMENTUM, cross_entropy, flat, make_learner, module_of
from tests.contract.test_engines import MAX_DELAY, POLICIES, fit

pytestmark = pytest.mark.cluster

STEPS = 20
WITHOUT = {
    "coded": "parts of a batch have gradients of their own",
    "k_sync of tiles": "every process has the same data",
    "tiles that stay": "every process has the same data",
    "ringleader": "every process has the same data",
}


class Loop:
    """A process with a training loop of its own."""

    def train(self, run: str, name: str, journal: str) -> tuple[Tensor, list[float], str]:
        """Train to the end of a run; return the model, the losses of this process, and why."""
        torch.set_num_threads(1)
        learner, losses = make_learner(), list[float]()
        model = module_of(learner)
        optimizer = MOMENTUM(model.parameters())
        settings: dict[str, Any] = {"batch_size": 64, "workers": 4, "steps": STEPS}
        policy = POLICIES[name]()
        with pl.session(
            model, optimizer, policy=policy, run=run, journal=journal, **settings
        ) as session:
            data: Any = learner.open_dataset()
            loader = DataLoader(data, batch_sampler=session.batches(data))
            for _ in range(100):
                for batch in loader:
                    loss = cross_entropy(model, batch)
                    loss.backward()
                    losses.append(loss.item())
                    session.step(loss)
                if session.ended:
                    break
            return flat(model), losses, session.ended


@pytest.fixture(scope="module")
def loops(ray_workers: pl.Ray) -> Iterator[list[Any]]:
    import ray

    fit(ray_workers, pl.sync(), 1)  # begins Ray
    made = [ray.remote(Loop).options(num_cpus=0).remote() for _ in range(4)]
    yield made
    for each in made:
        ray.kill(each)


def train(loops: list[Any], name: str, folder: Path) -> tuple[list[Any], pl.Journal]:
    import ray

    journal = folder / "run.jsonl"
    given = uuid.uuid4().hex, name, str(journal)
    answers = ray.get([each.train.remote(*given) for each in loops], timeout=120)
    return answers, pl.Journal.load(journal)


SOON = ("sync", "k_sync", "ringmaster")
NAMES = [
    name if name in SOON else pytest.param(name, marks=pytest.mark.long)
    for name in POLICIES
    if name not in WITHOUT
]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_trains_replays_and_accounts_for_every_sample(
    loops: list[Any], name: str, tmp_path: Path
) -> None:
    answers, journal = train(loops, name, tmp_path)
    models, losses, reasons = zip(*answers, strict=True)
    assert set(reasons) == {f"{STEPS} steps taken"}
    assert all(torch.equal(models[0], model) for model in models[1:])
    computed = [each for each in losses if len(each) > 2]
    assert computed and all(each[-1] < 0.95 * each[0] for each in computed)
    driven = Until(MinWorkers(4, POLICIES[name]()), steps=STEPS)
    assert pl.protocol.replay(driven, journal) == journal
    meter = Meter.begin(journal.header)
    for entry in journal:
        meter.observe(entry)
    assert max(meter.columns["staleness"]) <= MAX_DELAY.get(name, 0)
    places = Counter[int | None]()
    for stretch in sample_fates(journal):
        assert stretch.offset == places[stretch.tile]  # no gap, no overlap
        places[stretch.tile] += stretch.samples
    assert places.total() >= STEPS * 32  # growing k begins with half a batch


def test_sync_gives_the_bits_of_a_trainer(loops: list[Any], tmp_path: Path) -> None:
    answers, _ = train(loops, "sync", tmp_path)
    expected = fit(pl.Simulator(workers=4, delays=pl.delays.Fixed(1.0)), pl.sync(), STEPS)
    assert torch.equal(answers[0][0], flat(expected.model))
