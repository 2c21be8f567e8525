"""LoRA of `peft` on frozen bfloat16 models: only the adapter is sent, trained and saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.errors import CheckpointError

if not os.environ.get("CI"):  # there they must be
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
import peft
import transformers

WORDS = (torch.arange(64).unsqueeze(1) + torch.arange(8)) % 16


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=32, n_layer=2, n_head=2)
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made.to(torch.bfloat16)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made.to(torch.bfloat16)


def adapted(base: Callable[[], nn.Module], **options: Any) -> Any:
    layers = ["c_attn"] if base is gpt2 else ["q_proj", "v_proj"]
    lora = peft.LoraConfig(r=4, target_modules=layers, fan_in_fan_out=base is gpt2)
    torch.manual_seed(1)
    return peft.get_peft_model(base(), lora, **options)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]


def learner(model: Any) -> pl.TorchLearner:
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    return pl.TorchLearner(model, loss, optimizer, TensorDataset(WORDS), 16)


def trainer(model: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(learner(model), pl.sync(), pl.Simulator(2), progress=False, **options)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(input_ids=WORDS).logits)


@pytest.mark.parametrize("base", [gpt2, llama])
def test_only_the_adapter_is_sent_trained_and_saved(
    base: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = adapted(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert learner(model).message_bytes == 4 * trained
    saves = pl.Checkpoints(tmp_path / "run", every=6)

    straight = trainer(model).fit(steps=12)
    trainer(partial(adapted, base), checkpoints=saves).fit(steps=6)
    resumed = trainer(partial(adapted, base)).resume(saves).fit(steps=12)
    assert straight.metrics["loss"][-1] < 0.95 * straight.metrics["loss"][0]
    after = resumed.model.state_dict()
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], before[name]), name  # ours is unchanged
        if "lora" not in name:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, before[name]), name
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert after.keys() == before.keys()

    saved = load_file(tmp_path / "run" / "step-00000006" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == trained
    assert all("lora" in name for name in saved)


@pytest.mark.parametrize("base", [gpt2, llama])
def test_plain_peft_loads_the_adapter(base: Callable[[], nn.Module], tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path / "run", every=100)
    run = trainer(adapted(base), checkpoints=saves).fit(steps=8)
    run.model.save_pretrained(tmp_path / "adapter")
    expected = logits(run.model)
    plain = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    assert torch.equal(logits(plain), expected)
    assert not torch.equal(logits(base()), expected)

    saves.load(adapted(base)).save_pretrained(tmp_path / "again")
    one, other = (tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "again"))
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(CheckpointError, match="is of another model"):
        saves.load(base())


def test_a_checkpoint_is_as_large_as_the_adapter_and_its_optimizer(tmp_path: Path) -> None:
    model = adapted(gpt2)
    values = learner(model).message_bytes
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    saves = pl.Checkpoints(tmp_path, every=3)
    trainer(adapted(gpt2), checkpoints=saves).fit(steps=3)
    files = {file.name: file.stat().st_size for file in (tmp_path / "step-00000003").iterdir()}
    assert values <= files["model.safetensors"] < values + 4_000 < values + frozen / 10
    assert files["state.safetensors"] > 3 * values  # the vector, and two moments of Adam


def test_trained_bfloat16_is_refused_with_a_cast_that_helps() -> None:
    model = adapted(llama, autocast_adapter_dtype=False)
    with pytest.raises(ValueError, match=r"q_proj.lora_A.default.weight is torch.bfloat16, and"):
        trainer(model).fit(steps=1)
    for p in model.parameters():  # the line of the message
        if p.requires_grad:
            p.data = p.data.float()
    assert trainer(model).fit(steps=2).steps == 2


class Frozen(nn.Module):
    """A frozen base beside a trained layer."""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(512, 512, dtype=torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(512, 1)
        if file is not None:
            self.base.load_state_dict(load_file(file), assign=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.base(inputs.bfloat16()).float()))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch[0]).square().mean())


def frozen_learner(model: Any, loss: Any = mean) -> pl.TorchLearner:
    data = TensorDataset(torch.randn(32, 512, generator=torch.Generator().manual_seed(0)))
    return pl.TorchLearner(model, loss, partial(torch.optim.SGD, lr=0.1), data, 8)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_mapped_base_stays_in_its_file(tmp_path: Path) -> None:
    """The processes of a host then share its memory."""
    file = tmp_path / "base.safetensors"
    save_file(Frozen().base.state_dict(), file)
    recipe = frozen_learner(partial(Frozen, file))
    replica = recipe.for_workers().replica(0)
    server = recipe.server()
    weights = [side._flat.module.get_parameter("base.weight") for side in (replica, server)]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(n, 16) for n in line[0].split("-")] for line in maps if line[-1] == str(file)]
    for weight in weights:
        assert any(low <= weight.data_ptr() < high for low, high in spans)


def test_simulated_workers_share_the_frozen_base() -> None:
    module = Frozen()
    recipe = frozen_learner(module)
    sides = [recipe.replica(0)._flat, recipe.replica(0)._flat, recipe.server()._flat]
    weights = [side.module.get_parameter("base.weight") for side in sides]
    assert {weight.data_ptr() for weight in weights} == {module.base.weight.data_ptr()}
    made = recipe.server().model()  # the user's own, which may be changed
    assert made.get_parameter("base.weight").data_ptr() != module.base.weight.data_ptr()


def test_a_frozen_parameter_that_a_loss_changes_is_named() -> None:
    def moving(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            model.get_parameter("base.bias").add_(0.1)
        return mean(model, batch)

    made = pl.Trainer(frozen_learner(Frozen(), moving), pl.sync(), pl.Simulator(1), progress=False)
    with pytest.raises(ValueError, match=r"base\.bias has requires_grad=False and changed in tr"):
        made.fit(steps=1)


def test_gradient_checkpointing_by_prepare_gives_the_same_bits() -> None:
    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    found = []
    for given in (None, prepare):
        optimizer, data = partial(torch.optim.AdamW, lr=0.02), TensorDataset(WORDS)
        recipe = pl.TorchLearner(adapted(llama), loss, optimizer, data, 16, prepare=given)
        run = pl.Trainer(recipe, pl.sync(), pl.Simulator(2), progress=False).fit(steps=3)
        found.append(run.model.state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_every_value_of_a_large_base_counts(tmp_path: Path) -> None:
    """In a resume: the hash of a large tensor has samples, and a sum of all bytes."""
    saves = pl.Checkpoints(tmp_path, every=1)

    def made(model: nn.Module, **options: Any) -> pl.Trainer:
        recipe = frozen_learner(model)
        return pl.Trainer(recipe, pl.sync(), pl.Simulator(1), progress=False, **options)

    made(Frozen(), checkpoints=saves).fit(steps=1)
    assert made(Frozen()).resume(saves).fit(steps=2).steps == 2
    for row in (0, 211, 511):
        other = Frozen()
        other.base.weight[row, 307] += 1
        with pytest.raises(CheckpointError, match="frozen was"):
            made(other).resume(saves)
