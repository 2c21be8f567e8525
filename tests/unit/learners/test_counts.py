"""Losses that return (sum, count): steps are means over what is counted, not over samples."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.averages import by_count, mean_loss
from paceline.core.policy import Policy
from paceline.core.protocol import Task, Work
from paceline.data.sampling import Samples, Stream
from paceline.engines.checks import ResultCheck
from paceline.engines.results import Results
from paceline.planner.measure.curvature import measure_curvature
from tests import ragged
from tests.ragged import ROWS, SEED, by_tokens, error, flat_gradient, learner, move, network

CLOSE = 1e-6


def train(
    recipe: pl.TorchLearner, policy: Policy, steps: int = 3, workers: int = 4, **more: Any
) -> pl.Run:
    given = {"seed": SEED, "progress": False, **more}
    return pl.Trainer(recipe, policy, ragged.engine(workers), **given).fit(steps=steps)


# --- one process's mean over tokens --------------------------------------------------------------

POLICIES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "sync": (pl.sync(), {}),
    "shares by speed": (pl.sync(), {"placement": pl.BySpeed()}),
    "the fastest three": (pl.k_sync(3), {}),
    "a code": (pl.coded(2, verify=1), {}),
    "a code with short messages": (pl.coded(1, messages=2), {}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_is_the_mean_over_tokens(name: str) -> None:
    policy, more = POLICIES[name]
    run = train(learner(), policy, **more)
    expected = by_tokens(run)
    assert error(run, expected) < CLOSE
    shares = {task.samples for step in ragged.steps_of(run) for task, _ in step}
    assert (len(shares) > 1) == (name == "shares by speed")
    # The mean over samples is far from it, or this test could not fail.
    plain = train(learner(loss=ragged.mean_loss), policy, **more)
    assert error(plain, expected) > 1000 * CLOSE


@pytest.mark.parametrize("name", ["shares by speed", "a code with short messages"])
def test_micro_batches(name: str) -> None:
    policy, more = POLICIES[name]
    run = train(learner(micro_batch=2), policy, **more)
    assert error(run, by_tokens(run)) < CLOSE


def test_the_loss_of_a_step_is_the_mean_over_tokens() -> None:
    run = train(learner(), pl.sync(), 3, placement=pl.BySpeed())
    model, samples, expected = network().double(), Samples(Stream(len(ROWS), SEED), SEED), []
    for results in ragged.steps_of(run):
        rows = [i for task, _ in results for i in samples.of(task).tolist()]
        total, count = flat_gradient(model, rows)
        with torch.no_grad():
            losses = [ragged.token_loss(model, ragged.padded([ROWS[i]]))[0].item() for i in rows]
        expected.append(sum(losses) / count)
        move(model, total / count, 0.5)
    assert run.metrics["loss"] == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("bound", [None, 4.0])
def test_data_shards(bound: float | None) -> None:
    """Results have the weight that their shards are due; each counts by its tokens as well."""
    shards = pl.partition.even(len(ROWS), 8, seed=1)
    placement = pl.policies.Placed(shards, move=False, bound=bound)
    run = train(learner(), pl.k_sync(3), 4, placement=placement)
    model, samples = network().double(), Samples(Stream(len(ROWS), SEED), SEED, shards)
    for results in ragged.steps_of(run):
        total, mean, sum_of = torch.zeros(0), 0.0, sum(weight for _, weight in results)
        for task, weight in results:
            gradient, count = flat_gradient(model, samples.of(task).tolist())
            total = gradient * (weight / task.samples) + (total if total.numel() else 0.0)
            mean += weight * count / task.samples
        move(model, total * (sum_of / mean), 0.5)
    assert error(run, model) < CLOSE


def test_damped_steps_stay_damped() -> None:
    """The weight of a stale result is below 1, and a count must not bring it back to 1."""
    run = train(learner(), pl.asynchronous(), 9)
    model, samples = network().double(), Samples(Stream(len(ROWS), SEED), SEED)
    models = [copy.deepcopy(model)]
    assert any(weight < 0.9 for ((_, weight),) in ragged.steps_of(run))
    for ((task, weight),) in ragged.steps_of(run):
        total, count = flat_gradient(models[task.version], samples.of(task).tolist())
        move(model, total / count, 0.5 * weight)
        models.append(copy.deepcopy(model))
    assert error(run, model) < 2 * CLOSE


def test_local_steps() -> None:
    """Each local step is the mean over its tokens; a worker's change counts by all its tokens."""
    recipe = learner(outer=partial(torch.optim.SGD, lr=1.0), batch_size=48)
    run = train(recipe, pl.local_sgd(3), 3, placement=pl.BySpeed())
    model, samples = network().double(), Samples(Stream(len(ROWS), SEED), SEED)
    for results in ragged.steps_of(run):
        changes, tokens = [], []
        for task, _ in results:
            mine, seen = copy.deepcopy(model), 0
            for step in range(3):
                total, count = flat_gradient(mine, samples.of(task, step).tolist())
                move(mine, total / count, 0.5)
                seen += count
            pairs = zip(model.parameters(), mine.parameters(), strict=True)
            changes.append(torch.cat([(old - new).detach().flatten() for old, new in pairs]))
            tokens.append(seen)
        mean = sum(t * change for t, change in zip(tokens, changes, strict=True)) / sum(tokens)
        move(model, mean, 1.0)  # type: ignore[arg-type]
    assert error(run, model) < CLOSE


