"""Micro-batches as large as a worker's memory allows, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from paceline.core.logs import logger_of
from paceline.learners.base import Array, Arriving, Changed, Final, Span
from paceline.learners.flat import FlatModule

logger = logger_of(__name__)

MicroBatch: TypeAlias = int | Literal["auto"] | None
Found = TypeVar("Found")

# torch has a type of its own for GPUs only; the CPU's allocator and C++ have these words.
_WORDS = "can't allocate memory", "not enough memory", "bad_alloc", "out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory did not suffice, of a GPU or of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


class Pieces:
    """The size of a worker's micro-batches; with "auto", halved whenever memory does not suffice.

    size: the samples of a piece; None: all samples of a step.
    """

    def __init__(self, given: MicroBatch) -> None:
        self.is_auto = given == "auto"
        self.size: int | None = given if isinstance(given, int) else None
        self._tried = 1
        self._told = False  # whether a part of the present result was reported as final

    def of(self, samples: int) -> int:
        """Return the size of the pieces of a step with so many samples."""
        self._tried = min(self.size or samples, samples)
        return self.size or samples

    def watched(self, final: Final | None) -> Final | None:
        """Return the function for parts that are final; a task after it cannot begin again."""
        self._told = False
        if final is None or not self.is_auto:
            return final

        def told(vector: Array, span: Span) -> None:
            self._told = True
            final(vector, span)

        return told

    def until_it_fits(self, attempt: Callable[[], Found]) -> Found:
        """Return what the attempt returns; halve the size and repeat it while memory is short."""
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not self.is_auto or not is_out_of_memory(error):
                    raise
                if self._tried <= 1:
                    raise RuntimeError(
                        "the memory of this worker does not suffice for one sample; recompute "
                        "activations by prepare= (gradient checkpointing), use a smaller model or "
                        f"shorter samples, or a machine with more memory. {type(error).__name__}: "
                        f"{error}"
                    ) from error
            # Here the error, whose frames hold tensors, is gone.
            self._halve()

    def _halve(self) -> None:
        self.size = max(self._tried // 2, 1)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning(
            'out of memory with %d samples at a time; micro_batch="auto" is now %d in this worker',
            self._tried, self.size,
        )  # fmt: skip
        if self._told:  # the engine has sent parts of a gradient that now gets other bits
            raise Changed


class Loading:
    """Loads a task's model when called; called again, it restores the model as it was loaded.

    steps: whether the task changes the parameters, so that a copy is needed to restore them.
    """

    def __init__(self, flat: FlatModule, model: Iterable[Array], steps: bool) -> None:
        self._flat, self._model, self._steps = flat, model, steps
        self._is_loaded = False
        self._copy: Tensor | None = None

    def can_begin(self, done: int) -> bool:
        """Return whether a call would not wait for the model.

        done: the samples of the task that are computed.
        """
        model = self._model
        return self._is_loaded or not isinstance(model, Arriving) or model.here(done)

    def __call__(self) -> None:
        if not self._is_loaded:
            self._flat.load(self._model)
            self._is_loaded = True
            self._copy = self._flat.values.clone() if self._steps else None
            return
        if self._copy is not None:
            self._flat.values.copy_(self._copy)
        self._flat.reset()
