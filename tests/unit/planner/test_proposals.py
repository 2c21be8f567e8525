"""Candidates that theory proposes: where they come from, and that they can be the best."""

from __future__ import annotations

from dataclasses import replace

import paceline as pl
from paceline.core.state import describe
from paceline.delays.models import Delay
from paceline.planner import grid, proposals

BATCH, TARGET = 64, 0.5
LEARNER = pl.learners.Quadratic((1.0, 0.3) * 8 + (0.1,) * 48, noise=0.2, lr=0.14, batch_size=BATCH)
LATENCY = pl.delays.Link(1.5)


def profile(*delays: Delay, link: pl.delays.Link = LATENCY) -> pl.planner.Profile:
    workers = {f"w{i}": pl.planner.WorkerProfile(each, link) for i, each in enumerate(delays)}
    surface = pl.planner.measure_loss_surface(LEARNER)
    return pl.planner.Profile(
        workers, BATCH, LEARNER.message_bytes, surface=surface, local_steps=False, codes=False
    )


FAR = profile(*[pl.delays.Erlang(4, 1 / BATCH)] * 12)


def proposed(found: pl.planner.Profile, rate: float | None = 0.14) -> list[grid.Candidate]:
    return [each for each in proposals.candidates(found, False, TARGET, rate) if each.origin]


def test_a_proposal_that_the_grid_lacks_is_the_best() -> None:
    """Long messages favor stale gradients: 6 of the grid drops too many, and 12 is a risk."""
    fixed = {describe(each.policy) for each in grid.candidates(FAR)}
    found = pl.plan(FAR, target=TARGET, learning_rate=0.14, seeds=4)
    first = found.entries[0]
    assert first.text == "ringmaster(9)"
    assert describe(first.policy) not in fixed
    others = [entry for entry in found.entries if not entry.origin]
    assert others and all(entry.forecast.risk < 0.2 for entry in (first, others[0]))
    assert first.forecast.seconds < 0.9 * others[0].forecast.seconds
    assert (
        "ringmaster(9) was proposed by theory: at lr * curvature = 0.14 the flattest direction "
        "falls fastest with a staleness of up to 8." in str(found).splitlines()
    )
    assert found.about()["proposed_by_theory"].startswith("at lr * curvature")
    assert "proposed_by_theory" not in others[0].about()


def test_to_wait_for_all_is_no_proposal() -> None:
    """The grid has `sync`, which is `k_sync(12)` by another name."""
    for steps in (None, 8):
        steady = replace(profile(*[pl.delays.Fixed(0.1)] * 12), local_steps=True)
        found = proposals.candidates(steady, False, TARGET, 0.14, steps)
        assert not [each for each in found if "of the k fastest results" in each.origin]


def test_a_proposal_takes_as_long_as_was_forecast() -> None:
    found = pl.forecast(pl.ringmaster(9), FAR, learning_rate=0.14, target=TARGET, seeds=8)
    engine = pl.Simulator(12, pl.delays.Erlang(4, 1 / BATCH), LATENCY, unit=1)
    run = pl.Trainer(LEARNER, pl.ringmaster(9), engine, progress=False, seed=7).fit(
        steps=1000, until=lambda at: at.loss <= TARGET
    )
    assert abs(run.seconds / found.seconds - 1) < 0.25


def test_the_fastest_workers_are_named() -> None:
    """Two slow workers deliver little, and their gradients are the stalest."""
    quick, slow = pl.delays.Fixed(1 / BATCH), pl.delays.Fixed(40 / BATCH)
    found = profile(slow, quick, quick, quick, slow, link=pl.delays.Link())
    texts = [each.text for each in proposed(found, rate=0.3)]
    assert "OnlyWorkers(['w1', 'w2', 'w3'], asynchronous(damping=False))" in texts
    assert "k_sync(3)" not in texts  # which the grid has


def test_how_many_to_wait_for_needs_no_curvature() -> None:
    """So this number is proposed for every optimizer; on the grid are 15, 12 and 8."""
    workers = [pl.delays.ShiftedExponential(1 / BATCH, 0.2 / BATCH)] * 10
    found = profile(*workers, *[pl.delays.Fixed(3 / BATCH)] * 6, link=pl.delays.Link())
    adamw = replace(found, optimizer={"name": "AdamW", "lr": 1e-3})
    (only,) = proposed(adamw)
    assert only.text == "k_sync(9)"
    assert only.origin == "the expected time of the k fastest results is the least at k = 9"
    steps = {
        k: pl.forecast(pl.k_sync(k), adamw, learning_rate=1e-3, target=TARGET).per_step["seconds"]
        for k in (8, 9, 12, 15)
    }
    assert min(steps, key=lambda k: steps[k]) == 9


def test_each_policy_is_there_once() -> None:
    for rate in (None, 0.05, 0.3):
        found = proposals.candidates(FAR, False, TARGET, rate)
        policies = [describe(each.policy) for each in found]
        assert len(policies) == len({*policies})
        fixed = grid.candidates(FAR)
        assert [each.text for each in found[: len(fixed)]] == [each.text for each in fixed]


def test_one_worker_or_no_time_at_all() -> None:
    assert not proposed(profile(pl.delays.Fixed(1.0)))
    assert proposals.candidates(profile(*[pl.delays.Fixed(0.0)] * 3), False, TARGET, 0.1)
    nothing = profile(*[pl.delays.Fixed(0.0)] * 3, link=pl.delays.Link())
    assert all("sync" in each.text for each in proposed(nothing))


def test_laws_without_a_kernel_are_sampled() -> None:
    law = pl.delays.Bursts(pl.delays.Fixed(0.01), pl.delays.Fixed(0.05), 1.0, 1.0)
    texts = [each.text for each in proposed(profile(*[law] * 12))]
    assert any("ringmaster" in text or "asynchronous" in text for text in texts)
    assert texts == [each.text for each in proposed(profile(*[law] * 12))]
