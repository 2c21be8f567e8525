"""What came of a run: its model, its figures, its journals, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.callbacks import Live
from paceline.core.journal import Journal
from paceline.core.protocol import MAIN, Policy, WorkerId
from paceline.live import look
from paceline.policies.placed import Placed
from paceline.policies.placement import BySpeed
from paceline.report.glance import as_html
from paceline.report.metrics import Meter
from paceline.report.samples import Stretch, sample_fates
from paceline.report.text import forecast_line, placed_line, speeds_line, summary
from paceline.swarm import Swarm


@dataclass(frozen=True)
class Run:
    """What came of a run. Without a main node, figures are of all nodes together."""

    model: Any  # without a main node: the mean of all
    metrics: dict[str, NDArray[np.float64]]  # one value per step; see Meter.arrays
    meter: Meter
    journals: dict[WorkerId, Journal]  # of each node that decides, "main" if there is but one
    policy: Policy  # as it was driven, so that replay(run.policy, run.journal) == run.journal
    reason: str
    learned: Policy  # yours as it is now, with all that it has learned
    swarm: Swarm | None = None  # where there is no main node

    @property
    def journal(self) -> Journal:
        """The journal of the main node."""
        if self.swarm is not None:
            raise ValueError(
                "without a main node every node has a journal: run.journals['w0'] and so on"
            )
        return self.journals[MAIN]

    @property
    def models(self) -> dict[WorkerId, Any]:
        """The model of each node that was there in the end."""
        return {MAIN: self.model} if self.swarm is None else self.swarm.models()

    @property
    def steps(self) -> int:
        """The version of the model, counted from the very start; of all nodes', the mean."""
        return self.meter.version // len(self.journals)

    @property
    def seconds(self) -> float:
        return float(self.metrics["seconds"][-1]) if len(self.metrics["seconds"]) else 0.0

    def summary(self) -> str:
        """Say in a few lines what was done, used and wasted, and what it cost."""
        batch = next(iter(self.journals.values())).header.batch
        if self.swarm is not None:
            nodes = len(self.journals)
            return f"{summary(self.meter, self.reason, batch, nodes)}\n{self.swarm.summary()}"
        text = summary(self.meter, self.reason, batch)
        placement = getattr(self.learned, "placement", None)
        if isinstance(placement, Placed | BySpeed):
            text += "\n" + speeds_line(placement.speeds())
        if isinstance(placement, Placed):
            waited = getattr(self.learned, "waited", 0)
            moved = placement.moved if placement.move else None
            text += "\n" + placed_line(moved, waited, placement.missed())
        forecast = (self.journal.header.about or {}).get("forecast")
        if forecast is not None:
            text += "\n" + forecast_line(forecast, self.meter)
        for change in getattr(self.learned, "changes", ()):
            text += f"\n  replanned {change}"
        return text

    def _repr_html_(self) -> str:
        """Show in a notebook what was done, and what by whom."""
        header = next(iter(self.journals.values())).header
        meters = {MAIN: self.meter} if self.swarm is None else self.swarm.meter.nodes
        live = Live(header, meters, self.meter, lambda: self.seconds)
        return as_html(look(live, self.seconds, reason=self.reason))

    def report(self, path: Path | str) -> Path:
        """Write a page of HTML that shows it, opens offline and can be mailed; return where."""
        from paceline.report.page import record_of, write_page  # which needs a template engine

        files = [str(each.path) for each in self.journals.values() if each.path is not None]
        record = record_of(self.journals, self.reason)
        return write_page(path, record, files, getattr(self.learned, "changes", None))

    def samples(self) -> list[Stretch]:
        """Say what became of every sample that was handed out."""
        return [each for journal in self.journals.values() for each in sample_fates(journal)]
