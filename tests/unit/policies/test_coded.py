"""Coded steps: the whole batch in each, whoever is missing, and nobody's mistake unnoticed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import fsum
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.codes.approximate import Replicated, Stochastic, graph
from paceline.codes.base import Code
from paceline.codes.blocks import sketch
from paceline.codes.dual import by_speed
from paceline.codes.generators import best, repetition
from paceline.codes.groups import Grouped
from paceline.codes.placements import scattered
from paceline.core.coordinator import Coordinator
from paceline.core.journal import Entry, Journal
from paceline.core.protocol import (
    Cancel,
    Discard,
    Event,
    Finished,
    Joined,
    Left,
    Start,
    Step,
    Task,
    magnitude,
)
from paceline.data.partition.base import Partition
from paceline.learners.arrays import ArrayReplica
from paceline.learners.base import Array, Outcome, Proceed
from paceline.policies.coded import code_for
from paceline.testing import Done, transcript

RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(200, 13)), RNG.choice([-1.0, 1.0], 200)


def logistic(
    batch: int, kind: type[pl.learners.Logistic] = pl.learners.Logistic
) -> pl.learners.Logistic:
    return kind(FEATURES, LABELS, l2=0.1, lr=0.5, batch_size=batch)


def fit(
    policy: pl.policies.Coded | pl.policies.Gather,
    engine: pl.Simulator,
    batch: int,
    steps: int = 40,
) -> pl.Run:
    return pl.Trainer(logistic(batch), policy, engine, progress=False).fit(steps=steps)


def joined(n: int) -> list[tuple[float, Event | Done]]:
    return [(0.0, Joined(f"w{i}")) for i in range(n)]


def started(entries: list[Entry] | Journal) -> list[Task]:
    return [c.task for entry in entries for c in entry.commands if isinstance(c, Start)]


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "s", "m", "batch"),
    [(8, 2, 2, 32), (10, 2, 2, 43), (7, 1, 1, 28), (6, 0, 3, 25), (9, 3, 1, 36), (5, 4, 1, 5)],
)
def test_the_trajectory_is_that_of_sync(n: int, s: int, m: int, batch: int) -> None:
    """Also while some leave and return, and with parts of different size."""
    schedule: list[tuple[float, Joined | Left]] = [
        (5.0, Left("w1")),
        (9.0, Left("w2")),
        (30.0, Joined("w1")),
    ]
    expected = fit(pl.sync(), pl.Simulator(n), batch)
    run = fit(pl.coded(s, m), pl.Simulator(n, schedule=schedule), batch)
    np.testing.assert_allclose(run.model, expected.model, atol=1e-12)
    assert run.metrics["samples"].tolist() == [batch] * 40
    assert run.meter.samples_used == 40 * batch
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_more_parts_on_quick_workers() -> None:
    """Each part has the three holders it needs, and the quickest worker has most parts."""
    make = partial(_by_speed, speeds=(1.0, 1.0, 2.0, 4.0, 8.0))
    expected = fit(pl.sync(), pl.Simulator(5), 20)
    run = fit(pl.policies.Coded(make(5)), pl.Simulator(5), 20)
    np.testing.assert_allclose(run.model, expected.model, atol=1e-9)
    loads = {task.worker: task.computed for task in started(run.journal)}
    assert loads["w4"] > 2 * loads["w0"]


def _by_speed(n: int, speeds: tuple[float, ...]) -> Code:
    return by_speed(speeds, 10, stragglers=1, messages=2)


def test_messages_are_as_short_as_promised() -> None:
    """Each of 13 numbers in 4 blocks: 4 numbers, of 8 bytes, go up, and 13 down."""
    run = fit(pl.coded(1, 4), pl.Simulator(10), 40, steps=5)
    results = run.meter.used + run.meter.discarded + len(run.meter._held)
    assert run.meter.up_bytes == results * 26  # 13 * 8 / 4
    assert run.meter.down_bytes == run.meter.started * 13 * 8
    assert all(task.work.messages == 4 for task in started(run.journal))


def test_a_shorter_message_arrives_sooner() -> None:
    link = pl.delays.Link(up=13 * 8.0)  # a whole vector takes a second
    seconds = {
        m: fit(pl.coded(0, m), pl.Simulator(6, pl.delays.Fixed(0.01), link), 12, 10).seconds
        for m in (1, 2, 3)
    }
    assert seconds[1] == pytest.approx(10.1)
    assert seconds[2] == pytest.approx(10 * (7 / 13 + 0.02), rel=0.1)
    assert seconds[3] < 0.45 * seconds[1]


def test_every_sample_has_one_fate() -> None:
    run = fit(pl.coded(1, 2), pl.Simulator(6), 25, steps=8)
    place = 0
    for stretch in run.samples():
        assert stretch.offset == place
        place += stretch.samples
        assert stretch.fate == ("used" if place <= 8 * 25 else "unfinished")
    assert place == 9 * 25


# --- when a step is taken ------------------------------------------------------------------------


def test_a_step_is_taken_when_every_group_has_enough() -> None:
    """Two groups of two that do the same: one answer of each is enough, two of one are not."""
    script = [*joined(4), (1.0, Done("w0")), (2.0, Done("w1")), (3.0, Done("w3"))]
    entries = transcript(
        pl.policies.MinWorkers(4, pl.policies.Coded(Grouped(4, repetition(2)))), script, batch=8
    )
    assert [task.work.tag for task in started(entries)[:4]] == [0, 1, 2, 3]
    assert entries[4].commands == entries[5].commands == ()
    step, discard, cancel, *again = entries[6].commands
    assert isinstance(step, Step)
    assert step.weights[3] == (0.25,)  # of four parts
    assert set(step.weights) in ({0, 3}, {1, 3}, {0, 1, 3})
    assert sum(w[0] for id, w in step.weights.items() if id != 3 and isinstance(w, tuple)) == 0.25
    rest = [discard, cancel, *again]
    assert Cancel(2) in rest
    assert sum(isinstance(c, Start) for c in rest) == 4


def test_late_answers_are_of_no_use() -> None:
    script = [*joined(2), (1.0, Done("w0"))]
    policy = pl.policies.MinWorkers(2, pl.policies.Coded(Grouped(2, repetition(2))))
    coordinator = Coordinator(policy, 8)
    for now, event in script[:2]:
        assert not isinstance(event, Done)
        coordinator.handle(now, event)
    coordinator.handle(1.0, Finished(0, 8))
    assert coordinator.handle(2.0, Finished(1, 8)).commands == (Discard(1),)


@pytest.mark.parametrize("missing", list(combinations(range(6), 2)))
def test_any_two_of_six_may_be_missing(missing: tuple[int, int]) -> None:
    script = [*joined(6), *((1.0 + i, Done(f"w{i}")) for i in range(6) if i not in missing)]
    entries = transcript(pl.policies.MinWorkers(6, pl.coded(2, 1)), script, batch=6)
    steps = [c for entry in entries for c in entry.commands if isinstance(c, Step)]
    assert len(steps) == 1


def test_an_approximate_code_decodes_what_has_come() -> None:
    run = fit(pl.policies.Coded(Replicated(8, 2, 2), wait=6), pl.Simulator(8), 32)
    assert run.steps == 40
    assert run.metrics["loss"][-1] < run.metrics["loss"][0]
    assert all(count <= 6 for count in run.metrics["results"])


def test_an_approximate_code_steps_once_every_group_has_answered() -> None:
    """The three groups have answered after three of six results; a fourth would add nothing."""
    policy = pl.policies.MinWorkers(6, pl.policies.Coded(Replicated(6, 2, 1)))
    script = [*joined(6), *((1.0 + i, Done(f"w{i}")) for i in (0, 3, 5))]
    entries = transcript(policy, script, batch=12)
    (step,) = (c for entry in entries for c in entry.commands if isinstance(c, Step))
    assert list(step.weights.values()) == [(1 / 6,)] * 3  # the mean of six parts, exact


def test_an_approximate_code_steps_without_a_group_after_enough_answers() -> None:
    policy = pl.policies.MinWorkers(6, pl.policies.Coded(Replicated(6, 2, 3)))
    script = [*joined(6), *((1.0 + i, Done(f"w{i}")) for i in (0, 1, 2))]
    (step,) = (
        c
        for entry in transcript(policy, script, batch=12)
        for c in entry.commands
        if isinstance(c, Step)
    )
    assert list(step.weights.values()) == [(1.5 / 6,)] * 2  # groups 0 and 1, for group 2 as well


def test_covered_steps_are_those_of_sync_and_sooner_than_a_fixed_wait() -> None:
    """No group of two is ever lost if one worker may be missing."""
    delays = pl.delays.Exponential(1.0)
    covered = fit(pl.policies.Coded(Replicated(8, 2, 1)), pl.Simulator(8, delays), 32)
    waited = fit(pl.policies.Coded(Replicated(8, 2, 1), wait=7), pl.Simulator(8, delays), 32)
    exact = fit(pl.sync(), pl.Simulator(8, delays), 32)
    np.testing.assert_allclose(covered.model, exact.model, atol=1e-12)
    assert covered.seconds < 0.8 * waited.seconds


@pytest.mark.parametrize("wait", [2, 4, 6, None])
def test_a_stochastic_code_is_unbiased_at_any_wait(wait: int | None) -> None:
    """A constant gradient of 1, whose estimates are the sums of weights and coefficients."""
    code = Stochastic(6, scattered(6, 6, 2, seed=3), 0.25)
    policy = pl.policies.Coded(code, wait=wait)
    engine = pl.Simulator(6, pl.delays.Exponential(1.0))
    run = pl.Trainer(logistic(12), policy, engine, progress=False).fit(steps=400)
    sums = {i: sum(value for (value,) in code.row(i).values()) for i in range(code.n)}
    rows: dict[int, Any] = {task.id: task.work.tag for task in started(run.journal)}
    steps = [c for entry in run.journal for c in entry.commands if isinstance(c, Step)]
    estimates = [
        fsum(magnitude(weight) * sums[rows[id]] for id, weight in step.weights.items())
        for step in steps
    ]
    error = np.std(estimates) / len(estimates) ** 0.5
    assert len(estimates) == 400
    assert np.mean(estimates) == pytest.approx(1.0, abs=4 * error + 1e-12)


# --- who has which row ---------------------------------------------------------------------------


def test_the_row_of_one_who_left_goes_to_one_without() -> None:
    script: list[tuple[float, Event | Done]] = [*joined(4), (1.0, Left("w2")), (2.0, Joined("w9"))]
    entries = transcript(
        pl.policies.MinWorkers(4, pl.policies.Coded(Grouped(4, repetition(2)))), script, batch=8
    )
    assert entries[4].commands == ()
    (task,) = started(entries[5:])
    assert (task.worker, task.work.tag) == ("w9", 2)


def test_where_those_who_are_there_are_not_enough_one_takes_a_second_row() -> None:
    """Both of a group are gone: who has answered computes for them, and the step is exact."""
    script: list[tuple[float, Event | Done]] = [
        *joined(4),
        (1.0, Left("w2")),
        (1.0, Left("w3")),
        (2.0, Done("w0")),
        (3.0, Done("w0")),
    ]
    entries = transcript(
        pl.policies.MinWorkers(4, pl.policies.Coded(Grouped(4, repetition(2)))), script, batch=8
    )
    (again,) = started(entries[6:7])
    assert (again.worker, again.work.tag) == ("w0", 2)
    assert any(isinstance(c, Step) for c in entries[7].commands)


def test_the_code_is_made_anew_when_the_change_lasts() -> None:
    """Of six workers one leaves: for five steps its row stays empty, then there are five rows."""
    schedule = [(3.0, pl.protocol.Left("w5"))]
    run = fit(pl.coded(1, 1), pl.Simulator(6, pl.delays.Fixed(0.5), schedule=schedule), 30, 30)
    cuts = [(task.version, task.work.n_parts) for task in started(run.journal)]
    changed = min(version for version, cut in cuts if cut == 5)
    left = min(
        task.version
        for task in started(run.journal)
        if not any(t.worker == "w5" and t.version >= task.version for t in started(run.journal))
    )
    assert {cut for version, cut in cuts if version < changed} == {6}
    assert {cut for version, cut in cuts if version >= changed} == {5}
    assert 4 <= changed - left + 1 <= 6
    assert run.metrics["samples"].tolist() == [30] * 30


def test_the_code_grows_with_those_who_join() -> None:
    schedule: list[tuple[float, Joined | Left]] = [(0.1, Left("w5")), (9.0, Joined("w5"))]
    run = fit(pl.coded(1, 1), pl.Simulator(6, pl.delays.Fixed(0.5), schedule=schedule), 30, 40)
    assert [task.work.n_parts for task in started(run.journal)][-1] == 6


# --- wrong gradients -----------------------------------------------------------------------------


def answered(policy: pl.policies.Coded, n: int, sketches: dict[int, float]) -> Coordinator:
    """Let rows answer with given sketches, in their order."""
    coordinator = Coordinator(pl.policies.MinWorkers(n, policy), 8)
    tasks: dict[int, Task] = {}
    for i in range(n):
        for task in started([coordinator.handle(0.0, Joined(f"w{i}"))]):
            assert isinstance(task.work.tag, int)
            tasks[task.work.tag] = task
    for row, value in sketches.items():
        coordinator.handle(1.0, Finished(tasks[row].id, 8, stats={"sketch": value}))
    return coordinator


def test_the_wrong_one_is_named_and_left_out() -> None:
    """A group of three that do the same, and waits for all: two agree, so the third is wrong."""
    policy = pl.policies.Coded(Grouped(3, repetition(3)), verify=2)
    coordinator = answered(policy, 3, {0: 5.0, 1: 7.0, 2: 5.0})
    (step,) = (c for e in coordinator.journal for c in e.commands if isinstance(c, Step))
    assert 1 not in step.weights
    inner = coordinator.policy.inner  # type: ignore[attr-defined]
    assert inner.suspects == {"w1": 1}


def test_with_shorter_messages_too() -> None:
    """Six workers, messages of half the length, four stragglers' worth of redundancy."""
    code = Grouped(6, best(6, 2))
    blocks = np.array([3.0, -1.0])
    right = {i: float(np.array(code.row(i)[0]) @ blocks) for i in range(6)}
    for wrong in range(6):
        policy = pl.policies.Coded(code, verify=4)
        coordinator = answered(policy, 6, right | {wrong: right[wrong] + 0.1})
        assert coordinator.policy.inner.suspects == {f"w{wrong}": 1}  # type: ignore[attr-defined]
    clean = answered(pl.policies.Coded(code, verify=4), 6, right)
    assert clean.policy.inner.suspects == {}  # type: ignore[attr-defined]


