"""What journals tell of workers, against the delays and links that were simulated."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np
import pytest

import paceline as pl
from paceline.core.journal import Entry, Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Event,
    Finished,
    Joined,
    Left,
    Start,
    Step,
    Stepped,
    Task,
    View,
    Work,
)
from paceline.delays.fit import fit_workers
from paceline.delays.models import Exponential, Fixed, ShiftedExponential
from paceline.delays.observe import observe


def journal_of(
    policy: object,
    engine: pl.Simulator,
    steps: int,
    learner: object = None,
    seed: int = 0,
    **more: object,
) -> Journal:
    learner = learner or pl.learners.TimingOnly(batch_size=engine.size)
    trainer = pl.Trainer(learner, policy, engine, seed=seed, progress=False, **more)  # type: ignore[arg-type]
    return trainer.fit(steps=steps).journal


MEANS = [0.5, 1.0, 1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize("interruptible", [True, False])
def test_slow_workers_do_not_look_quick_under_k_sync(interruptible: bool) -> None:
    """Of six workers three are awaited: the mean of what finished is wrong by half and more."""
    delays = [Exponential(mean) for mean in MEANS]
    engine = pl.Simulator(6, delays, unit=2, interruptible=interruptible)
    journal = journal_of(pl.k_sync(3), engine, steps=1500)
    fits = fit_workers(journal)
    for index, mean in enumerate(MEANS):
        found, mean = fits[f"w{index}"], mean / 2  # per sample
        assert found.compute is not None
        assert found.compute.model.mean == pytest.approx(mean, rel=0.10), index
        assert found.compute.kind in ("Exponential", "ShiftedExponential")
        if interruptible:
            tasks = observe(journal)[f"w{index}"]
            naive = np.mean([t.seconds / t.samples for t in tasks if not t.censored])
            assert naive < (0.75 if index else 0.85) * mean
            assert found.censored > 0.1 * found.observations
        else:
            assert found.censored < 0.01 * found.observations  # late results are reported


def test_fitted_models_simulate_the_same_workers() -> None:
    delays = [ShiftedExponential(0.5 * (i + 1), 0.4) for i in range(4)]
    link = pl.delays.Link(latency=0.1)
    fits = fit_workers(journal_of(pl.k_sync(2), pl.Simulator(4, delays, link), steps=800))
    models, links = [], []
    for i in range(4):
        compute, way = fits[f"w{i}"].compute, fits[f"w{i}"].communication
        if compute is None or way is None:  # too slow to have ever been among the fastest two
            compute, way = fits["w2"].compute, fits["w2"].communication
        assert compute is not None and way is not None
        models.append(compute.model)
        links.append(pl.delays.Link(way.latency, way.down, way.up))
    seconds = [
        journal_of(pl.k_sync(2), engine, steps=400, seed=9)
        for engine in (pl.Simulator(4, delays, link), pl.Simulator(4, models, links, unit=1))
    ]
    truth, again = (list(journal)[-1].now for journal in seconds)
    assert again == pytest.approx(truth, rel=0.05)


def test_a_worker_that_never_finishes_is_not_fitted() -> None:
    engine = pl.Simulator(3, [Fixed(1.0), Fixed(1.0), Fixed(50.0)])
    slow = fit_workers(journal_of(pl.k_sync(2), engine, steps=20))["w2"]
    assert slow.compute is None and slow.communication is None
    assert slow.observations == slow.censored == 20


def test_a_worker_with_few_tasks_is_told_as_such() -> None:
    journal = journal_of(pl.sync(), pl.Simulator(2, Exponential(1.0)), steps=5)
    found = fit_workers(journal)["w0"]
    assert found.compute is not None
    assert not found.compute.fits
    assert found.compute.note == "5 finished tasks are too few to fit a law; 8 or more are needed"


def test_one_size_of_messages_is_a_lump() -> None:
    link = pl.delays.Link(latency=0.1, down=1e6, up=2e6)
    learner = pl.learners.TimingOnly(batch_size=4, message_bytes=1_000_000)
    journal = journal_of(pl.sync(), pl.Simulator(4, Exponential(1.0), link), 30, learner)
    found = fit_workers(journal)["w1"].communication
    assert found is not None
    assert found.seconds.kind == "Fixed"
    assert found.seconds.model.mean == pytest.approx(1.7)
    assert found.latency == pytest.approx(0.85)
    assert found.down == found.up == inf


def test_latency_and_bandwidths_from_messages_of_several_sizes() -> None:
    link = pl.delays.Link(latency=0.1, down=1e6, up=2e6)
    journals = []
    for size, policy in [(1_000_000, pl.sync()), (3_000_000, pl.coded(0, 2)), (10_000, pl.sync())]:
        learner = pl.learners.TimingOnly(batch_size=4, message_bytes=size)
        journals.append(journal_of(policy, pl.Simulator(4, Exponential(1.0), link), 20, learner))
    for found in fit_workers(*journals).values():
        assert found.communication is not None
        assert found.communication.latency == pytest.approx(0.1, rel=1e-6)
        assert found.communication.down == pytest.approx(1e6, rel=1e-6)
        assert found.communication.up == pytest.approx(2e6, rel=1e-6)
    both = fit_workers(journals[0], journals[2])["w0"].communication  # up is as large as down
    assert both is not None
    assert both.latency == pytest.approx(0.1, rel=1e-6)
    assert both.down == both.up == pytest.approx(2e6 / 1.5, rel=1e-6)


def test_sizes_that_a_codec_makes() -> None:
    """Models come as changes: whole at first, then as many as the worker has missed."""
    link = pl.delays.Link(latency=0.2, down=1e4, up=1e4)
    engine = pl.Simulator(3, [Exponential(m) for m in (1.0, 1.0, 4.0)], link)
    learner = pl.learners.Quadratic((1.0,) * 400, noise=1.0, batch_size=6)
    down = pl.codecs.TopK(0.1)
    journal = journal_of(pl.asynchronous(), engine, 300, learner, model_codec=down)
    sizes = {task.got for task in observe(journal)["w2"]}
    assert len(sizes) > 3
    found = fit_workers(journal)["w2"].communication
    assert found is not None
    assert found.down == pytest.approx(1e4, rel=1e-6)
    # The result's way up takes as long for each, as far as `sent` tells.
    assert 2 * found.latency + 3200 / found.up == pytest.approx(0.4 + 0.32, rel=1e-6)


def test_links_are_taken_off_the_time_of_tasks_given_up() -> None:
    """Half of the response is communication; the hidden part is what computing takes."""
    link = pl.delays.Link(latency=0.5)
    engine = pl.Simulator(6, [Exponential(mean) for mean in MEANS], link)
    fits = fit_workers(journal_of(pl.k_sync(3), engine, steps=1500))
    for index, mean in enumerate(MEANS):
        compute = fits[f"w{index}"].compute
        assert compute is not None
        assert compute.model.mean == pytest.approx(mean, rel=0.10)


def test_queues_and_slow_steps_are_not_response() -> None:
    """A worker has several tasks at once, and a model takes its time to be there."""
    link = pl.delays.Link(latency=0.25)
    engine = pl.Simulator(2, Fixed(1.0), link, unit=1, update=0.7)
    tasks = observe(journal_of(TwoEach(), engine, steps=10))
    for task in [*tasks["w0"], *tasks["w1"]]:
        if not task.censored:
            assert task.response == pytest.approx(task.samples + 0.5)
            assert task.communication == pytest.approx(0.5)


class TwoEach(Policy):
    """Gives every worker two tasks, and steps when all four are there."""

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if len(view.held) == 4:
            yield Step({id: 0.25 for id in view.held})
        if len(view.workers) == 2 and not view.running and not view.held:
            for worker in view.workers:
                yield Assign(worker)
                yield Assign(worker)


def scripted(*entries: Entry, message_bytes: int = 0) -> Journal:
    journal = Journal(Header(batch=1, message_bytes=message_bytes))
    for entry in entries:
        journal.append(entry)
    return journal


def task(id: int, since: float, worker: str = "w0", version: int = 0) -> Task:
    return Task(id, worker, Work(), version, since, samples=1, offset=id)


def test_what_becomes_of_tasks() -> None:
    """Done, cancelled, lost, queued in vain, still running at the end."""
    journal = scripted(
        Entry(0.0, Joined("w0"), (Start(task(0, 0.0)), Start(task(1, 0.0)))),
        Entry(2.0, Finished(0, 1, 1.5, waited=0.25), ()),
        Entry(3.0, Stepped(1), (Cancel(1), Start(task(2, 3.0, version=1)))),
        Entry(4.0, Left("w0"), ()),
        Entry(5.0, Joined("w0"), (Start(task(3, 5.0, version=1)), Start(task(4, 5.0, version=1)))),
        Entry(6.5, Stepped(2), (Cancel(4),)),
        message_bytes=8,
    )
    done, cancelled, lost, running = observe(journal)["w0"]
    assert (done.response, done.seconds, done.censored) == (1.75, 1.5, False)
    assert done.communication == pytest.approx(0.25)
    assert (cancelled.began, cancelled.response, cancelled.censored) == (1.75, 1.25, True)
    assert (lost.began, lost.response, lost.censored, lost.after) == (3.0, 1.0, True, True)
    assert (running.turn, running.response, running.censored, running.after) == (
        0,
        1.5,
        True,
        False,
    )
    assert [observation.turn for observation in (done, cancelled, lost)] == [0, 1, 2]
    assert running.got == 8


def test_warm_up_is_recognized_and_left_out() -> None:
    def run(first: float) -> Journal:
        entries, now = [Entry(0.0, Joined("w0"), (Start(task(0, 0.0)),))], 0.0
        rng = np.random.default_rng(0)
        for id in range(60):
            seconds = first if id < 2 else float(rng.exponential())
            now += seconds
            entries.append(Entry(now, Finished(id, 1, seconds), (Start(task(id + 1, now)),)))
        return scripted(*entries)

    cold = fit_workers(run(40.0))["w0"]
    assert cold.warmup == 2 and cold.compute is not None
    assert cold.compute.kind == "Exponential"
    assert cold.compute.model.mean < 1.5
    kept = fit_workers(run(40.0), skip=0)["w0"]
    assert kept.warmup == 0 and kept.compute is not None and kept.compute.model.mean > 1.9
    assert fit_workers(run(1.0))["w0"].warmup == 0
    assert fit_workers(run(1.0), skip=5)["w0"].warmup == 5


def test_work_that_goes_on_unseen_after_it_was_cancelled() -> None:
    """As on Ray: of each ten tasks of 1 s some are cancelled, and the next one waits for them."""
    rng = np.random.default_rng(0)
    entries = [Entry(0.0, Joined("w0"), (Start(task(0, 0.0)),))]
    now = free = 0.0
    truth = []
    for id in range(400):
        seconds = float(rng.exponential())
        begin, until = max(now, free), now + float(rng.exponential(2.0))
        free = begin + seconds
        if free <= until:
            now = free
            event: Finished | Stepped = Finished(id, 1, seconds)
            commands: tuple[Cancel | Start, ...] = (Start(task(id + 1, now)),)
        else:
            now = until
            event, commands = Stepped(0), (Cancel(id), Start(task(id + 1, now)))
            if begin >= until:
                free = max(free - seconds, 0.0)  # it was never put on the worker
        truth.append(seconds)
        entries.append(Entry(now, event, commands))
    journal = scripted(*entries)
    found = fit_workers(journal)["w0"]
    assert found.unclear > 50
    assert found.compute is not None and found.communication is not None
    assert found.compute.model.mean == pytest.approx(1.0, rel=0.15)
    assert found.communication.latency == 0.0
    trusting = fit_workers(journal, blocking=False)["w0"]
    assert trusting.unclear == 0
    assert trusting.communication is not None and trusting.communication.latency > 0.05


def test_a_resumed_run_knows_its_tasks() -> None:
    coordinator = pl.protocol.Coordinator(pl.sync(shares=2), batch=2)
    coordinator.handle(0.0, Joined("w0"))
    coordinator.handle(0.0, Joined("w1"))
    state = coordinator.state()
    journal = Journal(Header(batch=2, state=state))
    journal.append(Entry(3.0, Finished(0, 1, 2.0), ()))
    first = observe(journal)
    assert first["w0"][0].response == 3.0
    assert first["w1"][0].censored
