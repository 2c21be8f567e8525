"""The figures of a run without a main node: those of every node, and of all together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.core.journal import Entry, Header
from paceline.core.protocol import WorkerId
from paceline.report.columns import Columns
from paceline.report.metrics import KINDS, TOTALS, Meter
from paceline.report.text import in_bytes

_ADDED = (
    *("version", "started", "used", "cancelled", "discarded", "lost", "redone"),
    *("samples_used", "samples_started", "busy_seconds", "worker_seconds", "compute_seconds"),
    *("down_bytes", "up_bytes", "dollars", "letters", "tensors_sent"),
)


class PeersMeter:
    """Meters of all nodes. `total` has a row for each step of any node, and sums."""

    def __init__(self, headers: Mapping[WorkerId, Header], folder: Path | None = None) -> None:
        self.nodes = {name: Meter.begin(header, folder) for name, header in headers.items()}
        first = next(iter(headers.values()))
        self.total = Meter(first.message_bytes, first.prices, tiles=first.tiles)
        self.total.columns = Columns(KINDS, folder)

    def observe(self, node: WorkerId, entry: Entry) -> bool:
        """Count an entry; return whether a step was taken."""
        meter, total = self.nodes[node], self.total
        before = {name: getattr(meter, name) for name in _ADDED}
        meter.observe(entry)
        for name in _ADDED:
            setattr(total, name, getattr(total, name) + getattr(meter, name) - before[name])
        if meter.version == before["version"]:
            return False
        row = {name: values[-1] for name, values in meter.columns.items()}
        last = total.columns["seconds"][-1] if total.columns["seconds"] else 0.0
        # Nodes tell of their steps in turns, each of some at once.
        row |= {"step": total.version, "seconds": max(row["seconds"], last)}
        row |= {name: getattr(total, name) for name in TOTALS}
        total.columns.add([row[name] for name in total.columns])
        total.weigh(meter.last_weights)
        total.last_loss = meter.last_loss
        return True

    def close(self) -> None:
        """Need no files any more, as `Meter.close`."""
        for meter in (*self.nodes.values(), self.total):
            meter.close()

    def lines(self, spread: float | None = None) -> str:
        """Say who took how many steps, and what was sent of what could have been.

        spread: how far the models were apart in the end, which journals do not tell.
        """
        steps = sorted((meter.version, name) for name, meter in self.nodes.items())
        (least, slow), (most, quick) = steps[0], steps[-1]
        possible = tensors = 0
        for meter in self.nodes.values():
            assert meter.peer is not None
            links = len(meter.peer.neighbors)
            tensors += meter.version * links * len(meter.peer.tensors)
            possible += meter.version * links * meter.message_bytes
        sent, bytes_sent = self.total.tensors_sent, self.total.up_bytes
        apart = "" if spread is None else f"; distance of their models from the mean {spread:.3g}"
        return (
            f"  nodes     {least} ({slow}) to {most} ({quick}) steps each{apart}\n"
            f"  letters   {self.total.letters}, with {_part(sent, tensors)} of the tensors and "
            f"{_part(bytes_sent, possible)} of the {in_bytes(possible)} of telling all neighbors "
            "all at every step"
        )


def _part(some: float, whole: float) -> str:
    return f"{some / whole:.1%}" if whole else "none"
