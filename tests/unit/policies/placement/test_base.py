"""Shares by measured speed: the batch stays, the time falls to the limit, whatever the policy."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.protocol import Finished, Start

SPEEDS = [1, 1, 2, 2, 4, 4, 4, 4]
LIMIT = sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS))  # of equal shares' time over that of these
BATCH = 176


def problem(batch: int = BATCH) -> pl.learners.Logistic:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1024, 8))
    labels = np.sign(features @ rng.standard_normal(8))
    return pl.learners.Logistic(features, labels, lr=0.5, batch_size=batch)


def fit(
    policy: Policy,
    placement: pl.BySpeed | None = pl.BySpeed(),
    steps: int = 40,
    delays: list[pl.delays.Fixed] | list[pl.delays.Changed] | None = None,
) -> pl.Run:
    delays = delays or [pl.delays.Fixed(4 / speed) for speed in SPEEDS]
    engine = pl.Simulator(len(SPEEDS), delays, unit=BATCH / 8)
    trainer = pl.Trainer(problem(), policy, engine, progress=False, placement=placement)
    return trainer.fit(steps=steps)


def shares(run: pl.Run) -> dict[int, dict[str, int]]:
    """Return the samples of each worker's task, by version."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                found[command.task.version][command.task.worker] = command.task.samples
    return found


def test_after_one_step_the_time_is_the_least_there_can_be() -> None:
    run, equal = fit(pl.sync()), fit(pl.sync(), None)
    per_step = np.diff(run.metrics["seconds"])
    assert per_step == pytest.approx(np.diff(equal.metrics["seconds"]) / LIMIT)
    assert shares(run)[5] == {f"w{i}": 8 * speed for i, speed in enumerate(SPEEDS)}


def test_every_step_is_the_gradient_of_the_global_batch() -> None:
    """Whatever the shares: the same samples, weighed by their number."""
    run, equal = fit(pl.sync()), fit(pl.sync(), None)
    assert set(run.metrics["samples"]) == {BATCH}
    assert run.model == pytest.approx(equal.model, rel=1e-12)
    assert run.metrics["loss"] == pytest.approx(equal.metrics["loss"], rel=1e-12)


def test_shares_follow_speeds_that_change() -> None:
    """Without stopping: quick and slow change places at 40 s."""
    delays = [
        pl.delays.Changed(pl.delays.Fixed(4 / before), pl.delays.Fixed(4 / after), 40.0)
        for before, after in zip(SPEEDS, reversed(SPEEDS), strict=True)
    ]
    run = fit(pl.sync(), steps=80, delays=delays)
    assert set(run.metrics["samples"]) == {BATCH}
    assert max(shares(run)[10], key=shares(run)[10].__getitem__) != "w0"
    after = shares(run)[79]
    assert after["w0"] == after["w1"] == 4 * after["w7"] == 32
    assert np.diff(run.metrics["seconds"])[-1] == pytest.approx(4 / LIMIT, rel=0.05)


def test_a_limit_of_memory_is_kept() -> None:
    run = fit(pl.sync(), pl.BySpeed(max_samples={"w4": 20, "w5": 20}))
    late = shares(run)[30]
    assert late["w4"] == late["w5"] == 20 and sum(late.values()) == BATCH
    assert late["w6"] == late["w7"] == pytest.approx(2 * late["w2"], abs=2)


def test_k_sync_uses_the_batch_on_the_average() -> None:
    run = fit(pl.k_sync(6), steps=300)
    assert run.metrics["samples"].mean() == pytest.approx(BATCH, rel=0.05)
    assert run.metrics["results"].max() == 6


@pytest.mark.parametrize("k", [2, 4])
def test_a_bandits_choice_shares_the_batch(k: int) -> None:
    run = fit(pl.bandit(k), steps=60)
    assert set(run.metrics["samples"]) == {BATCH}
    assert len(set(shares(run)[0].values())) <= 2  # nothing is known
    for chosen in list(shares(run).values())[40:60]:
        assert len(chosen) == k
        total = sum(SPEEDS[int(worker[1:])] for worker in chosen)
        for worker, share in chosen.items():
            assert share == pytest.approx(BATCH * SPEEDS[int(worker[1:])] / total, abs=1)


