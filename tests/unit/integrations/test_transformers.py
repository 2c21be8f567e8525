"""A transformers.Trainer trains here as it does by itself, and is refused where it would not."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ray import cloudpickle
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, IterableDataset, Sampler

import paceline as pl
from paceline.data.sampling import Stream
from paceline.integrations import transformers_learner
from paceline.integrations.transformers import evaluate, training_steps
from paceline.learners.optimize import make_optimizer, trained
from tests.conftest import flat

if not os.environ.get("CI"):  # there it must be
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
import transformers
from transformers import TrainingArguments

WORDS, LENGTH, ROWS, SEED = 24, 12, 50, 42


class Ragged(Dataset[Any]):
    """Rows of 3 to 12 tokens; some tokens have no label, and a column is not of the model."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        words = [(row * 5 + place) % (WORDS - 1) + 1 for place in range(3 + (row * 7) % 10)]
        hidden = row % 4
        labels = [-100] * hidden + words[hidden:]
        return {"input_ids": words, "labels": labels, "source": f"row {row}"}


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad rows to the longest; an unknown column would raise."""
    assert all(set(row) == {"input_ids", "labels"} for row in rows)
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor(
        [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows]
    )
    return {
        "input_ids": filled("input_ids", 0),
        "attention_mask": mask,
        "labels": filled("labels", -100),
    }


def llama(**more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
            **more,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 30,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "max_grad_norm": 0.5,
        "seed": SEED,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**settings, **more})


class InOrder(Sampler[int]):
    """The samples that Paceline draws, so that both trainers see the same."""

    def __init__(self, samples: int, rows: int) -> None:
        self.order = Stream(rows, SEED).indices(0, samples).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Original(transformers.Trainer):
    """transformers' own loop over the samples of Paceline."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        args, train_dataset = self.args, cast(Any, self.train_dataset)
        samples = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps
        return InOrder(samples, len(train_dataset))


def hf(kind: type[Any], folder: Path, model: Any = None, **more: Any) -> Any:
    parts = {key: more.pop(key) for key in _PARTS if key in more}
    parts = {"train_dataset": Ragged(), "data_collator": padded, **parts}
    return kind(model=llama() if model is None else model, args=arguments(folder, **more), **parts)


_PARTS = (
    *("train_dataset", "eval_dataset", "data_collator", "compute_loss_func", "callbacks"),
    *("optimizers", "processing_class"),
)


def fitted(hf_trainer: Any, workers: int = 2, **more: Any) -> pl.Run:
    engine = pl.Simulator(workers=workers, delays=pl.delays.Fixed(1.0))
    trainer = pl.Trainer.from_transformers(hf_trainer, pl.sync(), engine, progress=False, **more)
    return trainer.fit(steps=hf_trainer.args.max_steps)


def distance(one: nn.Module, other: nn.Module) -> float:
    return float((flat(one) - flat(other)).abs().max())


def test_thirty_steps_are_those_of_transformers(tmp_path: Path) -> None:
    original = hf(Original, tmp_path, lr_scheduler_type="cosine")
    given = hf(transformers.Trainer, tmp_path, lr_scheduler_type="cosine")
    original.train()
    run = fitted(given, workers=3)  # whose shares of eight samples are unequal
    assert distance(run.model, original.model) < 1e-5
    assert distance(run.model, llama()) > 0.05
    assert distance(given.model, llama()) == 0  # as it was
    assert given.optimizer is None and given.lr_scheduler is None
    losses = run.metrics["loss"]
    assert losses[-1] < 0.8 * losses[0]
    run.model.save_pretrained(tmp_path / "saved")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert distance(again, run.model) == 0


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the user: a sum over labels, divided by their number."""
    chosen = labels[..., 1:]
    logits = outputs["logits"][..., :-1, :].transpose(1, 2)
    total = nn.functional.cross_entropy(logits, chosen, reduction="sum", ignore_index=-100)
    return cast(Tensor, total / num_items_in_batch)


VARIANTS: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "own loss": {"compute_loss_func": own_loss},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "sgd": {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0},  # scales count
    "adafactor": {"optim": "adafactor"},
    "no clipping": {"max_grad_norm": 0.0},
    "warmup ratio": {"warmup_steps": 0.5, "lr_scheduler_type": "constant_with_warmup"},
}


@pytest.fixture(scope="module")
def unvaried(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The model that all variants would make if their argument did nothing."""
    folder = tmp_path_factory.mktemp("unvaried")
    model: nn.Module = fitted(hf(transformers.Trainer, folder, max_steps=4, warmup_steps=1)).model
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_other_arguments_are_those_of_transformers(
    tmp_path: Path, name: str, unvaried: nn.Module
) -> None:
    more = {"max_steps": 4, "warmup_steps": 1, **VARIANTS[name]}
    original, given = hf(Original, tmp_path, **more), hf(transformers.Trainer, tmp_path, **more)
    original.train()
    run = fitted(given)
    assert distance(run.model, original.model) < 1e-5
    same = name in ("own loss", "gradient checkpointing")
    assert (distance(run.model, unvaried) < 1e-5) == same


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bf16_is_autocast_as_in_transformers(tmp_path: Path, smoothing: float) -> None:
    more: dict[str, Any] = {"max_steps": 1, "bf16": True, "logging_steps": 1}
    more["label_smoothing_factor"] = smoothing
    original, given = hf(Original, tmp_path, **more), hf(transformers.Trainer, tmp_path, **more)
    original.train()
    found = fitted(given, workers=1).metrics["loss"][0]  # micro-batches of four, as there
    expected = original.state.log_history[0]["loss"]
    more["bf16"] = False
    exact = fitted(hf(transformers.Trainer, tmp_path, **more), workers=1).metrics["loss"][0]
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(exact - expected) > 1e-5