def test_two_that_differ_are_known_to_differ_and_no_more() -> None:
    policy = pl.policies.Coded(Grouped(2, repetition(2)), verify=1)
    with pytest.raises(pl.errors.WrongGradients, match="contradict each other"):
        answered(policy, 2, {0: 5.0, 1: 7.0})


def test_in_a_whole_run_the_broken_worker_is_found() -> None:
    run = pl.Trainer(
        logistic(12, Broken), pl.coded(2, 1, verify=2), pl.Simulator(3), progress=False
    ).fit(steps=10)
    assert isinstance(run.policy, pl.policies.Coded)
    assert run.policy.suspects == {"w1": 10}
    expected = fit(pl.sync(), pl.Simulator(3), 12, 10)
    np.testing.assert_allclose(run.model, expected.model, atol=1e-12)


class Broken(pl.learners.Logistic):
    """A learner whose worker w1 returns gradients that are off in one element."""

    def replica(self, seed: int, tiles: Partition | None = None) -> ArrayReplica:
        return _BrokenReplica(self, seed, tiles)


class _BrokenReplica(ArrayReplica):
    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        outcome = super().compute(model, task, proceed)
        if task.worker == "w1" and outcome.vector is not None:
            vector = outcome.vector.copy()
            vector[4] += 0.5
            stats = {**outcome.stats, "sketch": outcome.stats["sketch"] + 0.5}
            outcome = replace(outcome, vector=vector, stats=stats)
        return outcome


