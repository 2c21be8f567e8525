"""Fine-tune a frozen bfloat16 language model by LoRA with peft: only the adapter is sent.

Run it:  pip install transformers peft && python examples/lora.py [--ray]
Data:    generated here: the base counts up by one, and learns to count by three
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import paceline as pl

NUMBERS, LENGTH = 32, 12
CONFIG = LlamaConfig(
    vocab_size=NUMBERS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)


def counting(by: int) -> Tensor:
    return (torch.arange(NUMBERS).unsqueeze(1) + by * torch.arange(LENGTH)) % NUMBERS


def train_a_base(file: Path) -> None:
    """Stands for a download: a small model that counts up by one."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(50):
        model(input_ids=counting(1), labels=counting(1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_file(model.bfloat16().state_dict(), file)


def load_base(file: Path) -> Any:
    base: Any = LlamaForCausalLM(CONFIG)
    base.load_state_dict(load_file(file), assign=True)  # maps the file, which processes then share
    return base


def adapted(file: Path) -> Any:
    """Each worker calls this, so the base is never sent."""
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(load_base(file), lora)


def loss(model: Any, batch: list[Tensor]) -> Tensor:
    (words,) = batch
    return model(input_ids=words, labels=words).loss  # type: ignore[no-any-return]


def accuracy(model: Any) -> float:
    """Return how many numbers after the first two are right, in percent."""
    words = counting(3)
    with torch.no_grad():
        told = model.eval()(input_ids=words).logits.argmax(dim=2)
    return 100 * float((told[:, 1:-1] == words[:, 2:]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray", action="store_true", help="real processes")
    engine = pl.Ray(workers=2) if parser.parse_args().ray else pl.Simulator(workers=2)
    folder = Path(tempfile.mkdtemp())
    file = folder / "base.safetensors"
    train_a_base(file)

    learner = pl.TorchLearner(
        partial(adapted, file),
        loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        dataset=TensorDataset(counting(3)),
        batch_size=32,
    )
    sent, whole = learner.message_bytes, file.stat().st_size
    print(f"{sent} bytes are sent each way in a step; the base has {whole}")
    saves = pl.Checkpoints(folder / "run", every=30)
    run = pl.Trainer(learner, pl.sync(), engine, checkpoints=saves, progress=False).fit(steps=60)
    print(run.summary())

    run.model.save_pretrained(folder / "adapter")
    plain = peft.PeftModel.from_pretrained(load_base(file), str(folder / "adapter"))
    print(f"accuracy of the base {accuracy(load_base(file)):.0f}%, with the adapter "
          f"{accuracy(plain):.0f}%")  # fmt: skip
    from_checkpoint = saves.load(adapted(file))
    print(f"accuracy of the last checkpoint {accuracy(from_checkpoint):.0f}%")


if __name__ == "__main__":
    main()
