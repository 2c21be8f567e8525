"""The rule of `Gather`, event by event: shares, quotas, who is given what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

import paceline as pl
from paceline.core.journal import Entry
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Joined,
    Left,
    Result,
    Start,
    Step,
    Stepped,
    Task,
    View,
    Want,
    Work,
    WorkerId,
    worker_names,
)
from paceline.core.state import describe
from paceline.policies.gather import mean
from paceline.testing import Done, transcript


def start(
    id: int,
    worker: str,
    offset: int,
    samples: int,
    version: int = 0,
    since: float = 0.0,
    attempt: int = 1,
) -> Start:
    work = Work(samples=samples)
    return Start(Task(id, worker, work, version, since, samples, offset, attempt))


def joined(*workers: str) -> list[tuple[float, Event | Done]]:
    return [(0.0, Joined(worker)) for worker in workers]


def answers(entries: list[Entry]) -> list[tuple[Command, ...]]:
    return [entry.commands for entry in entries]


def steps(entries: Iterable[Entry]) -> list[Step]:
    return [c for entry in entries for c in entry.commands if isinstance(c, Step)]


def tasks(entries: Iterable[Entry]) -> dict[int, Task]:
    found = (c.task for entry in entries for c in entry.commands if isinstance(c, Start))
    return {task.id: task for task in found}


# --- shares of the batch -------------------------------------------------------------------------


def test_the_shares_of_a_round_add_up_to_the_batch() -> None:
    """11 samples for 3: 4 + 4 + 3, in every round, from consecutive places of the stream."""
    script = [*joined("w0", "w1", "w2"), (1.0, Done("w2")), (2.0, Done("w0")), (3.0, Done("w1"))]
    assert answers(transcript(pl.policies.MinWorkers(3, pl.sync()), script, batch=11)) == [
        (),
        (),
        (start(0, "w0", 0, 4), start(1, "w1", 4, 4), start(2, "w2", 8, 3)),
        (),
        (),
        (
            Step({0: 4 / 11, 1: 4 / 11, 2: 3 / 11}),  # in the order of the data
            start(3, "w0", 11, 4, version=1, since=3.0),
            start(4, "w1", 15, 4, version=1, since=3.0),
            start(5, "w2", 19, 3, version=1, since=3.0),
        ),
        (),
    ]


@pytest.mark.parametrize("batch", [5, 6, 7, 8, 9, 64])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_sync_step_uses_the_batch_exactly(workers: int, batch: int) -> None:
    run = pl.Trainer(
        pl.learners.TimingOnly(batch_size=batch), pl.sync(), pl.Simulator(workers), progress=False
    ).fit(steps=6)
    assert run.metrics["samples"].tolist() == [batch] * 6
    assert run.metrics["results"].tolist() == [workers] * 6


def test_work_that_says_its_samples_is_not_shared() -> None:
    entries = transcript(pl.policies.Gather(2, work=Work(samples=5)), joined("w0", "w1"), batch=8)
    assert [task.samples for task in tasks(entries).values()] == [5, 5]


def test_work_may_depend_on_the_worker() -> None:
    def work(view: View, worker: WorkerId) -> Work:
        return Work(samples=10 + int(worker[1:]) + view.version)

    policy = pl.policies.Gather(2, work=work)
    script = [*joined("w0", "w1"), (1.0, Done("w0")), (1.0, Done("w1"))]
    entries = transcript(policy, script, batch=8)
    assert [task.samples for task in tasks(entries).values()] == [10, 11, 11, 12]


# --- who waits, who goes on ----------------------------------------------------------------------


def test_a_joiner_in_mid_round_waits_for_the_next_under_sync() -> None:
    script = [
        *joined("w0", "w1"),
        (1.0, Joined("w2")),
        (2.0, Done("w0")),
        (3.0, Done("w1")),
    ]
    entries = transcript(pl.policies.MinWorkers(2, pl.sync()), script, batch=6)
    assert answers(entries)[2:4] == [(), ()]
    assert entries[4].commands == (
        Step({0: 0.5, 1: 0.5}),
        start(2, "w2", 6, 2, version=1, since=3.0),
        start(3, "w0", 8, 2, version=1, since=3.0),
        start(4, "w1", 10, 2, version=1, since=3.0),
    )


def test_a_joiner_in_mid_round_works_at_once_with_a_fixed_k() -> None:
    script = [*joined("w0", "w1"), (1.0, Joined("w2"))]
    entries = transcript(pl.k_sync(2), script, batch=6)
    assert entries[2].commands == (start(2, "w2", 6, 3, since=1.0),)


def test_a_share_lost_in_mid_round_is_done_by_one_who_waits() -> None:
    script = [
        *joined("w0", "w1", "w2"),
        (1.0, Left("w0")),
        (2.0, Done("w1")),
        (3.0, Done("w2")),
        (4.0, Done("w1")),
    ]
    assert answers(transcript(pl.policies.MinWorkers(3, pl.sync()), script, batch=7))[3:] == [
        (),  # everyone is busy
        (start(3, "w1", 0, 3, since=2.0, attempt=2),),
        (),
        (
            Step({3: 3 / 7, 1: 2 / 7, 2: 2 / 7}),
            start(4, "w1", 7, 4, version=1, since=4.0),
            start(5, "w2", 11, 3, version=1, since=4.0),
        ),
        (),
    ]


def test_one_who_returns_in_mid_round_takes_up_what_was_lost() -> None:
    script = [*joined("w0", "w1"), (1.0, Left("w0")), (1.5, Joined("w0"))]
    entries = transcript(pl.policies.MinWorkers(2, pl.sync()), script, batch=8)
    assert entries[-1].commands == (start(2, "w0", 0, 4, since=1.5, attempt=2),)


@pytest.mark.parametrize(
    "policy",
    [pl.k_sync(1), pl.k_async(1), pl.asynchronous(), pl.rennala(1), pl.ringmaster(9)],
    ids=describe,
)
def test_what_was_lost_comes_before_anything_new(policy: pl.policies.Gather) -> None:
    script = [*joined("w0", "w1"), (1.0, Left("w0")), (2.0, Done("w1"))]
    step, again, *rest = transcript(policy, script, batch=8)[3].commands
    assert step == Step({1: 1.0})
    assert again == start(2, "w1", 0, 8, version=1, since=2.0, attempt=2)
    assert not rest


def test_everyone_gone_and_back_nothing_is_lost() -> None:
    """One worker does all three shares in turn, on the samples they were drawn for."""
    script = [
        *joined("w0", "w1", "w2"),
        *((1.0, Left(worker)) for worker in ("w0", "w1", "w2")),
        (2.0, Joined("w0")),
        (2.5, Done("w0")),  # the task it had before it left, too late
        *((3.0 + i, Done("w0")) for i in range(3)),
    ]
    entries = transcript(pl.policies.MinWorkers(3, pl.sync()), script, batch=9)
    assert entries[7].commands == (Discard(0),)
    (step,) = steps(entries)
    redone = tasks(entries)
    assert [redone[id].offset for id in step.weights] == [0, 3, 6]
    assert all(redone[id].attempt == 2 for id in step.weights)
    assert redone[max(redone)].samples == 9  # the next round has one worker


def test_a_share_that_no_worker_survives_is_replaced_by_a_new_one() -> None:
    """The round ends all the same; the samples that took three workers with them are left out."""
    script = [
        *joined("w0", "w1", "w2", "w3", "w4"),
        *((float(i), Left(worker)) for i, worker in enumerate(("w0", "w2", "w3"), start=1)),
        (4.0, Done("w1")),
        (5.0, Done("w4")),
    ]
    entries = transcript(pl.policies.MinWorkers(2, pl.sync()), script, batch=8)
    assert answers(entries)[1:9] == [
        (start(0, "w0", 0, 4), start(1, "w1", 4, 4)),
        *((), (), ()),  # they join in mid-round
        (start(2, "w2", 0, 4, since=1.0, attempt=2),),
        (start(3, "w3", 0, 4, since=2.0, attempt=3),),
        (start(4, "w4", 8, 4, since=3.0),),
        (),
    ]
    assert steps(entries) == [Step({1: 0.5, 4: 0.5})]


def test_an_empty_result_is_discarded_and_its_place_filled() -> None:
    script = [*joined("w0", "w1"), (1.0, Done("w0", samples=0)), (2.0, Done("w1"))]
    entries = transcript(pl.policies.MinWorkers(2, pl.sync()), script, batch=8)
    assert entries[2].commands == (Discard(0), start(2, "w0", 8, 4, since=1.0))
    assert entries[3].commands == ()


def test_a_result_that_has_grown_too_old_is_discarded_on_arrival() -> None:
    policy = pl.policies.Gather(2, max_staleness=1, preempt=False)
    script = [
        *joined("w0", "w1", "w2", "w3"),  # tasks 0 to 3 at version 0
        *((1.0, Done("w0")), (1.0, Done("w1"))),  # step 1, tasks 4 and 5
        *((2.0, Done("w0")), (2.0, Done("w1"))),  # step 2, tasks 6 and 7
        (3.0, Done("w2")),  # delay 2: of no use
        (4.0, Done("w0")),
        (5.0, Done("w1")),
    ]
    entries = transcript(policy, script, batch=2)
    late = next(entry for entry in entries if entry.now == 3.0)
    assert late.commands == (Discard(2), start(8, "w2", 8, 1, version=2, since=3.0))
    assert [list(step.weights) for step in steps(entries)] == [[0, 1], [4, 5], [6, 7]]
    assert not any(isinstance(c, Cancel) for entry in entries for c in entry.commands)


def test_what_a_step_left_out_is_discarded_once_it_is_too_old() -> None:
    def first(view: View, results: Collection[Result]) -> dict[int, float]:
        return {min(result.task.id for result in results): 1.0}

    script = [
        *joined("w0", "w1"),
        *((1.0, Done("w0")), (1.0, Done("w1"))),  # uses 0, keeps 1 for a step more
        (2.0, Done("w0")),
    ]
    policy = pl.policies.Gather(2, max_staleness=1, combine=first)
    assert [entry.commands for entry in transcript(policy, script, batch=2) if entry.now] == [
        (),
        (Step({0: 1.0}), start(2, "w0", 2, 1, version=1, since=1.0)),
        (),
        (
            Step({1: 1.0}),
            start(3, "w1", 3, 1, version=2, since=2.0),
        ),
        (),
    ]
    strict = transcript(pl.policies.Gather(2, combine=first), script[:4], batch=2)
    assert strict[3].commands[:2] == (Step({0: 1.0}), Discard(1))


# --- choosing k and workers ----------------------------------------------------------------------


@dataclass
class Growing:
    """Asks for one result more at each version."""

    wants: frozenset[Want] = frozenset({"norm"})
    most: int = 8
    learned: list[str] = field(default_factory=list)

    def choose(self, view: View) -> int:
        return view.version + 1

    def learn(self, view: View, event: Event) -> None:
        self.learned.append(type(event).__name__)


def test_a_chooser_is_asked_once_per_version_and_sees_every_event() -> None:
    policy = pl.policies.Gather(Growing())
    assert policy.wants == {"norm"}
    script = [*joined("w0", "w1"), (1.0, Done("w0")), (2.0, Done("w1")), (3.0, Done("w0"))]
    coordinator = pl.protocol.Coordinator(policy, 8)
    entries = transcript(policy, script, batch=8)
    assert [list(step.weights) for step in steps(entries)] == [[0]]
    assert entries[2].commands[1] == Cancel(1)  # w1's, of version 0
    for entry in entries:
        coordinator.handle(entry.now, entry.event)
    assert isinstance(coordinator.policy, pl.policies.Gather)
    assert isinstance(coordinator.policy.k, Growing)
    assert coordinator.policy.k.learned[:4] == ["Joined", "Joined", "Finished", "Stepped"]
    samples = [task.samples for task in tasks(entries).values()]
    assert samples == [8, 8, 4, 4]  # halves, as two results are awaited


@dataclass
class Odd:
    """Gives tasks to workers with odd numbers."""

    wants: frozenset[Want] = frozenset({"dot"})
    asked: list[int] = field(default_factory=list)

    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> dict[WorkerId, int]:
        self.asked.append(wanted)
        return {worker: 1 for worker in candidates if int(worker[1:]) % 2}

    def learn(self, view: View, news: Event | Cancel) -> None:
        pass


def test_a_selector_says_who_gets_a_task() -> None:
    policy = pl.policies.Gather(1, select=Odd(), hedge=1, refill=True)
    assert policy.wants == {"dot"}
    entries = transcript(policy, joined("w0", "w1", "w2", "w3", "w5"), batch=2)
    assert [task.worker for task in tasks(entries).values()] == ["w1", "w3"]  # and no third


def test_a_selector_hears_how_many_results_are_missing() -> None:
    selector = Odd()
    policy = pl.policies.Gather(2, select=selector, refill=True)
    coordinator = pl.protocol.Coordinator(policy, 2)
    for worker in ("w0", "w1", "w3"):
        coordinator.handle(0.0, Joined(worker))
    assert isinstance(coordinator.policy, pl.policies.Gather)
    assert isinstance(coordinator.policy.select, Odd)
    assert coordinator.policy.select.asked == [2, 2, 1]
    assert selector.asked == []


# --- weights -------------------------------------------------------------------------------------


def test_weights_follow_the_samples() -> None:
    script = [*joined("w0", "w1"), (1.0, Done("w1", samples=1)), (2.0, Done("w0", samples=3))]
    (step,) = steps(transcript(pl.policies.Gather(2, work=Work(samples=4)), script))
    assert step == Step({0: 0.75, 1: 0.25})
    assert list(step.weights) == [0, 1]  # summed in the order of the data, not of arrival


def test_faded_divides_by_one_more_than_the_delay() -> None:
    script = [
        *joined("w0", "w1"),
        *((float(at), Done("w0")) for at in (1, 2, 3)),
        (4.0, Done("w1")),
        (5.0, Done("w0")),
    ]
    entries = transcript(pl.asynchronous(), script, batch=4)
    weights = [list(step.weights.values()) for step in steps(entries)]
    assert weights == [[1.0], [1.0], [1.0], [1 / 4], [1 / 2]]
    undamped = transcript(pl.asynchronous(damping=False), script, batch=4)
    assert {w for step in steps(undamped) for w in step.weights.values()} == {1.0}


# --- what is refused -----------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^k=0: a step needs at least one result; use k >= 1$"):
        pl.policies.Gather(0)
    with pytest.raises(ValueError, match=r"^max_staleness=-1: use >= 0$"):
        pl.policies.Gather(1, max_staleness=-1)


def refusal(policy: pl.policies.Gather, workers: int, batch: int) -> str:
    with pytest.raises(ValueError) as refused:
        pl.Trainer(pl.learners.TimingOnly(batch), policy, pl.Simulator(workers), progress=False)
    return str(refused.value)


def test_more_results_than_workers_are_refused() -> None:
    assert refusal(pl.k_sync(12), 8, 64) == (
        "k=12 exceeds the 8 workers of this engine; use k <= 8, "
        "or refill=True (rennala) to let quick workers deliver several results"
    )
    pl.k_sync(8).check(worker_names(8), 64)
    pl.rennala(12).check(worker_names(8), 64)


@pytest.mark.parametrize(
    "policy", [pl.sync(), pl.sync(shares=8), pl.k_async(8), pl.rennala(8)], ids=describe
)
def test_a_batch_smaller_than_its_shares_is_refused(policy: pl.policies.Gather) -> None:
    told = "batch_size=7 cannot be shared among k=8 results; use batch_size >= 8"
    assert refusal(policy, 8, 7) == told
    policy.check(worker_names(8), 8)


def test_work_with_its_own_samples_needs_no_batch_to_share() -> None:
    pl.policies.Gather(8, work=Work(samples=1)).check(worker_names(8), 1)
    pl.policies.Gather(8, work=lambda view, worker: Work(samples=1)).check(worker_names(8), 1)


def test_redo_is_a_command_of_the_protocol() -> None:
    """What the transcripts above show as started tasks, the policy asks for by the task's id."""
    policy = pl.k_sync(1)
    coordinator = pl.protocol.Coordinator(policy, 4)
    coordinator.handle(0.0, Joined("w0"))
    coordinator.ledger.record(1.0, Left("w0"))
    coordinator.ledger.record(1.0, Joined("w1"))
    given = next(coordinator.policy.react(coordinator.ledger, Joined("w1")))
    assert given == Assign("w1", redo=0)


