"""The steps that a server may have to take again, and the version before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from paceline.engines.ray.servers.slices import Slot, Step, Version


class History:
    """Keeps each step until every slice of a later version is on a second node.

    base: the version before the steps of the log.
    """

    def __init__(self, base: Version) -> None:
        self.base = base
        self.log: deque[Step] = deque()

    @property
    def last(self) -> Version:
        """The newest version whose step was sent to servers."""
        return self.log[-1].model if self.log else self.base

    @property
    def last_whole(self) -> int:
        """The number of the newest whole version."""
        whole = [step.version for step in self.log if step.model.whole]
        return max([*whole, self.base.number])

    def versions(self) -> list[Version]:
        return [self.base, *(step.model for step in self.log)]

    def clear(self) -> None:
        """Start anew from the last version."""
        self.base = self.last
        self.log.clear()

    def forget(
        self,
        slots: Collection[Slot],
        several: bool,
        is_safe: Callable[[Slot, int], bool],
        limit: int,
    ) -> None:
        """Drop the steps that no server has to take again.

        several: whether servers are on several nodes, so that one of them can be lost.
        is_safe: whether a slice of a version is on a second node.
        limit: the number of steps beyond which the oldest ones go in any case.
        """
        oldest = min(slot.newest.version for slot in slots)  # a server may take the next one again
        dropped = 0
        for count, step in enumerate(self.log, 1):
            if not step.model.whole or step.version > oldest:
                break
            safe = not several or all(is_safe(slot, step.version) for slot in slots)
            if safe or len(self.log) - count >= limit:
                dropped = count
        for _ in range(dropped):
            self.base = self.log.popleft().model
        for slot in slots:
            slot.states = {v: s for v, s in slot.states.items() if v >= self.base.number}
