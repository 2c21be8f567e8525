"""Files of a whole version, one for each slice, which servers write during the next steps.

After each step a server publishes its slice and its state as objects that never change. A file is
written from these objects, so that a server can take the next steps meanwhile, and nothing is
copied for it. The stores keep the objects until their file is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.engines.base import Writing
from paceline.engines.ray.servers.events import SliceNotWritten, SliceWritten, WriteSlice
from paceline.engines.ray.servers.steps import Do, Steps
from paceline.learners.base import Layout, Saved, Span

NAME = "state-{index:05d}-of-{count:05d}.safetensors"


@dataclass(eq=False)
class _Order:
    """Files that are wanted, or under way.

    parts: the span, the hash and the plain data of each slice that is written.
    """

    writing: Writing
    token: str
    timeout: float
    files: list[str] = field(default_factory=list)
    parts: dict[str, tuple[Span, str, dict[str, Any]]] = field(default_factory=dict)


class Files:
    """Has servers write the files of one version at a time."""

    def __init__(self, layout: Layout, steps: Steps, do: Do) -> None:
        self._layout, self._steps, self._do = layout, steps, do
        self._order: _Order | None = None

    def begin(self, writing: Writing, token: str, timeout: float) -> None:
        """Write the newest version as soon as all servers have it."""
        if self._order is not None:
            self._fail("another version is written instead")
        self._order = _Order(writing, token, timeout)
        self.advance()

    def advance(self) -> None:
        """Send the files to the servers if the version is whole. Called before each next step."""
        order, last = self._order, self._steps.history.last
        if order is None or order.files or last.number < order.writing.version or not last.whole:
            return
        slots, number = self._steps.slots, order.writing.version
        if any(slot.newest.version != number or len(slot.newest.spans) != 1 for slot in slots):
            return  # a slice starts again from an older copy, and takes its steps once more
        order.files = [NAME.format(index=i, count=len(slots)) for i in range(len(slots))]
        for slot, file in zip(slots, order.files, strict=True):
            if self._order is order:  # a call may fail at once
                given = order.writing, order.token, order.timeout, slot.newest
                self._do(WriteSlice(slot.server, number, file, *given))

    def written(self, event: SliceWritten) -> None:
        order, call = self._order, event.call
        if order is None or order.writing is not call.writing:
            return  # it was given up before
        order.parts[call.file] = call.copy.spans[0], event.sha256, event.data
        if len(order.parts) == len(order.files):
            self._order = None
            parts = [order.parts[file] for file in order.files]
            order.writing.hashes = {
                file: sha for file, (_, sha, _) in zip(order.files, parts, strict=True)
            }
            empty = {"values": np.empty(0)}
            states = [(span, Saved(empty, data)) for span, _, data in parts]
            order.writing.data = self._layout.cut(states, (0, self._layout.size)).data

    def not_written(self, event: SliceNotWritten) -> None:
        if self._order is not None and self._order.writing is event.call.writing:
            self._fail(f"server {event.call.server} did not write {event.call.file}: {event.why}")

    def give_up(self, writing: Writing) -> None:
        """Forget files that are not wanted any more, and free the slices that wait for them."""
        if self._order is not None and self._order.writing is writing:
            self._fail("it was given up")

    def _fail(self, why: str) -> None:
        assert self._order is not None
        self._order.writing.failure = why
        self._order = None
