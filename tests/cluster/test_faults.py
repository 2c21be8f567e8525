"""Real faults on a real Ray: processes killed, paused and slowed while training goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.codecs.base import Codec
from paceline.core.errors import WorkersLost
from paceline.core.protocol import Cancel, Discard, Draining, Finished, Joined, Left, Start, Step
from paceline.engines.ray.job import RayJob
from paceline.engines.ray.pool import Member
from paceline.testing import Throttle
from paceline.training.checkpoint import read
from tests.conftest import cross_entropy, flat, make_learner

pytestmark = pytest.mark.cluster


def heavy_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Take some 50 ms of computing, so that a fault falls into the middle of a task."""
    weight = torch.eye(300)
    for _ in range(60):
        weight = weight @ torch.eye(300)
    return cross_entropy(model, batch) * weight[0, 0]


def heavy_learner(**more: Any) -> pl.TorchLearner:
    plain = make_learner()
    return pl.TorchLearner(
        plain.model, heavy_loss, plain.optimizer, plain.dataset, plain.batch_size, **more
    )


class At(pl.Callback):
    """Does something right after a step, when the next tasks have just been handed out."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self._step, self._action = step, action

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == self._step:
            self._action()


def lives(run: pl.Run) -> list[Joined | Left]:
    return [e.event for e in run.journal if isinstance(e.event, Joined | Left)]


@pytest.mark.parametrize("policy", [pl.sync(), pl.k_sync(3), pl.rennala(6), pl.ringmaster(4)])
def test_a_worker_killed_in_mid_step_costs_no_step_and_no_sample(
    ray_workers: pl.Ray, policy: pl.policies.Gather
) -> None:
    def kill() -> None:
        os.kill(ray_workers.pids()["w1"], signal.SIGKILL)

    trainer = pl.Trainer(
        heavy_learner(), policy, ray_workers, progress=False, callbacks=[At(5, kill)]
    )
    run = trainer.fit(steps=14)
    assert run.steps == 14
    assert Left("w1") in lives(run)
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    place = 0
    for stretch in run.samples():  # every sample once: used, or listed with its fate
        assert stretch.offset == place
        place += stretch.samples
        assert stretch.fate in {"used", "unfinished", "cancelled", "discarded"}
    assert run.meter.lost == run.meter.redone == 1
    steps = [c for e in run.journal for c in e.commands if isinstance(c, Step)]
    used = [id for step in steps for id in step.weights]
    assert len(used) == len(set(used))


def test_under_sync_a_killed_worker_does_not_change_the_trajectory(ray_workers: pl.Ray) -> None:
    def kill() -> None:
        os.kill(ray_workers.pids()["w2"], signal.SIGKILL)

    learner = heavy_learner()
    killed = pl.Trainer(
        learner, pl.sync(shares=4), ray_workers, progress=False, callbacks=[At(3, kill)]
    ).fit(steps=10)
    whole = pl.Trainer(learner, pl.sync(shares=4), pl.Simulator(4), progress=False).fit(steps=10)
    assert Left("w2") in lives(killed)
    assert torch.equal(flat(killed.model), flat(whole.model))


@pytest.mark.parametrize("codec", [None, pl.codecs.Lazy(codec=pl.codecs.TopK(0.2))])
def test_a_lost_worker_is_created_anew_and_takes_part(
    ray_workers: pl.Ray, codec: Codec | None
) -> None:
    before: dict[str, int] = {}

    class UntilBack(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step == 3:
                before.update(ray_workers.pids())
                os.kill(before["w0"], signal.SIGKILL)
            elif ray_workers.pids().get("w0") not in (None, before.get("w0")) and before:
                self.since = getattr(self, "since", progress.step)
                if progress.step >= self.since + 5:
                    progress.stop("it is back")

    # Lazy results have to be known anew: the first message of the new one is number 1 again.
    run = pl.Trainer(
        heavy_learner(),
        *(pl.sync(), ray_workers),
        progress=False,
        callbacks=[UntilBack()],
        codec=codec,
    ).fit(seconds=90)
    assert run.reason == "it is back"
    at = max(i for i, e in enumerate(run.journal) if e.event == Joined("w0"))
    after = list(run.journal)[at:]
    mine = {
        c.task.id
        for e in after
        for c in e.commands
        if isinstance(c, Start) and c.task.worker == "w0"
    }
    used = {id for e in after for c in e.commands if isinstance(c, Step) for id in c.weights}
    assert mine & used


@pytest.mark.long
def test_a_paused_worker_is_given_up_after_the_timeout() -> None:
    with pl.Ray(workers=2, timeout=4, start_timeout=60, respawns=1) as engine:
        paused: list[int] = []

        def pause() -> None:
            paused.append(engine.pids()["w1"])
            os.kill(paused[0], signal.SIGSTOP)

        run = pl.Trainer(
            heavy_learner(), pl.sync(shares=2), engine, progress=False, callbacks=[At(2, pause)]
        ).fit(steps=8)
        assert run.steps == 8 and Left("w1") in lives(run)
        assert not is_alive(paused[0])  # it must not wake up later and go on
        assert [s.fate for s in run.samples() if s.fate not in ("used", "unfinished")] == []


def test_the_task_of_a_paused_worker_is_redone_before_its_timeout() -> None:
    with pl.Ray(workers=4, timeout=600, start_timeout=60) as engine:
        paused: list[int] = []

        def pause() -> None:
            paused.append(engine.pids()["w1"])
            os.kill(paused[0], signal.SIGSTOP)

        run = pl.Trainer(
            heavy_learner(), pl.k_sync(4), engine, progress=False, callbacks=[At(12, pause)]
        ).fit(steps=20)
        assert is_alive(paused[0]) and Left("w1") not in lives(run)
    lengths = np.diff(run.metrics["seconds"])
    assert max(lengths[10:]) < max(8 * float(np.median(lengths)), 4.0)  # overdue after 1 s or more
    tasks = {c.task.id: c.task for e in run.journal for c in e.commands if isinstance(c, Start)}
    used = [id for e in run.journal for c in e.commands if isinstance(c, Step) for id in c.weights]
    assert any(tasks[id].copy_of is not None for id in used)
    assert len({tasks[id].offset for id in used}) == len(used)
    assert [s.fate for s in run.samples() if s.fate not in ("used", "unfinished")] == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_when_all_workers_are_lost_the_model_is_saved(tmp_path: Path) -> None:
    with pl.Ray(workers=1, start_timeout=60, respawns=0) as engine:

        def kill() -> None:
            os.kill(engine.pids()["w0"], signal.SIGKILL)

        trainer = pl.Trainer(
            heavy_learner(), pl.sync(), engine, progress=False, callbacks=[At(2, kill)],
            checkpoints=pl.Checkpoints(tmp_path, every=100),
        )  # fmt: skip
        with pytest.raises(WorkersLost, match="all 1 workers are lost") as raised:
            trainer.fit(steps=8)
    run: pl.Run = raised.value.run  # type: ignore[attr-defined]
    assert 2 <= run.steps < 8
    assert read(tmp_path).step == run.steps


@pytest.mark.timing
def test_nobody_waits_for_a_slowed_worker_and_its_late_results_are_not_used(
    ray_workers: pl.Ray,
) -> None:
    learner = heavy_learner()
    warm = pl.Trainer(learner, pl.sync(), ray_workers, progress=False).fit(steps=2)
    assert warm.steps == 2
    with Throttle(ray_workers.pids()["w3"], share=0.05):
        run = pl.Trainer(learner, pl.k_sync(3), ray_workers, progress=False).fit(steps=20)
    starts = {c.task.id: c.task for e in run.journal for c in e.commands if isinstance(c, Start)}
    cancelled = {c.task for e in run.journal for c in e.commands if isinstance(c, Cancel)}
    steps = [c for e in run.journal for c in e.commands if isinstance(c, Step)]
    assert all(len({starts[id].version for id in step.weights}) == 1 for step in steps)
    assert not cancelled & {id for step in steps for id in step.weights}
    of_slow = [id for id in cancelled if starts[id].worker == "w3"]
    assert len(of_slow) > len(steps) / 2
    assert not [e for e in run.journal if isinstance(e.event, Left)]


@pytest.mark.long
def test_a_repeated_or_foreign_answer_is_not_taken(
    ray_workers: pl.Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray delivers at least once when calls are retried: hand every answer over three times."""
    learner = make_learner()
    trainer = pl.Trainer(learner, pl.asynchronous(), ray_workers, progress=False)
    finish = RayJob._finished

    def thrice(self: RayJob, member: Member, future: Future[object]) -> None:
        for _ in range(3):
            finish(self, member, future)

    monkeypatch.setattr(RayJob, "_finished", thrice)
    run = trainer.fit(steps=20)
    finished = [e.event.task for e in run.journal if isinstance(e.event, Finished)]
    assert len(finished) == len(set(finished))
    assert not [c for e in run.journal for c in e.commands if isinstance(c, Discard)]


