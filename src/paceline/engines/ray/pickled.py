"""The size of a learner when pickled for the workers, counted without copying its data."""

from __future__ import annotations

import sys
from pickle import PickleBuffer
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from paceline.core.logs import logger_of

logger = logger_of(__name__)

LIMIT = 100_000_000
"""Bytes above which the check warns: about a second at 1 Gbit/s, for each node."""


def check_pickled(learner: Any) -> None:
    """Refuse a learner that cannot be pickled; warn if it carries much data to the workers."""
    for name, value in getattr(learner, "__dict__", {"learner": learner}).items():
        try:
            size = PickledSize(value)
        except Exception as error:
            raise ValueError(
                f"{name}= ({type(value).__name__}) cannot be pickled for the workers: {error}; "
                "remove locks, open files and the like from it, or create them in each worker "
                "process; dataset= may be a function that does so"
            ) from error
        if size.total > LIMIT and name != "model":
            logger.warning("%s= %s", name, size.describe())


class PickledSize:
    """Counts the bytes of an object as Ray pickles it.

    Ray sends arrays as they are. A tensor is sent with its whole storage, even if it is a view of a
    small part. So each view of one storage sends it again. Counting stops when the bytes of the
    pickle itself pass the limit, since only pickling can tell their number.
    """

    def __init__(self, value: Any) -> None:
        self.arrays = self.tensors = self.written = self.views = 0
        self.storages: dict[int, int] = {}
        self.is_whole = True
        try:
            _Counter(self).dump(value)
        except _Enough:
            self.is_whole = False

    @property
    def total(self) -> int:
        return self.arrays + self.tensors + self.written

    def write(self, data: Any) -> None:
        self.written += memoryview(data).nbytes
        if self.written > LIMIT:
            raise _Enough

    def describe(self) -> str:
        more = "" if self.is_whole else "more than "
        told = f"is {more}{self.total / 1e6:,.0f} MB when pickled, and every node gets a copy"
        once = sum(self.storages.values())
        if self.tensors - once > LIMIT:
            told += (
                f", since {self.views} tensors in it are views, each pickled with all its storage "
                f"({once / 1e6:,.0f} MB if sent once): keep the whole tensor and index it in "
                "__getitem__, or clone() the views"
            )
        return f"{told}; give dataset= a function that opens the data, called once in each worker"


class _Enough(Exception):
    """The limit is passed, so the rest need not be pickled."""


class _Counter(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles everything but arrays and tensors, which it counts."""

    def __init__(self, size: PickledSize) -> None:
        super().__init__(size, protocol=5, buffer_callback=self._count_buffer)
        self._size = size

    def _count_buffer(self, buffer: PickleBuffer) -> None:
        self._size.arrays += buffer.raw().nbytes

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")  # not imported for learners that do without it
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            self._size.arrays += thing.nbytes
        elif torch and isinstance(thing, torch.Tensor) and thing.layout == torch.strided:
            self._count_tensor(thing)
        elif not isinstance(thing, ray.ObjectRef | ActorHandle):  # these note that they were sent
            return super().reducer_override(thing)
        return int, ()

    def _count_tensor(self, tensor: Any) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        self._size.tensors += storage.nbytes()
        self._size.views += tensor.nbytes < storage.nbytes()
        self._size.storages[storage.data_ptr()] = storage.nbytes()
