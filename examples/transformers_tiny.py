"""Train a tiny GPT-2 of Hugging Face's transformers to sort letters, with 2 workers.

Run it:  pip install transformers && python examples/transformers_tiny.py
Data:    generated here: six letters, then the same letters in alphabetical order
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import paceline as pl

LETTERS, LENGTH = 10, 6
ANSWER = LETTERS  # a separate token; the sorted letters follow it


class Sorting(Dataset[dict[str, Tensor]]):
    """Rows in the format of transformers' models; the loss ignores tokens labeled -100."""

    def __init__(self, rows: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        letters = torch.randint(LETTERS, (rows, LENGTH), generator=random)
        answer = torch.full((rows, 1), ANSWER)
        self.words = torch.cat([letters, answer, letters.sort(dim=1).values], dim=1)
        self.labels = self.words.clone()
        self.labels[:, : LENGTH + 1] = -100

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[row], "labels": self.labels[row]}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=LETTERS + 1,
        n_positions=2 * LENGTH + 1,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=ANSWER,
        eos_token_id=ANSWER,
    )
    return GPT2LMHeadModel(config)


def held_out_loss(model: GPT2LMHeadModel) -> float:
    rows = Sorting(256, seed=1)
    with torch.no_grad():
        return float(model(input_ids=rows.words, labels=rows.labels).loss)


def main() -> None:
    model = make_model()
    learner = pl.TorchLearner(
        model,
        lambda model, batch: model(**batch).loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        dataset=Sorting(4096, seed=0),
        batch_size=64,  # samples of all workers together
    )
    run = pl.Trainer(learner, pl.sync(), pl.Ray(workers=2)).fit(steps=250)
    print(run.summary())
    model.eval()
    before, after = held_out_loss(model), held_out_loss(run.model)
    print(f"test loss before {before:.3f}, after {after:.3f}")
    tied = run.model.lm_head.weight is run.model.transformer.wte.weight
    print(f"first and last layer share their weights: {tied}")


if __name__ == "__main__":
    main()