@pytest.mark.long
def test_an_answer_that_nobody_looked_at_in_time_is_not_overdue() -> None:
    """The driver is busy for longer than the timeout, as with an evaluation in a callback."""

    def evaluate() -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < 3.0:
            torch.eye(300) @ torch.eye(300)

    with pl.Ray(workers=2, timeout=2, start_timeout=60) as engine:
        run = pl.Trainer(
            make_learner(), pl.sync(shares=2), engine, progress=False, callbacks=[At(3, evaluate)]
        ).fit(steps=6)
        assert run.steps == 6 and not [event for event in lives(run) if isinstance(event, Left)]


def test_a_learner_that_cannot_be_sent_is_told_of_and_leaves_nothing_behind(
    ray_workers: pl.Ray,
) -> None:
    learner = make_learner()
    broken = pl.TorchLearner(
        learner.model, learner.loss, learner.optimizer, Unsendable(), learner.batch_size
    )
    with pytest.raises(ValueError, match="cannot be pickled for the workers: cannot be sent"):
        pl.Trainer(broken, pl.sync(), ray_workers, progress=False).fit(steps=1)
    run = pl.Trainer(learner, pl.sync(), ray_workers, progress=False).fit(steps=2)
    assert run.steps == 2


class Unsendable(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.zeros(4, 20), torch.zeros(4).long())

    def __reduce__(self) -> str:
        raise TypeError("cannot be sent")


