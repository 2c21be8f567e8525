"""Loops as people write them, each in a session of its own on a real Ray."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.data.sampling import Stream
from paceline.sessions.cluster import NAMESPACE, is_over, start_ray
from paceline.sessions.session import Session

pytestmark = pytest.mark.cluster

BATCH, STEPS = 32, 6
INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :1] * 2 - INPUTS[:, 1:2]
DATA = TensorDataset(INPUTS, TARGETS)

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    import ray

    ours = start_ray(None, 2)  # other tests keep a Ray of their own in this process
    yield
    if ours:
        ray.shutdown()


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Linear(16, 1))


def mse(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss = mse,
    clip: float | None = None,
    schedule: Any = None,
) -> nn.Module:
    """Train in this process on the same samples, without Paceline."""
    stream = Stream(len(DATA), 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(stream.indices(step * BATCH, BATCH))
        optimizer.zero_grad()
        loss(model, INPUTS[chosen], TARGETS[chosen]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model


def join(model: nn.Module, optimizer: Any, **more: Any) -> Session:
    settings = {"workers": 1, "batch_size": BATCH, "steps": STEPS, **more}
    return pl.session(model, optimizer, run=uuid.uuid4().hex, **settings)


def loop(session: Session, loss: Loss = mse, workers: int = 0) -> int:
    """Train to the end of the run; return the number of batches."""
    loader = DataLoader(DATA, batch_sampler=session.batches(DATA), num_workers=workers)
    count = 0
    for _ in range(50):
        for inputs, targets in loader:
            found = loss(session.model, inputs, targets)
            found.backward()
            session.step(found)
            count += 1
        if session.ended:
            break
    return count


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return all(torch.allclose(mine[k], theirs[k], atol=tolerance) for k in mine)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_plain_loop() -> None:
    model = net()
    first = copy.deepcopy(model)
    with join(model, adamw(model)) as session:
        count = loop(session)
        assert session.ended == f"{STEPS} steps taken" and session.version == STEPS
        assert STEPS <= count <= STEPS + 1
    assert same(model, alone(first, adamw(first)))


@pytest.mark.parametrize("micro", [8, 12])
def test_gradients_are_added_up(micro: int) -> None:
    model = net()
    first = copy.deepcopy(model)
    with join(model, adamw(model), micro_batch=micro) as session:
        loop(session)
    assert same(model, alone(first, adamw(first)))


def test_batches_weigh_by_their_counts() -> None:
    """A loss over some samples of each batch: the step is the mean over all of them."""

    def some(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return mse(model, inputs[inputs[:, 0] > 0.3], targets[inputs[:, 0] > 0.3])

    model = net()
    first = copy.deepcopy(model)
    with join(model, adamw(model), micro_batch=5) as session:
        loader = DataLoader(DATA, batch_sampler=session.batches(DATA))
        while not session.ended:
            for inputs, targets in loader:
                loss = some(model, inputs, targets)
                loss.backward()
                session.step(loss, count=(inputs[:, 0] > 0.3).sum())
    assert same(model, alone(first, adamw(first), loss=some))


def test_clipping_and_a_schedule() -> None:
    model = net()
    first = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(first)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    with join(model, optimizer, scheduler=schedule, clip_norm=0.5) as session:
        loop(session)
    expected = alone(first, other, clip=0.5, schedule=CosineAnnealingLR(other, STEPS))
    assert same(model, expected)


def test_autocast() -> None:
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.mse_loss(model(inputs).float(), targets)

    model = net()
    first = copy.deepcopy(model)
    with join(model, adamw(model)) as session:
        loop(session, loss)
    assert same(model, alone(first, adamw(first), loss=loss))


def test_a_gradient_scaler() -> None:
    model = net()
    first = copy.deepcopy(model)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with join(model, optimizer) as session:
        loader = DataLoader(DATA, batch_sampler=session.batches(DATA))
        while not session.ended:
            for inputs, targets in loader:
                loss = mse(model, inputs, targets)
                scaler.scale(loss).backward()
                session.step(loss, scaler=scaler)
    assert same(model, alone(first, adamw(first)))


def test_several_losses_and_gradients_set_to_none() -> None:
    model = net()
    first = copy.deepcopy(model)
    optimizer = adamw(model)
    with join(model, optimizer) as session:
        loader = DataLoader(DATA, batch_sampler=session.batches(DATA))
        while not session.ended:
            for inputs, targets in loader:
                optimizer.zero_grad(set_to_none=True)
                loss = mse(model, inputs, targets)
                loss.backward()
                (0.01 * squares(model)).backward()
                session.step(loss)

    def both(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return mse(model, inputs, targets) + 0.01 * squares(model)

    assert same(model, alone(first, adamw(first), loss=both))


def test_evaluation_and_an_average_of_the_weights() -> None:
    model = net(norm=True)
    first = copy.deepcopy(model)
    average, other = AveragedModel(model), AveragedModel(first)
    losses = []
    with join(model, adamw(model)) as session:
        loader = DataLoader(DATA, batch_sampler=session.batches(DATA))
        while not session.ended:
            for inputs, targets in loader:
                loss = mse(model, inputs, targets)
                loss.backward()
                before = session.version
                session.step(loss)
                if session.ended or session.version > before:
                    average.update_parameters(model)
                model.eval()
                with torch.no_grad():
                    losses.append(mse(model, INPUTS, TARGETS).item())
                model.train()
    expected = torch.optim.AdamW(first.parameters(), lr=0.01)
    expected.register_step_post_hook(lambda *_: other.update_parameters(first))
    assert same(model, alone(first, expected))
    assert same(average, other)
    assert losses[-1] < losses[0]


def test_frozen_parameters_stay() -> None:
    model = net()
    next(model.parameters()).requires_grad_(False)
    first = copy.deepcopy(model)
    with join(model, adamw(model)) as session:
        loop(session)
    assert torch.equal(next(model.parameters()), next(first.parameters()))
    assert same(model, alone(first, adamw(first)))


def test_the_processes_of_a_loader_read_ahead() -> None:
    model = net()
    first = copy.deepcopy(model)
    with join(model, adamw(model)) as session:
        loop(session, workers=2)
        assert not session.wasted
    assert same(model, alone(first, adamw(first)))


def test_a_loop_that_ends_early() -> None:
    model = net()
    session = join(model, adamw(model), steps=None)
    loader = DataLoader(DATA, batch_sampler=session.batches(DATA))
    for epoch in range(3):
        for place, (inputs, targets) in enumerate(loader):
            loss = mse(model, inputs, targets)
            loss.backward()
            session.step(loss)
            if epoch == 1 and place == 1:
                break
    assert session.version == 3 + 2 + 4  # the last iteration has the rest of the second epoch too
    session.close()
    assert session.ended == ""


def test_an_epoch_is_one_iteration() -> None:
    model = net()
    with join(model, adamw(model), steps=None) as session:
        batches = session.batches(DATA)
        loader = DataLoader(DATA, batch_sampler=batches)
        assert len(loader) == 3
        for _ in range(4):
            seen: list[Tensor] = []
            for inputs, targets in loader:
                seen.append(inputs)
                loss = mse(model, inputs, targets)
                loss.backward()
                session.step(loss)
            found = torch.cat(seen)
            assert len(seen) == 3 and len(torch.unique(found, dim=0)) == len(DATA)


# --- what is refused -----------------------------------------------------------------------------


def test_the_optimizer_takes_no_step_of_its_own() -> None:
    model = net()
    optimizer = adamw(model)
    with join(model, optimizer) as session:
        mse(model, INPUTS, TARGETS).backward()
        with pytest.raises(RuntimeError, match=r"session\.step"):
            optimizer.step()
        assert session.ended == ""


def test_a_learning_rate_that_the_loop_changes() -> None:
    model = net()
    optimizer = adamw(model)
    with join(model, optimizer) as session:
        batch = next(iter(DataLoader(DATA, batch_sampler=session.batches(DATA))))
        mse(model, *batch).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(RuntimeError, match="scheduler="):
            session.step()


def test_several_batches_for_a_step() -> None:
    model = net()
    with join(model, adamw(model)) as session:
        loader = DataLoader(DATA, batch_sampler=session.batches(DATA))
        with pytest.raises(RuntimeError, match="micro_batch"):
            for _ in range(3):
                for place, (inputs, targets) in enumerate(loader):
                    mse(model, inputs, targets).backward()
                    if place % 3 == 2:
                        session.step()


@pytest.mark.parametrize("policy", [pl.deadline(1.0), pl.coded(1)])
def test_a_policy_that_no_loop_can_follow(policy: Any) -> None:
    model = net()
    session = join(model, adamw(model), policy=policy, workers=(1, 2))
    with pytest.raises(RuntimeError, match=r"pl\.Trainer"):
        loop(session)
    session.close()


def test_a_session_with_other_settings_is_refused() -> None:
    model = net()
    with join(model, adamw(model), workers=2) as session:
        session.batches(DATA)
        other = net()
        wrong = pl.session(other, adamw(other), run=session.run, batch_size=16)
        with pytest.raises(ValueError, match="this run has batch_size=32"):
            wrong.batches(DATA)
        other = net()
        sgd = torch.optim.SGD(other.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="this session has optimizer=SGD"):
            pl.session(other, sgd, run=session.run).batches(DATA)
        other = net()
        with pytest.raises(ValueError, match="has 10 samples, and the run has 96"):
            pl.session(other, adamw(other), run=session.run).batches(TensorDataset(INPUTS[:10]))


def test_a_schedule_that_watches_a_metric() -> None:
    model = net()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match="depends on steps alone"):
        join(model, optimizer, scheduler=ReduceLROnPlateau(optimizer))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=2)
    model = net()
    first = copy.deepcopy(model)
    with join(model, adamw(model), steps=3, checkpoints=saves) as session:
        loop(session)
    model = net()
    with join(model, adamw(model), checkpoints=saves, resume=True) as session:
        assert loop(session) == STEPS - 3
    assert same(model, alone(first, adamw(first)))


@pytest.mark.long
def test_the_hub_of_an_ended_run_goes_away() -> None:
    import ray

    model = net()
    with join(model, adamw(model), steps=1) as session:
        loop(session)
    deadline = time.monotonic() + 120
    while not is_over(session.run) or _has_hub(session.run):
        assert time.monotonic() < deadline
        time.sleep(1)
    with pytest.raises(ValueError, match="Failed to look up"):
        ray.get_actor(session.run, NAMESPACE)


def _has_hub(run: str) -> bool:
    import ray

    try:
        ray.get_actor(run, NAMESPACE)
    except ValueError:
        return False
    return True


def test_an_optimizer_with_a_past() -> None:
    model = net()
    optimizer = adamw(model)
    mse(model, INPUTS, TARGETS).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="taken steps already"):
        join(model, optimizer)
