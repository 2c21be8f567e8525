"""The metrics of decentralized training: those of each node, and of all nodes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from paceline.core.journal import Entry, Header
from paceline.core.protocol import Evaluated, Finished, Joined, Left, Peer, Send, WorkerId
from paceline.report.columns import Columns
from paceline.report.evaluations import Evaluation
from paceline.report.html.collect import Meters, OneMeter
from paceline.report.metrics import KINDS, TOTALS, Meter
from paceline.report.text import in_bytes

_ADDED = (
    *("version", "started", "used", "cancelled", "discarded", "lost", "redone"),
    *("samples_used", "samples_started", "busy_seconds", "worker_seconds", "compute_seconds"),
    "driver_seconds",
    *("down_bytes", "up_bytes", "dollars", "messages", "tensors_sent"),
)


@dataclass
class GossipMeter(Meter):
    """Counts messages as well. Bytes up are sent to peers, bytes down received from peers."""

    messages: int = 0  # one for each receiver
    tensors_sent: int = 0  # in messages


@dataclass
class NodeMeter(GossipMeter):
    """Counts the entries of one node, which is its own only worker and gets no model to start."""

    peer: Peer = Peer("", (), ())

    @classmethod
    def begin(cls, header: Header, folder: Path | None = None) -> Self:
        meter = super().begin(header, folder)
        assert header.peer is not None
        meter.peer = header.peer
        return meter

    def observe(self, entry: Entry) -> None:
        super().observe(entry)
        for command in entry.commands:
            if isinstance(command, Send):
                tensors = self.peer.tensors if command.tensors is None else command.tensors
                self.messages += len(command.to)
                self.tensors_sent += len(command.to) * len(tensors)

    def _come_or_go(self, event: Joined | Left, now: float) -> None:
        if event.worker == self.peer.name:  # the journal of a neighbor counts its own time
            super()._come_or_go(event, now)

    def _join(self, worker: WorkerId) -> None:
        super()._join(worker)
        self.workers[worker].model_bytes = 0

    def _finish(self, event: Finished, now: float) -> None:
        super()._finish(event, now)
        if (tally := self.workers.get(self.peer.name)) is not None:
            tally.model_bytes = 0


class GossipMeters:
    """The meters of all nodes. `total` has a row for each step of any node, and the sums."""

    def __init__(self, headers: Mapping[WorkerId, Header], folder: Path | None = None) -> None:
        self.nodes = {name: NodeMeter.begin(header, folder) for name, header in headers.items()}
        first = next(iter(headers.values()))
        self.total = GossipMeter(first.message_bytes, first.prices, tiles=first.tiles)
        self.total.columns = Columns(KINDS, folder)
        self.total.version = sum(meter.version for meter in self.nodes.values())
        self.total.samples_used = sum(meter.samples_used for meter in self.nodes.values())

    @property
    def messages(self) -> int:
        """The messages between nodes."""
        return self.total.messages

    def observer(self, node: WorkerId) -> Callable[[Entry], object]:
        """Return the function that counts the entries of a node."""
        return partial(self.observe, node)

    def observe(self, node: WorkerId, entry: Entry) -> bool:
        """Count an entry; return whether a step was taken."""
        meter, total = self.nodes[node], self.total
        before = {name: getattr(meter, name) for name in _ADDED}
        meter.observe(entry)
        for name in _ADDED:
            setattr(total, name, getattr(total, name) + getattr(meter, name) - before[name])
        if isinstance(entry.event, Evaluated):
            total.evaluations.append(self._evaluation(entry.event))
        if meter.version == before["version"]:
            return False
        row = {name: values[-1] for name, values in meter.columns.items()}
        last = total.columns["seconds"][-1] if total.columns["seconds"] else 0.0
        # Nodes report in turns, each several steps at once.
        row |= {"step": total.version, "seconds": max(row["seconds"], last)}
        row |= {name: getattr(total, name) for name in TOTALS}
        total.columns.add([row[name] for name in total.columns])
        total.weigh(meter.last_weights)
        total.last_loss = meter.last_loss
        return True

    def _evaluation(self, event: Evaluated) -> Evaluation:
        """Return an evaluation of the mean model; a step is one of each node."""
        seconds = self.total.columns["seconds"]
        place = min(event.step * len(self.nodes), len(seconds)) - 1
        at = seconds[place] if seconds else 0.0
        return Evaluation(event.step, at, event.metrics, event.mode)

    def close(self) -> None:
        """Release the files of all meters, as `Meter.close`."""
        for meter in (*self.nodes.values(), self.total):
            meter.close()

    def lines(self, spread: float | None = None) -> str:
        """Return the steps of the nodes, and the share of the possible updates that was sent.

        spread: the consensus distance at the end, which journals do not hold.
        """
        steps = sorted((meter.version, name) for name, meter in self.nodes.items())
        (least, slow), (most, quick) = steps[0], steps[-1]
        possible = tensors = 0
        for meter in self.nodes.values():
            links = len(meter.peer.neighbors)
            tensors += meter.version * links * len(meter.peer.tensors)
            possible += meter.version * links * meter.message_bytes
        sent, bytes_sent = self.total.tensors_sent, self.total.up_bytes
        apart = "" if spread is None else f"; distance of their models from the mean {spread:.3g}"
        return (
            f"  nodes     {least} ({slow}) to {most} ({quick}) steps each{apart}\n"
            f"  updates   {self.messages} messages, with {_part(sent, tensors)} of the tensors and "
            f"{_part(bytes_sent, possible)} of the {in_bytes(possible)} of sending whole models "
            "to all neighbors at every step"
        )


def meter_of(header: Header) -> Meter:
    """Return the meter for a journal: of one node, or of a central coordinator."""
    return Meter.begin(header) if header.peer is None else NodeMeter.begin(header)


def meters_of(headers: Mapping[WorkerId, Header]) -> Meters:
    """Return the meters for the journals of one run."""
    if len(headers) > 1:
        return GossipMeters(headers)
    ((node, header),) = headers.items()
    return OneMeter(node, meter_of(header))


def _part(some: float, whole: float) -> str:
    return f"{some / whole:.1%}" if whole else "none"
