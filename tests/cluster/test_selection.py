"""Workers chosen by their pace on a real Ray: eight processes, three of them really slowed."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Cancel, Finished, Left, Start, Step, Task
from paceline.testing import SlowWorkers
from tests.conftest import cross_entropy

pytestmark = [pytest.mark.cluster, pytest.mark.timing]

WORKERS, SLOW, OTHERS = 8, ("w1", "w4", "w6"), ("w0", "w2", "w5")
# A quarter of what each would have if all computed at once; as fewer do, it is less than that.
SHARE = min(1.0, len(os.sched_getaffinity(0)) / WORKERS) / 4
BATCH = 192  # of which a third is some 25 ms of computing, against 2 ms of Ray's call
LEARNING, AFTER = 15, 100  # rounds in which anything goes, and rounds that are looked at


@pytest.fixture(scope="module")
def engine() -> Iterator[pl.Ray]:
    """Start eight workers and let each compute once, which the first time takes longer.

    The deadline is long: a slowed worker on a machine that others use may need a minute for a task.
    """
    with pl.Ray(workers=WORKERS, timeout=600) as engine:
        pl.Trainer(make_learner(), pl.sync(), engine, progress=False).fit(steps=2)
        yield engine


def make_learner(micro_batch: int | None = None) -> pl.TorchLearner:
    """Make a small CNN on random but learnable images: much computing and short messages."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(512, 1, 24, 24, generator=generator)
    labels = (images.flatten(1) @ torch.randn(24 * 24, 3, generator=generator)).argmax(dim=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten()),
            nn.Linear(32 * 8 * 8, 3),
        )
    sgd = partial(torch.optim.SGD, lr=0.02)
    data = TensorDataset(images, labels)
    return pl.TorchLearner(model, cross_entropy, sgd, data, BATCH, micro_batch=micro_batch)


def slowed(engine: pl.Ray) -> SlowWorkers:
    """Slow three of the workers from the first step on."""
    return SlowWorkers(engine, dict.fromkeys(SLOW, SHARE), period=0.05)


def train(
    engine: pl.Ray,
    policy: pl.policies.Gather,
    steps: int,
    callbacks: Sequence[pl.Callback],
    micro_batch: int | None = None,
) -> pl.Run:
    """Train, and check what holds of every run: nobody is lost, and the journal replays."""
    learner = make_learner(micro_batch)
    run = pl.Trainer(learner, policy, engine, progress=False, callbacks=callbacks).fit(steps=steps)
    assert run.steps == steps
    assert not [entry for entry in run.journal if isinstance(entry.event, Left)]
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    return run


def tasks(run: pl.Run) -> list[Task]:
    """Return all tasks that were handed out."""
    return [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]


def part(run: pl.Run, workers: Collection[str], rounds: range) -> float:
    """Return which part of the shares of some rounds was given to some workers."""
    given: Counter[bool] = Counter()
    for task in tasks(run):
        if task.version in rounds:
            given[task.worker in workers] += task.work.shares
    return given[True] / given.total()


def estimates(run: pl.Run) -> dict[str, float]:
    """Return the seconds per sample that the selector has learned by the end."""
    assert isinstance(run.policy, pl.policies.Gather) and isinstance(
        run.policy.select, pl.selection.Bandit
    )
    return run.policy.select.seconds()


@pytest.mark.parametrize(
    "index", [pl.selection.KL(), pl.selection.Thompson()], ids=lambda index: type(index).__name__
)
def test_slow_workers_get_hardly_a_task(
    engine: pl.Ray, index: pl.selection.KL | pl.selection.Thompson
) -> None:
    run = train(engine, pl.bandit(3, index=index), LEARNING + AFTER, [slowed(engine)])
    assert part(run, SLOW, range(LEARNING)) > 0.05  # each is tried, as long as nothing is known
    assert part(run, SLOW, range(LEARNING, run.steps)) < 0.05
    assert np.all(run.metrics["results"] == 3) and np.all(run.metrics["samples"] == BATCH)
    assert run.meter.wasted == 0


class Evaluating(pl.Callback):
    """Keeps the driver busy with something of its own for a second, now and then."""

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step % 10 == 0:
            weights, end = torch.randn(400, 400), time.monotonic() + 1.0
            while time.monotonic() < end:
                weights = torch.tanh(weights @ weights)


