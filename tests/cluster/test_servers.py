"""Servers that each own a slice of the model, on a real Ray: same steps, and faults survived."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline as pl
from paceline.core.protocol import Left, Step
from paceline.training.evaluate import Evaluate
from paceline.training.plateau import Plateau
from tests import ragged
from tests.cluster.test_faults import At, heavy_learner, lives
from tests.conftest import flat, make_learner

pytestmark = pytest.mark.cluster


def by_name(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Biases have no weight decay, and a learning rate of their own."""
    named = dict(named_parameters)
    biases = [named.pop(name) for name in list(named) if name.endswith("bias")]
    assert biases and named
    groups: list[dict[str, Any]] = [
        {"params": list(named.values())},
        {"params": biases, "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


ADAM = {
    "optimizer": by_name,
    "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5),
    "transform": pl.learners.ClipNorm(0.5),
}
LEARNERS: dict[str, Callable[[], pl.TorchLearner]] = {
    "momentum": make_learner,
    "AdamW by name, a schedule, clipping": lambda: remake(**ADAM),
    "LARS": lambda: remake(transform=pl.learners.TrustRatio(0.02, weight_decay=1e-3)),
}


def remake(**changes: Any) -> pl.TorchLearner:
    plain = make_learner()
    given: dict[str, Any] = {"model": plain.model, "optimizer": plain.optimizer, **changes}
    return pl.TorchLearner(
        loss=plain.loss, dataset=plain.dataset, batch_size=plain.batch_size, **given
    )


def simulated(learner: pl.TorchLearner, steps: int) -> pl.Run:
    return pl.Trainer(learner, pl.sync(), pl.Simulator(4), progress=False).fit(steps=steps)


@pytest.mark.parametrize("name", LEARNERS)
def test_steps_in_slices_are_the_steps_of_the_whole(ray_servers: pl.Ray, name: str) -> None:
    run = pl.Trainer(LEARNERS[name](), pl.sync(), ray_servers, progress=False).fit(steps=12)
    whole = simulated(LEARNERS[name](), 12)
    assert torch.allclose(flat(run.model), flat(whole.model), rtol=1e-6, atol=1e-6)
    assert run.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.parametrize("servers", ["driver", 3])
def test_a_plateau_scales_the_learning_rate_of_servers(ray_servers: pl.Ray, servers: Any) -> None:
    """The scale goes with each step, with or without sums over all slices."""

    def run(engine: Any, name: str) -> pl.Run:
        plateau = Evaluate(lambda model: 1.0, every=2, plateau=Plateau(0.3, patience=1))
        options: dict[str, Any] = {"callbacks": [plateau], "progress": False}
        return pl.Trainer(LEARNERS[name](), pl.sync(), engine, **options).fit(steps=12)

    before, ray_servers.servers = ray_servers.servers, servers
    try:
        for name in ("momentum", "AdamW by name, a schedule, clipping"):
            found, whole = run(ray_servers, name), run(pl.Simulator(4), name)
            steps = [c for e in found.journal for c in e.commands if isinstance(c, Step)]
            assert [c.lr_scale for c in steps] == [1.0] * 6 + [0.3] * 4 + [0.3 * 0.3] * 2
            assert torch.allclose(flat(found.model), flat(whole.model), rtol=1e-6, atol=1e-6)
            plain = simulated(LEARNERS[name](), 12)
            assert not torch.allclose(flat(found.model), flat(plain.model), rtol=1e-4, atol=1e-4)
            assert pl.protocol.replay(found.driven_policy, found.journal) == found.journal
    finally:
        ray_servers.servers = before


@pytest.mark.parametrize("policy", [pl.sync(), pl.coded(1, messages=2)], ids=["sync", "coded"])
def test_steps_are_means_over_tokens(ray_servers: pl.Ray, policy: Any) -> None:
    given: dict[str, Any] = {"seed": ragged.SEED, "progress": False}
    run = pl.Trainer(ragged.learner(), policy, ray_servers, **given).fit(steps=4)
    assert ragged.error(run, ragged.by_tokens(run)) < 1e-6


def test_a_run_goes_on_with_other_servers(ray_servers: pl.Ray, tmp_path: object) -> None:
    saves = pl.Checkpoints(str(tmp_path), every=5)
    learner = LEARNERS["AdamW by name, a schedule, clipping"]
    pl.Trainer(learner(), pl.sync(), ray_servers, progress=False, checkpoints=saves).fit(steps=5)
    resumed = pl.Trainer(learner(), pl.sync(), pl.Simulator(4), progress=False)
    whole = resumed.resume(str(tmp_path)).fit(steps=9)
    again = pl.Trainer(learner(), pl.sync(), ray_servers, progress=False).resume(str(tmp_path))
    run = again.fit(steps=9)
    assert torch.allclose(flat(run.model), flat(whole.model), rtol=1e-6, atol=1e-6)
    straight = simulated(learner(), 9)
    assert torch.allclose(flat(run.model), flat(straight.model), rtol=1e-6, atol=1e-6)


def wide_learner() -> pl.TorchLearner:
    """A model of 1.2 MB, which servers write themselves, cut in mid-row."""
    return remake(**ADAM, model=wide_model())


def wide_model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = torch.nn.Linear(20, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 577)
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(577, 3))


def test_servers_write_a_checkpoint_from_which_a_run_goes_on_with_the_same_bits(
    ray_servers: pl.Ray, tmp_path: Path
) -> None:
    saves = pl.Checkpoints(tmp_path, every=5)
    plain = partial(pl.Trainer, policy=pl.sync(), progress=False)
    whole = plain(wide_learner(), engine=ray_servers, checkpoints=saves).fit(steps=9)
    folder = saves.folder(5)
    slices = sorted(path.name for path in folder.glob("state-*"))
    assert slices == [f"state-{i:05d}-of-{len(slices):05d}.safetensors" for i in range(len(slices))]
    assert len(slices) > 1 and not (folder / "state.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000009"]
    again = plain(wide_learner(), engine=ray_servers).resume(folder).fit(steps=9)
    assert torch.equal(flat(again.model), flat(whole.model))
    five = plain(wide_learner(), engine=ray_servers).fit(steps=5)
    model = load_file(folder / "model.safetensors")
    assert model.keys() == five.model.state_dict().keys()
    for name, tensor in five.model.state_dict().items():
        assert torch.equal(model[name], tensor), name


def test_a_server_that_is_killed_while_it_writes_does_no_harm(
    ray_servers: pl.Ray, tmp_path: Path
) -> None:
    saves = pl.Checkpoints(tmp_path, every=3, keep=99)
    kill = At(4, lambda: os.kill(ray_servers.pids()["s1"], signal.SIGKILL))
    run = pl.Trainer(
        wide_learner(), pl.sync(), ray_servers, checkpoints=saves, callbacks=[kill], progress=False
    ).fit(steps=9)
    calm = pl.Trainer(wide_learner(), pl.sync(), ray_servers, progress=False).fit(steps=9)
    assert run.steps == 9 and torch.equal(flat(run.model), flat(calm.model))
    first = min(tmp_path.glob("step-*"))
    again = pl.Trainer(wide_learner(), pl.sync(), ray_servers, progress=False).resume(first)
    assert torch.equal(flat(again.fit(steps=9).model), flat(calm.model))


def test_the_model_can_be_looked_at_while_it_trains(ray_servers: pl.Ray) -> None:
    seen: list[torch.Tensor] = []

    class Look(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step in (3, 6):
                seen.append(flat(progress.model()))

    pl.Trainer(make_learner(), pl.sync(), ray_servers, progress=False, callbacks=[Look()]).fit(
        steps=7
    )
    for step, model in zip((3, 6), seen, strict=True):
        assert torch.equal(model, flat(simulated(make_learner(), step).model))


@pytest.mark.parametrize("name", ["momentum", "AdamW by name, a schedule, clipping"])
@pytest.mark.parametrize("victims", [("s1",), ("s0", "s2"), ("s1", "w2")])
def test_servers_killed_in_mid_step_change_nothing(
    ray_servers: pl.Ray, name: str, victims: tuple[str, ...]
) -> None:
    """With a worker in the same step, too: nothing is half taken, nothing taken twice."""

    def kill() -> None:
        for victim in victims:
            os.kill(ray_servers.pids()[victim], signal.SIGKILL)

    trainer = pl.Trainer(
        LEARNERS[name](), pl.sync(shares=4), ray_servers, progress=False, callbacks=[At(4, kill)]
    )
    run = trainer.fit(steps=9)
    whole = simulated(LEARNERS[name](), 9)
    assert run.steps == 9
    assert torch.allclose(flat(run.model), flat(whole.model), rtol=1e-6, atol=1e-6)
    if name == "momentum":  # a norm's sum over slices rounds otherwise than that of the whole
        assert torch.equal(flat(run.model), flat(whole.model))
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    assert (Left("w2") in lives(run)) == ("w2" in victims)
    assert {stretch.fate for stretch in run.samples()} <= {"used", "unfinished"}


@pytest.mark.parametrize("name", ["momentum", "LARS"])
def test_a_killed_server_changes_nothing_although_workers_have_rounded_values(
    ray_servers: pl.Ray, name: str
) -> None:
    codec = pl.codecs.BFloat16()

    def fit(engine: pl.Ray | pl.Simulator, *callbacks: pl.Callback) -> pl.Run:
        trainer = pl.Trainer(
            LEARNERS[name](), pl.sync(shares=4), engine, callbacks=callbacks, progress=False,
            codec=codec, model_codec=codec,
        )  # fmt: skip
        return trainer.fit(steps=9)

    run = fit(ray_servers, At(4, lambda: os.kill(ray_servers.pids()["s1"], signal.SIGKILL)))
    whole = fit(pl.Simulator(4))
    assert run.steps == 9
    assert torch.allclose(flat(run.model), flat(whole.model), rtol=1e-6, atol=1e-6)
    if name == "momentum":  # a norm's sum over slices rounds otherwise than that of the whole
        assert torch.equal(flat(run.model), flat(whole.model))


@pytest.mark.parametrize("policy", [pl.k_sync(2), pl.rennala(4), pl.ringmaster(4)])
def test_under_every_policy_a_killed_server_costs_no_step(
    ray_servers: pl.Ray, policy: pl.policies.Gather
) -> None:
    def kill() -> None:
        os.kill(ray_servers.pids()["s0"], signal.SIGKILL)

    trainer = pl.Trainer(
        heavy_learner(), policy, ray_servers, progress=False, callbacks=[At(4, kill)]
    )
    run = trainer.fit(steps=10)
    assert run.steps == 10
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.long
def test_a_paused_server_is_given_up_after_the_timeout() -> None:
    with pl.Ray(workers=2, servers=2, timeout=5, start_timeout=60) as engine:

        def pause() -> None:
            os.kill(engine.pids()["s1"], signal.SIGSTOP)

        run = pl.Trainer(
            make_learner(), pl.sync(shares=2), engine, progress=False, callbacks=[At(3, pause)]
        ).fit(steps=8)
    whole = pl.Trainer(make_learner(), pl.sync(), pl.Simulator(2), progress=False).fit(steps=8)
    assert torch.equal(flat(run.model), flat(whole.model))
    assert not [event for event in lives(run) if isinstance(event, Left)]  # the workers waited


def test_what_cannot_be_cut_is_refused_before_anything_is_trained(ray_servers: pl.Ray) -> None:
    learner = remake(optimizer=partial(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(ValueError, match="servers='driver'"):
        pl.Trainer(learner, pl.sync(), ray_servers, progress=False).fit(steps=1)
    with pytest.raises(ValueError, match="3 servers for a model of 1 values"):
        pl.Trainer(pl.learners.Quadratic(), pl.sync(), ray_servers, progress=False).fit(steps=1)


def test_a_users_error_in_a_servers_step_reaches_the_user(ray_servers: pl.Ray) -> None:
    learner = remake(transform=Broken())
    with pytest.raises(ZeroDivisionError, match="my own transform"):
        pl.Trainer(learner, pl.sync(), ray_servers, progress=False).fit(steps=3)
    assert (
        pl.Trainer(make_learner(), pl.sync(), ray_servers, progress=False).fit(steps=2).steps == 2
    )


class Broken:
    """A transform of a user, with a mistake in it."""

    def sums(self, pieces: object) -> dict[str, float]:
        return {}

    def apply(self, pieces: object, totals: object) -> None:
        raise ZeroDivisionError("my own transform")
