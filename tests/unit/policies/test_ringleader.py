"""Ringleader ASGD: rounds in which every worker leads one step, along the means of all workers."""

from __future__ import annotations

import numpy as np
import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator
from paceline.core.policy import Policy
from paceline.core.protocol import Discard, Finished, Joined, Left, Start, Step, Task
from paceline.policies import Placed, Ringleader, ringleader

SIZES = [10, 20, 30, 60]
TILES = pl.partition.Partition(np.repeat(range(4), SIZES))
OWNERS = {f"w{i}": [i] for i in range(4)}
OPTIMA = np.array([8.0, -4.0, 2.0, 1.0])  # of each worker's data
SECONDS = [0.1, 1.0, 1.0, 3.0]  # for a sample


def trained(
    policy: Policy, steps: int, rate: float = 0.02, seconds: list[float] = SECONDS
) -> pl.Run:
    """Fit a mean: the optimum over all samples is that of the workers, by their samples."""
    targets = np.repeat(OPTIMA, SIZES)
    learner = pl.learners.LeastSquares(np.ones((120, 1)), targets, rate, 8)
    delays = [pl.delays.Exponential(each) for each in seconds]
    return pl.Trainer(learner, policy, pl.Simulator(4, delays), progress=False).fit(steps=steps)


def placed(**given: object) -> Ringleader:
    return ringleader(samples=2).placed(Placed(TILES, move=False, owners=OWNERS, **given))  # type: ignore[arg-type]


def steps_of(run: pl.Run) -> list[tuple[str, Step, dict[int, Task]]]:
    """Return each step with the worker whose result led to it, and the tasks until then.

    A worker that waits with its results leads a step without a new one; then its name is empty.
    """
    tasks: dict[int, Task] = {}
    found = []
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
            elif isinstance(command, Step):
                by = tasks[entry.event.task].worker if isinstance(entry.event, Finished) else ""
                found.append((by, command, dict(tasks)))
    return found


def test_every_worker_leads_one_step_of_a_round() -> None:
    found = steps_of(trained(ringleader(most=1000), 400))
    leaders = [worker for worker, _, _ in found]
    rounds = [leaders[i : i + 4] for i in range(0, 400, 4)]
    assert all(sorted(each) == ["w0", "w1", "w2", "w3"] for each in rounds)
    assert [step.keep for _, step, _ in found] == [True, True, True, False] * 100


def test_a_result_is_at_most_2n_minus_2_versions_old() -> None:
    found = steps_of(trained(ringleader(most=1000), 800))
    ages = [
        version - tasks[id].version
        for version, (_, step, tasks) in enumerate(found)
        for id in step.weights
    ]
    assert max(ages) == 2 * 4 - 2
    fast = [
        sum(tasks[id].worker == "w0" for id in step.weights) for _, step, tasks in found if step
    ]
    assert max(fast) > 10  # no result of the fast worker is dropped


@pytest.mark.parametrize("policy", [ringleader(), placed()], ids=["equal", "placed"])
def test_workers_count_by_their_data(policy: Ringleader) -> None:
    data = [0.25] * 4 if policy.placement is None else [size / 120 for size in SIZES]
    for _, step, tasks in steps_of(trained(policy, 200)):
        parts = dict.fromkeys(OWNERS, 0.0)
        for id, weight in step.weights.items():
            assert isinstance(weight, float)
            parts[tasks[id].worker] += weight
        assert list(parts.values()) == pytest.approx(data)


@pytest.mark.long
def test_the_optimum_is_that_of_all_samples() -> None:
    """Steps on each result as it comes follow the fast worker; its data are 1/12 of all."""
    best = float(np.average(OPTIMA, weights=SIZES))
    assert trained(placed(), 3000).model[0] == pytest.approx(best, abs=0.3)
    loose = pl.asynchronous(damping=False).placed(
        Placed(TILES, move=False, owners=OWNERS, bound=None)
    )
    assert trained(loose, 3000, rate=0.005).model[0] > best + 1.0


def test_a_worker_with_many_results_waits_for_its_step() -> None:
    run = trained(ringleader(most=3), 400)
    for _, step, tasks in steps_of(run):
        of = [tasks[id].worker for id in step.weights]
        assert max(of.count(worker) for worker in OWNERS) <= 3


def test_the_others_go_on_without_a_lost_worker() -> None:
    """The fast one waits with all results that it may have, so that none of its own will come."""
    coordinator = Coordinator(ringleader(most=1), batch=4)
    coordinator.handle(0.0, Joined("w0"))
    coordinator.handle(0.0, Joined("w1"))
    first, _ = coordinator.ledger.running.values()
    coordinator.handle(1.0, Finished(first.id, first.samples))
    assert (coordinator.ledger.version, list(coordinator.ledger.idle)) == (0, ["w0"])
    commands = coordinator.handle(2.0, Left("w1")).commands
    assert any(isinstance(command, Step) for command in commands)
    (again,) = coordinator.ledger.running.values()
    assert again.worker == "w0"


def test_a_round_ends_if_the_worker_leaves_that_has_not_led() -> None:
    coordinator = Coordinator(ringleader(most=2), batch=4)
    ledger = coordinator.ledger
    for worker in ("w0", "w1"):
        coordinator.handle(0.0, Joined(worker))
    first, second = ledger.running.values()
    coordinator.handle(1.0, Finished(second.id, second.samples))
    coordinator.handle(2.0, Finished(first.id, first.samples))  # and so w0 leads
    assert ledger.version == 1
    coordinator.handle(3.0, Left("w1"))
    for now in range(4, 12):
        (task,) = ledger.running.values()
        coordinator.handle(float(now), Finished(task.id, task.samples))
    assert ledger.version > 8
    assert len(ledger.held) <= 2


def test_a_worker_that_returns_leads_once_in_a_round() -> None:
    coordinator = Coordinator(ringleader(most=1), batch=4)
    ledger = coordinator.ledger
    for worker in ("w0", "w1", "w2"):
        coordinator.handle(0.0, Joined(worker))
    for task in list(ledger.running.values()):
        coordinator.handle(1.0, Finished(task.id, task.samples))
    version = ledger.version
    for now in range(2, 8):
        coordinator.handle(float(now), Left("w2"))
        coordinator.handle(float(now), Joined("w2"))
    assert ledger.version <= version + 3


def test_the_loss_of_a_used_result_does_not_stop_the_round() -> None:
    policy = ringleader(most=2)
    coordinator = Coordinator(policy, batch=6)
    ledger = coordinator.ledger
    for worker in ("w0", "w1", "w2"):
        coordinator.handle(0.0, Joined(worker))
    for task in list(ledger.running.values()):
        coordinator.handle(1.0, Finished(task.id, task.samples))
    assert ledger.version == 1  # w2 has led
    (lost,) = (id for id, result in ledger.held.items() if result.task.worker == "w2")
    ledger.apply(Discard(lost))
    for _ in range(6):
        task = next(iter(ledger.running.values()))
        coordinator.handle(2.0, Finished(task.id, task.samples))
    assert ledger.version >= 3 and ledger.running


def test_a_sample_counts_once() -> None:
    run = trained(ringleader(), 400)
    computed = sum(e.event.samples for e in run.journal if isinstance(e.event, Finished))
    assert 0.9 * computed < run.meter.samples_used <= computed


def test_it_refuses_other_placements() -> None:
    with pytest.raises(ValueError, match=r"use Placed\(…\)"):
        ringleader().placed(pl.BySpeed())
    with pytest.raises(ValueError, match="batch_size=2 cannot be shared among 4 workers"):
        ringleader().check(list(OWNERS), 2)