@pytest.mark.parametrize(
    "policy",
    [pl.asynchronous(damping=False), pl.ringmaster(16), pl.k_async(2)],
    ids=["asynchronous", "ringmaster", "k_async"],
)
def test_when_nobody_waits_all_deliver_equally_often(policy: Policy) -> None:
    """So nobody's results are staler than the others'."""
    run = fit(policy, steps=400)
    delivered = Counter[str]()
    tasks = {c.task.id: c.task for e in run.journal for c in e.commands if isinstance(c, Start)}
    for entry in run.journal:
        if isinstance(entry.event, Finished):
            delivered[tasks[entry.event.task].worker] += 1
    counts = list(delivered.values())
    assert len(counts) == 8 and max(counts) < 1.15 * min(counts)
    assert run.metrics["samples"].mean() == pytest.approx(BATCH, rel=0.1)


def test_who_is_always_cut_short_gets_less_until_it_can_follow() -> None:
    delays = [pl.delays.Fixed(1.0)] * 7 + [pl.delays.Fixed(20.0)]
    run = fit(pl.k_sync(7), steps=60, delays=delays)
    last = shares(run)[59]
    assert last["w7"] <= 2 * BATCH / 7 / 20 + 1


def test_lost_work_is_done_again_and_the_batch_stays() -> None:
    engine = pl.Simulator(
        4,
        [pl.delays.Fixed(1.0), pl.delays.Fixed(2.0), pl.delays.Fixed(1.0), pl.delays.Fixed(4.0)],
        schedule=[(5.3, pl.protocol.Left("w1")), (9.1, pl.protocol.Joined("w1"))],
    )
    run = pl.Trainer(problem(64), pl.sync(), engine, progress=False, placement=pl.BySpeed()).fit(
        steps=30
    )
    assert set(run.metrics["samples"]) == {64}
    fates = run.samples()
    assert all(a.offset + a.samples == b.offset for a, b in pairwise(fates))


def test_a_worker_that_returns_has_the_speed_that_it_had() -> None:
    engine = pl.Simulator(
        4,
        [pl.delays.Fixed(1.0), pl.delays.Fixed(4.0), pl.delays.Fixed(1.0), pl.delays.Fixed(1.0)],
        schedule=[(20.3, pl.protocol.Left("w1")), (24.6, pl.protocol.Joined("w1"))],
    )
    run = pl.Trainer(problem(65), pl.sync(), engine, progress=False, placement=pl.BySpeed()).fit(
        steps=40
    )
    given = shares(run)
    first = next(step for step in sorted(given) if step > 20 and "w1" in given[step])
    assert given[first]["w1"] == given[39]["w1"] == 5  # one of 13: a quarter of the others' 20


def test_a_policy_of_its_own_mind_refuses() -> None:
    for policy, why in [
        (pl.coded(1), "takes no placement"),
        (pl.ata(8), "already divides the batch by speed"),
        (pl.deadline(1.0), "shares already follow speed"),
    ]:
        with pytest.raises(ValueError, match=why):
            pl.Trainer(problem(), policy, pl.Simulator(8), placement=pl.BySpeed())
    with pytest.raises(ValueError, match="8 results within these limits may have 160 samples"):
        pl.Trainer(problem(), pl.sync(), pl.Simulator(8), placement=pl.BySpeed(max_samples=20))
    with pytest.raises(ValueError, match="smoothing=0"):
        pl.BySpeed(smoothing=0)
    inner = pl.policies.MinWorkers(2, pl.sync())
    pl.Trainer(problem(), inner, pl.Simulator(8), progress=False, placement=pl.BySpeed()).fit(
        steps=2
    )
    assert inner.inner.placement is None  # a recipe stays


def test_speeds_can_be_looked_at() -> None:
    run = fit(pl.sync())
    speeds = run.policy.placement.speeds()  # type: ignore[attr-defined]
    assert speeds["w7"] == pytest.approx(4 * speeds["w0"])
