"""Evaluation during a run: early stopping, averages, the best model, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.errors import CheckpointError
from paceline.core.protocol import Evaluated
from paceline.report.callbacks import State
from paceline.report.html.page import page, record_of
from paceline.training.checkpoint.callbacks import restore_states
from paceline.training.evaluate import Evaluate
from tests.conftest import flat, make_learner
from tests.unit.training.checkpoint.sliced import Sliced


def fit(evaluate: Evaluate, steps: int = 20, **more: Any) -> pl.Run:
    engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
    callbacks = [evaluate, *more.pop("callbacks", [])]
    options = {name: more.pop(name) for name in ("journal", "checkpoints") if name in more}
    trainer = pl.Trainer(
        make_learner(**more), pl.sync(), engine, progress=False, callbacks=callbacks, **options
    )
    return trainer.fit(steps=steps)


def size(model: nn.Module) -> float:
    assert not model.training
    return float(flat(model).norm())


def test_every_so_many_steps_and_the_best() -> None:
    seen: list[tuple[int, Any]] = []
    log = lambda step, found: seen.append((step, found))  # noqa: E731
    evaluate = Evaluate(size, every=6, mode="max", log=log)
    run = fit(evaluate)
    assert [done.step for done in evaluate.history] == [6, 12, 18]
    assert [done.seconds for done in evaluate.history] == [6.0, 12.0, 18.0]
    assert evaluate.best is not None and evaluate.best_model is not None
    best = max(evaluate.history, key=lambda done: done.metrics["evaluation"])
    assert evaluate.best == best
    assert size(evaluate.best_model) == best.metrics["evaluation"]
    assert seen == [(done.step, done.metrics) for done in evaluate.history]
    assert run.steps == 20
    assert run.evaluations == tuple(evaluate.history)
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    told = f"evaluation {evaluate.history[-1].metrics['evaluation']:.4g} at step 18"
    assert told in run.summary() and f"{best.metrics['evaluation']:.4g}" in run.summary()


def test_early_stopping_is_by_the_first_metric() -> None:
    numbers = iter([3.0, 2.0, 2.5, 2.1, 2.2, 0.0])
    evaluate = Evaluate(lambda model: {"loss": next(numbers), "other": 0.0}, every=2, patience=3)
    run = fit(evaluate)
    assert run.steps == 10 and run.reason == "no better evaluation in 3"
    assert evaluate.best is not None and evaluate.best.step == 4


def test_numbers_that_are_not_are_never_best() -> None:
    numbers = iter([float("nan"), 5.0, float("nan")])
    evaluate = Evaluate(lambda model: next(numbers), every=2)
    fit(evaluate, steps=6)
    assert evaluate.best is not None and evaluate.best.step == 4


@pytest.mark.parametrize("every", [1, 3])
def test_the_average_is_that_of_the_weights(every: int) -> None:
    decay, models = 0.8, list[nn.Module]()

    class Keep(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            models.append(progress.model())

    evaluate = Evaluate(lambda model: 0.0, every=12, average=decay, average_every=every)
    fit(evaluate, steps=12, callbacks=[Keep()])
    taken = models[every - 1 :: every]
    expected = [p.detach().clone() for p in taken[0].parameters()]
    for model in taken[1:]:
        for mean, new in zip(expected, model.parameters(), strict=True):
            mean.mul_(decay**every).add_(new.detach(), alpha=1 - decay**every)
    for mean, found in zip(expected, evaluate.best_model.parameters(), strict=True):
        assert torch.allclose(mean, found, atol=1e-6)


def test_in_the_background_training_goes_on() -> None:
    """The first evaluation ends only when the run has taken its last step."""
    go, began = threading.Event(), threading.Event()

    def wait(model: nn.Module) -> float:
        began.set()
        assert go.wait(timeout=60)
        return size(model)

    class Last(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step == 20:
                assert began.wait(timeout=60)
                go.set()

    evaluate = Evaluate(wait, every=4, background=True)
    run = fit(evaluate, callbacks=[Last()])
    assert run.steps == 20
    assert evaluate.history[0].step == 4
    assert run.evaluations == tuple(evaluate.history)  # told after the last step
    assert run.evaluations[0].seconds == 4.0
    expected = Evaluate(size, every=4)
    fit(expected)
    assert expected.history[0].metrics == evaluate.history[0].metrics


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_the_function_ends_the_run(background: bool) -> None:
    def wrong(model: nn.Module) -> float:
        raise KeyError("accuracy")

    with pytest.raises(KeyError, match="accuracy"):
        fit(Evaluate(wrong, every=2, background=background))


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"every": 0}, "every=0"),
        ({"mode": "best"}, "mode='best'"),
        ({"average": 1.5}, "average=1.5"),
        ({"patience": 0}, "patience=0"),
    ],
)
def test_settings_that_cannot_be(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Evaluate(size, **more)
    with pytest.raises(ValueError, match="give a function of the model"):
        Evaluate("accuracy")  # type: ignore[arg-type]


def test_a_function_without_numbers() -> None:
    with pytest.raises(ValueError, match="returned no number"):
        fit(Evaluate(lambda model: {}, every=2))


def test_a_report_of_the_journal_has_every_metric(tmp_path: Path) -> None:
    numbers = iter([3.0, float("nan"), 2.5, 2.75])
    evaluate = Evaluate(lambda model: {"loss <b>": next(numbers), "accuracy": 0.5}, every=5)
    run = fit(evaluate, journal=tmp_path / "run.jsonl")
    read = pl.Journal.load(tmp_path / "run.jsonl")
    steps = [e.event.step for e in read if isinstance(e.event, Evaluated)]
    assert steps == [5, 10, 15, 20]
    text = page(record_of({"main": read}))
    assert text.count("accuracy against time") and "loss &lt;b&gt; against time" in text
    assert "loss <b>" not in text
    told = "was 2.75 at step 20, the last of 4 evaluations; the best was 2.5 at step 15."
    assert f"loss &lt;b&gt; {told}" in text
    assert "4 times; loss <b> 2.75 at step 20, best 2.5 at step 15" in run.summary()


def test_nodes_of_a_decentralized_run_are_evaluated_together() -> None:
    evaluate = Evaluate(size, every=4)
    policy = pl.gossip.Gossip(pl.gossip.ring(3))
    engine = pl.Simulator(workers=3, delays=pl.delays.Fixed(1.0))
    trainer = pl.Trainer(make_learner(), policy, engine, progress=False, callbacks=[evaluate])
    run = trainer.fit(steps=8)
    assert [done.step for done in run.evaluations] == [4, 8]
    assert [done.metrics for done in run.evaluations] == [d.metrics for d in evaluate.history]
    for node, journal in run.journals.items():
        assert pl.protocol.replay(run.driven_policy, journal) == journal, node


def saved_fit(evaluate: Evaluate, folder: Path, steps: int, resumed: bool = False) -> pl.Run:
    engine = pl.Simulator(workers=2, delays=pl.delays.Exponential(1.0))
    trainer = pl.Trainer(
        make_learner(),
        pl.k_sync(1),
        engine,
        progress=False,
        callbacks=[evaluate, Evaluate(lambda model: 1.0, every=5)],
        checkpoints=pl.Checkpoints(folder, every=7),
    )
    return (trainer.resume(folder) if resumed else trainer).fit(steps=steps)


@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_run_goes_on_with_average_best_and_history(every: int, tmp_path: Path) -> None:
    """The first metric is best in the middle of the first half, and again in the second."""

    def new() -> Evaluate:
        def score(model: nn.Module) -> dict[str, float]:
            return {"loss": abs(float(flat(model)[0]) * 1e3 % 1 - 0.5), "none": float("nan")}

        return Evaluate(score, every=3, average=0.7, average_every=every)

    whole, first, second = new(), new(), new()
    run = saved_fit(whole, tmp_path / "whole", 28)
    saved_fit(first, tmp_path / "parts", 14)
    later = saved_fit(second, tmp_path / "parts", 28, resumed=True)
    assert flat(run.model).tolist() == flat(later.model).tolist()
    assert repr(second.history) == repr(whole.history)  # nan is not equal to nan
    assert len(first.history) < len(second.history)
    assert repr(second.best) == repr(whole.best)
    assert flat(second.best_model).tolist() == flat(whole.best_model).tolist()
    averages = []
    for each in (second, whole):
        assert each._averaged is not None and each._averaged.model is not None
        averages.append(flat(each._averaged.model).tolist())
    assert averages[0] == averages[1]
    assert [done.step for done in later.evaluations][:2] == [15, 15]  # of both callbacks


def test_a_resumed_run_goes_on_with_early_stopping(tmp_path: Path) -> None:
    rising = lambda model, numbers=iter(range(9)): float(next(numbers))  # noqa: E731
    saved_fit(Evaluate(rising, every=4, patience=3), tmp_path, 14)
    evaluate = Evaluate(lambda model: 7.0, every=4, patience=3)
    run = saved_fit(evaluate, tmp_path, 40, resumed=True)
    assert run.steps == 16 and run.reason == "no better evaluation in 3"
    assert evaluate.best is not None and evaluate.best.step == 4
    assert evaluate.best_model is not None


def test_old_checkpoints_and_other_callbacks(tmp_path: Path, caplog: Any) -> None:
    """A checkpoint without the state of a callback, or with that of another, is read."""
    engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
    options: dict[str, Any] = {"progress": False, "checkpoints": pl.Checkpoints(tmp_path)}
    pl.Trainer(make_learner(), pl.sync(), engine, **options).fit(steps=4)
    assert not (tmp_path / "step-00000004" / "callbacks.safetensors").exists()
    evaluate = Evaluate(size, every=2)
    options["callbacks"] = [evaluate]
    pl.Trainer(make_learner(), pl.sync(), engine, **options).resume(tmp_path).fit(steps=8)
    assert [done.step for done in evaluate.history] == [6, 8]
    del options["callbacks"]
    trainer = pl.Trainer(make_learner(), pl.sync(), engine, **options)
    assert trainer.resume(tmp_path).fit(steps=9).steps == 9
    assert "the saved state of Evaluate is not used" in caplog.text


def test_a_state_that_does_not_fit_is_refused() -> None:
    evaluate = Evaluate(size)
    other = State({"history": [[1]], "best": None, "bad": 0})
    with pytest.raises(CheckpointError, match="Evaluate does not fit"):
        restore_states([evaluate], {"Evaluate": other}, lambda: None)
    model = nn.Linear(2, 1)
    data: dict[str, Any] = {"history": [], "best": None, "bad": 0, "plateau": None}
    wrong = State(data, {"best/weight": torch.zeros(1, 3), "best/bias": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="'weight' is of another shape"):
        restore_states([evaluate], {"Evaluate": wrong}, lambda: model)


@pytest.mark.parametrize("place", ["slices", "memory://evaluate"])
def test_servers_and_stores_save_it_too(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.training.saving.LEAST_BYTES", 0)
    where = place if "://" in place else str(tmp_path)

    def trainer(evaluate: Evaluate) -> pl.Trainer:
        engine = Sliced(2, 3) if place == "slices" else pl.Simulator(workers=2)
        options: dict[str, Any] = {"progress": False, "callbacks": [evaluate]}
        saves = pl.Checkpoints(where, every=4)
        return pl.Trainer(make_learner(), pl.sync(), engine, checkpoints=saves, **options)

    whole, later = (Evaluate(size, every=2, average=0.5) for _ in range(2))
    trainer(whole).fit(steps=8)
    if place == "slices":
        assert (tmp_path / "step-00000004" / "state-00000-of-00003.safetensors").exists()
    trainer(later).resume(f"{where}/step-00000004").fit(steps=8)
    found, expected = ([(e.step, e.metrics) for e in each.history] for each in (later, whole))
    assert found == expected  # but slices do not have the time of the simulator
    assert flat(later.best_model).tolist() == flat(whole.best_model).tolist()


PLAIN: dict[str, Any] = {"type": "any", "more": [1, (2.5, float("inf"))]}


class Count(pl.Callback):
    """A callback with an array of numpy, beside those of torch."""

    def started(self, live: Any) -> None:
        self.steps = np.zeros(2, np.int64)

    def stepped(self, progress: pl.Progress) -> None:
        self.steps[progress.step % 2] += 1

    def state(self) -> State:
        return State(PLAIN, {"steps": self.steps.copy()})

    def restore(self, state: State, model: Any) -> None:
        assert state.data == PLAIN
        self.steps = state.tensors["steps"].copy()


@pytest.mark.parametrize("beside", [[], [Evaluate(size, every=2)]])
def test_a_callback_of_your_own_has_a_state(beside: list[Evaluate], tmp_path: Path) -> None:
    count, engine = Count(), pl.Simulator(workers=2)
    options: dict[str, Any] = {"progress": False, "callbacks": [*beside, count]}
    options["checkpoints"] = pl.Checkpoints(tmp_path)
    pl.Trainer(make_learner(), pl.sync(), engine, **options).fit(steps=5)
    pl.Trainer(make_learner(), pl.sync(), engine, **options).resume(tmp_path).fit(steps=8)
    assert count.steps.tolist() == [4, 4]
