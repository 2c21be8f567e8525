"""Metrics of a run in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from paceline.integrations.trackers.base import Tracker
from paceline.integrations.trackers.figures import Plain, configuration, report
from paceline.report.callbacks import Live

_FLUSH = 10  # seconds; with TensorBoard's default, curves are two minutes late


class TensorBoard(Tracker):
    """Writes event files into a folder, for `tensorboard --logdir FOLDER`.

    every: steps between two writes; the last step is always written.
    workers_every: the same for the metrics of each worker.
    """

    def __init__(
        self, folder: PathLike[str] | str, every: int = 1, workers_every: int = 10
    ) -> None:
        super().__init__(every, workers_every)
        self._folder = str(folder)
        self._make = _summary_writer()  # now, so that a missing package raises at once
        self._writer: Any = None

    def _open(self, live: Live) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._writer, given = None, configuration(live.header)
        self._writer = writer = self._make(self._folder, flush_secs=_FLUSH)
        # Like add_hparams, but inside this run instead of in a new one. The end of its session is
        # left out, since it would mark the run as successful.
        for each in hparams(given, {"train/loss": 0.0})[:2]:
            writer.file_writer.add_summary(each)
        writer.add_text("run/configuration", _table(given))
        writer.flush()

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def _close(self, live: Live, reason: str) -> None:
        steps = live.total.columns["step"]
        text = f"{reason}\n\n```\n{report(live, reason)}\n```"
        try:
            self._writer.add_text("run/ended", text, int(steps[-1]) if steps else 0)
        finally:
            self._writer.close()


def _table(given: dict[str, Plain]) -> str:
    """Return names and values in Markdown, which TensorBoard shows as a table."""
    rows = [f"|{name}|{str(value).replace('|', '&#124;')}|" for name, value in given.items()]
    return "\n".join(["|name|value|", "|---|---|", *rows])


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard is not installed ({error}): pip install 'paceline[tensorboard]'"
        ) from None
    return SummaryWriter
