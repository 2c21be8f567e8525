"""What a `transformers.Trainer` may not ask for, with a sentence for each on what to do instead."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paceline.core.logs import logger_of

logger = logger_of(__name__)

_SHARDED = "every worker holds the whole model; leave it out, and Paceline divides the batch"
# Arguments that change a training step, and what to do instead.
_ARGUMENTS = {
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "parallelism_config": _SHARDED,
    "torch_compile": "leave it out, and give transformers_learner prepare=torch.compile",
    "use_liger_kernel": "leave it out, and apply the kernel in prepare= of transformers_learner",
    "neftune_noise_alpha": "leave it out, and add the noise in prepare= of transformers_learner",
    "auto_find_batch_size": 'leave it out, and give transformers_learner micro_batch="auto"',
    "group_by_length": "leave it out: Paceline draws the samples itself, shuffled",
    "debug": "leave it out, and look for faults with transformers alone",
}
# Methods that change a training step, the option that replaces each, and what to do.
_DRAWN = "Paceline draws samples itself, shuffled; remove it, and weight samples in the loss"
_LOSS = "give transformers_learner a loss= function loss(model, batch)"
_METHODS = {
    "compute_loss": ("loss", _LOSS),
    "training_step": ("loss", _LOSS),
    "compute_loss_context_manager": ("loss", _LOSS),
    "autocast_smart_context_manager": ("loss", _LOSS),
    "_prepare_inputs": ("loss", "prepare batches in the data_collator"),
    "_prepare_input": ("loss", "prepare batches in the data_collator"),
    "get_batch_samples": ("loss", _LOSS),
    "_get_num_items_in_batch": ("loss", _LOSS),
    "get_train_dataloader": ("dataset", "give transformers_learner dataset= and collate="),
    "_get_train_sampler": ("", _DRAWN),
    "_clip_grad_norm": ("transform", "give transformers_learner a transform= of gradients"),
    "_inner_training_loop": ("", "remove it; pl.Trainer has its own loop"),
    "_run_epoch": ("", "remove it; pl.Trainer has its own loop"),
}
# Optimizers of `optim=` that are made from parameters alone, and step on the CPU of a server.
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
_METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
# Callbacks that each transformers.Trainer has, and that only report.
_REPORTS = (
    "DefaultFlowCallback",
    "ProgressCallback",
    "PrinterCallback",
    "NotebookProgressCallback",
)
# Arguments that do not change a step and have a counterpart elsewhere, with their defaults.
_ELSEWHERE = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "push_to_hub": False,
    "full_determinism": False,
    "tf32": None,
    "torch_empty_cache_steps": None,
    "train_sampling_strategy": "random",
    "enable_jit_checkpoint": False,
}


def check_trainer(hf_trainer: Any, options: Collection[str]) -> None:
    """Refuse what would change a step; name what is not used. `options` replace parts of it."""
    args = hf_trainer.args
    for name, instead in _ARGUMENTS.items():
        if value := getattr(args, name, None):
            raise ValueError(
                f"TrainingArguments({name}={_short(value)}) is not supported: {instead}"
            )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"TrainingArguments(train_sampling_strategy={strategy!r}) is not supported: leave it "
            "out; Paceline draws the samples itself, shuffled"
        )
    if args.world_size > 1:
        raise ValueError(
            f"this is one of {args.world_size} processes, each with its own trainer; start the "
            "script with plain python, and give pl.Ray(workers=…) the number of workers"
        )
    _check_model(hf_trainer)
    _check_methods(hf_trainer, options)
    _check_optimizer(hf_trainer, options)
    _name_unused(hf_trainer)


def _check_model(hf_trainer: Any) -> None:
    model = hf_trainer.model
    if getattr(hf_trainer, "is_model_parallel", False):
        raise ValueError(
            f"{type(model).__name__} is divided among several devices; load it without device_map="
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"{type(model).__name__} is quantized, and cannot be copied to another device; load it "
            "without quantization_config"
        )
    if hf_trainer.state.global_step:
        raise ValueError(
            f"this transformers.Trainer has trained {hf_trainer.state.global_step} steps already; "
            "make a new one with its model"
        )


def _check_methods(hf_trainer: Any, options: Collection[str]) -> None:
    for method, (option, instead) in _METHODS.items():
        if is_own(hf_trainer, method) and option not in options:
            raise ValueError(
                f"{type(hf_trainer).__name__} defines {method}, which Paceline does not call; "
                f"{instead}"
            )


def _check_optimizer(hf_trainer: Any, options: Collection[str]) -> None:
    args = hf_trainer.args
    given = (
        "optimizer" in options
        or hf_trainer.optimizer is not None
        or getattr(hf_trainer, "optimizer_cls_and_kwargs", None) is not None
        or is_own(hf_trainer, "create_optimizer")
        or is_own(hf_trainer, "create_optimizer_and_scheduler")
    )
    optim, schedule = _value(args.optim), _value(args.lr_scheduler_type)
    if not given and optim not in _OPTIMIZERS:
        raise ValueError(
            f"TrainingArguments(optim={optim!r}) is not supported; use one of "
            f"{', '.join(_OPTIMIZERS)}, or give transformers_learner an optimizer="
        )
    replaced = {"scheduler", "inner_scheduler", "optimizer"} & set(options)
    if not replaced and hf_trainer.lr_scheduler is None and schedule in _METRIC_SCHEDULES:
        raise ValueError(
            f"TrainingArguments(lr_scheduler_type={schedule!r}) watches a metric, and here a "
            "schedule depends on steps alone; use linear, cosine or another schedule of steps"
        )


def _name_unused(hf_trainer: Any) -> None:
    """Log the callbacks and arguments that are not used, in one line each."""
    kinds = [type(callback) for callback in hf_trainer.callback_handler.callbacks]
    idle = [
        kind.__name__
        for kind in kinds
        if kind.__name__ not in _REPORTS and not kind.__module__.startswith("transformers.integra")
    ]
    if idle:
        logger.warning(
            "Paceline does not call %s of transformers; use callbacks= of pl.Trainer, and "
            "fit(until=…) to stop early", ", ".join(idle),
        )  # fmt: skip
    args = hf_trainer.args
    unused = [
        name
        for name, default in _ELSEWHERE.items()
        if _value(getattr(args, name, default)) != default
    ]
    if unused:
        logger.info(
            "not used of TrainingArguments: %s; docs/frameworks.md has their counterparts",
            ", ".join(unused),
        )


def is_own(thing: Any, method: str) -> bool:
    """Return whether a class outside transformers defines the method."""
    found = getattr(type(thing), method, None)
    return found is not None and str(found.__module__).partition(".")[0] != "transformers"


def _value(name: Any) -> Any:
    """Return the text of an enumeration of transformers."""
    return getattr(name, "value", name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else "…"