def test_a_stepped_event_alone_changes_nothing() -> None:
    entries = transcript(pl.k_sync(1), [*joined("w0"), (1.0, Done("w0"))], batch=4)
    assert entries[-1].event == Stepped(1)
    assert entries[-1].commands == ()
    assert isinstance(entries[-2].event, Finished)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: pl.k_sync("3"), r"k='3': use a whole number from 1 on"),  # type: ignore[arg-type]
        (lambda: pl.k_sync(2.5), r"k=2.5: use a whole number from 1 on"),  # type: ignore[arg-type]
        (lambda: pl.k_sync(3, samples="8"), r"samples='8': use a whole number"),  # type: ignore[arg-type]
        (lambda: pl.asynchronous("3"), r"max_staleness='3': use >= 0"),  # type: ignore[arg-type]
        (lambda: pl.ringmaster("2"), r"threshold='2': .* use threshold >= 1"),  # type: ignore[arg-type]
        (lambda: pl.local_sgd("10"), r"steps='10': use a whole number"),  # type: ignore[arg-type]
        (lambda: pl.local_sgd(0), r"steps=0: use at least 1"),
        (lambda: pl.bandit(2, hedge="1"), r"hedge='1': use 0 or more"),  # type: ignore[arg-type]
    ],
)
def test_numbers_of_another_kind_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_numbers_may_be_those_of_numpy() -> None:
    assert pl.k_sync(np.int64(3)) == pl.k_sync(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "given"), [(pl.sync(shares=2), 0), (pl.k_sync(2), 1)])
