"""A `transformers.Trainer` as a learner: its model, data, loss, optimizer and schedule."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.logs import logger_of
from paceline.integrations.configured import restore
from paceline.integrations.transformers_checks import check_trainer
from paceline.learners.feed import check_map_style
from paceline.learners.loss import Count
from paceline.learners.optimizer_recipe import Pace, RemadeOptimizer, RemadeSchedules
from paceline.learners.prepare import Prepare
from paceline.learners.torch import TorchLearner
from paceline.learners.transforms import ClipNorm

logger = logger_of(__name__)


def transformers_learner(
    hf_trainer: Any, *, batch_size: int | None = None, **options: Any
) -> TorchLearner:
    """Return a learner of a `transformers.Trainer`, whose `train` is not called.

    batch_size: the global batch of all workers together; by default
        `per_device_train_batch_size * gradient_accumulation_steps`, times the GPUs of this process.
    options: other arguments of `TorchLearner`, such as `outer`, `prepare`, `device`. They replace
        those of the trainer: `loss=` its `compute_loss`, `optimizer=` its optimizer and schedule.

    A step is along the mean over the tokens of the global batch, however it is divided among the
    workers. Paceline determines the order of samples: it shuffles every epoch. A batch may reach
    into the next epoch, so no last batch is smaller. The given trainer and model stay unchanged.
    """
    import transformers

    if not isinstance(hf_trainer, transformers.Trainer):
        raise ValueError(
            f"{type(hf_trainer).__name__} is no transformers.Trainer; give pl.TorchLearner the "
            "model and a loss"
        )
    check_trainer(hf_trainer, options)
    hf_trainer = copy.copy(hf_trainer)  # keeps the given one from what its methods set
    hf_trainer.train_dataset = options.get("dataset", hf_trainer.train_dataset)
    args, model, data = hf_trainer.args, _model(hf_trainer), _data(hf_trainer)
    size = _global_batch(args) if batch_size is None else batch_size
    prefix = "" if options.get("outer") is None else "inner_"  # of the local steps
    if "optimizer" not in options:
        steps = training_steps(hf_trainer, batch_size=batch_size)
        keep = f"{prefix}scheduler" not in options
        options = {**_rules(hf_trainer, steps, f"{prefix}scheduler", keep), **options}
    if args.max_grad_norm > 0:
        options.setdefault(f"{prefix}transform", ClipNorm(args.max_grad_norm))
    if args.gradient_checkpointing:
        options["prepare"] = _Checkpointed(
            args.gradient_checkpointing_kwargs, options.get("prepare")
        )
    learner = TorchLearner(
        **{
            "model": model,
            "loss": _loss(hf_trainer),
            "batch_size": size,
            "micro_batch": args.per_device_train_batch_size,
            "device": "cpu" if args.use_cpu else "auto",
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor or 2,
            "pin_memory": args.dataloader_pin_memory,
            "loss_scale": "auto" if args.fp16 else None,
            **data,
            **options,
        }
    )
    logger.info(
        "%s trains on %d samples with a global batch of %d, shared among all workers",
        type(model).__name__, learner.examples, size,
    )  # fmt: skip
    return learner


def training_steps(hf_trainer: Any, *, batch_size: int | None = None) -> int:
    """Return the steps of `hf_trainer.train()`, which are those of its schedule too.

    They are `max_steps`, or those of `num_train_epochs`. With another `batch_size` than its own,
    an epoch has as many steps as it has such batches.
    """
    args = hf_trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    samples = _samples(_dataset(hf_trainer))
    if args.dataloader_drop_last:
        samples -= samples % args.train_batch_size
    size = _global_batch(args) if batch_size is None else batch_size
    epochs = float(args.num_train_epochs)
    return ceil(epochs * max(ceil(samples / max(size, 1)), 1))


def evaluate(hf_trainer: Any, model: nn.Module, dataset: Any = None) -> dict[str, float]:
    """Return the metrics of `hf_trainer.evaluate` for another model, such as `progress.model()`.

    dataset: replaces the trainer's `eval_dataset`. A copy of the model is evaluated.
    """
    runner = copy.copy(hf_trainer)
    runner.accelerator = copy.copy(hf_trainer.accelerator)
    runner.accelerator._models = []  # or it would not prepare this model
    runner.model = runner.model_wrapped = copy.deepcopy(model).to(hf_trainer.args.device)
    found: dict[str, float] = runner.evaluate(dataset)
    return found


@dataclass(frozen=True)
class Smoothed:
    """The LabelSmoother of transformers. Since version 5 it takes the number of labels."""

    smoother: Any
    shifts: bool

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None) -> Any:
        takes_items = "num_items_in_batch" in signature(self.smoother).parameters
        more = {"num_items_in_batch": num_items_in_batch} if takes_items else {}
        return self.smoother(outputs, labels, shift_labels=self.shifts, **more)


@dataclass(frozen=True)
class ModelLoss:
    """The loss of `transformers.Trainer.compute_loss`, for `TorchLearner`.

    counts: whether the loss is a mean over labels; labels of -100 do not count. Then it returns
        (sum, count), else the mean over samples.
    passes: whether the model takes the number of labels, `num_items_in_batch`.
    shifts: whether the first label of a row does not count, since no token is before it.
    smoothed: replaces the loss of the model, if there are labels.
    function: the user's `compute_loss_func`, which replaces both.
    dtype: what the model computes in (autocast); None: in the dtype of its weights.
    """

    counts: bool
    passes: bool
    shifts: bool
    smoothed: Smoothed | None = None
    function: Any = None
    dtype: torch.dtype | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Count]:
        inputs = dict(batch)
        count = self._count(inputs)
        items = None if count is None else count.clamp(min=1)
        own: Any = self.smoothed if self.function is None else self.function
        labels = None if own is None else inputs.pop("labels", None)
        if self.passes and items is not None:
            inputs["num_items_in_batch"] = items
        with self._precision(model):
            outputs = model(**inputs)
        if own is not None and (labels is not None or self.function is not None):
            outputs = outputs if self.dtype is None else _floats(outputs)
            loss = own(outputs, labels, num_items_in_batch=items)
        else:
            loss = _loss_of(outputs, model, inputs)
        if items is None or count is None:
            return loss.float()  # type: ignore[no-any-return]
        return loss.float() * items, count

    def _count(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the number of labels that count, or None if the loss is no mean over them."""
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if self.shifts and isinstance(labels, Tensor):
                labels = labels[..., 1:]
        if not self.counts or "labels" not in inputs or not isinstance(labels, Tensor):
            return None
        return labels.ne(-100).sum()

    def _precision(self, model: nn.Module) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(next(model.parameters()).device.type, dtype=self.dtype)


