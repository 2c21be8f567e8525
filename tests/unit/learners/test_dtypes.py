"""Frozen parameters and buffers of any dtype survive training, checkpoint and resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.errors import CheckpointError
from paceline.learners.frozen import frozen_parameters

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
ODD = 0.1 + 1e-9  # no float32


class Mixed(nn.Module):
    """A trained layer beside frozen parameters and constant buffers of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(3).half(), requires_grad=False)
        self.head = nn.Linear(4, 2)
        self.register_buffer("wide", torch.tensor([ODD, 1.0], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.bfloat16))
        self.register_buffer("large", torch.arange(20_000) + 2**40)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x.to(torch.bfloat16)).float() * self.scale.float()
        return torch.as_tensor(self.head(hidden))


def squares(module: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor((module(batch[0]) - batch[1]).square().mean())


def rows() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 4, generator=random), torch.randn(64, 2, generator=random))


def learner(module: nn.Module) -> pl.TorchLearner:
    return pl.TorchLearner(module, squares, partial(torch.optim.AdamW, lr=0.01), rows, 16)


def trainer(module: nn.Module, **options: Any) -> pl.Trainer:
    return pl.Trainer(learner(module), pl.sync(), pl.Simulator(2), progress=False, **options)


def frozen(module: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in module.state_dict().items() if not n.startswith("head.")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_of_any_dtype_is_exported_as_it_is_and_a_frozen_base_is_not(
    dtype: torch.dtype,
) -> None:
    module = nn.Linear(2, 1)
    module.frozen = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    module.register_buffer("constant", torch.ones(20_000).to(dtype))
    server = learner(module).server()
    exported, model = server.export(), server.model().state_dict()
    assert exported.keys() == {"weight", "bias", "constant"}
    for name, tensor in {"frozen": model["frozen"], "constant": exported["constant"]}.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor.view(torch.uint8), getattr(module, name).view(torch.uint8))


def test_all_dtypes_survive_a_checkpoint_and_a_resume(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=2)
    straight = trainer(Mixed()).fit(steps=4)
    trainer(Mixed(), checkpoints=saves).fit(steps=2)
    saved = load_file(tmp_path / "step-00000002" / "model.safetensors")
    expected = frozen(Mixed())
    base = {name for name, _ in frozen_parameters(Mixed())}
    assert saved.keys() == Mixed().state_dict().keys() - base
    for name in expected.keys() - base:
        tensor = expected[name]
        assert saved[name].dtype == tensor.dtype, name
        assert torch.equal(saved[name], tensor), name
    run = trainer(Mixed()).resume(saves).fit(steps=4)
    for name, tensor in straight.model.state_dict().items():
        assert run.model.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(run.model.state_dict()[name], tensor), name
        if name in expected:
            assert torch.equal(tensor, expected[name]), name


def test_a_resume_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=2)
    trainer(Mixed(), checkpoints=saves).fit(steps=2)
    other = Mixed()
    other.base.weight.data[3, 3] += 1
    with pytest.raises(CheckpointError, match=r"is not of this run: frozen was '\w+' and is '"):
        trainer(other).resume(tmp_path / "step-00000002")


class Extra(nn.Linear):
    """Has something in its state_dict that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"some": "text"}

    def set_extra_state(self, state: Any) -> None: ...


class Untouched(pl.Callback):
    def __init__(self) -> None:
        self.steps = 0

    def stepped(self, progress: pl.Progress) -> None:
        self.steps += 1


def test_a_model_that_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    module, seen = nn.Linear(4, 2), Untouched()
    module.register_buffer("phase", torch.ones(30_000, dtype=torch.complex128))
    saves = pl.Checkpoints(tmp_path, every=1)
    with pytest.raises(CheckpointError, match="'phase' of the model cannot be saved"):
        trainer(module, checkpoints=saves, callbacks=[seen]).fit(steps=2)
    with pytest.raises(ValueError, match="'_extra_state' in the state_dict of Extra is no tensor"):
        trainer(Extra(4, 2), checkpoints=saves, callbacks=[seen]).fit(steps=2)
    assert seen.steps == 0