@pytest.mark.parametrize(
    "messages", [pl.codecs.BFloat16(), pl.codecs.Feedback(pl.codecs.TopK(0.5))]
)
def test_with_codecs(messages: Any) -> None:
    """Rounding is all that a codec changes, and error feedback brings back what Top-K left out."""
    steps = 40
    recipe = learner(optimizer=partial(torch.optim.SGD, lr=0.03))
    run = train(recipe, pl.sync(), steps, placement=pl.BySpeed(), codec=messages)
    expected = by_tokens(run, 0.03)
    plain = train(learner(optimizer=recipe.optimizer, loss=ragged.mean_loss), pl.sync(), steps,
                  placement=pl.BySpeed(), codec=messages)  # fmt: skip
    assert error(run, expected) < 0.3 * error(plain, expected)


# --- what a count may be -------------------------------------------------------------------------


def outcome(loss: Any, samples: int = 4, micro_batch: int | None = None) -> Any:
    recipe = learner(loss=loss, micro_batch=micro_batch)
    task = Task(0, "w0", Work(samples=samples), 0, 0.0, samples, 0)
    return recipe.replica(SEED).compute([recipe.server().vector], task, lambda done: True)


@pytest.mark.parametrize("kind", [int, float, np.int64, torch.tensor])
def test_kinds_of_counts(kind: Any) -> None:
    found = outcome(lambda model, batch: (ragged.mean_loss(model, batch) * 8.0, kind(8)))
    plain = outcome(ragged.mean_loss)
    np.testing.assert_allclose(found.vector, 2.0 * plain.vector, rtol=1e-6)
    assert found.stats == {"loss": pytest.approx(plain.stats["loss"], rel=1e-6), "count": 2.0}


def test_as_many_counts_as_samples_is_the_mean() -> None:
    def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return ragged.mean_loss(model, batch) * len(batch[0]), len(batch[0])

    for policy in (pl.sync(), pl.coded(1, messages=2), pl.asynchronous()):
        ours = train(learner(loss=counted), policy)
        plain = train(learner(loss=ragged.mean_loss), policy)
        assert error(ours, plain.model.double()) < CLOSE
        assert ours.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)


