"""The result of a run: its model, metrics and journals, and how to show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.journal import Journal
from paceline.core.policy import Policy
from paceline.core.protocol import MAIN, WorkerId
from paceline.gossip.metrics import meters_of
from paceline.policies.placement.base import BySpeed
from paceline.policies.placement.tiles import Placed
from paceline.report.callbacks import Live
from paceline.report.evaluations import Evaluation
from paceline.report.glance import as_html
from paceline.report.live import look
from paceline.report.metrics import Meter
from paceline.report.samples import Stretch, sample_fates
from paceline.report.text import changed_line, forecast_line, placed_line, speeds_line, summary


@dataclass(frozen=True)
class Run:
    """The result of a run; the metrics of a decentralized run cover all nodes together."""

    model: Any  # decentralized: the mean of all models
    metrics: dict[str, NDArray[np.float64]]  # one value per step; see Meter.arrays
    meter: Meter
    journals: dict[WorkerId, Journal]  # one per coordinator: "main", or each node
    driven_policy: Policy  # as it was driven: replay(run.driven_policy, run.journal) == run.journal
    reason: str
    policy: Policy  # your policy with its state at the end
    meters: Mapping[WorkerId, Meter]  # one per journal
    make_models: Callable[[], dict[WorkerId, Any]]
    more: Callable[[], str] = str  # returns extra lines for the summary
    _asked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def is_summarized(self) -> bool:
        """Whether `summary` was called."""
        return bool(self._asked)

    @property
    def journal(self) -> Journal:
        """The journal of the central coordinator."""
        if MAIN not in self.journals:
            raise ValueError(
                "each node of a decentralized run has a journal: run.journals['w0'] and so on"
            )
        return self.journals[MAIN]

    @property
    def models(self) -> dict[WorkerId, Any]:
        """The model of each node that was connected at the end."""
        return self.make_models()

    @property
    def steps(self) -> int:
        """The model version, counted from the very start; decentralized: the mean of all nodes."""
        return self.meter.version // len(self.journals)

    @property
    def seconds(self) -> float:
        return float(self.metrics["seconds"][-1]) if len(self.metrics["seconds"]) else 0.0

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """The evaluations that callbacks recorded: step, seconds and metrics of each."""
        return tuple(self.meter.evaluations)

    def summary(self) -> str:
        """Return a few lines on the work that was done, used and wasted, and on its cost."""
        self._asked.append(True)
        first = next(iter(self.journals.values()))
        batch, file = (
            first.header.batch,
            "" if first.path is None else f"\n  journal   {first.path}",
        )
        if file and len(self.journals) > 1:
            file += f" and {len(self.journals) - 1} more"
        nodes = None if MAIN in self.journals else len(self.journals)
        text = summary(self.meter, self.reason, batch, nodes)
        if more := self.more():
            text += f"\n{more}"
        placement, findings = self.policy.acting.placement, self.policy.findings()
        if isinstance(placement, Placed | BySpeed):
            text += "\n" + speeds_line(placement.speeds())
        if isinstance(placement, Placed):
            moved = placement.moved if placement.move else None
            text += "\n" + placed_line(moved, findings.waited, placement.missed())
        about = first.header.about or {}
        if (changed := about.get("changed")) is not None:
            text += "\n" + changed_line(changed)
        forecast = about.get("forecast")
        if forecast is not None:
            text += "\n" + forecast_line(forecast, self.meter)
        for change in findings.changes or ():
            text += f"\n  replanned {change}"
        return text + file

    def _repr_html_(self) -> str:
        """Return the metrics of the run and of each worker as HTML for a notebook."""
        header = next(iter(self.journals.values())).header
        live = Live(header, self.meters, self.meter, lambda: self.seconds)
        return as_html(look(live, self.seconds, reason=self.reason))

    def report(self, path: Path | str) -> Path:
        """Write the run as one HTML page that opens offline and can be mailed; return its path."""
        from paceline.report.html.page import record_of, write_page  # needs a template engine

        files = [str(each.path) for each in self.journals.values() if each.path is not None]
        headers = {node: each.header for node, each in self.journals.items()}
        record = record_of(self.journals, self.reason, meters_of(headers))
        return write_page(path, record, files, self.policy.findings().changes, self._advice())

    def _advice(self) -> str:
        from paceline.planner.advice import advice  # needs scipy

        if MAIN not in self.journals:
            return ""
        found = advice(self.journal, self.seconds - self.meter.began, len(self.metrics["step"]))
        return "" if found is None else str(found)

    def samples(self) -> list[Stretch]:
        """Return the fate of every sample that was handed out."""
        return [each for journal in self.journals.values() for each in sample_fates(journal)]
