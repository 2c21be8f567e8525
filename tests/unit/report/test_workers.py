"""What each worker did: tallies that add up to the run's figures, and tasks one by one."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given

import paceline as pl
from paceline.core.journal import Header, Journal
from paceline.core.protocol import Finished, Step
from paceline.policies.wrappers import MinWorkers
from paceline.report.callbacks import Live
from paceline.report.metrics import Meter
from paceline.report.workers import Span
from paceline.testing import legal_histories
from tests.policies import POLICIES

LEARNER = pl.learners.Quadratic(curvature=(1.0, 0.1), noise=1.0, batch_size=16)
DELAYS = [pl.delays.ShiftedExponential(0.1, 0.02)] * 3 + [pl.delays.Fixed(1.0)]


def ran(policy: pl.protocol.Policy, **given: object) -> pl.Run:
    engine = pl.Simulator(
        4, DELAYS, schedule=[(3.0, pl.protocol.Left("w1")), (6.0, pl.protocol.Joined("w1"))]
    )
    return pl.Trainer(LEARNER, policy, engine, progress=False, **given).fit(steps=60)  # type: ignore[arg-type]


def spans_of(journal: Journal) -> tuple[Meter, list[Span]]:
    spans: list[Span] = []
    meter = Meter.begin(journal.header)
    meter.listener = spans.append
    for entry in journal:
        meter.observe(entry)
    return meter, spans


KEEPING = {"ringleader"}  # its steps use results several times


@pytest.mark.parametrize("policy", POLICIES)
def test_tallies_add_up_to_the_run(policy: str) -> None:
    run = ran(POLICIES[policy](), prices=pl.Prices(per_hour=1.0, per_gigabyte=5.0))
    meter, tallies = run.meter, run.meter.workers
    assert set(tallies) == {"w0", "w1", "w2", "w3"}
    for name in ("started", "used", "cancelled", "discarded", "lost", "down_bytes", "up_bytes"):
        assert sum(getattr(t, name) for t in tallies.values()) == getattr(meter, name), name
    now = meter._now
    assert isclose(sum(t.busy_seconds(now) for t in tallies.values()), meter.busy_seconds)
    assert isclose(sum(t.there_seconds(now) for t in tallies.values()), meter.worker_seconds)
    assert sum(t.samples for t in tallies.values()) == meter.samples_used
    assert tallies["w1"].losses == 1 and tallies["w0"].losses == 0
    mean = sum(t.staleness for t in tallies.values()) / meter.used
    weighted = run.metrics["staleness"] @ run.metrics["results"] / run.metrics["results"].sum()
    if policy in KEEPING:  # a result is oldest in the last of its steps, which counts it
        assert mean >= weighted
    else:
        assert isclose(mean, weighted, abs_tol=1e-12)
    assert all(0 <= t.share_used(now) <= 1 + 1e-12 for t in tallies.values())


def test_who_is_slow_is_seen() -> None:
    meter = ran(pl.k_async(2)).meter
    tallies, now = meter.workers, meter.now
    # A unit is 4 samples; a task of k_async(2) has 8.
    assert 3.5 < tallies["w3"].speed(now) <= 4.0  # and its last task goes on
    assert 25 < tallies["w0"].speed(now) < 40 and 20 < tallies["w0"].latest < 41
    assert tallies["w3"].mean_staleness > 3 * tallies["w0"].mean_staleness


def test_the_speed_of_a_worker_that_is_cancelled_when_slow_is_a_bound() -> None:
    quick = pl.delays.ShiftedExponential(0.08, 0.02)
    slow = pl.delays.Mixture((quick, pl.delays.Scaled(quick, 10)), (0.1, 0.9))
    engine = pl.Simulator(4, [quick] * 3 + [slow])
    meter = pl.Trainer(LEARNER, pl.k_sync(3), engine, progress=False).fit(steps=200).meter
    speeds = {name: tally.speed(meter.now) for name, tally in meter.workers.items()}
    w3 = meter.workers["w3"]
    assert w3.cancelled > 5 * w3.finished > 0
    assert w3.is_bound and not any(meter.workers[name].is_bound for name in ("w0", "w1", "w2"))
    assert speeds["w3"] < w3.finished_samples / w3.finished_seconds  # by those alone


def test_the_time_of_every_task_counts_for_the_speed() -> None:
    journal = Journal(Header(batch=6))
    coordinator = pl.protocol.Coordinator(MinWorkers(2, pl.k_sync(1)), 6, journal=journal)
    events: list[tuple[float, pl.protocol.Event]] = [
        (0.0, pl.protocol.Joined("w0")),
        (0.0, pl.protocol.Joined("w1")),
        (2.0, Finished(0, 3)),  # which cancels w1 after 2 s
        (7.0, Finished(3, 3)),  # of w1, after 5 s; w0 is cancelled after 5 s
        (8.0, pl.protocol.Left("w0")),  # after 1 s of work
    ]
    for now, event in events:
        coordinator.handle(now, event)
    meter, _ = spans_of(journal)
    w0, w1 = meter.workers["w0"], meter.workers["w1"]
    # w0: 3 samples in 2 s, 6 in at least 5 s, and 6 that were lost, which usually take 4 s.
    # w1 is at a task of 6, which usually take 10 s.
    assert (w0.finished_seconds, w0.given_up_seconds, w0.longest) == (2.0, 5.0 + 4.0, 5.0)
    assert w0.speed(100.0) == 15 / 11  # it has nothing to do
    assert w1.speed(8.0) == 9 / (2 + 5) and w1.speed(18.0) == 15 / (2 + 5 + 11)


def test_a_slow_worker_who_is_never_awaited_works_for_nothing() -> None:
    run = ran(pl.k_sync(2))
    slow, now = run.meter.workers["w3"], run.meter._now
    assert slow.used == 0 and slow.share_used(now) == 0.0 and slow.cancelled > 50


@pytest.mark.parametrize("policy", POLICIES)
def test_every_task_is_told_of_once(policy: str) -> None:
    run = ran(POLICIES[policy]())
    meter, spans = spans_of(run.journal)
    told = [span.task.id for span in [*spans, *meter.unsettled()]]
    assert len(told) == len(set(told)) == meter.started
    by_fate = {fate: sum(s.fate == fate for s in spans) for fate in ("used", "cancelled", "lost")}
    assert by_fate == {"used": meter.used, "cancelled": meter.cancelled, "lost": meter.lost}
    for span in spans:
        assert span.task.since <= span.end <= meter._now
        assert (span.step > span.task.version) == (span.fate == "used")
    steps = {span.step for span in spans if span.fate == "used"}
    without = {
        version
        for version, step in enumerate(steps_of(run.journal), start=1)
        if step.keep  # a later step counts its results
    }
    assert steps == set(range(1, run.steps + 1)) - without
    assert bool(without) == (policy in KEEPING)


def steps_of(journal: Journal) -> list[Step]:
    return [c for entry in journal for c in entry.commands if isinstance(c, Step)]


@given(legal_histories())
def test_books_agree_in_any_history(history: pl.testing.History) -> None:
    journal = history.play(pl.k_sync(2)).journal
    meter, spans = spans_of(journal)
    assert len(spans) + len(meter.unsettled()) == meter.started
    present = [name for name, tally in meter.workers.items() if tally.present]
    assert sorted(present) == sorted(meter._present)
    assert sum(t.running for t in meter.workers.values()) == len(meter._running)


class Looking(pl.Callback):
    """Notes what can be seen while the run goes on."""

    def started(self, live: Live) -> None:
        self.live = live
        self.seen: list[dict[str, int]] = []

    def stepped(self, progress: pl.Progress) -> None:
        self.seen.append({name: t.used for name, t in self.live.workers().items()})


def test_figures_may_be_read_while_it_runs() -> None:
    look = Looking()
    run = ran(pl.k_sync(3), callbacks=[look])
    assert [sum(seen.values()) for seen in look.seen] == [3 * step for step in range(1, 61)]
    assert list(look.seen[0]) == ["w0", "w1", "w2", "w3"]
    assert look.live.now() == run.seconds and "k=3" in look.live.header.policy


def test_neighbors_that_come_back_are_not_workers_of_a_node() -> None:
    engine = pl.Simulator(
        4, DELAYS, schedule=[(3.0, pl.protocol.Left("w1")), (6.0, pl.protocol.Joined("w1"))]
    )
    trainer = pl.Trainer(LEARNER, pl.gossip.Gossip(pl.gossip.ring(4)), engine, progress=False)
    run = trainer.fit(seconds=10)
    nodes = run.meters
    there = {node: meter.worker_seconds for node, meter in nodes.items()}
    assert there["w1"] == pytest.approx(there["w0"] - 3.0, abs=1.1)
    assert all(set(meter.workers) == {node} for node, meter in nodes.items())
    assert run.meter.worker_seconds <= 4 * run.seconds + 1e-9


def test_without_a_main_node_each_node_is_its_own_worker() -> None:
    look = Looking()
    policy = pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Averaging())
    engine = pl.Simulator(4, DELAYS)
    trainer = pl.Trainer(LEARNER, policy, engine, callbacks=[look], progress=False)
    trainer.fit(seconds=10)
    steps = {node: meter.version for node, meter in look.live.meters.items()}
    assert {node: t.used for node, t in look.live.workers().items()} == steps