def test_batches_without_anything_to_count() -> None:
    """They change nothing: neither the gradient nor the mean of the others."""

    def long_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        total, count = ragged.token_loss(model, batch)
        return (total, int(count)) if count > 5 else (torch.zeros(()), 0)

    found = outcome(long_rows, samples=12, micro_batch=1)
    rows = Samples(Stream(len(ROWS), SEED), SEED).of(Task(0, "", Work(), 0, 0.0, 12, 0)).tolist()
    used = [i for i in rows if len(ROWS[i]) > 6]
    assert 0 < len(used) < len(rows)
    total, count = flat_gradient(network(), used)
    np.testing.assert_allclose(found.vector, total / 12, atol=1e-6)
    assert found.stats["count"] == count / 12
    none = outcome(lambda model, batch: (ragged.token_loss(model, batch)[0], 0))
    assert not none.vector.any() and none.samples == 4
    assert none.stats == {"count": 0.0}
    run = train(learner(loss=lambda m, b: (ragged.token_loss(m, b)[0], 0)), pl.sync(), 2)
    assert error(run, network().double()) == 0.0


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ((1.0, -1), "count -1"),
        ((1.0, float("nan")), "count nan"),
        ((1.0, torch.ones(2)), "of shape"),
        ((1.0, "8"), "a str as its count"),
        ((1.0, 2, 3), "a tuple of 3"),
        ((1.0, 2), "the sum of the losses as a tensor"),
    ],
)
def test_counts_that_cannot_be(found: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        outcome(lambda model, batch: found)


def test_a_count_for_some_batches_only() -> None:
    calls: list[int] = []

    def now_and_then(model: nn.Module, batch: Any) -> Any:
        calls.append(0)
        total, count = ragged.token_loss(model, batch)
        return (total, count) if len(calls) % 2 else total / count

    with pytest.raises(ValueError, match="for some batches and none for others"):
        outcome(now_and_then, micro_batch=2)


def test_robust_rules_refuse_counts() -> None:
    with pytest.raises(ValueError, match="robust= limits weights"):
        train(learner(), pl.sync(), 1, robust=pl.robust.TrimmedMean(1))


# --- buffers, checkpoints, decentralized ---------------------------------------------------------


def test_buffers_move_by_their_mean_change() -> None:
    """The change of BatchNorm's statistics is weighed by tokens, and keeps its scale."""

    def features(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        scores = model(inputs[:, :1].float())
        return scores.square().sum(), int((labels != ragged.PAD).sum())

    norm = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    run = train(learner(model=norm, loss=features), pl.sync(), 1)
    means, counts, samples = [], [], Samples(Stream(len(ROWS), SEED), SEED)
    for task, _ in ragged.steps_of(run)[0]:
        rows = [ROWS[i] for i in samples.of(task).tolist()]
        means.append(0.1 * float(torch.stack([row[0] for row in rows]).double().mean()))
        counts.append(sum(len(row) - 1 for row in rows))
    expected = float(np.average(means, weights=counts))
    assert float(run.model[0].running_mean) == pytest.approx(expected, rel=1e-5)


def test_held_results_are_saved_with_their_counts() -> None:
    recipe = learner()
    task = Task(0, "w0", Work(samples=6), 0, 0.0, 6, 0)
    replica, found = recipe.replica(SEED), []
    for resumed in (False, True):
        server = recipe.server()
        results = Results(server, frozenset())
        for id in range(2):
            mine = replace(task, id=id, offset=6 * id)
            done = replica.compute([server.vector], mine, lambda done: True)
            results.hold(id, np.array(done.vector), done.stats)
        if resumed:
            arrays, losses, counts = results.save()
            results = Results(server, frozenset())
            results.load(arrays, losses, counts, {})
        stats = results.step({0: 0.5, 1: 0.5}, keep=False)
        found.append((stats, server.vector.tobytes()))
    assert found[0] == found[1]


def test_nodes_of_a_decentralized_run_use_their_own_means() -> None:
    counted, plain = (
        train(learner(loss=loss), pl.gossip.Gossip(pl.gossip.ring(4)), 3)
        for loss in (ragged.token_loss, ragged.mean_loss)
    )
    for name, model in counted.models.items():
        ours, other = model.parameters(), plain.models[name].parameters()
        for mine, theirs in zip(ours, other, strict=True):
            torch.testing.assert_close(mine, theirs, atol=CLOSE, rtol=0.0)


def test_curvature_is_that_of_the_mean() -> None:
    def doubled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        count = 2 * len(batch[0])
        return ragged.mean_loss(model, batch) * count, count

    ours, plain = (
        measure_curvature(learner(loss=loss), samples=32, pieces=2, steps=4)
        for loss in (doubled, ragged.mean_loss)
    )
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert ours.spectrum[-1][0] == pytest.approx(plain.spectrum[-1][0], rel=1e-3)


def test_a_count_that_a_worker_cannot_have_computed_is_refused() -> None:
    check = ResultCheck(3, np.float32)
    task = Task(0, "w0", Work(samples=2), 0, 0.0, 2, 0)
    vector = np.ones(3, np.float32)
    assert check.fault(task, vector, 2, {"count": 4.0}) is None
    for count in (-1.0, float("inf"), float("nan")):
        assert "counts" in (check.fault(task, vector, 2, {"count": count}) or "")


# --- the averages themselves ---------------------------------------------------------------------


def test_the_loss_of_a_step_is_weighed_like_its_results() -> None:
    none = [None, None]
    assert mean_loss([0.25, 0.75], [4.0, 8.0], none) == 7.0
    assert mean_loss([-0.5, 0.5], [1.0, 3.0], none) == 2.0
    assert mean_loss([0.5, 0.5], [None, 3.0], none) == 3.0
    assert mean_loss([1.0], [None], [None]) is None
    assert mean_loss([0.5, 0.5], [None, 3.0], [0.0, 4.0]) == 3.0


def test_weights_by_count() -> None:
    assert by_count([0.5, 0.5], [None, None]) == [0.5, 0.5]
    assert by_count([0.5, 0.5], [0.0, 0.0]) == [0.5, 0.5]
    assert by_count([0.25], [4.0]) == [0.0625]
    assert by_count([0.5, 0.5], [None, 3.0]) == [0.25, 0.25]
    assert by_count([(0.5, -1.0), (0.25, 2.0)], [2.0, 4.0]) == [(0.25, -0.5), (0.125, 1.0)]
