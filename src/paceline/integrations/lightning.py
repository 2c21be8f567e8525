"""A LightningModule and its data as a learner, from `lightning` or `pytorch_lightning`.

This file imports neither package: it only calls a few methods of the module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from math import ceil, floor
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.core.logs import logger_of
from paceline.integrations.configured import rules
from paceline.learners.torch import TorchLearner

logger = logger_of(__name__)

_PACKAGES = ("lightning", "pytorch_lightning")
_BATCHES = "prepare batches in the collate_fn of the DataLoader, or in training_step"
# Methods that change a training step, and what to do instead.
_REFUSED = {
    "backward": "return a loss whose gradient is the one you want",
    "optimizer_step": "give lightning_learner an optimizer=, or a transform= of gradients",
    "lr_scheduler_step": "give lightning_learner a scheduler=",
    "configure_gradient_clipping": "give lightning_learner transform=ClipNorm(…)",
    "transfer_batch_to_device": _BATCHES,
    "on_before_batch_transfer": _BATCHES,
    "on_after_batch_transfer": _BATCHES,
}
# Methods that mostly observe or log.
_NOT_CALLED = (
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end"),
    *("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_callbacks"),
)


def lightning_learner(
    module: Any, data: Any, *, batch_size: int | None = None, **options: Any
) -> TorchLearner:
    """Return a learner of a LightningModule, and of a LightningDataModule or a DataLoader.

    batch_size: the global batch of all workers together; by default that of the DataLoader.
    options: other arguments of `TorchLearner`, such as `micro_batch`, `transform`, `outer`. With
        `optimizer=`, `configure_optimizers` is not called.

    `training_step` returns the loss; its `batch_idx` is always 0, and its logs are dropped.
    Paceline determines the order of samples: it shuffles every epoch, whatever the DataLoader does.
    A batch may reach into the next epoch, so no last batch is dropped. A schedule's epoch has as
    many steps as the DataLoader has batches. The given module stays unchanged.
    """
    _check_module(module)
    loader = _loader(data)
    size = loader.batch_size if batch_size is None else batch_size
    assert size is not None
    examples = len(loader.dataset)  # type: ignore[arg-type]
    logger.info(
        "%s trains on %d samples with a global batch of %d, shared among all workers%s",
        type(module).__name__, examples, size,
        " (that of the DataLoader)" if batch_size is None else "",
    )  # fmt: skip
    module = copy.deepcopy(module)
    module.prepare_data()
    module.setup("fit")
    module.configure_model()
    if "optimizer" not in options:
        batches = examples / max(size, 1)  # TorchLearner refuses a size of 0
        steps = max(floor(batches) if loader.drop_last else ceil(batches), 1)
        options = {**rules(module, steps, options), **options}
    return TorchLearner(
        module,
        TrainingStep(_takes_index(module)),
        dataset=loader.dataset,
        batch_size=size,
        **{**_fetching(loader), **options},
    )


@dataclass(frozen=True)
class TrainingStep:
    """The loss function of a LightningModule, for `TorchLearner`."""

    takes_index: bool

    def __call__(self, module: Any, batch: Any) -> Tensor:
        with _without_logs(module):
            found = module.training_step(batch, *([0] if self.takes_index else []))
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step of {type(module).__name__} returned {type(found).__name__}; return "
                'the loss as a tensor, or a dict with it under "loss"; a batch cannot be skipped'
            )
        return loss


@contextmanager
def _without_logs(module: nn.Module) -> Iterator[None]:
    """Drop all logs of the block; without a trainer, Lightning would warn at every call."""
    silent = [part for part in module.modules() if hasattr(type(part), "log_dict")]
    for part in silent:
        vars(part).update(log=_drop, log_dict=_drop)
    try:
        yield
    finally:
        for part in silent:
            del part.log, part.log_dict


def _drop(*_: Any, **__: Any) -> None:
    """Ignore a log call."""


def _check_module(module: Any) -> None:
    """Refuse other modules and changed steps; warn of methods that are not called."""
    name = type(module).__name__
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"]
    if not any(_package(kind) in _PACKAGES for kind in kinds):
        raise ValueError(
            f"{name} is no LightningModule; give pl.TorchLearner the module and a loss"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization (automatic_optimization=False), and here the server "
            "makes the steps; write one loss, and give pl.TorchLearner the module and the loss"
        )
    if not _is_own(module, "training_step"):
        raise ValueError(f"{name} has no training_step; define one that returns the loss")
    _refuse_methods(module)
    if idle := [method for method in _NOT_CALLED if _is_own(module, method)]:
        logger.warning("%s defines %s, which Paceline does not call", name, ", ".join(idle))


def _refuse_methods(thing: Any) -> None:
    for method, instead in _REFUSED.items():
        if _is_own(thing, method):
            raise ValueError(
                f"{type(thing).__name__} defines {method}, which Paceline does not call; remove "
                f"it, and {instead}"
            )


def _is_own(thing: Any, method: str) -> bool:
    """Return whether a class outside Lightning defines the method."""
    found = getattr(type(thing), method, None)
    return found is not None and _package(found) not in _PACKAGES


def _package(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]


def _takes_index(module: Any) -> bool:
    """Return whether training_step takes the batch index, by Lightning's own rule."""
    found = signature(module.training_step).parameters
    if "dataloader_iter" in found:
        raise ValueError(
            f"training_step of {type(module).__name__} draws batches itself (dataloader_iter); let "
            "it take a batch"
        )
    kinds = [parameter.kind for parameter in found.values()]
    return len(found) > 1 or Parameter.VAR_POSITIONAL in kinds


def _fetching(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return how workers fetch samples, as the DataLoader would."""
    return {
        "collate": loader.collate_fn,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor or 2,  # None without processes
        "pin_memory": loader.pin_memory,
    }


def _loader(data: Any) -> DataLoader[Any]:
    """Return the DataLoader of the training data; refuse one that Paceline cannot replace."""
    if hasattr(data, "train_dataloader"):
        _refuse_methods(data)
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if not isinstance(data, DataLoader):
        raise ValueError(
            f"the data are a {type(data).__name__}; give a LightningDataModule whose "
            "train_dataloader() returns one torch DataLoader, or that DataLoader"
        )
    if isinstance(data.dataset, IterableDataset):
        raise ValueError(
            f"{type(data.dataset).__name__} is an IterableDataset, and workers fetch samples by "
            "their index; give a map-style dataset, with __len__ and __getitem__"
        )
    if data.batch_sampler is None:
        raise ValueError("the DataLoader has no batch_size; use DataLoader(dataset, batch_size=…)")
    sampler: Any = data.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(data.dataset)  # type: ignore[arg-type]
    )
    own_loop = type(data).__iter__ is not DataLoader.__iter__
    if own_loop or not plain or data.batch_size is None:  # None: a batch_sampler was given
        chosen = data if own_loop else sampler if not plain else data.batch_sampler
        raise ValueError(
            f"the DataLoader draws with {type(chosen).__name__}, and here samples are drawn by "
            "Paceline, shuffled; use DataLoader(dataset, batch_size=…), and weight samples in "
            "the loss; Trainer(placement=…) sets which worker has which samples"
        )
    return data
