"""Parts of a gradient that are final while the backward pass still goes on.

As DistributedDataParallel does, a replica learns from hooks which gradients are complete, and
reports neighbors together once they are large enough to be sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from paceline.core.logs import logger_of
from paceline.learners.base import Changed, Final, Span
from paceline.learners.flat import FlatModule

logger = logger_of(__name__)

BUCKET = 2**16
"""Values of a part at least: 256 KiB of float32."""


class EarlyGradients:
    """Watches the gradients of a flat module on the CPU.

    A parameter may get its gradient in several additions of one backward pass, as with reentrant
    activation checkpointing. The first pass only counts them: unless each has one, nothing is ever
    reported early.
    """

    def __init__(self, flat: FlatModule) -> None:
        self._vector = flat.grads.numpy()
        self._count = 0  # passes that were watched
        self._usable = True
        self._tell: Final | None = None
        self._watching = False
        self._seen: set[int] = set()
        self._twice = False
        self._bucket: Span = (0, 0)
        for index, (parameter, span) in enumerate(zip(flat.parameters, flat.spans(), strict=True)):
            hook = partial(self._added, index, span)
            parameter.register_post_accumulate_grad_hook(hook)

    @contextmanager
    def watching(self, tell: Final) -> Iterator[None]:
        """Report parts of the gradient during the last backward pass of a task.

        Raise `Changed` at its end if a part that was reported has changed since.
        """
        told = self._count > 0 and self._usable
        self._tell, self._watching = tell if told else None, True
        self._seen.clear()
        self._bucket = (0, 0)
        try:
            yield
        finally:
            self._tell, self._watching = None, False
        self._count += 1
        if self._twice and self._usable:
            self._usable = False
            logger.info("gradients are sent after the backward pass: it adds to some of them twice")
            if told:
                raise Changed

    def _added(self, index: int, span: Span, parameter: Tensor) -> None:
        if not self._watching:
            return
        self._twice |= index in self._seen
        self._seen.add(index)
        if self._tell is None:
            return
        start, stop = self._bucket
        # The pass goes from the last parameter to the first.
        self._bucket = (span[0], stop) if span[1] == start else span
        if self._bucket[1] - self._bucket[0] >= BUCKET:
            self._tell(self._vector, self._bucket)
            self._bucket = (0, 0)
