"""A run that is resumed with other settings: what is kept, what is refused, and every sample."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.schema import save_state
from paceline.data.sampling import Stream
from paceline.learners.transforms import ClipNorm
from paceline.policies.coded import coded
from paceline.policies.placement.tiles import Placed
from paceline.policies.wrappers import OnlyWorkers
from tests.conftest import cross_entropy, flat, make_learner, module_of

ROWS = np.random.default_rng(3).normal(size=(64, 4))
LABELS = np.where(ROWS @ np.ones(4) > 0, 1.0, -1.0)
UNEQUAL = [pl.delays.ShiftedExponential(1.0, 0.5)] * 2 + [pl.delays.Fixed(2.7)] * 4
EVEN = pl.partition.Partition(np.arange(64) % 8)


def logistic(batch_size: int = 12) -> pl.learners.Logistic:
    return pl.learners.Logistic(ROWS, LABELS, l2=0.1, batch_size=batch_size)


def simulated(policy: Policy, workers: int = 4, learner: Any = None, **more: Any) -> pl.Trainer:
    engine = pl.Simulator(workers, UNEQUAL[:workers])
    return pl.Trainer(learner or logistic(), policy, engine, progress=False, **more)


def positions(run: pl.Run, fate: str) -> list[tuple[int | None, int]]:
    return [
        (each.tile, each.offset + i)
        for each in run.samples()
        if each.fate == fate
        for i in range(each.samples)
    ]


def placed(parts: pl.partition.Partition, move: bool) -> Policy:
    return pl.policies.Gather(placement=Placed(parts, move=move))


CHANGES: dict[str, tuple[Policy, int, int, Policy, int, int]] = {
    "k": (pl.k_sync(3), 4, 12, pl.k_sync(2), 4, 12),
    "a larger k": (pl.k_async(2), 4, 12, pl.k_async(3), 4, 12),
    "sync after async": (pl.asynchronous(), 4, 12, pl.sync(), 4, 12),
    "async after k_sync": (pl.k_sync(2), 4, 12, pl.asynchronous(), 4, 12),
    "deadline after async": (pl.asynchronous(), 4, 12, pl.deadline(9.0), 4, 12),
    "async after a bandit": (pl.bandit(2), 4, 12, pl.asynchronous(), 4, 12),
    "fewer workers": (pl.asynchronous(), 4, 12, pl.asynchronous(), 2, 12),
    "more workers": (pl.asynchronous(), 4, 12, pl.asynchronous(), 6, 12),
    "some workers": (pl.asynchronous(), 4, 12, OnlyWorkers(["w1", "w3"], pl.sync()), 4, 12),
    "by speed": (pl.asynchronous(), 4, 12, pl.policies.Gather(placement=pl.BySpeed()), 4, 12),
    "after a code": (coded(1), 4, 12, pl.asynchronous(), 4, 12),
    "another code": (coded(1), 4, 12, coded(2), 4, 12),
    "shards that stay": (placed(EVEN, False), 4, 12, placed(EVEN, False), 3, 12),
    "shards that move": (placed(EVEN, False), 4, 12, placed(EVEN, True), 6, 12),
    "a larger batch": (pl.asynchronous(), 4, 12, pl.asynchronous(), 4, 20),
    "a smaller batch": (pl.k_async(2), 4, 12, pl.k_async(2), 4, 6),
    "all at once": (pl.asynchronous(), 4, 12, pl.k_async(2), 3, 20),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_sample_is_used_once_across_the_change(name: str, tmp_path: Path) -> None:
    policy, workers, batch, other, now, batch_now = CHANGES[name]
    saves = pl.Checkpoints(tmp_path)
    first = simulated(policy, workers, logistic(batch), checkpoints=saves).fit(steps=13)
    trainer = simulated(other, now, logistic(batch_now)).resume(
        tmp_path, allow={"policy", "batch_size"}
    )
    assert trainer.step == 13
    run = trainer.fit(steps=33)
    assert run.steps == 33
    before, after = positions(first, "used"), positions(run, "used")
    assert before and after
    assert len(set(before)) == len(before)
    assert len(set(after)) == len(after)
    assert not set(before) & set(after)
    if not policy.needs_exact_results:  # parts in flight are dropped, and computed anew
        given_up = {*positions(first, "cancelled"), *positions(first, "discarded")}
        in_flight = {*positions(first, "unfinished"), *positions(first, "lost")} - given_up
        assert in_flight <= {*after, *positions(run, "cancelled"), *positions(run, "unfinished")}
    fates = {each.fate for each in (*first.samples(), *run.samples())}
    known = {place for each in (first, run) for fate in fates for place in positions(each, fate)}
    for tile in {tile for tile, _ in known}:  # no position is left out
        offsets = sorted(offset for of, offset in known if of == tile)
        assert offsets[0] == 0
        assert all(b == a + 1 for a, b in pairwise(offsets))
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_the_journal_and_the_summary_say_what_changed(tmp_path: Path) -> None:
    saves, smaller = pl.Checkpoints(tmp_path), replace(network(), batch_size=32)
    simulated(pl.k_sync(3), learner=network(), checkpoints=saves).fit(steps=6)
    trainer = simulated(pl.k_sync(2), 3, smaller, journal=tmp_path / "run.jsonl")
    run = trainer.resume(tmp_path, allow={"policy", "batch_size"}).fit(steps=9)
    told = [
        "another batch_size: 64 -> 32",
        "another policy: k_sync(3) -> k_sync(2)",
        "another number of workers: 4 -> 3",
    ]
    about = pl.Journal.load(tmp_path / "run-6.jsonl").header.about
    assert about is not None
    assert about["changed"] == {"step": 6, "settings": told}
    assert f"\n  resumed   at step 6 with {'; '.join(told)}" in run.summary()
    assert "resumed" not in trainer.fit(steps=12).summary()  # the next run changes nothing


def test_without_a_change_allow_changes_nothing(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=7)
    whole = simulated(pl.bandit(2), learner=network(), checkpoints=saves).fit(steps=20)
    trainer = simulated(pl.bandit(2), learner=network())
    run = trainer.resume(
        tmp_path / "step-00000007", allow={"policy", "optimizer", "batch_size"}
    ).fit(steps=20)
    assert torch.equal(flat(run.model), flat(whole.model))
    assert "changed" not in (run.journal.header.about or {})


def test_the_same_policy_keeps_what_it_learned(tmp_path: Path) -> None:
    simulated(pl.bandit(2), checkpoints=pl.Checkpoints(tmp_path)).fit(steps=20)
    allow = {"policy", "batch_size"}
    trained = simulated(pl.bandit(2), learner=logistic()).resume(tmp_path)
    kept = simulated(pl.bandit(2), learner=logistic(6)).resume(tmp_path, allow=allow)
    other = simulated(pl.bandit(3)).resume(tmp_path, allow=allow)
    states = [each._start.snapshot.coordinator["policy"] for each in (trained, kept, other)]  # type: ignore[union-attr]
    assert states[1] == states[0]
    assert states[2] == save_state(pl.bandit(3))
    assert states[2] != states[0]


# --- the optimizer -------------------------------------------------------------------------------


def network(optimizer: Any = None, **more: Any) -> pl.TorchLearner:
    plain = make_learner(hidden=4)
    return pl.TorchLearner(
        module_of(plain),
        cross_entropy,
        optimizer or partial(torch.optim.Adam, lr=0.01),
        plain.dataset,
        64,
        **more,
    )


def by_hand(steps: int, change_at: int, lr: float, gamma: float = 1.0) -> torch.Tensor:
    """Return the weights of a loop in plain torch that changes its learning rate on the way."""
    learner = network()
    model, data = module_of(learner), learner.dataset
    assert isinstance(data, TensorDataset)
    order = Stream(512, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        if step >= change_at:
            for group in optimizer.param_groups:
                group["lr"] = lr * gamma ** (step // 5)
        chosen = torch.as_tensor(order.indices(step * 64, 64))
        optimizer.zero_grad()
        cross_entropy(model, [tensor[chosen] for tensor in data.tensors]).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_another_learning_rate_keeps_the_moments_of_adam(gamma: float, tmp_path: Path) -> None:
    """As in a loop in torch that sets `lr`; a schedule is then at the step of the checkpoint."""
    simulated(pl.sync(shares=1), 1, network(), checkpoints=pl.Checkpoints(tmp_path)).fit(steps=7)
    more = {} if gamma == 1.0 else {"scheduler": partial(StepLR, step_size=5, gamma=gamma)}
    learner = network(partial(torch.optim.Adam, lr=0.003), **more)
    trainer = simulated(pl.sync(shares=1), 1, learner).resume(tmp_path, allow={"optimizer"})
    run = trainer.fit(steps=15)
    assert torch.allclose(flat(run.model), by_hand(15, 7, 0.003, gamma), atol=1e-6)
    assert not torch.allclose(flat(run.model), by_hand(15, 15, 0.01), atol=1e-4)


def test_a_change_inside_a_function_is_found(tmp_path: Path) -> None:
    """Both are described as `<lambda>`, so only the settings of the optimizer differ."""
    rates = iter([0.01, 0.003])
    learners = [
        network(lambda parameters, lr=lr: torch.optim.Adam(parameters, lr=lr)) for lr in rates
    ]
    saves = pl.Checkpoints(tmp_path)
    simulated(pl.sync(shares=1), 1, learners[0], checkpoints=saves).fit(steps=7)
    trainer = simulated(pl.sync(shares=1), 1, learners[1]).resume(tmp_path, allow={"optimizer"})
    run = trainer.fit(steps=15)
    assert torch.allclose(flat(run.model), by_hand(15, 7, 0.003), atol=1e-6)
    assert "with another setting of the optimizer" in run.summary()


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (partial(torch.optim.SGD, lr=0.1), "Adam and the optimizer is torch.optim.sgd.SGD"),
        (partial(torch.optim.AdamW, lr=0.1), "the optimizer is torch.optim.adamw.AdamW"),
        (partial(torch.optim.Adam, lr=0.1, amsgrad=True), "it has no max_exp_avg_sq"),
    ],
)
def test_an_optimizer_that_does_not_fit_starts_anew(
    optimizer: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = simulated(pl.sync(), 2, network(), checkpoints=pl.Checkpoints(tmp_path)).fit(steps=7)
    trainer = simulated(pl.sync(), 2, network(optimizer))
    with caplog.at_level(logging.WARNING):
        trainer.resume(tmp_path, allow={"optimizer"})
    assert "the optimizer starts without the saved state: it " in caplog.text
    assert why in caplog.text
    learner = network(optimizer)
    server = learner.server()
    kept = trainer._start.server(trainer._settled())
    assert np.array_equal(kept.vector, flat(first.model).numpy())
    server.vector[:] = kept.vector
    gradient = np.linspace(-1, 1, len(kept.vector), dtype=np.float32)
    for each in (kept, server):  # as a new optimizer at these weights
        each.step([1.0], [gradient], frozenset())
    assert np.array_equal(kept.vector, server.vector)
    assert why in trainer.fit(steps=9).summary()


def test_another_transform_and_local_steps_are_of_the_optimizer(tmp_path: Path) -> None:
    outer = partial(torch.optim.SGD, lr=1.0)
    sgd = partial(torch.optim.SGD, lr=0.1)
    saves = pl.Checkpoints(tmp_path / "local")
    local = network(sgd, outer=outer, inner_transform=ClipNorm(1.0))
    first = simulated(pl.local_sgd(3), 2, local, checkpoints=saves).fit(steps=4)
    other = network(
        partial(torch.optim.SGD, lr=0.05), outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    )
    run = simulated(pl.local_sgd(2), 2, other).resume(
        saves.path, allow={"optimizer", "policy"}
    ).fit(steps=8)  # fmt: skip
    assert not set(positions(first, "used")) & set(positions(run, "used"))
    without = simulated(pl.asynchronous(), 2, network(sgd))  # tasks in flight had local steps
    run = without.resume(saves.path, allow={"optimizer", "policy"}).fit(steps=12)
    assert not set(positions(first, "used")) & set(positions(run, "used"))
    assert set(positions(first, "unfinished")) <= set(positions(run, "used"))


# --- refusals ------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    told = "allow='codec': known are 'policy', 'optimizer', 'batch_size'; nothing else"
    with pytest.raises(ValueError, match=told):
        simulated(pl.sync()).resume(tmp_path, missing_ok=True, allow={"codec"})


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({}, {"seed": 1}, "seed was 0 and is 1 (never accepted: it orders the samples)"),
    "codec": ({"codec": pl.codecs.BFloat16()}, {}, "codec was 'BFloat16()' and is None (never"),
    "robust": ({}, {"robust": pl.robust.TrimmedMean(1)}, "(never accepted: it keeps the aggregate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_some_settings_may_never_differ(name: str, tmp_path: Path) -> None:
    before, now, told = REFUSED[name]
    saves = pl.Checkpoints(tmp_path)
    simulated(pl.k_sync(3), learner=network(), checkpoints=saves, **before).fit(steps=2)
    with pytest.raises(pl.errors.CheckpointError) as refusal:
        simulated(pl.sync(), learner=network(), **now).resume(
            tmp_path, allow={"policy", "optimizer", "batch_size"}
        )
    assert told in str(refusal.value)
    assert "policy was 'Gather(k=3)' and is 'Gather()' (allow={'policy'}" in str(refusal.value)
    assert "or use resume" not in str(refusal.value)


ODD = pl.partition.Partition(np.arange(64) // 8)
STREAMS: dict[str, tuple[Policy, Policy, int, str]] = {
    "other shards": (placed(EVEN, True), placed(ODD, True), 12, "give the placement the saved"),
    "no shards": (placed(EVEN, True), pl.sync(), 12, "its data shards (tiles) are others"),
    "a code": (pl.sync(), coded(1), 12, "a gradient code takes the samples of a step"),
    "a batch": (coded(1), coded(1), 24, "keep the saved batch_size"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_change_of_what_positions_mean_is_refused(name: str, tmp_path: Path) -> None:
    before, now, batch, told = STREAMS[name]
    simulated(before, checkpoints=pl.Checkpoints(tmp_path)).fit(steps=3)
    trainer = simulated(now, learner=logistic(batch))
    with pytest.raises(pl.errors.CheckpointError) as refusal:
        trainer.resume(tmp_path, allow={"policy", "batch_size"})
    assert told in str(refusal.value)
    assert trainer.step == 0