def test_fp16_is_autocast_with_a_loss_scale(tmp_path: Path) -> None:
    """Its gradients are those of float32; transformers itself needs a GPU for fp16."""
    given = hf(transformers.Trainer, tmp_path, max_steps=3)
    exact = fitted(given)
    given.args.fp16 = True
    assert transformers_learner(given).loss_scale == "auto"
    found = fitted(given)
    assert 1e-7 < distance(found.model, exact.model) < 1e-3


def test_adapters_train_as_in_transformers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", r=2))

    more: dict[str, Any] = {"max_steps": 4, "warmup_steps": 1, "gradient_checkpointing": True}
    more["label_smoothing_factor"] = 0.1
    original = hf(Original, tmp_path, adapted(), **more)
    given = hf(transformers.Trainer, tmp_path, adapted(), **more)
    original.train()
    run = fitted(given)
    assert distance(run.model, original.model) < 1e-5 < distance(run.model, adapted())
    assert distance(given.model, adapted()) == 0


class Still(transformers.BertForSequenceClassification):
    """Takes no number of labels, as classifiers of your own do."""

    accepts_loss_kwargs = False


def bert() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        config.num_labels = 3
        return Still(config)  # type: ignore[no-untyped-call]


class Classes(Dataset[Any]):
    """Rows of equal length with one label each, which the default collator takes as they are."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": [(row + place) % WORDS for place in range(4)], "label": row % 3}


def test_a_loss_that_counts_no_labels_is_a_mean_over_samples(tmp_path: Path) -> None:
    more: dict[str, Any] = {"max_steps": 4, "warmup_steps": 0, "optim": "sgd"}
    data = {"train_dataset": Classes(), "data_collator": None, "learning_rate": 0.1}
    original = hf(Original, tmp_path, bert(), **more, **data)
    given = hf(transformers.Trainer, tmp_path, bert(), **more, **data)
    original.train()
    run = fitted(given, workers=4)
    assert distance(run.model, original.model) < 1e-5 < distance(run.model, bert())


def test_a_dataset_of_datasets_loses_the_columns_that_the_model_does_not_take(
    tmp_path: Path,
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([Ragged()[row] for row in range(ROWS)])
    learner: Any = transformers_learner(hf(transformers.Trainer, tmp_path, train_dataset=rows))
    assert set(learner.dataset[0]) == {"input_ids", "labels"} and learner.collate is padded
    assert set(rows.column_names) == {"input_ids", "labels", "source"}
    kept = hf(transformers.Trainer, tmp_path, train_dataset=rows, remove_unused_columns=False)
    learner = transformers_learner(kept)
    assert "source" in learner.dataset[0]


def test_arguments_reach_the_learner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = hf(
        transformers.Trainer, tmp_path, dataloader_num_workers=2, dataloader_prefetch_factor=3,
        max_steps=-1, num_train_epochs=3, warmup_steps=0,
    )  # fmt: skip
    given.args.dataloader_pin_memory = True  # which use_cpu has turned off
    with caplog.at_level(logging.INFO, "paceline"):
        learner = transformers_learner(given)
    assert "50 samples with a global batch of 8, shared among all workers" in caplog.text
    assert (learner.batch_size, learner.micro_batch, learner.device) == (8, 4, "cpu")
    assert (learner.num_workers, learner.prefetch_factor, learner.pin_memory) == (2, 3, True)
    assert training_steps(given) == 21  # 7 of each epoch
    assert training_steps(given, batch_size=25) == 6
    rates = [learner.rate(step) for step in (0, 7, 21)]
    assert rates == pytest.approx([5e-3, 5e-3 * 2 / 3, 0.0])
    assert transformers_learner(given, batch_size=25).rate(3) == pytest.approx(2.5e-3)
    given.args._n_gpu = 2
    assert transformers_learner(given).batch_size == 16
    given.args._n_gpu = 0
    other = transformers_learner(
        given, micro_batch=2, optimizer=partial(optim.SGD, lr=0.5), device="auto", transform=None
    )
    assert other.rate(9) == 0.5 and other.micro_batch == 2 and other.device == "auto"
    clip = transformers_learner(given, optimizer=partial(optim.SGD, lr=0.5)).transform
    assert clip == pl.learners.ClipNorm(0.5) and other.transform is None
    local = transformers_learner(given, outer=partial(optim.SGD, lr=1.0))
    assert local.inner_scheduler and local.inner_transform and not local.transform
    engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
    assert pl.Trainer.from_transformers(given, pl.sync(), engine, progress=False).seed == SEED


def test_groups_are_those_of_transformers_on_whole_models_and_slices(tmp_path: Path) -> None:
    given = hf(transformers.Trainer, tmp_path)
    learner = cloudpickle.loads(cloudpickle.dumps(transformers_learner(given).for_workers()))
    model = llama()
    made = make_optimizer(learner.optimizer, trained(model))
    expected = hf(transformers.Trainer, tmp_path, model).create_optimizer()
    for mine, theirs in zip(made.param_groups, expected.param_groups, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in theirs["params"]]
        assert mine["weight_decay"] == theirs["weight_decay"]
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert all(group["params"] for group in made.param_groups)


def test_optimizers_that_were_given_are_used_and_stay(tmp_path: Path) -> None:
    model = llama()
    mine = optim.SGD(model.parameters(), lr=0.25)
    given = hf(transformers.Trainer, tmp_path, model, optimizers=(mine, None))
    assert transformers_learner(given).rate(5) == 0.25  # after warm-up
    assert mine.param_groups[0]["lr"] == 0.25 and given.optimizer is mine
    assert transformers_learner(given, scheduler=None).rate(0) == 0.25
    halved = optim.lr_scheduler.LinearLR(mine, start_factor=0.5)
    given = hf(transformers.Trainer, tmp_path, model, optimizers=(mine, halved))
    assert transformers_learner(given).rate(0) == 0.125
    assert transformers_learner(given, scheduler=None).rate(0) == 0.25
    assert mine.param_groups[0]["lr"] == 0.125


def test_a_model_is_evaluated_as_transformers_does(tmp_path: Path) -> None:
    given = hf(transformers.Trainer, tmp_path, max_steps=3, eval_dataset=Ragged(16))
    seen = []

    class Watch(pl.Callback):
        def stepped(self, progress: Any) -> None:
            seen.append(evaluate(given, progress.model())["eval_loss"])

    run = fitted(given, callbacks=[Watch()])
    assert distance(given.model, llama()) == 0
    again = hf(transformers.Trainer, tmp_path, run.model, eval_dataset=Ragged(16))
    assert seen[-1] == pytest.approx(again.evaluate()["eval_loss"], abs=1e-6)
    assert len(set(seen)) == len(seen) >= 3


def test_a_run_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    def trainer(folder: Path) -> pl.Trainer:
        engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
        given, saves = hf(transformers.Trainer, tmp_path, max_steps=8), pl.Checkpoints(folder)
        return pl.Trainer.from_transformers(
            given, pl.sync(), engine, progress=False, checkpoints=saves
        )

    whole = trainer(tmp_path / "whole").fit(steps=8)
    trainer(tmp_path / "cut").fit(steps=3)  # during warm-up
    rest = trainer(tmp_path / "cut").resume(tmp_path / "cut").fit(steps=8)
    assert distance(rest.model, whole.model) == 0


def test_a_tokenizer_sets_the_special_tokens_of_the_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 7}, unk_token="[PAD]"))
    known = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    given = hf(transformers.Trainer, tmp_path, processing_class=known)
    learner: Any = transformers_learner(given)
    assert learner.model.config.pad_token_id == 7 and given.model.config.pad_token_id is None


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield Ragged()[0]


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss


class OwnStep(transformers.Trainer):
    def training_step(self, *given: Any, **more: Any) -> Any:
        return super().training_step(*given, **more)


class OwnData(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


Plain = transformers.Trainer
EVALUATED = {"eval_strategy": "steps", "eval_dataset": Ragged(8), "eval_steps": 5}
FOREIGN = optim.lr_scheduler.LambdaLR(optim.SGD([nn.Parameter(torch.ones(1))]), lambda _: 1.0)
REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (Plain, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0.* add the noise in prepare="),
    (Plain, {"torch_compile": True}, "torch_compile=True.* prepare=torch.compile"),
    (Plain, {"auto_find_batch_size": True}, 'micro_batch="auto"'),
    (Plain, {"train_sampling_strategy": "group_by_length"}, "draws the samples itself"),
    (Plain, {"debug": "underflow_overflow"}, "debug=.* leave it out"),
    (Plain, {"optim": "adamw_8bit"}, "optim='adamw_8bit'.* use one of adamw_torch, .*optimizer="),
    (Plain, {"lr_scheduler_type": "greedy", **EVALUATED}, "'greedy'.* watches a metric"),
    (Plain, {"train_dataset": None}, "no train_dataset; give it one"),
    (Plain, {"train_dataset": Lines()}, "Lines is an IterableDataset"),
    (Plain, {"optimizers": (None, FOREIGN)}, "LambdaLR .* bound to another optimizer .* both"),
    (OwnLoss, {}, "OwnLoss defines compute_loss, .* loss= function"),
    (OwnStep, {}, "OwnStep defines training_step, .* loss= function"),
    (OwnData, {}, "OwnData defines get_train_dataloader, .* dataset= and collate="),
    (Original, {}, "Original defines _get_train_sampler, .* draws samples itself"),
]


@pytest.mark.parametrize(("kind", "more", "message"), REFUSED)
def test_a_trainer_that_would_train_otherwise_is_refused(
    tmp_path: Path, kind: type[Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        transformers_learner(hf(kind, tmp_path, **more))


# These need a GPU or a package to be made, or cannot be made at all without one.
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepspeed", "holds the whole model"),
        ("fsdp", "holds the whole model"),
        ("use_liger_kernel", "apply the kernel in prepare="),
    ],
)
def test_an_argument_of_other_machines_is_refused(tmp_path: Path, name: str, message: str) -> None:
    given = hf(transformers.Trainer, tmp_path)
    setattr(given.args, name, True)
    with pytest.raises(ValueError, match=f"{name}=True.*{message}"):
        transformers_learner(given)


def test_other_objects_and_trained_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Linear is no transformers\.Trainer"):
        transformers_learner(nn.Linear(1, 1))
    done = hf(transformers.Trainer, tmp_path, max_steps=1)
    done.train()
    with pytest.raises(ValueError, match="has trained 1 steps already"):
        transformers_learner(done)


def test_an_option_replaces_what_would_be_refused(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    learner = transformers_learner(hf(OwnLoss, tmp_path), loss=loss)
    assert learner.loss is loss
    given = hf(OwnData, tmp_path, train_dataset=None)
    assert transformers_learner(given, dataset=Ragged(9), collate=padded).examples == 9
    given = hf(transformers.Trainer, tmp_path, optim="adamw_8bit")
    assert transformers_learner(given, optimizer=partial(optim.SGD, lr=0.5)).rate(0) == 0.5


class Quiet(transformers.TrainerCallback):
    pass


def test_what_is_not_used_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = hf(transformers.Trainer, tmp_path, callbacks=[Quiet()], **EVALUATED)
    with caplog.at_level(logging.INFO, "paceline"):
        transformers_learner(given)
    assert "does not call Quiet of transformers" in caplog.text
    assert "not used of TrainingArguments: eval_strategy;" in caplog.text
    caplog.clear()
    transformers_learner(hf(transformers.Trainer, tmp_path))
    assert "does not call" not in caplog.text and "not used" not in caplog.text