def _loss(hf_trainer: Any) -> ModelLoss:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model, smoother = hf_trainer.model, hf_trainer.label_smoother
    function, passes = hf_trainer.compute_loss_func, bool(hf_trainer.model_accepts_loss_kwargs)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    causal = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return ModelLoss(
        counts=passes or function is not None or smoother is not None,
        passes=passes,
        shifts=getattr(hf_trainer, "_loss_shifts_labels", False),
        smoothed=None if smoother is None else Smoothed(smoother, causal),
        function=function,
        dtype=_dtype(hf_trainer.args),
    )


def _dtype(arguments: Any) -> torch.dtype | None:
    if arguments.fp16:
        return torch.float16
    return torch.bfloat16 if arguments.bf16 else None


def _loss_of(outputs: Any, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned no loss for {', '.join(inputs)}; let the data have "
            "labels, or give transformers_learner a loss="
        )
    return loss


def _floats(outputs: Any) -> Any:
    """Return a model's outputs in float32, as transformers gives them to other losses."""
    if not isinstance(outputs, dict):
        return type(outputs)(map(_float, outputs)) if isinstance(outputs, tuple) else outputs
    changed = copy.copy(outputs)
    for name, value in outputs.items():
        changed[name] = _float(value)
    return changed


def _float(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


def _model(hf_trainer: Any) -> nn.Module:
    """Return a copy of the model as `train` would begin with it, in the main memory."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin, trainer

    model: nn.Module = copy.deepcopy(hf_trainer.model).to("cpu")
    align = getattr(trainer, "align_special_tokens", None)  # since transformers 5
    words = hf_trainer.processing_class
    known = isinstance(words, PreTrainedTokenizerBase | ProcessorMixin)
    if align is not None and known and hasattr(model, "config"):
        align(model, words)
    return model


def _dataset(hf_trainer: Any) -> Any:
    if hf_trainer.train_dataset is None:
        raise ValueError("the transformers.Trainer has no train_dataset; give it one")
    return hf_trainer.train_dataset


def _samples(data: Any) -> int:
    """Return the size of a dataset, or of that which a function opens."""
    data = data() if callable(data) and not hasattr(data, "__getitem__") else data
    check_map_style(data)
    return len(data)


def _data(hf_trainer: Any) -> dict[str, Any]:
    """Return dataset and collate, without the columns that the model does not take."""
    data, collate = _dataset(hf_trainer), hf_trainer.data_collator
    if hasattr(data, "remove_columns") and hasattr(data, "column_names"):  # of `datasets`
        data = hf_trainer._remove_unused_columns(data, description="training")
    else:
        collate = hf_trainer._get_collator_with_removed_columns(collate, description="training")
    return {"dataset": data, "collate": collate}


def _global_batch(args: Any) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps)


def _rules(hf_trainer: Any, steps: int, keyword: str, keep: bool) -> dict[str, Any]:
    """Return optimizer and schedule; the schedule by its keyword, and only if it is to be kept."""
    trained = [p for p in hf_trainer.model.parameters() if p.requires_grad]
    optimizer, scheduler = _made(hf_trainer, trained, steps)
    if getattr(scheduler, "optimizer", scheduler) is not optimizer:
        raise ValueError(
            f"{type(scheduler).__name__} of the transformers.Trainer is bound to another "
            "optimizer than the trainer's; give its optimizers= both"
        )
    if keep:
        schedules = RemadeSchedules(optimizer, [Pace(scheduler, "step")], steps_per_epoch=1)
        return {"optimizer": RemadeOptimizer(optimizer, trained), keyword: schedules}
    alike = RemadeOptimizer(optimizer, trained)(trained)  # the given one keeps its learning rate
    restore(alike, [scheduler], "the transformers.Trainer")
    return {"optimizer": RemadeOptimizer(alike, trained)}


def _made(hf_trainer: Any, trained: Sequence[nn.Parameter], steps: int) -> tuple[Any, Any]:
    """Return optimizer and schedule as the trainer makes them, or those given to it."""
    given = hf_trainer.optimizer
    if given is not None and hf_trainer.lr_scheduler is None:
        # A schedule sets the first learning rate, and the user's optimizer is to keep its own.
        hf_trainer.optimizer = RemadeOptimizer(given, trained)(trained)
    hf_trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    return hf_trainer.optimizer, hf_trainer.lr_scheduler


@dataclass(frozen=True)
class _Checkpointed:
    """Enables the model's gradient checkpointing in a worker; then calls the user's `prepare`."""

    settings: Mapping[str, Any] | None
    then: Prepare | None = None

    def __call__(self, model: Any) -> nn.Module | None:
        settings = dict(self.settings or {})
        named = {name: settings.pop(name) for name in _OF_METHOD if name in settings}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or None, **named)
        return None if self.then is None else self.then(model)


_OF_METHOD = "every_n_layers", "offload"  # arguments of the method, not of torch's checkpoint
