"""The trainer on the simulator: ends, interruptions, journals, and going on where one was."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.policy import Policy, Wrapper
from paceline.core.protocol import (
    Command,
    Event,
    Interrupted,
    Start,
    Step,
    Stepped,
    Stop,
    View,
)
from paceline.delays.models import Delay
from paceline.learners.base import Learner
from paceline.report.callbacks import Live
from paceline.report.metrics import TOTALS
from tests import policies

POLICIES: dict[str, Policy] = {
    **{name: make() for name, make in policies.POLICIES.items()},
    "sync(3)": pl.sync(shares=3),
    "asynchronous(2)": pl.asynchronous(2, damping=False),
    "local_sgd": pl.local_sgd(2),
    "hedged": pl.bandit(2, hedge=1, window=4, index=pl.selection.KL(shape=4.0)),
    "thompson": pl.bandit(2, index=pl.selection.Thompson(), discount=0.8),
    "ata": pl.ata(2, index=pl.selection.LCB(scale=2.0)),
    "growing": pl.k_sync(pl.policies.GrowOnNoise(1, 4, memory=3, lag=2), samples=8),
}
RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(50, 4)), RNG.choice([-1.0, 1.0], 50)


def logistic(batch_size: int = 10) -> pl.learners.Logistic:
    return pl.learners.Logistic(FEATURES, LABELS, l2=0.1, lr=0.3, batch_size=batch_size)


def squared(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    found: Tensor = (model(inputs).squeeze(1) - targets).square().mean()
    return found


def network(loss: Callable[..., Tensor] = squared, **more: Any) -> pl.TorchLearner:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    data = TensorDataset(torch.from_numpy(FEATURES).float(), torch.from_numpy(LABELS).float())
    given: dict[str, Any] = {"micro_batch": 5, "optimizer": partial(torch.optim.Adam, lr=0.01)}
    return pl.TorchLearner(model, loss, dataset=data, batch_size=10, **given | more)


def lively(**more: Any) -> pl.Simulator:
    """An engine with bursts, links and departures."""
    burst = pl.delays.Bursts(pl.delays.Exponential(0.5), pl.delays.Exponential(5.0), 3.0, 2.0)
    delays: list[Delay] = [
        burst,
        pl.delays.Trace([0.5, 1.5, 0.25]),
        pl.delays.LogNormal(1.0, 0.5),
        pl.delays.Exponential(1.0),
    ]
    schedule: list[tuple[float, pl.protocol.Joined | pl.protocol.Left]] = [
        *(
            (2.0, pl.protocol.Left("w1")),
            (5.0, pl.protocol.Joined("w1")),
            (6.0, pl.protocol.Left("w3")),
        ),
        *(
            (6.5, pl.protocol.Left("w0")),
            (9.0, pl.protocol.Joined("w3")),
            (9.5, pl.protocol.Joined("w0")),
        ),
    ]
    return pl.Simulator(4, delays, [pl.delays.Link(0.01, 1e5, 1e4)], schedule=schedule, **more)


def trainer(
    policy: Policy | None = None,
    learner: Learner | None = None,
    engine: pl.Simulator | None = None,
    **more: Any,
) -> pl.Trainer:
    policy = pl.sync() if policy is None else policy
    return pl.Trainer(
        learner or logistic(), policy, engine or pl.Simulator(4), progress=False, **more
    )


def parameters(run: pl.Run) -> np.ndarray[Any, Any]:
    if isinstance(run.model, nn.Module):
        return np.concatenate([value.numpy().ravel() for value in run.model.state_dict().values()])
    return np.asarray(run.model)


# --- ends ----------------------------------------------------------------------------------------


def test_an_end_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"fit\(\) needs an end: epochs=…, steps=…, seconds=… or"):
        trainer().fit()


def test_steps() -> None:
    run = trainer().fit(steps=7)
    assert (run.steps, run.reason) == (7, "7 steps taken")
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (2, 10), (0.5, 3), (1.5, 8)])
def test_epochs(epochs: float, steps: int) -> None:
    """50 examples in batches of 10."""
    run = trainer().fit(epochs=epochs)
    assert (run.steps, run.reason) == (steps, f"{10 * steps} samples used")


def test_a_learner_without_epochs_says_so() -> None:
    with pytest.raises(ValueError, match=r"this learner has no epochs; use steps=… or seconds=…"):
        trainer(learner=pl.learners.Quadratic()).fit(epochs=1)


def test_seconds() -> None:
    run = trainer(learner=logistic(8), engine=pl.Simulator(4, pl.delays.Fixed(1.0))).fit(
        seconds=4.5
    )
    assert (run.steps, run.reason, run.seconds) == (4, "4.5 seconds passed", 4.0)


def test_until_a_condition_holds() -> None:
    seen: list[pl.Progress] = []

    def until(progress: pl.Progress) -> bool:
        seen.append(progress)
        return progress.step == 6

    run = trainer().fit(until=until)
    assert (run.steps, run.reason) == (6, "the condition of until holds")
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].samples == 60
    assert seen[-1].epoch == 1.2
    assert seen[-1].workers == 4
    assert seen[-1].seconds == run.seconds
    assert seen[-1].loss == run.metrics["loss"][-1]
    assert np.array_equal(seen[-1].model(), run.model)


def test_the_first_of_several_ends_counts() -> None:
    assert trainer().fit(steps=3, epochs=10, seconds=1e9, until=lambda p: False).steps == 3
    assert trainer().fit(steps=100, epochs=1).steps == 5
    assert trainer().fit(steps=100, until=lambda p: p.step == 2).steps == 2


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    run = trainer(learner=pl.learners.Quadratic(start=nan)).fit(steps=9)
    assert (run.steps, run.reason) == (1, "the loss is nan at step 1")
    infinite = network(lambda model, batch: squared(model, batch) * inf)
    assert trainer(learner=infinite).fit(steps=9).reason == "the loss is inf at step 1"
    assert (
        trainer(learner=pl.learners.TimingOnly(8)).fit(steps=9).reason == "9 steps taken"
    )  # has none at all


@pytest.mark.parametrize("workers", [0, 5, -1])
def test_min_workers_must_be_possible(workers: int) -> None:
    told = f"min_workers={workers}: this engine has 4 workers; use 1 to 4"
    with pytest.raises(ValueError, match=told):
        trainer(min_workers=workers)


def test_training_begins_with_min_workers() -> None:
    assert trainer(min_workers=2).fit(steps=2).metrics["results"].tolist() == [2.0, 4.0]
    assert trainer().fit(steps=2).metrics["results"].tolist() == [4.0, 4.0]


# --- looking on ----------------------------------------------------------------------------------


class Noting(pl.Callback):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def started(self, live: Live) -> None:
        self.log.append(f"{self.name} started")

    def stepped(self, progress: pl.Progress) -> None:
        self.log.append(f"{self.name} {progress.step}")

    def ended(self, reason: str) -> None:
        self.log.append(f"{self.name} ended: {reason}")


def test_callbacks_are_told_in_order() -> None:
    log: list[str] = []
    trainer(callbacks=[Noting("a", log), Noting("b", log)]).fit(steps=2)
    assert log == [
        *("a started", "b started", "a 1", "b 1", "a 2", "b 2"),
        *("a ended: 2 steps taken", "b ended: 2 steps taken"),
    ]


class Acting(pl.Callback):
    """Does something at a step."""

    def __init__(self, step: int, act: Callable[[pl.Progress], None]) -> None:
        self.step, self.act = step, act

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == self.step:
            self.act(progress)


def test_a_callback_may_stop_the_run() -> None:
    log: list[str] = []
    stopping = Acting(3, lambda progress: progress.stop("good enough"))
    run = trainer(callbacks=[stopping, Noting("after", log)]).fit(steps=9)
    assert (run.steps, run.reason) == (3, "good enough")
    assert log[-2:] == ["after 3", "after ended: good enough"]
    last = list(run.journal)[-1]
    assert (last.event, last.commands) == (Interrupted("good enough"), (Stop("good enough"),))


def test_the_first_reason_to_stop_counts() -> None:
    stopping = Acting(3, lambda progress: progress.stop("good enough"))
    assert trainer(callbacks=[stopping]).fit(steps=3).reason == "3 steps taken"
    assert trainer(callbacks=[stopping]).fit(until=lambda p: p.step == 3).reason == "good enough"


def ctrl_c(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_an_interruption_by_the_user_ends_the_run_with_what_was_learned(tmp_path: Path) -> None:
    log: list[str] = []
    saves = pl.Checkpoints(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    interrupted = trainer(
        callbacks=[Acting(5, lambda progress: ctrl_c()), Noting("b", log)],
        checkpoints=saves,
        learner=network(),
    )
    run = interrupted.fit(steps=12)
    assert signal.getsignal(signal.SIGINT) is before
    assert (run.steps, run.reason) == (5, "interrupted by the user")
    assert log[-2:] == ["b 5", "b ended: interrupted by the user"]
    expected = trainer(learner=network()).fit(steps=5)
    assert np.array_equal(parameters(run), parameters(expected))
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    again = interrupted.fit(steps=12)  # and it can be taken up again
    whole = trainer(learner=network()).fit(steps=12)
    assert np.array_equal(parameters(again), parameters(whole))
    resumed = trainer(learner=network()).resume(tmp_path / "step-00000005").fit(steps=12)
    assert np.array_equal(parameters(resumed), parameters(whole))


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_sigterm_saves_and_raises_with_the_run(tmp_path: Path) -> None:
    log: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    terminated = trainer(
        callbacks=[Acting(5, lambda progress: sigterm()), Noting("b", log)],
        checkpoints=pl.Checkpoints(tmp_path),
        learner=network(),
    )
    with pytest.raises(pl.errors.Terminated) as raised:
        terminated.fit(steps=12)
    assert signal.getsignal(signal.SIGTERM) is before
    assert isinstance(raised.value, SystemExit)
    assert raised.value.code == 143
    run = raised.value.run
    assert (run.steps, run.reason) == (5, "terminated by SIGTERM")
    assert log[-2:] == ["b 5", "b ended: terminated by SIGTERM"]
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    whole = trainer(learner=network()).fit(steps=12)
    resumed = trainer(learner=network()).resume(tmp_path / "step-00000005").fit(steps=12)
    assert np.array_equal(parameters(resumed), parameters(whole))


def test_sigterm_while_the_last_checkpoint_is_written_does_not_tear_it(tmp_path: Path) -> None:
    class Slow(pl.Checkpoints):
        def save(self, snapshot: Any, model: Any) -> None:
            sigterm()
            super().save(snapshot, model)

    with pytest.raises(pl.errors.Terminated) as raised:
        trainer(checkpoints=Slow(tmp_path)).fit(steps=4)
    assert raised.value.run.reason == "4 steps taken"
    assert trainer().resume(tmp_path).fit(steps=4).steps == 4


def test_nodes_without_a_coordinator_end_at_sigterm() -> None:
    policy = pl.gossip.Gossip(pl.gossip.ring(4))
    ending = pl.Trainer(
        logistic(), policy, pl.Simulator(4), progress=False,
        callbacks=[Acting(3, lambda progress: sigterm())],
    )  # fmt: skip
    with pytest.raises(pl.errors.Terminated) as raised:
        ending.fit(steps=50)
    assert raised.value.run.reason == "terminated by SIGTERM"
    assert 3 <= raised.value.run.steps < 50


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import paceline as pl

class Say(pl.Callback):
    def stepped(self, progress):
        if progress.step == 20:
            print("training", flush=True)

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
learner = pl.learners.Quadratic(noise=0.1, lr=0.01)
trainer = pl.Trainer(
    learner, pl.k_sync(3), pl.Simulator(4), callbacks=[Say()], progress=False,
    checkpoints=pl.Checkpoints(folder / "saved", every=10**9), journal=folder / "run.jsonl",
).resume(folder / "saved", missing_ok=True)
run = trainer.fit(steps=steps)
np.save(folder / "model.npy", run.model)
"""


