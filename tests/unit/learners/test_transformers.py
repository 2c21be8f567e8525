"""Models of Hugging Face's transformers train with a loss of one line."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import paceline as pl
from paceline.learners.feed import move

if not os.environ.get("CI"):  # there it must be
    pytest.importorskip("transformers")
import transformers

WORDS, LENGTH, SAMPLES = 16, 8, 64


class Texts:
    """Rows as dicts, one by one; words count up, so that each tells the next."""

    def __init__(self) -> None:
        starts = torch.arange(SAMPLES).unsqueeze(1)
        self.words = (starts + torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


class Many(Texts):
    """The same, but only several at a time, as `datasets` is quickest."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        return [super(Many, self).__getitem__(index) for index in indices]


class Encoded:
    """Collates to a BatchEncoding, as tokenizers and collators of transformers do."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> Any:
        return transformers.BatchEncoding(default_collate(rows))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def learner(model: nn.Module, data: Any, **more: Any) -> pl.TorchLearner:
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    return pl.TorchLearner(model, lambda m, batch: m(**batch).loss, optimizer, data, 16, **more)


def run(recipe: pl.TorchLearner, steps: int = 20, **more: Any) -> pl.Run:
    engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
    return pl.Trainer(recipe, pl.sync(), engine, progress=False, **more).fit(steps=steps)


@pytest.mark.parametrize("make", [gpt, bert])
def test_a_model_with_tied_weights_and_dropout_learns(make: Any, tmp_path: Path) -> None:
    saves = pl.Checkpoints(tmp_path, every=20)
    given: Any = make()
    recipe = learner(given, Texts())
    done = run(recipe, checkpoints=saves)
    assert done.metrics["loss"][-1] < 0.6 * done.metrics["loss"][0]
    model = done.model
    tied = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is tied
    assert not torch.equal(tied, given.get_input_embeddings().weight)
    assert sum(p.numel() for p in model.parameters()) * 4 == recipe.message_bytes  # once
    again = run(learner(make(), Texts()))  # dropout is seeded by the task
    assert again.metrics["loss"].tolist() == done.metrics["loss"].tolist()


def test_tied_weights_get_the_gradients_of_both_uses() -> None:
    model = gpt().eval()
    batch = default_collate([Texts()[i] for i in range(16)])
    model(**batch).loss.backward()
    expected = model.get_input_embeddings().weight.grad  # type: ignore[operator]

    class Still(nn.Module):
        """Has no dropout, whoever calls train()."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, **batch: Tensor) -> Any:
            self.inner.eval()
            return self.inner(**batch)

    data: Any = Rows()  # no Dataset of torch, as those of Hugging Face are none
    recipe = pl.TorchLearner(
        Still(), lambda m, b: m(**b).loss, partial(torch.optim.SGD, lr=1.0), data, 16
    )
    after = run(recipe, steps=1).model.inner.get_input_embeddings().weight
    before = gpt().get_input_embeddings().weight  # type: ignore[operator]
    assert torch.allclose(before - after, expected, atol=1e-6)
    assert expected.abs().max() > 1e-3


class Rows(Texts):
    """The first 16 samples, which are one batch."""

    def __len__(self) -> int:
        return 16


def test_rows_may_come_several_at_a_time_and_as_batch_encoding() -> None:
    losses = [
        run(learner(gpt(), data, **more), steps=5).metrics["loss"]
        for data, more in [(Texts(), {}), (Many(), {}), (Texts(), {"collate": Encoded()})]
    ]
    assert np.array_equal(losses[0], losses[1]) and np.array_equal(losses[0], losses[2])


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


def test_batches_of_any_kind_move_to_a_device() -> None:
    zeros = torch.zeros(2)
    encoded = move(transformers.BatchEncoding({"input_ids": zeros}), "meta")
    assert encoded["input_ids"].is_meta and type(encoded) is transformers.BatchEncoding
    pair = move({"pair": Pair(zeros, zeros), "name": "x"}, "meta")["pair"]
    assert type(pair) is Pair and pair.inputs.is_meta and pair.labels.is_meta
