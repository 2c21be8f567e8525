"""Fine-tunes by LoRA on hosts that are far apart, and asks for counts of bytes.

Run on host 0 by test_lora.py: python lora_run.py ADDRESS WORKERS FOLDER
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import peft
import ray
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl

STEPS = 5
LAYERS: dict[str, Any] = {"gpt2": ["c_attn", "c_fc", "c_proj"], "llama": "all-linear"}


def base(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=512,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config).bfloat16()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


def adapted(kind: str, folder: str) -> nn.Module:
    """Return the base with an adapter; the base of Llama is mapped from the host's own file."""
    made = base(kind)
    if kind == "llama":
        made.load_state_dict(load_file(Path(folder) / "base.safetensors"), assign=True)
    lora = peft.LoraConfig(r=64, target_modules=LAYERS[kind], fan_in_fan_out=kind == "gpt2")
    return peft.get_peft_model(made, lora)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]


def mark(what: str, wait: bool = False) -> None:
    """Ask for a count, with `wait` when nothing is under way; wait until it is taken."""
    print(json.dumps({"mark": what, "wait": wait}), flush=True)
    input()


class Marks(pl.Callback):
    def stepped(self, progress: pl.Progress) -> None:
        if progress.step in (1, STEPS):
            mark(f"step {progress.step}")


def main() -> None:
    address, workers, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    save_file(base("llama").state_dict(), Path(folder) / "base.safetensors")
    words = (torch.arange(256).unsqueeze(1) + torch.arange(16)) % 64
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    arms: dict[str, dict[str, Any]] = {
        "llama": {},
        "gpt2": {},
        "llama, codecs": {"codec": pl.codecs.TopK(0.05), "model_codec": pl.codecs.BFloat16()},
    }
    with pl.Ray(workers=workers, cpus=1, timeout=120, servers="driver") as engine:
        for name, options in arms.items():
            recipe = pl.TorchLearner(
                partial(adapted, name.partition(",")[0], folder),
                loss,
                partial(torch.optim.AdamW, lr=1e-3),
                TensorDataset(words),
                batch_size=4 * workers,
            )
            dense, facts = recipe.message_bytes, recipe.about()
            common: dict[str, Any] = {"progress": False, **options}
            mark("start", wait=True)
            pl.Trainer(recipe, pl.sync(), engine, **common).fit(steps=1)
            mark("end of the start", wait=True)
            run = pl.Trainer(recipe, pl.sync(), engine, callbacks=[Marks()], **common).fit(
                steps=STEPS
            )
            run.model.save_pretrained(Path(folder) / name)
            found = {"arm": name, "dense": dense, "base": 2 * (facts["parameters"] - dense // 4)}
            print(json.dumps({**found, "losses": run.metrics["loss"].tolist()}), flush=True)


if __name__ == "__main__":
    main()
