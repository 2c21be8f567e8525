"""`local_steps`: the user's loop and optimizer run untouched; models meet every few hundred steps.

Each worker takes steps of its own. Every `every` steps it sends the change of its model, and the
run takes an outer step with the changes of k workers. With Nesterov momentum this is DiLoCo
(Douillard et al., 2023, arXiv 2311.08105). A worker may be a group of processes under torchrun.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.checks import check_whole
from paceline.core.logs import logger_of
from paceline.core.protocol import Prices, Work
from paceline.learners.base import Array
from paceline.learners.flat import FlatModule
from paceline.learners.optimize import MakeOptimizer, Rates, shapes_of
from paceline.policies.gather import Gather
from paceline.sessions.cluster import ensure_ray
from paceline.sessions.connection import Connection, join
from paceline.sessions.groups import Group, trained_names
from paceline.sessions.launchers import run_name, started_workers
from paceline.sessions.learner import Recipe
from paceline.sessions.options import Options, workers_given
from paceline.sessions.turns import RunEnded, Turn, Turns

if TYPE_CHECKING:
    from paceline.codecs.base import Codec
    from paceline.training.checkpoint import Checkpoints

logger = logger_of(__name__)

NESTEROV: MakeOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of DiLoCo."""


def local_steps(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    every: int = 500,
    outer: MakeOptimizer = NESTEROV,
    k: int | None = None,
    max_staleness: int = 0,
    overlap: bool = False,
    run: str | None = None,
    workers: int | tuple[int, int] | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    address: str | None = None,
    timeout: float | None = None,
    journal: Path | str | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    prices: Prices | None = None,
    codec: Codec | None = None,
    model_codec: Codec | None = None,
    process_group: Any = None,
    allow_insecure: bool = False,
) -> LocalSteps:
    """Join a run whose workers train by themselves, and meet every `every` steps.

    The loop, the optimizer, its state and the data stay the user's own. The optimizer's steps are
    counted. After every `every` of them, `optimizer.step()` returns with the run's newest model.

    outer: makes the optimizer of the outer step from parameters.
    k: changes that an outer step needs; by default those of all workers.
    max_staleness: outer steps by which a change may be late and still count.
    overlap: go on with the next steps while changes travel. The outer step then arrives late, and
        the steps taken meanwhile are added to it.
    rounds: outer steps after which the run ends; without it, when all workers have left.
    process_group: the torch.distributed group of several processes that are one worker, with DDP
        or FSDP2 inside. Every process of the group calls this.
    timeout: seconds a worker may take for its steps before it counts as lost; 3600 by default.
    Other arguments are those of `session`.
    """
    check_whole("every", every)
    check_whole("max_staleness", max_staleness, 0)
    work = Work(samples=1, steps=every)
    policy = Gather(k, max_staleness=max_staleness, preempt=not max_staleness, work=work)
    options = Options(
        policy=policy,
        batch_size=1,
        workers=workers_given(workers) or started_workers(process_group),
        steps=rounds,
        seed=seed,
        timeout=3600.0 if timeout is None else timeout,
        journal=None if journal is None else str(Path(journal).absolute()),
        checkpoints=checkpoints,
        resume=resume or None,
        prices=prices,
        codec=codec,
        model_codec=model_codec,
    )
    group = Group(process_group)
    if group.leads:
        ensure_ray(address, allow_insecure)
    made = LocalSteps(run or run_name(), model, options, outer, every, overlap, group)
    optimizer.register_step_post_hook(made.count)
    return made