def test_nobody_is_slow_because_the_driver_was_busy(engine: pl.Ray) -> None:
    """Results that lie there meanwhile count from when they came: 11 % of tasks went astray."""
    policy = pl.bandit(3, discount=0.95, index=pl.selection.KL(shape=2))
    run = train(engine, policy, LEARNING + 60, [slowed(engine), Evaluating()])
    waited = [e.event.waited for e in run.journal if isinstance(e.event, Finished)]
    assert max(waited) > 0.5
    assert part(run, SLOW, range(LEARNING, run.steps)) < 0.05


def test_without_selection_slow_workers_get_as_many_tasks_as_others(engine: pl.Ray) -> None:
    run = train(engine, pl.k_sync(3), 40, [slowed(engine)])
    assert part(run, SLOW, range(40)) == 3 / 8
    workers = {task.id: task.worker for task in tasks(run)}
    steps = [c for e in run.journal for c in e.commands if isinstance(c, Step)]
    used = [workers[id] in SLOW for step in steps[LEARNING:] for id in step.weights]
    assert np.mean(used) < 0.05  # they are slow indeed: nearly all of it was for nothing
    assert np.all(run.metrics["results"] == 3) and np.all(run.metrics["samples"] == BATCH)


# Rounds: when others become slow; by when that is learned (2 were needed as measured, and 12 to 16
# without the discount); and how many are looked at from then on.
CHANGE, RECOVERY, WINDOW = 60, 8, 40


class Change(pl.Callback):
    """Slows other workers from a step on, and frees those that were slow."""

    def __init__(self, slow: SlowWorkers) -> None:
        self._slow = slow

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == CHANGE:
            self._slow.change(dict.fromkeys(OTHERS, SHARE))


def test_when_others_become_slow_the_discounted_bandit_recovers(engine: pl.Ray) -> None:
    slow = slowed(engine)
    policy = pl.bandit(3, discount=0.95)
    run = train(engine, policy, CHANGE + RECOVERY + WINDOW, [slow, Change(slow)])
    before, after = range(LEARNING, CHANGE), range(CHANGE + RECOVERY, run.steps)
    assert part(run, SLOW, before) < 0.1
    assert part(run, OTHERS, before) > 0.2  # there is something to unlearn
    assert part(run, OTHERS, after) < 0.1
    assert part(run, SLOW, after) > 0.2  # one of the freed at least: only two were always quick


HEDGED_LEARNING = 30  # longer, since each cancelled task tells but that it would have gone on


def test_what_was_cancelled_tells_who_is_slow(engine: pl.Ray) -> None:
    policy = pl.bandit(2, hedge=2)
    run = train(engine, policy, HEDGED_LEARNING + AFTER, [slowed(engine)], micro_batch=16)
    assert part(run, SLOW, range(HEDGED_LEARNING, run.steps)) < 0.1
    assert np.all(run.metrics["results"] == 2) and np.all(run.metrics["samples"] == BATCH)
    cancelled = [c.task for e in run.journal for c in e.commands if isinstance(c, Cancel)]
    assert run.meter.wasted == len(cancelled) == 2 * run.steps
    # Slow workers hardly ever ended a task, and are known to be slow all the same. They need not
    # be the last three: on few cores a quick one may happen to be cancelled as often.
    ended = {e.event.task for e in run.journal if isinstance(e.event, Finished)}
    assert sum(task.id in ended for task in tasks(run) if task.worker in SLOW) <= 6
    seconds = estimates(run)
    quick = [seconds[worker] for worker in seconds if worker not in SLOW]
    assert min(seconds[worker] for worker in SLOW) > 2 * np.median(quick)


def test_slow_workers_get_hardly_a_share_of_the_batch(engine: pl.Ray) -> None:
    run = train(engine, pl.ata(8), LEARNING + AFTER, [slowed(engine)])
    assert part(run, SLOW, range(LEARNING, run.steps)) < 0.05
    assert max(task.work.shares for task in tasks(run)) > 1
    assert np.all(run.metrics["samples"] == BATCH) and run.meter.wasted == 0