def test_a_worker_that_joins_during_a_round(policy: pl.policies.Gather, given: int) -> None:
    """A spare task would take samples that a later step of an undisturbed run uses."""
    coordinator = pl.protocol.Coordinator(policy, batch=4)
    for worker in ("w0", "w1"):
        coordinator.handle(0.0, pl.protocol.Joined(worker))
    assert len(coordinator.ledger.running) == 2
    coordinator.handle(1.0, pl.protocol.Joined("w2"))
    assert len(coordinator.ledger.running) == 2 + given
    coordinator.handle(2.0, pl.protocol.Left("w1"))  # its task goes to the worker without one
    assert {task.worker for task in coordinator.ledger.running.values()} >= {"w0", "w2"}
    assert not coordinator.ledger.lost or given


def _result(id: int, steps: int, samples: int, done: int | None = None) -> Result:
    task = Task(id, f"w{id}", Work(samples=samples, steps=steps), 0, 0.0, samples, id)
    return Result(task, 1.0, samples * steps if done is None else done, 1.0, {})


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([_result(0, 1, 8), _result(1, 4, 8)], [0.5, 0.5]),  # a change of 4 steps is 4 times longer
        ([_result(0, 4, 8), _result(1, 4, 24)], [0.25, 0.75]),
        ([_result(0, 4, 8, done=16), _result(1, 4, 8)], [0.5, 0.5]),  # two whole steps
        ([_result(0, 4, 8, done=4), _result(1, 1, 8, done=4)], [0.5, 0.5]),  # half a step each
        ([_result(0, 1, 8, done=4), _result(1, 1, 8)], [1 / 3, 2 / 3]),
    ],
)
def test_results_weigh_by_samples_per_local_step(
    results: list[Result], expected: list[float]
) -> None:
    weights = mean(None, results)  # type: ignore[arg-type]
    assert list(weights.values()) == pytest.approx(expected)


def test_every_sample_counts_the_same_whatever_the_local_steps() -> None:
    """One worker takes 1 local step and one 4, of 8 samples each: an epoch of 40 samples.

    With a tiny learning rate the local models stay the same. The step is then the mean gradient of
    all 40, times the mean number of local steps, 40 / 16.
    """
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(40, 3)), rng.choice([-1.0, 1.0], 40)
    learner = pl.learners.Logistic(features, labels, lr=1e-9, batch_size=16)

    def work(view: pl.protocol.View, worker: str) -> Work:
        return Work(samples=8, steps=4 if worker == "w1" else 1)

    policy = pl.policies.Gather(2, work=work)
    run = pl.Trainer(learner, policy, pl.Simulator(2), progress=False).fit(steps=1)
    # The gradient at 0 of log(1 + exp(-y a.x)) is -y a / 2.
    gradient = (-labels[:, None] * features / 2).mean(axis=0)
    np.testing.assert_allclose(run.model, -1e-9 * 40 / 16 * gradient, rtol=1e-6)