def test_a_gradient_in_another_order_is_wrong_too() -> None:
    """Its plain sum would be the same."""
    message = np.arange(13.0)
    one, other = (sketch(m, np.random.default_rng(3)) for m in (message, message[::-1].copy()))
    assert one != pytest.approx(other)


def test_healthy_workers_are_not_suspected_though_gradients_add_up_to_zero() -> None:
    """The gradients of a softmax over classes do; what is left of a plain sum is rounding."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 20, generator=generator)
    data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
    model = torch.nn.Linear(20, 5)

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    learner = pl.TorchLearner(model, loss, partial(torch.optim.SGD, lr=0.1), data, 20)
    for verify in (1, 2):
        policy = pl.coded(2, 1, verify=verify)
        run = pl.Trainer(learner, policy, pl.Simulator(5), progress=False).fit(steps=10)
        assert isinstance(run.policy, pl.policies.Coded) and run.policy.suspects == {}


def test_who_returns_no_number_is_named() -> None:
    for row in range(3):
        policy = pl.policies.Coded(Grouped(3, repetition(3)), verify=2)
        coordinator = answered(policy, 3, {0: 5.0, 1: 5.0, 2: 5.0} | {row: float("nan")})
        assert coordinator.policy.inner.suspects == {f"w{row}": 1}  # type: ignore[attr-defined]


def test_where_all_are_without_a_number_nobody_is_blamed() -> None:
    """Training has diverged: the step is taken, and its loss ends the run."""
    coordinator = answered(
        pl.policies.Coded(Grouped(3, repetition(3)), verify=2),
        3,
        dict.fromkeys(range(3), float("nan")),
    )
    assert coordinator.policy.inner.suspects == {}  # type: ignore[attr-defined]
    assert coordinator.ledger.version == 1


def test_rows_without_parts_are_not_waited_for() -> None:
    code = by_speed((0.01, 5.0, 5.0, 5.0, 5.0), 10, 1, 2)
    assert not code.row(0)
    run = fit(pl.policies.Coded(code, verify=1), pl.Simulator(5), 20, steps=5)
    assert run.steps == 5


def test_what_is_verified_stays_so_while_one_is_away() -> None:
    """The one who is left of a group computes the other's row as well."""
    policy = pl.policies.Coded(Grouped(4, repetition(2)), verify=1)
    schedule = [(0.5, pl.protocol.Left("w0"))]
    run = fit(policy, pl.Simulator(4, pl.delays.Fixed(1.0), schedule=schedule), 8, steps=5)
    rows = [task.work.tag for task in started(run.journal) if task.version == 2]
    assert sorted(map(str, rows)) == ["0", "1", "2", "3"]


