"""Profiles: what they tell of workers and of a loss, from runs, and through a file."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.delays.models import Delay
from paceline.planner.forecast.quadratic import modes_of
from paceline.planner.grid import candidates
from paceline.planner.measure.curvature import measure_curvature
from paceline.planner.measure.gradient_spectrum import gradient_spectrum
from tests.conftest import make_learner

SURFACE = pl.planner.Surface(
    2.0, 1.0, 3.0, ((0.1, 0.9), (4.0, 0.1)), 10, 0.5, ((0.1, 0.5), (4.0, 0.5))
)
LEARNER = pl.learners.Quadratic((1.0, 0.1) * 200, noise=1.0, batch_size=32)


def of(*delays: object, **more: object) -> pl.planner.Profile:
    workers = {f"w{i}": pl.planner.WorkerProfile(each) for i, each in enumerate(delays)}  # type: ignore[arg-type]
    return pl.planner.Profile(workers, 32, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "delay",
    [
        pl.delays.Fixed(1.0),
        pl.delays.Exponential(0.3),
        pl.delays.ShiftedExponential(1.0, 2.0),
        pl.delays.Erlang(3, 1.5),
        pl.delays.LogNormal(1.0, 0.5),
        pl.delays.Pareto(1.0, 2.5),
        pl.delays.Trace([1.0, 2.0, 0.5]),
        pl.delays.Mixture(
            [pl.delays.Fixed(1.0), pl.delays.Scaled(pl.delays.Exponential(2.0), 3.0)], [0.9, 0.1]
        ),
        pl.delays.Bursts(pl.delays.Fixed(1.0), pl.delays.Fixed(5.0), 10.0, 2.0),
        pl.delays.Changed(pl.delays.Fixed(1.0), pl.delays.Fixed(5.0), 10.0),
    ],
    ids=lambda delay: type(delay).__name__,
)
def test_a_delay_comes_back_from_a_file(delay: object, tmp_path: Path) -> None:
    profile = of(delay, pl.delays.Fixed(2.0))
    profile.save(tmp_path / "profile.json")
    assert pl.planner.Profile.load(tmp_path / "profile.json") == profile


def test_all_of_it_comes_back() -> None:
    prices = pl.Prices({"w0": 1.0, "w1": 2.0}, 0.1, idle=True)
    workers = {
        "w0": pl.planner.WorkerProfile(pl.delays.Fixed(1.0), pl.delays.Link(0.1, 1e6, 1e5)),
        "w1": pl.planner.WorkerProfile(pl.delays.Exponential(1.0)),  # whose bandwidths are infinite
    }
    profile = pl.planner.Profile(workers, 64, 1000, prices, SURFACE, ("a note",), False, False)
    assert pl.planner.Profile.from_json(profile.to_json()) == profile
    json.loads(profile.to_json(), parse_constant=pytest.fail)  # no NaN, no Infinity


def test_a_file_builds_nothing_else() -> None:
    text = of(pl.delays.Fixed(1.0)).to_json()
    with pytest.raises(ValueError, match="unknown law 'Popen'; known are Fixed"):
        pl.planner.Profile.from_json(text.replace('"Fixed"', '"Popen"'))
    with pytest.raises(ValueError, match="no profile of format 1"):
        pl.planner.Profile.from_json('{"format": 7}')


def test_a_run_is_simulated_again_as_it_was() -> None:
    """Means within 10 % after 60 tasks of each worker, and links to the byte."""
    links = [pl.delays.Link(0.05, 1e5, 2e4), pl.delays.Link(0.2, 1e4, 1e4)]
    delays: list[Delay] = [pl.delays.Exponential(0.1), pl.delays.ShiftedExponential(0.2, 0.05)]
    engine = pl.Simulator(2, delays, links, unit=1)
    found = pl.profile(LEARNER, engine, seconds=1000.0, tasks=200)
    for worker, delay, link in zip(found.workers.values(), delays, links, strict=True):
        assert worker.compute.mean == pytest.approx(delay.mean, rel=0.15)
        assert (worker.link.latency, worker.link.down, worker.link.up) == pytest.approx(
            (link.latency, link.down, link.up), rel=1e-6
        )
    assert not found.notes
    assert found.batch_size == 32
    assert found.message_bytes == LEARNER.message_bytes


def test_nothing_is_learned_while_measuring_and_seeds_repeat() -> None:
    engine = pl.Simulator(3, [pl.delays.Exponential(0.1)] * 3, unit=1)
    one, two = (pl.profile(LEARNER, engine, seconds=200.0, seed=5) for _ in range(2))
    assert one == two
    assert one != pl.profile(LEARNER, engine, seconds=200.0, seed=6)
    assert one.known().loss == measure_curvature(LEARNER).loss


def test_timing_alone_has_no_surface() -> None:
    found = pl.profile(
        pl.learners.TimingOnly(8), pl.Simulator(2, pl.delays.Fixed(1.0)), seconds=100.0
    )
    assert found.workers["w1"].compute == pl.delays.Fixed(1.0 / 4)
    with pytest.raises(ValueError, match=r"has no measurements of the model; use pl\.profile"):
        found.known()


def test_a_journal_of_any_policy_will_do() -> None:
    engine = pl.Simulator(
        3, [pl.delays.Exponential(0.1)] * 2 + [pl.delays.Exponential(0.5)], unit=1
    )
    prices = pl.Prices(1.0)
    trainer = pl.Trainer(LEARNER, pl.k_sync(2), engine, progress=False, prices=prices)
    found = pl.planner.profile_of(trainer.fit(steps=300).journal, learner=LEARNER)
    assert found.prices == prices
    assert found.workers["w2"].compute.mean == pytest.approx(0.5, rel=0.35)  # mostly cancelled
    measured = measure_curvature(LEARNER)
    assert (
        pl.planner.profile_of(trainer.fit(steps=310).journal, curvature=measured).known().noise
        == 400
    )


def test_messages_of_one_size_are_noted() -> None:
    engine = pl.Simulator(2, pl.delays.Fixed(1.0), pl.delays.Link(0.1, 1e4, 1e4))
    run = pl.Trainer(LEARNER, pl.sync(), engine, progress=False).fit(steps=20)
    found = pl.planner.profile_of(run.journal)
    assert "latency and bandwidth are not told apart" in found.notes[0]


def test_a_worker_that_never_finished_is_as_slow_as_was_seen() -> None:
    engine = pl.Simulator(2, [pl.delays.Fixed(1.0), pl.delays.Fixed(1e6)])
    found = pl.profile(LEARNER, engine, seconds=100.0)
    assert found.workers["w1"].compute.mean >= 100.0 / 16
    assert found.notes[0].startswith("w1 never finished a task, and is taken to need")


def test_nothing_is_known_of_who_never_had_a_task() -> None:
    only = pl.policies.OnlyWorkers(["w0"], pl.sync())
    run = pl.Trainer(LEARNER, only, pl.Simulator(2), progress=False).fit(steps=9)
    with pytest.raises(ValueError, match="w1 never had a task in these journals"):
        pl.planner.profile_of(run.journal)


def test_whether_given_up_work_goes_on_is_seen() -> None:
    for ends in (True, False):
        engine = pl.Simulator(4, pl.delays.Exponential(0.1), unit=1, interruptible=ends)
        run = pl.Trainer(LEARNER, pl.k_sync(2), engine, progress=False).fit(steps=200)
        assert pl.planner.profile_of(run.journal).interruptible == ends


def test_a_rate_at_which_training_diverges_can_be_profiled() -> None:
    found = pl.profile(
        replace(make_learner(), optimizer=partial(torch.optim.SGD, lr=1e4)),
        pl.Simulator(2, pl.delays.Fixed(0.01), unit=1), sizes=False, warm=30,
    )  # fmt: skip
    assert found.known().sharpest == 0
    assert any("diverges within 30 steps" in note for note in found.notes)


def test_the_plain_rate_of_optimizers() -> None:
    learner, sgd = make_learner(), torch.optim.SGD

    def rate(**more: object) -> float:
        return pl.planner.sgd_equivalent_lr(replace(learner, **more))  # type: ignore[arg-type]

    assert rate(optimizer=partial(sgd, lr=0.1)) == 0.1
    assert rate(optimizer=partial(sgd, lr=0.1, momentum=0.9)) == pytest.approx(1.0)
    outer = partial(sgd, lr=0.7, momentum=0.9, nesterov=True)
    assert rate(optimizer=partial(sgd, lr=0.1), outer=outer) == pytest.approx(0.7)
    warm = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: min(step / 10, 1))
    assert rate(optimizer=partial(sgd, lr=0.1), scheduler=warm) == 0.1
    both = rate(optimizer=partial(sgd, lr=0.1), outer=outer, inner_scheduler=warm)
    assert both == pytest.approx(0.7)
    assert pl.planner.sgd_equivalent_lr(LEARNER) == LEARNER.lr
    with pytest.raises(ValueError, match="forecasts are for SGD only"):
        rate(optimizer=partial(torch.optim.AdamW, lr=0.1))


def test_a_surface_is_the_same_with_an_outer_optimizer() -> None:
    learner = make_learner()
    plain = pl.planner.measure_loss_surface(learner)
    outer = pl.planner.measure_loss_surface(
        replace(learner, outer=partial(torch.optim.SGD, lr=1.0))
    )
    assert outer.pull == pytest.approx(np.array(plain.pull), rel=1e-3)


def test_numbers_of_numpy_are_saved() -> None:
    found = pl.planner.Profile(
        {"w0": pl.planner.WorkerProfile(pl.delays.Fixed(1.0), pl.delays.Link(np.float64(0.1)))}, 8,
        surface=pl.planner.Surface(1.0, 1.0, 1.0, ((1.0, 1.0),), floor=np.float64(0.5)),
    )  # fmt: skip
    assert pl.planner.Profile.from_json(found.to_json()) == found


def test_refusals() -> None:
    with pytest.raises(ValueError, match="a profile names those of its engine"):
        pl.planner.Profile({}, 8)
    with pytest.raises(ValueError, match="use a batch >= 1"):
        pl.planner.Profile({"w0": pl.planner.WorkerProfile(pl.delays.Fixed(1.0))}, 0)
    with pytest.raises(ValueError, match="give as floor= the loss of the best model"):
        pl.planner.Surface(1.0, 1.0, 1.0, ((1.0, 1.0),), floor=2.0)
    with pytest.raises(ValueError, match="no curvature is above 0 here"):
        pl.planner.Surface(1.0, 1.0, 1.0, ((-1.0, 1.0),))
    with pytest.raises(ValueError, match="got no journal"):
        pl.planner.profile_of()
    with pytest.raises(ValueError, match="use seconds > 0 and tasks >= 1"):
        pl.profile(LEARNER, pl.Simulator(2), seconds=0.0)


# --- where the gradient points -------------------------------------------------------------------


def test_the_gradients_spectrum_is_that_of_the_hessian() -> None:
    """g.H⁻¹g / 2 from it is the way down of a least squares problem, to 1e-6."""
    rng = np.random.default_rng(3)
    features = rng.standard_normal((300, 6)) * [3, 2, 1, 1, 0.5, 0.3]
    targets = features @ rng.standard_normal(6) + rng.standard_normal(300)
    learner = pl.learners.LeastSquares(features, targets)
    found = gradient_spectrum(learner, samples=300)
    hessian = features.T @ features / 300
    gradient = -features.T @ targets / 300
    best = np.linalg.solve(hessian, -gradient).astype(np.float64)
    way = learner.gradient(np.zeros(6), np.arange(300))[0]
    way -= learner.gradient(best, np.arange(300))[0]
    assert [value for value, _ in found] == pytest.approx(np.linalg.eigvalsh(hessian), rel=1e-6)
    square = float(gradient @ gradient)
    assert sum(0.5 * square * share / value for value, share in found) == pytest.approx(way)
    assert sum(share for _, share in found) == pytest.approx(1.0)


def test_no_gradient_points_nowhere() -> None:
    with pytest.raises(ValueError, match="it has no direction"):
        gradient_spectrum(pl.learners.LeastSquares(np.eye(3), np.zeros(3)))
    with pytest.raises(ValueError, match="use at least 1 of each"):
        gradient_spectrum(pl.learners.LeastSquares(np.eye(3), np.ones(3)), steps=0)


def test_a_net_is_measured_again_after_some_steps() -> None:
    """Its curvature has grown, and it cannot take local steps without an outer optimizer."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    inputs = torch.randn(400, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def loss(module: object, batch: object) -> object:
        return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])  # type: ignore

    learner = pl.TorchLearner(net, loss, partial(torch.optim.SGD, lr=0.5), data, batch_size=32)  # type: ignore[arg-type]
    engine = pl.Simulator(2, pl.delays.Fixed(0.1))
    found = pl.profile(learner, engine, seconds=100.0, tasks=10, loss_seconds=inf)
    surface = found.known()
    assert surface.top == surface.sharpest > 1.2 * max(value for value, _ in surface.spectrum)
    assert not found.local_steps
    assert not any("local_sgd" in each.text for each in candidates(found))
    cold = pl.profile(learner, engine, seconds=100.0, tasks=10, warm=0, loss_seconds=inf).known()
    assert cold.sharpest == 0
    assert cold == replace(surface, sharpest=0.0, trained=None)
    modes = modes_of(surface)
    assert modes.sharpest == surface.sharpest > modes.curvature.max()
    assert modes.excess == pytest.approx(surface.loss)
