"""A policy is shown as its user wrote it."""

from __future__ import annotations

from math import inf

import pytest

import paceline as pl
from paceline.cli.expressions import parse
from paceline.core.state import describe
from paceline.learners.arrays import TimingOnly
from paceline.policies.named import written

TEXTS = [
    "sync()",
    "k_sync(7)",
    "k_sync(7, samples=32)",
    "k_async(2)",
    "asynchronous()",
    "asynchronous(damping=False)",
    "asynchronous(max_staleness=4)",
    "rennala(16)",
    "ringmaster(32)",
    "ringmaster(4, stops=False)",
    "local_sgd(10)",
    "local_sgd(10, k=3)",
    "local_sgd(10, overlap=True)",
    "bandit(4)",
    "bandit(4, hedge=2, index=Thompson(), discount=0.98)",
    "bandit(4, minimize='dollars')",
    "ata(8, samples=16)",
    "k_sync(Schedule(plan={0: 2, 100: 4}))",
    "OnlyWorkers(['w0', 'w1'], sync())",
    "OnlyWorkers(['w0', 'w1'], k_sync(1)), placement=BySpeed()",
    "sync(), placement=BySpeed()",
    "Until(k_sync(3), steps=10)",
    "Gather(k=4, max_staleness=2, preempt=False, combine=staleness_weighted)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_policy_is_shown_as_it_was_written(text: str) -> None:
    policy = parse(text)
    assert written(policy) == text
    assert describe(parse(written(policy))) == describe(policy)


def test_shares_of_sync_have_no_spare_tasks() -> None:
    assert pl.sync(shares=8) != pl.k_sync(8)
    assert written(pl.sync(shares=8)) == "sync(shares=8)"


def test_what_was_learned_does_not_change_the_text() -> None:
    policy = pl.bandit(2, seed=3)
    pl.Trainer(TimingOnly(batch_size=8), policy, pl.Simulator(workers=4), progress=False).fit(
        steps=20
    )
    assert written(policy) == "bandit(2, seed=3)"


def test_a_function_for_the_work_has_no_shorter_text() -> None:
    policy = pl.policies.Gather(2, inf, work=lambda view, worker: pl.protocol.Work(samples=3))
    assert written(policy).startswith("Gather(k=2, max_staleness=inf, work=")


def test_journal_and_page_show_it() -> None:
    trainer = pl.Trainer(
        TimingOnly(batch_size=8),
        pl.sync(),
        pl.Simulator(workers=4),
        placement=pl.BySpeed(),
        progress=False,
    )
    run = trainer.fit(steps=3)
    assert run.journal.header.written == "sync(), placement=BySpeed()"
    assert "Gather(placement=BySpeed())" in run.journal.header.policy
