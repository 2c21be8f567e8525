"""The validation of a LightningModule as a function for `Evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, sizes: values.sum(),
    "max": lambda values, sizes: values.max(),
    "min": lambda values, sizes: values.min(),
}


def lightning_evaluation(
    data: Any, *, monitor: str | None = None
) -> Callable[[Any], dict[str, float]]:
    """Return a function that validates a LightningModule, for `Evaluate(function, every=…)`.

    data: a DataLoader, or a LightningDataModule with `val_dataloader`.
    monitor: the logged metric that decides what is best; None: the first.

    The function runs `validation_step` on each batch and returns what it logs. A metric is the mean
    over samples, or what `reduce_fx` says. A step that logs nothing and returns its loss has the
    metric "val_loss".
    """
    loader = _loader(data)

    def validate(module: Any) -> dict[str, float]:
        logs = _Logs()
        takes_index = _takes_index(module)
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), logs.of(module):
                module.on_validation_epoch_start()
                for index, batch in enumerate(loader):
                    logs.size = _size_of(batch)
                    logs.found(module.validation_step(batch, *([index] if takes_index else [])))
                logs.size = 1
                module.on_validation_epoch_end()
            return logs.metrics(monitor)
        finally:
            module.train(was_training)

    return validate


class _Logs:
    """Collects what a module logs while it is validated."""

    def __init__(self) -> None:
        self.size = 1  # samples of the current batch
        self._values: dict[str, list[tuple[float, int]]] = {}
        self._reductions: dict[str, str] = {}
        self._computed: dict[str, Any] = {}  # metric objects, such as those of torchmetrics
        self._returned: list[tuple[float, int]] = []

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Take the place of `log` and `log_dict` in a block."""
        parts = [part for part in module.modules() if hasattr(type(part), "log_dict")]
        for part in parts:
            vars(part).update(log=self._log, log_dict=self._log_dict)
        try:
            yield
        finally:
            for part in parts:
                vars(part).pop("log", None)
                vars(part).pop("log_dict", None)

    def _log(self, name: str, value: Any, *_: Any, **more: Any) -> None:
        if hasattr(value, "compute"):
            self._computed[name] = value
            return
        reduction = more.get("reduce_fx", "mean")
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"log({name!r}, reduce_fx={reduction!r}): use one of {', '.join(_REDUCTIONS)}"
            )
        self._reductions[name] = reduction
        size = more.get("batch_size") or self.size
        self._values.setdefault(name, []).append((float(value), size))

    def _log_dict(self, values: Mapping[str, Any], *_: Any, **more: Any) -> None:
        for name, value in values.items():
            self._log(name, value, **more)

    def found(self, output: Any) -> None:
        """Note what validation_step returned."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._returned.append((float(loss), self.size))

    def metrics(self, monitor: str | None) -> dict[str, float]:
        """Return the metrics of all batches, the monitored one first."""
        values = self._values
        if not values and not self._computed and self._returned:
            values = {"val_loss": self._returned}
        found = {}
        for name, pairs in values.items():
            numbers, sizes = torch.tensor(pairs, dtype=torch.float64).unbind(1)
            found[name] = float(_REDUCTIONS[self._reductions.get(name, "mean")](numbers, sizes))
        for name, metric in self._computed.items():
            found[name] = float(metric.compute())
            metric.reset()
        if not found:
            raise ValueError(
                "validation_step logged nothing and returned no loss; use self.log(name, value)"
            )
        if monitor is not None and monitor not in found:
            raise ValueError(f"monitor={monitor!r} was not logged; use one of {', '.join(found)}")
        return found if monitor is None else {monitor: found[monitor], **found}


def _loader(data: Any) -> DataLoader[Any]:
    if hasattr(data, "val_dataloader"):
        data.prepare_data()
        data.setup("validate")
        data = data.val_dataloader()
    if not isinstance(data, DataLoader):
        raise ValueError(
            f"the data are a {type(data).__name__}; give a DataLoader, or a LightningDataModule "
            "whose val_dataloader() returns one DataLoader"
        )
    return data


def _takes_index(module: Any) -> bool:
    """Return whether validation_step takes the batch index; refuse a module without it."""
    step = getattr(type(module), "validation_step", None)
    if step is None or str(step.__module__).partition(".")[0] in ("lightning", "pytorch_lightning"):
        raise ValueError(
            f"{type(module).__name__} has no validation_step; define one, or give Evaluate a "
            "function of your own"
        )
    found = signature(module.validation_step).parameters
    return len(found) > 1 or Parameter.VAR_POSITIONAL in [each.kind for each in found.values()]


def _size_of(batch: Any) -> int:
    """Return the samples of a batch: the length of its first tensor, as Lightning counts them."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    inner = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | list | tuple):
        return next((size for each in inner if (size := _size_of(each))), 0)
    return 0