class LocalSteps:
    """A worker of a run with local steps; `local_steps` makes it.

    rounds: outer steps that this worker has taken part in.
    wasted: steps whose change was not used: others were faster.
    """

    def __init__(
        self,
        run: str,
        model: nn.Module,
        options: Options,
        outer: MakeOptimizer,
        every: int,
        overlap: bool,
        group: Group,
    ) -> None:
        self.run, self.model, self.rounds, self.wasted = run, model, 0, 0
        self._every, self._overlap, self._group = every, overlap, group
        self._taken = self._version = 0  # steps of this round; outer steps of the model here
        self._loss: Tensor | float | None = None
        self._turn: Turn | None = None
        self._ended: RunEnded | None = None
        self._sent: Array | None = None  # the model whose change is under way
        self._start: Array = np.zeros(0, np.float32)  # the model at which the round began
        self._turns: Turns | None = None
        self._connection: Connection | None = None
        state = group.state(model)
        if group.leads:
            tree = tree_of(state, trained_names(model))
            self._flat = FlatModule(tree)
            recipe = Recipe(tree_of(state, set(shapes_of(tree))), outer, outer=outer)
            rate = Rates(outer, None, shapes_of(tree)).at
            self._connection, options = join(run, recipe, options, 1, rate)
            self._turns = self._connection.turns
            atexit.register(self.close)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- for the loop ----------------------------------------------------------------------------

    def report(self, loss: Tensor | float) -> None:
        """Tell the loss of a step, for reports; the last one of a round is sent."""
        self._loss = loss

    def count(self, *_: Any) -> None:
        """Count a step of the optimizer, and exchange the model if it is time."""
        if self._ended is not None:
            return
        self._taken += 1
        if self._sent is not None and self._arrived():
            self._merge()
        elif self._group.is_single and self._turn is not None and self._turn.abandoned:
            self.wasted += self._taken  # nobody waits for this round any more
            self._begin()
        if self._taken < self._every or self._ended is not None:
            return
        if self._sent is not None:  # the last round is still under way: wait for it
            self._merge()
            if self._ended is not None:
                return
        self._exchange()

    @property
    def ended(self) -> str:
        """Why the run ended; empty while it goes on."""
        return "" if self._ended is None else self._ended.reason

    @property
    def version(self) -> int:
        """The outer steps that the model here contains."""
        return self._version

    @property
    def worker(self) -> str | None:
        """The name of this worker in the run: w0, w1, …; None in other processes of a group."""
        return None if self._connection is None else self._connection.name

    def close(self) -> None:
        """Leave the run; others go on."""
        if self._connection is not None:
            self._connection.close()

    # --- rounds ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take the next turn, and load its model."""
        model = self._take()
        if model is not None:
            self._put(model)
            self._start, self._taken = model, 0

    def _exchange(self) -> None:
        """Send the change of the model; without overlap, wait for the outer step."""
        now = self._now()
        self._finish(now)
        self.rounds += 1
        if self._overlap:
            self._sent, self._taken = now, 0
        else:
            self._begin()

    def _merge(self) -> None:
        """Add the steps taken since the model was sent to the outer step that has arrived."""
        model, sent, self._sent = self._take(), self._sent, None
        assert sent is not None
        if model is None:
            return
        now, self._start = self._now(), model
        if self._group.leads:
            trained = self._flat.trainable
            merged = model.copy()
            merged[:trained] += now[:trained] - sent[:trained]
            model = merged
        self._put(model)

    def _arrived(self) -> bool:
        """Return whether the next turn is there; a group decides together."""
        here = self._turns is not None and self._turns.ready
        return bool(self._group.share(here))

    def _take(self) -> Array | None:
        """Return the model of the next turn; None if the run has ended."""
        end: RunEnded | None = None
        model: Array | None = None
        if self._turns is not None:
            try:
                self._turn = self._turns.take()
                model = self._turn.model
            except RunEnded as found:
                end, model = found, found.model
        version = self._turn.task.version if self._turn is not None else 0
        ended = end and end.reason, end is not None and end.failed, end.step if end else version
        reason, failed, version = self._group.share(ended)
        if reason is None:
            self._version = version
            return model if self._group.leads else np.zeros(0, np.float32)
        self._ended, self._turn = end or RunEnded(reason, failed, None), None
        if failed:
            raise RuntimeError(f"run {self.run} has failed: {reason}")
        logger.info("run %s has ended: %s", self.run, reason)
        if self._group.share(model is not None):
            self._put(np.zeros(0, np.float32) if model is None else model)
            self._version = version
        return None

    def _finish(self, now: Array) -> None:
        """Give the change of the model to the run."""
        if self._turns is None or self._turn is None:
            return
        change = self._start - now
        trained = self._flat.trainable
        np.negative(change[trained:], out=change[trained:])  # buffers: what to add
        loss, self._loss = self._loss, None
        value = loss.detach().item() if isinstance(loss, Tensor) else loss
        stats = {} if value is None else {"loss": float(value)}
        if not self._turns.finish(self._turn, change, self._every, stats):
            self.wasted += self._every

    # --- the model -------------------------------------------------------------------------------

    def _now(self) -> Array:
        """Return the model of the loop as it is sent; empty in a process that does not send."""
        state = self._group.state(self.model)
        if not self._group.leads:
            return np.zeros(0, np.float32)
        self._flat.module.load_state_dict(state)
        self._flat.pull(self._flat.module)
        return self._flat.values.numpy().copy()

    def _put(self, vector: Array) -> None:
        """Load a model into that of the loop, in all processes of the group."""
        state: Mapping[str, Tensor] = {}
        if self._group.leads:
            self._flat.load([vector])
            state = self._flat.module.state_dict()
        self._group.load(self.model, state)


class Tree(nn.Module):
    """A module that has tensors and no forward pass."""


def tree_of(state: Mapping[str, Tensor], trained: set[str]) -> nn.Module:
    """Return a module with the tensors of a `state_dict`, under the same names."""
    root = Tree()
    for name, tensor in state.items():
        *path, leaf = name.split(".")
        place: nn.Module = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, Tree())
            place = place.get_submodule(part)
        value = tensor.detach().clone()
        if name in trained:
            place.register_parameter(leaf, nn.Parameter(value))
        else:
            place.register_buffer(leaf, value)
    return root
