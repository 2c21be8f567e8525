"""Frozen parameters and buffers of any dtype survive export, checkpoint and resume."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.errors import CheckpointError
from tests.conftest import module_of

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
def test_a_frozen_tensor_of_any_dtype_is_exported_as_it_is(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 1)
    module.frozen = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    exported = learner(module).server().export()["frozen"]
    assert exported.dtype == dtype
    assert torch.equal(exported.view(torch.uint8), module.frozen.view(torch.uint8))


def test_all_dtypes_survive_a_checkpoint_and_a_resume(tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=2)
    straight = trainer(Mixed()).fit(steps=4)
    trainer(Mixed(), checkpoints=saves).fit(steps=2)
    saved = load_file(tmp_path / "step-00000002" / "model.safetensors")
    expected = frozen(Mixed())
    for name, tensor in expected.items():
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
    other.base.weight.data += 1
    with pytest.raises(CheckpointError, match=r"'base.weight' in model.safetensors differs"):
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


def test_lora_on_a_frozen_bfloat16_base(tmp_path: Path) -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("peft")
        pytest.importorskip("transformers")
    import peft
    import transformers

    words = (torch.arange(64).unsqueeze(1) + torch.arange(8)) % 16

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2
        )
        base: Any = transformers.GPT2LMHeadModel(config)
        base = base.to(torch.bfloat16)
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(base, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    def train(steps: int, resume: bool, **options: Any) -> pl.Run:
        optimizer = partial(torch.optim.AdamW, lr=0.05)
        recipe = pl.TorchLearner(adapted(), loss, optimizer, TensorDataset(words), 16)
        assert recipe.message_bytes < 4 * sum(p.numel() for p in module_of(recipe).parameters()) / 5
        made = pl.Trainer(recipe, pl.sync(), pl.Simulator(2), progress=False, **options)
        return (made.resume(tmp_path) if resume else made).fit(steps=steps)

    straight = train(12, False)
    train(6, False, checkpoints=pl.Checkpoints(tmp_path, every=6))
    resumed = train(12, True)
    assert straight.metrics["loss"][-1] < straight.metrics["loss"][0]
    before, after = adapted().state_dict(), resumed.model.state_dict()
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, after[name]), name
        if "lora" not in name:
            assert tensor.dtype == before[name].dtype == torch.bfloat16, name
            assert torch.equal(tensor, before[name]), name
    saved = load_file(tmp_path / "step-00000006" / "model.safetensors")
    assert {str(t.dtype) for n, t in saved.items() if "lora" not in n} == {"torch.bfloat16"}
    assert np.isfinite(straight.metrics["loss"]).all()