def test_nothing_is_kept_of_parts_that_were_lost() -> None:
    script: list[tuple[float, Event | Done]] = [*joined(4)]
    for turn in range(20):
        script += [(1.0 + turn, Left("w0")), (1.5 + turn, Joined("w0"))]
    coordinator = Coordinator(pl.policies.MinWorkers(4, pl.coded(1, 1)), 8)
    for now, event in script:
        assert not isinstance(event, Done)
        coordinator.handle(now, event)
    assert not coordinator.ledger.lost


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (
            pl.policies.Coded(Grouped(4, repetition(2))),
            "the code has 4 rows and this engine 6 workers; make it for 6, or give Coded a",
        ),
        (pl.coded(1, 1), None),
        (
            pl.policies.Coded(graph(6, 2, 1), wait=7),
            "wait=7: 6 workers return at most 6 results; use wait from 1 to 6, or no wait= to",
        ),
        (pl.coded(1, 1, verify=2), "verify=2: this code tolerates 1 stragglers"),
        (
            pl.policies.Coded(graph(6, 2, 1), wait=5, verify=1),
            "differ even if all workers are right; use an exact code, and no wait=",
        ),
    ],
)
def test_what_cannot_work_is_refused(policy: pl.policies.Coded, told: str | None) -> None:
    engine = pl.Simulator(6)
    if told is None:
        with pytest.raises(ValueError, match="batch_size=5 cannot be cut into 6 parts"):
            pl.Trainer(logistic(5), policy, engine, progress=False)
        return
    with pytest.raises(ValueError, match=told):
        pl.Trainer(logistic(12), policy, engine, progress=False)


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="stragglers=-1: use at least 0"):
        pl.coded(-1)
    with pytest.raises(ValueError, match="messages=0: use at least 1"):
        pl.coded(1, 0)
    assert code_for(3, 2, 4).n == 3  # fewer workers than it would need: it bears less
