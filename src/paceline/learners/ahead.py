"""The start of local steps, which may come before the model of their task has arrived.

With `Work.overlap` a worker goes on from its own model, where its last task ended. When the model
of the task arrives, the steps taken meanwhile are added to it:

    model + (own now - own at the start)

Follows CoCoD-SGD (Shen et al., 2019, arXiv 1906.12043). There the outer step is a plain average,
and the model arrives at the end of the round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.protocol import Task, WorkerId
from paceline.learners.flat import FlatModule
from paceline.learners.memory import Loading


class Ends:
    """The models at which the last tasks of workers ended; a simulator has several workers.

    Only tasks with `Work.overlap` are remembered: each takes the memory of a model.
    """

    def __init__(self, flat: FlatModule) -> None:
        self._flat = flat
        self._last: dict[WorkerId, tuple[int, Tensor]] = {}  # the task's version, and the model

    def remember(self, task: Task, samples: int) -> None:
        """Keep the model at which a whole task ended; the change of its buffers is in `grads`."""
        if task.work.overlap and samples == task.computed:
            end = self._flat.values.clone()
            end[self._flat.trainable :] += self._flat.grads[self._flat.trainable :]
            self._last[task.worker] = task.version, end

    def before(self, task: Task) -> Tensor | None:
        """Return the model from which a task may begin: its worker was in the round before."""
        version, end = self._last.get(task.worker, (-1, None))
        return end if task.work.overlap and version == task.version - 1 else None

    def forget(self, worker: WorkerId) -> None:
        self._last.pop(worker, None)


class EarlyStart:
    """Loads the model of a task, or the worker's own if that of the task has yet to arrive.

    model: the trained parameters that were loaded; from `complete` on, those of the task's model.
    """

    def __init__(self, flat: FlatModule, load: Loading, own: Tensor | None) -> None:
        self._flat, self._load = flat, load
        self._own = None if load.can_begin(0) else own
        if self._own is None:
            load()
        else:
            flat.values.copy_(self._own)
            flat.reset()
        self.model = self._parameters.clone()

    @property
    def _parameters(self) -> Tensor:
        return self._flat.values[: self._flat.trainable]

    def go_on(self, done: int) -> None:
        """Put the model in place if it has arrived; done: samples of the task that are computed."""
        if self._own is None:
            return
        if self._flat.values.is_cuda:  # otherwise all steps are launched before the first is done
            torch.cuda.synchronize()
        if self._load.can_begin(done):
            self.complete()

    @torch.no_grad()
    def complete(self) -> None:
        """Put the model in place; wait for it if necessary, as long as the engine does."""
        if self._own is None:
            return
        self._own, trained = None, self._flat.trainable
        moved = torch.sub(self._parameters, self.model)
        self._flat.buffer_change()
        buffers = self._flat.grads[trained:].clone()
        self._load()
        self.model = self._parameters.clone()
        self._parameters.add_(moved)
        self._flat.add_to_buffers(buffers)
