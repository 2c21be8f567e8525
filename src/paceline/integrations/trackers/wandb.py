"""Metrics of a run in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.integrations.trackers.base import Tracker
from paceline.integrations.trackers.figures import configuration, report
from paceline.report.callbacks import FAILED, Live


class WandB(Tracker):
    """Sends metrics to a new run, which begins and ends with the training.

    every: steps between two writes; the last step is always written.
    workers_every: the same for the metrics of each worker.
    options: for `wandb.init`, such as name="…", tags=[…], mode="offline", dir="…", config={…}.
    """

    def __init__(
        self, project: str | None = None, every: int = 1, workers_every: int = 10, **options: Any
    ) -> None:
        super().__init__(every, workers_every)
        self._wandb = _wandb()  # now, so that a missing package raises at once
        self._options = {"project": project, "reinit": "create_new", **options}
        self._run: Any = None

    def _open(self, live: Live) -> None:
        given = {**configuration(live.header), **(self._options.get("config") or {})}
        self._run = self._wandb.init(**{**self._options, "config": given})

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def _close(self, live: Live, reason: str) -> None:
        try:
            self._run.summary.update({"ended": reason, "report": report(live, reason)})
        finally:
            self._run.finish(exit_code=int(reason == FAILED))


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            f"Weights & Biases is not installed ({error}): pip install 'paceline[wandb]'"
        ) from None
    return wandb