def test_results_do_not_pile_up_in_the_object_store(ray_workers: pl.Ray) -> None:
    import ray

    learner = make_learner(hidden=40_000, batch_size=8)  # results of about 4 MB
    pl.Trainer(learner, pl.ringmaster(3), ray_workers, progress=False).fit(steps=60)
    node = ray.available_resources().get("object_store_memory", 0.0)
    total = ray.cluster_resources()["object_store_memory"]
    assert total - node < 80e6, f"{(total - node) / 1e6:.0f} MB are still held"


def spoiled_loss(flag: Path, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Be not a number in the process whose number is in a file."""
    loss = cross_entropy(model, batch)
    return loss * float("nan") if flag.exists() and flag.read_text() == str(os.getpid()) else loss


def test_a_worker_whose_results_are_not_finite_is_ended_and_the_run_goes_on(
    ray_workers: pl.Ray, tmp_path: Path
) -> None:
    flag, plain = tmp_path / "spoiled", make_learner()
    bad: list[int] = []

    def spoil() -> None:
        bad.append(ray_workers.pids()["w1"])
        flag.write_text(str(bad[0]))

    learner = pl.TorchLearner(
        plain.model, partial(spoiled_loss, flag), plain.optimizer, plain.dataset, plain.batch_size
    )
    trainer = pl.Trainer(learner, pl.sync(), ray_workers, progress=False, callbacks=[At(4, spoil)])
    run = trainer.fit(steps=40)
    assert run.steps == 40 and Left("w1") in lives(run)
    assert bool(torch.isfinite(flat(run.model)).all()) and np.isfinite(run.metrics["loss"]).all()
    assert not Path(f"/proc/{bad[0]}").exists()


def nothing_but_nan(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model, batch) * float("nan")


@pytest.mark.long
def test_a_model_that_is_not_finite_on_anyone_ends_the_run(ray_workers: pl.Ray) -> None:
    plain = make_learner()
    learner = pl.TorchLearner(
        plain.model, nothing_but_nan, plain.optimizer, plain.dataset, plain.batch_size
    )
    run = pl.Trainer(learner, pl.sync(), ray_workers, progress=False).fit(steps=10)
    assert "not because of a worker" in run.reason and run.steps == 0
    assert bool(torch.isfinite(flat(run.model)).all())


def test_an_address_that_is_not_used_is_named(
    ray_workers: pl.Ray, caplog: pytest.LogCaptureFixture
) -> None:
    pl.Trainer(heavy_learner(), pl.sync(), ray_workers, progress=False).fit(steps=1)
    assert not pl.Ray(2, address="127.0.0.9:1")._cluster.connect("127.0.0.9:1", 2, 0)
    assert "uses that one instead of address='127.0.0.9:1'" in caplog.text
    caplog.clear()
    assert not ray_workers._cluster.connect("auto", 2, 0)
    assert "instead of" not in caplog.text


@pytest.mark.long
def test_a_drained_worker_finishes_its_task_and_is_replaced() -> None:
    """Nothing is redone: each drained worker leaves after its result."""
    with pl.Ray(workers=3, start_timeout=60) as engine:
        before: list[dict[str, int]] = []

        def drain(name: str) -> None:
            before.append(engine.pids())
            engine.drain(name)

        turns = [At(4 + 20 * i, partial(drain, f"w{i}")) for i in range(2)]
        trainer = pl.Trainer(heavy_learner(), pl.sync(), engine, progress=False, callbacks=turns)
        run = trainer.fit(seconds=25.0)
        after = engine.pids()
    drained = [e.event.worker for e in run.journal if isinstance(e.event, Draining)]
    assert drained == ["w0", "w1"]
    assert after["w0"] != before[0]["w0"]
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    assert all(task.attempt == 1 for task in tasks)
    assert [s.fate for s in run.samples() if s.fate not in ("used", "unfinished")] == []
    assert lives(run).count(Joined("w0")) >= drained.count("w0")  # the last may still start
    assert lives(run).count(Left("w0")) <= drained.count("w0")
