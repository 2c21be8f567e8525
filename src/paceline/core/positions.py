"""The next positions in the streams of data shards (tiles), and the samples that results have."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from paceline.core.protocol import Result, Task, Work


def draw(next_in_tile: MutableMapping[int, int], work: Work) -> tuple[int, ...]:
    """Draw the next samples of each tile of a work; return their offsets."""
    tiles = work.tiles or {}
    offsets = tuple(next_in_tile.get(tile, 0) for tile in tiles)
    for (tile, count), begin in zip(tiles.items(), offsets, strict=True):
        next_in_tile[tile] = begin + count * work.steps
    return offsets


def give_back(next_in_tile: MutableMapping[int, int], task: Task, samples: int) -> bool:
    """Return a task's unused samples to their tiles; False if later ones were drawn already."""
    if task.work.tiles is None:
        return True
    drawn = task.drawn(samples)
    if any(next_in_tile[t] != at + drawn[t] for t, at, _ in task.stretches() if drawn[t]):
        return False
    next_in_tile.update((t, at) for t, at, _ in task.stretches() if drawn[t])
    return True


def shorten(next_in_tile: MutableMapping[int, int], task: Task, samples: int) -> None:
    """Return the samples that were not computed in time to their tiles."""
    drawn = task.drawn(samples)
    for tile, offset, whole in task.stretches():
        if next_in_tile[tile] == offset + whole:
            next_in_tile[tile] = offset + drawn[tile]


def distinct_samples(results: Iterable[Result]) -> int:
    """Count the samples of results; a part that several workers computed counts once."""
    parts: dict[int, int] = {}
    shared = 0
    for result in results:
        task = result.task
        if task.work.parts is None:
            shared += result.samples
        else:
            parts.update((index, task.part(index)[1]) for index in task.work.parts)
    return shared + sum(parts.values())
