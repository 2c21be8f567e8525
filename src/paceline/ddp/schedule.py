"""The batch shares of all ranks, step by step, learned from the speeds of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from paceline.data.placement import shares, step_seconds

_FIRST = 5  # steps to the first exchange; the interval doubles until it is `every`
_WORTH = 0.05  # new shares must shorten the step by this part, so that noise changes nothing


class Schedule:
    """The shares of the steps of an epoch; they change only at steps that no rank has drawn."""

    def __init__(
        self,
        batch_size: int,
        speeds: Sequence[float],
        max_samples: Sequence[int],
        smoothing: float,
        every: int,
    ) -> None:
        if every < 1 or not 0 <= smoothing < 1:
            raise ValueError(f"every={every}, smoothing={smoothing}: use >= 1, and 0 to below 1")
        self._batch_size, self._smoothing, self._every = batch_size, smoothing, every
        self._most = tuple(max_samples)
        self._speeds = [nan] * len(speeds)  # of all ranks, as last exchanged and smoothed
        self._gap = min(_FIRST, every)  # steps between two exchanges
        self.left = self._gap  # steps to the next exchange
        _check(batch_size, speeds, max_samples)
        self._entries = [(0, shares(batch_size, speeds, max_samples=max_samples))]

    def __repr__(self) -> str:
        """Show all values on which the shares of coming steps depend."""
        settings = (self._batch_size, self._most, self._smoothing, self._every)
        return f"Schedule({self._entries}, {settings})"

    def at(self, step: int, count: int | None = None) -> tuple[int, ...]:
        """Return the shares of a step, or those of a smaller batch in the same proportion."""
        held = next(held for since, held in reversed(self._entries) if since <= step)
        if count is None or count == self._batch_size:
            return held
        return shares(count, held, max_samples=self._most)

    def restart(self) -> None:
        """Begin an epoch with the newest shares."""
        self._entries = [(0, self._entries[-1][1])]

    def learn(self, speeds: Sequence[float], since: int, done: int) -> None:
        """Smooth the speeds; if new shares save enough time, use them from step `since` on.

        A rank that has timed nothing gives nan and keeps its previous speed.
        """
        fade = self._smoothing
        self._speeds = [
            old if not isfinite(new) else fade * old + (1 - fade) * new if isfinite(old) else new
            for old, new in zip(self._speeds, speeds, strict=True)
        ]
        self._gap = self.left = min(2 * self._gap, self._every)
        if not all(map(isfinite, self._speeds)):
            return
        now = self._entries[-1][1]
        better = shares(self._batch_size, self._speeds, max_samples=self._most)
        promised = step_seconds(better, self._speeds)
        if step_seconds(now, self._speeds) > (1 + _WORTH) * promised:
            earlier = [entry for entry in self._entries if entry[0] < since]
            past = sum(begin <= done for begin, _ in earlier)
            self._entries = [*earlier[max(past - 1, 0) :], (since, better)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "shares": [[since, [*held]] for since, held in self._entries],
            "speeds": [speed if isfinite(speed) else None for speed in self._speeds],
            "gap": self._gap,
            "left": self.left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the shares and speeds, unless the number of ranks differs or a limit is exceeded."""
        entries = [(since, tuple(held)) for since, held in state["shares"]]
        if all(
            len(held) == len(self._most)
            and all(
                share <= max_samples for share, max_samples in zip(held, self._most, strict=True)
            )
            for _, held in entries
        ):
            self._entries = entries
            self._speeds = [nan if speed is None else speed for speed in state["speeds"]]
            self._gap, self.left = state["gap"], state["left"]


def _check(batch_size: int, speeds: Sequence[float], max_samples: Sequence[int]) -> None:
    """Refuse a batch that cannot be cut among these ranks."""
    if not all(isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds {[*speeds]}: use finite numbers > 0, samples per second or so")
    if batch_size < len(speeds):
        raise ValueError(
            f"batch_size={batch_size} is for all {len(speeds)} ranks together, and each needs at "
            f"least 1 sample; use batch_size >= {len(speeds)}"
        )
    if min(max_samples) < 1 or sum(max_samples) < batch_size:
        raise ValueError(
            f"max_samples={[*max_samples]} leaves no way to place a batch of {batch_size}: the "
            f"ranks together take {sum(max_samples)}, each at least 1; use a smaller batch_size or "
            "a larger max_samples"
        )
