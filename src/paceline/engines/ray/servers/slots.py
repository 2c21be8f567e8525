"""The slices that the model is cut into, and the servers that have them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from paceline.engines.ray.servers.fleet import Fleet, Settings
from paceline.engines.ray.servers.slices import Copy, Kept, Object, Slot

_cuts = itertools.count()  # of all jobs: server processes may outlive one

Copies: TypeAlias = Sequence[tuple[str, Copy]]
"""Copies of all slices, in their order, each with the server that is to start from it."""


class Slots:
    """The slots of the present cut, in the order of their slices.

    With several chunks, every server has one slice of each of them.
    starting: slots whose server is not up.
    number: of this cut.
    is_first: whether the model was not cut anew.
    """

    def __init__(self, settings: Settings, fleet: Fleet, copies: Copies) -> None:
        self._settings, self._fleet = settings, fleet
        self._slots = [
            Slot(index, copy.spans[0], server, copy) for index, (server, copy) in enumerate(copies)
        ]
        self.spans = [slot.span for slot in self._slots]
        self.starting: set[int] = set()
        self.number, self.is_first = next(_cuts), True

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __contains__(self, slot: object) -> bool:
        """Whether it is a slot of the present cut, and not one of an earlier cut."""
        return any(each is slot for each in self._slots)

    @property
    def servers(self) -> list[str]:
        """The servers that have slices, each once."""
        return list(dict.fromkeys(slot.server for slot in self._slots))

    @property
    def nodes(self) -> set[str]:
        """The nodes with servers."""
        return {self.node(slot) for slot in self._slots}

    @property
    def is_even(self) -> bool:
        """Whether every server has one slice of each chunk."""
        return all(len(self.of(server)) == self._settings.chunks for server in self.servers)

    def of(self, server: str) -> list[Slot]:
        """Return the slots of a server."""
        return [slot for slot in self._slots if slot.server == server]

    def node(self, slot: Slot) -> str:
        return self._fleet.node(slot.server)

    def elsewhere(self, slot: Slot) -> list[int]:
        """Return the versions of which a server on another node keeps the state."""
        here, fleet = self.node(slot), self._fleet

        def is_away(state: Object | Kept) -> bool:
            at = state.server if isinstance(state, Kept) else None
            return at is None or (fleet.has(at) and fleet.node(at) != here)

        return [version for version, state in slot.states.items() if is_away(state)]

    def last_chunk_first(self) -> list[Slot]:
        """Return the slots in the order in which their results come: a backward pass ends with the
        first layers. A server takes the steps of its slices in this order."""
        width = len(self._slots) // self._settings.chunks
        return sorted(self._slots, key=lambda slot: (-(slot.index // width), slot.index))

    def cut(self, servers: Sequence[str]) -> None:
        """Cut the model anew among servers. Only between two steps."""
        olds, chunks = self._slots, self._settings.chunks
        self.spans = self._settings.layout.spans(len(servers), chunks)
        self.number, self.is_first, self._slots = next(_cuts), False, []
        self.starting.clear()
        pairs = zip([*servers] * chunks, self.spans, strict=True)
        for index, (server, span) in enumerate(pairs):
            meet = [s for s in olds if s.span[0] < span[1] and span[0] < s.span[1]]
            parts = [part for slot in meet for part in slot.newest.parts]
            copy = Copy(olds[0].newest.version, [slot.span for slot in meet], parts)
            self._slots.append(Slot(index, span, server, copy))