@pytest.mark.parametrize("command", [[], ["-m", "paceline", "train"]])
def test_a_process_that_gets_sigterm_saves_and_exits_with_143(
    command: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = [sys.executable, *command, str(script)]
    process = subprocess.Popen(
        [*start, str(tmp_path), "1000000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    assert ("(ended: terminated by SIGTERM)" in printed) == bool(command)  # paceline's summary
    (saved,) = (tmp_path / "saved").glob("step-*")
    steps = int(saved.name.removeprefix("step-")) + 7
    subprocess.run([*start, str(tmp_path), str(steps)], check=True, timeout=60)
    learner = pl.learners.Quadratic(noise=0.1, lr=0.01)
    whole = pl.Trainer(learner, pl.k_sync(3), pl.Simulator(4), progress=False).fit(steps=steps)
    assert np.array_equal(np.load(tmp_path / "model.npy"), whole.model)


def acting_at(call: int, act: Callable[[], None]) -> Callable[..., Tensor]:
    """Return a loss that does something when it is asked for so many times."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return squared(model, batch)

    return loss


def fail() -> None:
    raise ZeroDivisionError("mine")


def test_an_interruption_within_the_users_code_can_be_taken_up_again() -> None:
    interrupted = trainer(learner=network(acting_at(10, ctrl_c), micro_batch=None))
    run = interrupted.fit(steps=6)
    assert (run.steps, run.reason) == (2, "interrupted by the user")
    again = interrupted.fit(steps=6)
    whole = trainer(learner=network(micro_batch=None)).fit(steps=6)
    assert np.array_equal(parameters(again), parameters(whole))


def test_who_insists_is_heard_at_once() -> None:
    log: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    insisting = [Acting(3, lambda progress: ctrl_c(times=2)), Noting("b", log)]
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer(callbacks=insisting).fit(steps=9)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert log[-2:] == ["b 2", "b ended: failed"]


# --- errors --------------------------------------------------------------------------------------


def test_the_users_exception_reaches_the_user_and_the_callbacks_hear_of_it(tmp_path: Path) -> None:
    log: list[str] = []
    learner = network(acting_at(10, fail), micro_batch=None)
    failing = trainer(learner=learner, callbacks=[Noting("a", log)], journal=tmp_path / "j.jsonl")
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        failing.fit(steps=9)
    assert any(entry.name == "loss" for entry in raised.traceback)  # with its own traceback
    assert log == ["a started", "a 1", "a 2", "a ended: failed"]
    journal = pl.Journal.load(tmp_path / "j.jsonl")  # whole, up to the failure
    steps = [c for entry in journal for c in entry.commands if isinstance(c, Step)]
    assert len(steps) == 2


@pytest.mark.parametrize("fitted", [0, 2])
def test_after_a_failure_the_next_fit_begins_where_the_books_do(fitted: int) -> None:
    failing = trainer(learner=network(acting_at(16, fail), micro_batch=None))
    if fitted:
        failing.fit(steps=fitted)
    with pytest.raises(ZeroDivisionError):
        failing.fit(steps=6)
    run = failing.fit(steps=6)
    whole = trainer(learner=network(micro_batch=None)).fit(steps=6)
    assert run.metrics["step"].tolist() == [4, 5, 6]  # the failure was in step 4
    assert np.array_equal(parameters(run), parameters(whole))


def test_an_error_carries_the_run_and_the_last_whole_model_is_saved(tmp_path: Path) -> None:
    learner = network(acting_at(16, fail), micro_batch=None)
    failing = trainer(learner=learner, checkpoints=pl.Checkpoints(tmp_path))
    with pytest.raises(ZeroDivisionError) as raised:
        failing.fit(steps=6)
    run: pl.Run = raised.value.run  # type: ignore[attr-defined]
    expected = trainer(learner=network(micro_batch=None)).fit(steps=3)
    assert (run.steps, run.reason) == (3, "ZeroDivisionError: mine")
    assert np.array_equal(parameters(run), parameters(expected))
    resumed = trainer(learner=network(micro_batch=None)).resume(tmp_path).fit(steps=6)
    whole = trainer(learner=network(micro_batch=None)).fit(steps=6)
    assert resumed.metrics["step"].tolist() == [4, 5, 6]
    assert np.array_equal(parameters(resumed), parameters(whole))


class Losing(pl.Simulator):
    """Its servers are lost for good at the fourth step: the newest model cannot be gathered."""

    lost = False

    def settle(self) -> None:
        if self.lost:
            raise RuntimeError("a slice is lost")

    def next_event(self) -> Any:
        if self._results.version >= 4:
            self.lost = True
            raise RuntimeError("servers are lost")
        return super().next_event()


@pytest.mark.parametrize("every", [3, 100])
def test_a_model_that_cannot_be_gathered_is_that_of_the_last_checkpoint(
    every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = pl.Checkpoints(tmp_path, every=every)
    losing = pl.Trainer(logistic(), pl.sync(), Losing(4), checkpoints=saves, progress=False)
    with pytest.raises(RuntimeError, match="servers are lost") as raised:
        losing.fit(steps=9)
    run, kept = raised.value.run, 3 if every == 3 else 0  # type: ignore[attr-defined]
    assert run.reason.endswith(f"(the model is that of step {kept}: step 4 is incomplete)")
    assert "an earlier step is kept: RuntimeError: a slice is lost" in caplog.text
    server = logistic().server()
    begun = server.model()
    if kept:
        begun = (
            pl.Trainer(logistic(), pl.sync(), pl.Simulator(4), progress=False).fit(steps=3).model
        )
    assert np.array_equal(run.model, begun)


def test_a_step_that_fails_half_way_is_not_kept(tmp_path: Path) -> None:
    class Failing(pl.Simulator):
        def execute(self, node: str, command: Command) -> None:
            super().execute(node, command)
            if isinstance(command, Step) and self._results.version == 4:
                raise RuntimeError("mine")

    saves = pl.Checkpoints(tmp_path, every=3)
    failing = pl.Trainer(logistic(), pl.sync(), Failing(4), checkpoints=saves, progress=False)
    with pytest.raises(RuntimeError, match="mine") as raised:
        failing.fit(steps=9)
    expected = pl.Trainer(logistic(), pl.sync(), pl.Simulator(4), progress=False).fit(steps=3)
    assert np.array_equal(raised.value.run.model, expected.model)  # type: ignore[attr-defined]
    assert not (tmp_path / "step-00000004").exists()


def test_an_exception_in_opening_the_data_reaches_the_user() -> None:
    def missing() -> Any:
        raise FileNotFoundError("no such data")

    log: list[str] = []
    learner = network()
    broken = pl.TorchLearner(learner.model, learner.loss, learner.optimizer, missing, 10)
    with pytest.raises(FileNotFoundError, match="no such data"):
        trainer(learner=broken, callbacks=[Noting("a", log)]).fit(steps=9)
    assert log == []  # before anything is started


def test_an_exception_of_a_callback_reaches_the_user() -> None:
    def evaluate(progress: pl.Progress) -> None:
        raise LookupError("no such metric")

    with pytest.raises(LookupError, match="no such metric"):
        trainer(callbacks=[Acting(2, evaluate)]).fit(steps=9)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: (pl.sync(), logistic(), pl.Simulator(4)), "Gather, Logistic, Simulator"),
        (lambda: (logistic(), pl.Simulator(4), pl.sync()), "Logistic, Simulator, Gather"),
        (lambda: (logistic(), pl.sync, pl.Simulator(4)), "Logistic, sync, Simulator"),
        (lambda: (logistic(), pl.sync(), pl.Simulator), "Logistic, Gather, Simulator"),
        (lambda: (nn.Linear(2, 1), pl.sync(), pl.Simulator(4)), "Linear, Gather, Simulator"),
        (lambda: (logistic(), pl.sync(), 4), "Logistic, Gather, int"),
    ],
)
def test_arguments_of_other_kinds_are_refused(given: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=rf"Trainer\({told}\): give a learner such as"):
        pl.Trainer(*given())


# --- going on ------------------------------------------------------------------------------------

ENGINES: dict[str, Callable[[], pl.Simulator]] = {
    "lively": lively,
    "lively, not to be interrupted": partial(lively, interruptible=False),
}


def learner_for(policy: str, torches: bool) -> Learner:
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    if torches:
        local: dict[str, Any] = {"outer": outer, "inner": "fresh"}  # checkpoints have no other
        return network(**local if policy == "local_sgd" else {})
    return logistic()


@pytest.mark.parametrize(
    ("engine", "torches"),
    [("lively", False), ("lively", True), ("lively, not to be interrupted", False)],
)
@pytest.mark.parametrize("name", POLICIES)
def test_resumed_from_the_middle_it_is_the_uninterrupted_run_bit_for_bit(
    name: str, engine: str, torches: bool, tmp_path: Path
) -> None:
    def make(**more: Any) -> pl.Trainer:
        learner = learner_for(name, torches)
        return trainer(POLICIES[name], learner, ENGINES[engine](), seed=4, **more)

    whole = make().fit(steps=16)
    saving = make(checkpoints=pl.Checkpoints(tmp_path, every=6, keep=9)).fit(steps=16)
    assert saving.journal == whole.journal  # saving disturbs nothing
    run = make().resume(tmp_path / "step-00000006").fit(steps=16)
    assert run.steps == 16
    assert np.array_equal(parameters(run), parameters(whole))
    for column, values in whole.metrics.items():
        if column in ("busy_seconds", "up_bytes", "dollars"):  # counted from the resume on
            assert np.allclose(run.metrics[column], values[6:] - values[5]), column
        elif column in TOTALS:  # what was started right after step 6 is neither's
            assert np.array_equal(np.diff(run.metrics[column]), np.diff(values[6:])), column
        else:
            assert np.array_equal(run.metrics[column], values[6:]), column
    entries = list(run.journal)
    assert entries == list(whole.journal)[-len(entries) :]
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.parametrize("name", POLICIES)
def test_fitting_twice_is_fitting_once(name: str) -> None:
    once = trainer(POLICIES[name], engine=lively()).fit(steps=20)
    twice = trainer(POLICIES[name], engine=lively())
    first, second = twice.fit(steps=7), twice.fit(steps=20)
    assert (first.steps, second.steps) == (7, 20)
    assert np.array_equal(second.model, once.model)
    assert second.metrics["seconds"].tolist() == once.metrics["seconds"][7:].tolist()
    assert [*first.journal, *second.journal] == [
        entry._replace(commands=(*entry.commands, Stop("7 steps taken")))
        if i == len(first.journal) - 1
        else entry
        for i, entry in enumerate(once.journal)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_an_end_that_was_reached_before_changes_nothing(name: str) -> None:
    """No event is taken from the engine by a fit that has nothing to do."""
    once = trainer(POLICIES[name], engine=lively()).fit(steps=20)
    often = trainer(POLICIES[name], engine=lively())
    often.fit(steps=7)
    for _ in range(3):
        idle = often.fit(steps=7)
        assert (idle.steps, idle.reason) == (7, "7 steps taken")
        assert len(idle.metrics["step"]) == 0
        assert pl.protocol.replay(idle.driven_policy, idle.journal) == idle.journal
    run = often.fit(steps=20)
    assert np.array_equal(run.model, once.model)
    assert run.metrics["seconds"].tolist() == once.metrics["seconds"][7:].tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_stopped_by_time_it_goes_on_the_same(name: str) -> None:
    once = trainer(POLICIES[name], engine=lively()).fit(steps=15)
    twice = trainer(POLICIES[name], engine=lively())
    assert twice.fit(seconds=4.2).reason == "4.2 seconds passed"
    run = twice.fit(steps=15)
    assert np.array_equal(run.model, once.model)
    assert run.seconds == once.seconds


def test_stopped_at_the_moment_of_a_result_it_goes_on_the_same() -> None:
    """Tasks of one second; the results of the second round come when the time is up."""

    def make() -> pl.Trainer:
        return trainer(pl.asynchronous(), engine=pl.Simulator(3, pl.delays.Fixed(1.0), unit=10))

    once, twice = make().fit(steps=12), make()
    twice.fit(steps=3)
    twice.fit(seconds=2.0)
    assert np.array_equal(twice.fit(steps=12).model, once.model)


def test_ends_count_from_the_very_start(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path)
    trainer(checkpoints=saves).fit(epochs=1)
    run = trainer().resume(tmp_path).fit(epochs=3)
    assert (run.steps, len(run.metrics["step"])) == (15, 10)
    assert trainer().resume(tmp_path).fit(steps=7).metrics["step"].tolist() == [6.0, 7.0]


def test_a_run_ends_with_a_checkpoint(tmp_path: Path) -> None:
    run = trainer(checkpoints=pl.Checkpoints(tmp_path, every=100)).fit(steps=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    resumed = trainer().resume(tmp_path).fit(steps=3)
    assert np.array_equal(resumed.model, run.model)


class Forgetful(pl.Simulator):
    """An engine that, like Ray, cannot save work in flight."""

    def save(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("name", POLICIES)
def test_where_work_in_flight_is_lost_it_is_done_again(name: str, tmp_path: Path) -> None:
    engine = Forgetful(4, [pl.delays.Exponential(1.0)])
    saves = pl.Checkpoints(tmp_path)
    first = trainer(POLICIES[name], engine=engine, checkpoints=saves).fit(steps=8)
    resumed = trainer(POLICIES[name], engine=engine).resume(tmp_path)
    run = resumed.fit(steps=20)
    assert run.steps == 20
    entries = list(run.journal)
    assert [entry.event for entry in entries[:4]] == [pl.protocol.Joined(f"w{i}") for i in range(4)]
    assert entries[0].now == list(first.journal)[-1].now  # the clock goes on
    assert not any(entry.commands for entry in entries[:3])  # until all are back
    again = [c.task for c in entries[3].commands if isinstance(c, Start)]
    assert again
    assert {(task.version, task.attempt) for task in again} == {(8, 1)}
    stepped = [entry.event.version for entry in entries if isinstance(entry.event, Stepped)]
    assert stepped[0] == 9
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    done = [s for s in first.samples() if s.fate not in ("unfinished", "lost")]
    place = 0
    for stretch in sorted([*done, *run.samples()], key=lambda stretch: stretch.offset):
        assert stretch.offset == place
        place += stretch.samples
    if name in ("sync", "local_sgd"):  # which wait for everyone
        assert np.array_equal(run.model, trainer(POLICIES[name]).fit(steps=20).model)


DIFFERENT: dict[str, tuple[Callable[[], pl.Trainer], str]] = {
    "seed": (
        lambda: trainer(seed=1),
        "seed was 0 and is 1 (never accepted: it orders the samples); "
        "give the Trainer the saved settings",
    ),
    "policy": (
        lambda: trainer(pl.k_sync(2)),
        "policy was 'Gather()' and is 'Gather(k=2)' (allow={'policy'} accepts it); "
        "give the Trainer the saved settings, or use resume(…, allow={'policy'})",
    ),
    "batch": (
        lambda: trainer(pl.k_sync(2), learner=logistic(20)),
        "batch_size was 10 and is 20 (allow={'batch_size'} accepts it); "
        "policy was 'Gather()' and is 'Gather(k=2)' (allow={'policy'} accepts it); "
        "give the Trainer the saved settings, or use resume(…, allow={'batch_size', 'policy'})",
    ),
    "learner": (
        lambda: trainer(learner=pl.learners.Quadratic(batch_size=10)),
        "learner was 'Logistic' and is 'Quadratic' (never accepted: the saved state is of that "
        "model); examples was 50 and is None (never accepted: positions in the data count them); "
        "give the Trainer the saved settings",
    ),
    "several": (
        lambda: trainer(learner=logistic(20), seed=1),
        "batch_size was 10 and is 20 (allow={'batch_size'} accepts it); seed was 0 and is 1 "
        "(never accepted: it orders the samples); give the Trainer the saved settings",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_checkpoint_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    trainer(checkpoints=pl.Checkpoints(tmp_path)).fit(steps=2)
    other, told = DIFFERENT[name]
    with pytest.raises(pl.errors.CheckpointError) as refusal:
        other().resume(tmp_path)
    place = tmp_path / "step-00000002"
    assert str(refusal.value) == f"{place} is not of this run: {told}"


@pytest.mark.parametrize("workers", [3, 5])
def test_a_simulation_goes_on_with_its_own_workers(workers: int, tmp_path: Path) -> None:
    """Its events in flight are of them; on Ray, where there are none, any number will do."""
    trainer(checkpoints=pl.Checkpoints(tmp_path)).fit(steps=2)
    told = f"workers was 4 and is {workers} .allow={{'policy'}} accepts it"
    with pytest.raises(pl.errors.CheckpointError, match=told):
        trainer(engine=pl.Simulator(workers)).resume(tmp_path)


def test_a_policy_with_a_bound_function_is_described_alike_in_another_process() -> None:
    def combine(view: Any, results: Any, power: float) -> Any:
        return {}

    def same(view: Any, results: Any, power: float) -> Any:
        return {}

    same.__name__ = combine.__name__
    same.__qualname__ = combine.__qualname__
    one = pl.policies.Gather(2, combine=partial(combine, power=2.0))
    other = pl.policies.Gather(2, combine=partial(same, power=2.0))
    assert trainer(one)._settled().about() == trainer(other)._settled().about()


# --- the run -------------------------------------------------------------------------------------


def test_the_callers_objects_are_recipes() -> None:
    """Two runs from the same policy, learner and engine do not know of each other."""
    policy, learner, engine = pl.asynchronous(), network(), lively()
    first = trainer(policy, learner, engine).fit(steps=9)
    second = trainer(policy, learner, engine).fit(steps=9)
    assert policy == pl.asynchronous()
    assert np.array_equal(parameters(first), parameters(second))
    assert first.journal == second.journal
    other = trainer(policy, learner, engine, seed=1).fit(steps=9)
    assert not np.array_equal(parameters(first), parameters(other))


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_is_replayed_from_its_journal(name: str) -> None:
    twice = trainer(POLICIES[name], engine=lively())
    first = twice.fit(steps=6)
    second = twice.fit(seconds=first.seconds + 5.0)
    run = twice.fit(until=lambda progress: progress.step >= second.steps + 9)
    for one in (first, second, run):
        assert len(one.journal) > 3
        assert pl.protocol.replay(one.driven_policy, one.journal) == one.journal
    assert first.journal.header.state is None
    assert run.journal.header.state is not None
    other = pl.policies.Until(
        pl.policies.MinWorkers(4, pl.policies.Gather(3, refill=True)), steps=6
    )
    assert pl.protocol.replay(other, first.journal) != first.journal


def test_a_resumed_journal_is_not_replayed_by_another_policy() -> None:
    twice = trainer(pl.k_sync(2))
    twice.fit(steps=3)
    run = twice.fit(steps=9)
    other = pl.policies.Until(pl.policies.MinWorkers(0, pl.k_sync(4)), steps=9)
    with pytest.raises(ValueError, match=r"continues a run of .*k=2.* does not fit .*k=4"):
        pl.protocol.replay(other, run.journal)


def test_the_journal_goes_to_a_file_and_that_of_a_resumed_run_to_another(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    saves = pl.Checkpoints(tmp_path / "saves")
    first = trainer(journal=path, checkpoints=saves).fit(steps=5)
    content = path.read_bytes()
    second = trainer(journal=path).resume(tmp_path / "saves").fit(steps=9)
    assert path.read_bytes() == content
    assert sorted(file.name for file in path.parent.iterdir()) == ["run-5.jsonl", "run.jsonl"]
    for run, name in ((first, "run.jsonl"), (second, "run-5.jsonl")):
        loaded = pl.Journal.load(path.parent / name)
        assert loaded == run.journal
        assert pl.protocol.replay(run.driven_policy, loaded) == loaded
    in_memory = trainer().fit(steps=5)
    assert first.journal == in_memory.journal


def test_the_name_of_the_journal_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    first = trainer(journal=path).fit(steps=2)
    assert "journal of this run" not in caplog.text
    assert f"\n  journal   {path}" in first.summary()
    second = trainer(journal=path).fit(steps=2)
    assert f"the journal of this run is {tmp_path / 'run.2.jsonl'}" in caplog.text
    assert f"\n  journal   {tmp_path / 'run.2.jsonl'}" in second.summary()


def test_a_run_that_ended_with_nan_is_replayed_from_its_file(tmp_path: Path) -> None:
    run = trainer(learner=pl.learners.Quadratic(start=nan), journal=tmp_path / "j.jsonl").fit(
        steps=9
    )
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_the_header_says_what_the_run_was() -> None:
    header = trainer(pl.k_sync(2), seed=3).fit(steps=1).journal.header
    assert header.policy == "Until(inner=MinWorkers(n=4, inner=Gather(k=2)), steps=1)"
    assert header.batch == 10
    assert header.state is None
    assert header.about is not None
    assert {"learner", "seed", "policy", "engine", "versions"} <= set(header.about)
    assert (header.about["seed"], header.about["engine"][:20]) == (3, "Simulator(workers=4,")
    assert {"python", "paceline", "torch", "numpy"} <= set(header.about["versions"])


def test_a_summary_mentions_the_figures() -> None:
    run = trainer(pl.k_sync(2), engine=pl.Simulator(4, pl.delays.Fixed(1.0))).fit(steps=6)
    first, samples, tasks, waiting, messages, cost = run.summary().splitlines()
    assert first.startswith("6 steps in ")
    assert f"loss {run.metrics['loss'][0]:.4g} -> {run.metrics['loss'][-1]:.4g}" in first
    assert first.endswith("(ended: 6 steps taken)")
    assert "60 used, 10 a step (batch_size 10)" in samples
    assert "28 started, 12 used, 12 wasted (12 cancelled, 0 discarded, 0 lost" in tasks
    assert "mean staleness 0 versions" in waiting
    size = run.meter.message_bytes
    assert size == logistic().message_bytes > 0
    assert messages == f"  messages  {28 * size} B down, {12 * size} B up"
    assert cost == f"  cost      {4 * run.seconds:.4g} busy worker-seconds of {4 * run.seconds:.4g}"


# --- prices --------------------------------------------------------------------------------------

DEAR = pl.Prices({f"w{i}": 3600.0 for i in range(4)}, per_gigabyte=2e6)


class Watchful(Wrapper):
    """Synchronous, and notes the prices and sizes it is shown."""

    seen: ClassVar[list[tuple[int, pl.Prices]]] = []

    def __init__(self) -> None:
        self.inner = pl.sync()

    def react(self, view: View, event: Event) -> Iterator[Command]:
        self.seen.append((view.message_bytes, view.prices))
        yield from self.inner.react(view, event)


def test_prices_reach_the_policy_the_journal_and_the_figures(tmp_path: Path) -> None:
    Watchful.seen.clear()
    engine = pl.Simulator(4, pl.delays.Fixed(1.0), unit=2)
    run = trainer(Watchful(), logistic(8), engine, prices=DEAR, journal=tmp_path / "j").fit(steps=3)
    size = logistic().message_bytes
    assert set(map(str, Watchful.seen)) == {str((size, DEAR))}
    for header in (run.journal.header, pl.Journal.load(tmp_path / "j").header):
        assert (header.message_bytes, header.prices) == (size, DEAR)
    down, up = 16, 12  # the last step is answered with four more tasks
    assert (run.meter.down_bytes, run.meter.up_bytes) == (down * size, up * size)
    assert run.meter.dollars == pytest.approx(3 * 4 * 1.0 + (down + up) * size * 0.002)
    assert run.metrics["dollars"].tolist() == pytest.approx(
        [step * (4 + 8 * size * 0.002) for step in (1, 2, 3)]
    )


def test_without_prices_nothing_costs_anything() -> None:
    run = trainer().fit(steps=3)
    assert run.journal.header.prices == pl.Prices()
    assert run.meter.dollars == 0.0 and run.meter.busy_seconds > 0
    assert "$" not in run.summary()


@pytest.mark.parametrize("name", ["per_hour", "per_gigabyte"])
def test_a_worker_without_a_price_is_told_before_anything_is_started(name: str) -> None:
    told = (
        f"prices: {name} names no price for w1, w3; this engine has the 4 workers w0 to w3: "
        "name each of them, or give one number for all"
    )

    def prices(*workers: str) -> pl.Prices:
        given: dict[str, Any] = {name: dict.fromkeys(workers, 1.0)}
        return pl.Prices(**given)

    with pytest.raises(ValueError, match=told):
        trainer(prices=prices("w0", "w2", "w5"))
    trainer(prices=prices(*(f"w{i}" for i in range(9))))  # more are no harm
    with pytest.raises(ValueError, match=r"for w0 to w9; this engine has the 10 workers"):
        trainer(prices=prices(), engine=pl.Simulator(10))


def test_prices_may_be_any_numbers_in_any_mapping(tmp_path: Path) -> None:
    table = {f"w{i}": np.float64(i) for i in range(4)}
    prices = pl.Prices(MappingProxyType(table), np.float32(0.5), idle=True)  # type: ignore[arg-type]
    saves = pl.Checkpoints(tmp_path / "saves")
    run = trainer(prices=prices, checkpoints=saves, journal=tmp_path / "j").fit(steps=2)
    table["w0"] = np.float64(99.0)  # what was given may change later
    expected = pl.Prices({"w0": 0.0, "w1": 1.0, "w2": 2.0, "w3": 3.0}, 0.5, idle=True)
    assert run.journal.header.prices == expected
    assert pl.Journal.load(tmp_path / "j").header.prices == expected


def test_a_resumed_run_has_the_prices_of_its_own_trainer(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=4)
    first = trainer(Watchful(), prices=DEAR, checkpoints=saves).fit(steps=4)
    assert first.meter.dollars > 0
    cheap = pl.Prices(per_hour=36.0)
    for prices, expected in ((cheap, cheap), (None, pl.Prices())):
        Watchful.seen.clear()
        run = trainer(Watchful(), prices=prices).resume(tmp_path).fit(steps=8)
        assert run.steps == 8
        assert {str(shown) for _, shown in Watchful.seen} == {str(expected)}
        assert run.journal.header.prices == expected
        assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
        assert {str(shown) for _, shown in Watchful.seen} == {str(expected)}  # in the replay too
        second = expected.second("w0")
        assert run.meter.dollars == pytest.approx(second * run.meter.busy_seconds)
        assert (run.meter.dollars > 0) is (prices is cheap)


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_in_two_parts_costs_what_it_costs_in_one(name: str) -> None:
    """With one price of bytes for all, so that late results of cancelled tasks have one, too."""

    def make() -> pl.Trainer:
        return trainer(POLICIES[name], engine=lively(interruptible=False), prices=DEAR)

    once, twice = make().fit(steps=20).meter, make()
    first, second = twice.fit(steps=7).meter, twice.fit(steps=20).meter
    assert second.dollars > 0
    for figure in TOTALS:
        parts = getattr(first, figure) + getattr(second, figure)
        assert parts == pytest.approx(getattr(once, figure)), figure


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_every_sample_has_one_fate(name: str, interrupts: bool) -> None:
    run = trainer(POLICIES[name], engine=lively(interruptible=interrupts)).fit(steps=40)
    place = used = 0
    for stretch in run.samples():
        assert stretch.offset == place  # no gap, no overlap
        place += stretch.samples
        used += stretch.samples if stretch.fate == "used" else 0
    assert used == run.meter.samples_used
    started = [c.task for entry in run.journal for c in entry.commands if isinstance(c, Start)]
    assert place == sum(t.samples * t.work.steps for t in started if t.attempt == 1)
    assert run.meter.lost >= run.meter.redone > 0


@pytest.mark.parametrize("name", POLICIES)
def test_no_sample_falls_between_a_run_and_its_resumption(name: str) -> None:
    """What the first leaves unfinished or lost, the second takes over, and nothing else."""
    twice = trainer(POLICIES[name], engine=lively())
    first, second = twice.fit(steps=11), twice.fit(steps=30)
    done = [s for s in first.samples() if s.fate not in ("unfinished", "lost")]
    place = 0
    for stretch in sorted([*done, *second.samples()], key=lambda stretch: stretch.offset):
        assert stretch.offset == place
        place += stretch.samples
    used = sum(s.samples for s in [*done, *second.samples()] if s.fate == "used")
    assert used == second.meter.samples_used
