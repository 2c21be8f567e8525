"""Fetching the batches of tasks: in the computing process, or by the processes of a DataLoader.

What is random about a batch depends on its seed only, so both give the same bits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from paceline.data.shards import Shards

Collate: TypeAlias = Callable[[list[Any]], Any]
Data: TypeAlias = Dataset[Any] | Shards

PATIENCE = 600.0
"""Seconds that loader processes may take for a batch before its task fails."""


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of a batch; the seed of torch, numpy and `random` while it is fetched."""

    indices: tuple[int, ...]
    seed: int


class Feed(Protocol):
    """Fetches the batches of one task after the other."""

    def begin(self, wanted: Sequence[Request], likely: Sequence[Request] = ()) -> None:
        """Begin to fetch the batches of a task, and then those of the next one, as is likely."""

    def next(self) -> Any:
        """Return the next batch of the task."""


def feed_of(
    dataset: Data,
    collate: Collate,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
) -> Feed:
    """Return the feed of a dataset; the numbers are those of a DataLoader."""
    fetch = Fetch(dataset, collate)
    if num_workers:
        return LoaderFeed(fetch, num_workers, prefetch_factor, pin_memory)
    return OwnFeed(fetch)


def check_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"dataset {kind} is an IterableDataset, and workers fetch samples by their index; give "
            "a map-style dataset, or paceline.data.shards.Shards for data that are read in order"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset {kind} is neither map-style (__len__ and __getitem__) nor a function that "
            "opens such a dataset"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch (CPU), numpy and Python inside; restore them afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # Not torch.manual_seed, which takes 0.5 ms to note where it was called for other devices.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class Fetch(Dataset[Any]):
    """A dataset of batches, each by its request; None for no request."""

    def __init__(self, dataset: Data, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate
        self._tensors = (
            dataset.tensors
            if type(dataset) is TensorDataset and collate is default_collate
            else None
        )
        self._many = getattr(dataset, "__getitems__", None)

    def __getitem__(self, request: Request | None) -> Any:
        if request is None:
            return None
        if self._tensors is not None:  # nothing of the user's runs
            chosen = torch.tensor(request.indices)
            return [tensor[chosen] for tensor in self._tensors]
        with seeded(request.seed):
            if self._many is not None:
                return self._collate(self._many(list(request.indices)))
            return self._collate([self._dataset[index] for index in request.indices])


class OwnFeed:
    """Fetches in the process that computes; the first batch at once, while the model arrives."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._wanted: deque[Request] = deque()
        self._first: Any = None

    def begin(self, wanted: Sequence[Request], likely: Sequence[Request] = ()) -> None:
        self._wanted = deque(wanted)
        self._first = self._fetch[self._wanted.popleft()] if wanted else None

    def next(self) -> Any:
        if self._first is None:
            return self._fetch[self._wanted.popleft()]
        first, self._first = self._first, None
        return first


class LoaderFeed:
    """Fetches by the processes of a DataLoader, which remain from task to task.

    A DataLoader asks for its next index whenever it returns a batch. If nothing is to be fetched
    then, it is given None, for which it returns None.
    """

    def __init__(
        self, fetch: Fetch, num_workers: int, prefetch_factor: int, pin_memory: bool
    ) -> None:
        self._ahead = num_workers * prefetch_factor
        self._waiting: deque[Request] = deque()  # not yet given to the loader
        self._given: deque[Request | None] = deque()  # of which it has not returned the batch
        self._wanted: deque[Request] = deque()  # of the task, not yet returned
        self._early: dict[Request, Any] = {}  # batches that came before their turn
        self._batches: Iterator[Any] | None = None
        self._loader: DataLoader[Any] = DataLoader(
            fetch,
            batch_size=None,
            sampler=_Asked(self._waiting, self._given),
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            timeout=PATIENCE,
            generator=torch.Generator(),  # not the global one, whose numbers are the model's
        )

    def begin(self, wanted: Sequence[Request], likely: Sequence[Request] = ()) -> None:
        self._wanted = deque(wanted)
        under_way = {*self._given, *self._early}
        self._early = {each: self._early[each] for each in wanted if each in self._early}
        asked = [*wanted, *likely[: self._ahead]]
        self._waiting.clear()
        self._waiting.extend(each for each in asked if each not in under_way)
        if self._batches is None:
            self._batches = iter(self._loader)
        for _ in range(len(self._given)):  # give it all it takes, in place of indices None
            if not self._waiting or self._given[0] is not None:
                break
            self._take()

    def next(self) -> Any:
        for _ in range(len(self._given) + len(self._waiting) + 1):
            if self._wanted[0] in self._early:
                return self._early.pop(self._wanted.popleft())
            self._take()
        raise RuntimeError("a batch was not fetched; this is a bug in Paceline")

    def _take(self) -> None:
        """Take the loader's next batch, and keep it if the task needs it."""
        assert self._batches is not None
        request = self._given.popleft()
        try:
            batch = next(self._batches)
        except BaseException:
            self._reset()
            raise
        if request is not None and request in self._wanted:
            self._early[request] = batch

    def _reset(self) -> None:
        """Forget the loader's processes after an error; the next task starts new ones."""
        self._batches = None
        self._given.clear()
        self._waiting.clear()
        self._early.clear()


class _Asked(Sampler[Any]):
    """Moves requests from one queue to the other, each when the loader asks for an index.

    It does not refer to the feed, so that the loader's processes end as soon as the feed is gone.
    """

    def __init__(self, waiting: deque[Request], given: deque[Request | None]) -> None:
        self._waiting, self._given = waiting, given

    def __iter__(self) -> Iterator[Request | None]:
        while True:
            index = self._waiting.popleft() if self._waiting else None
            self._given.append(index)
            yield index


def _as_it_is(batch: Any) -> Any:
    return batch


def move(batch: Any, device: str) -> Any:
    """Move a batch to a device: tensors in lists, tuples and dicts, or objects with `to`."""
    if device == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [move(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if callable(to := getattr(batch, "to", None)):  # such as the BatchEncoding of transformers
        return to(device)
    return batch
