"""`session`: the user's own loop computes the gradients of a run that it has joined."""

from __future__ import annotations

import atexit
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.checks import check_seconds, check_whole
from paceline.core.logs import logger_of
from paceline.core.policy import Policy
from paceline.core.protocol import Prices
from paceline.data.shards import stream_of
from paceline.learners.flat import FlatModule
from paceline.learners.frozen import without_base
from paceline.learners.optimize import Rates, shapes_of, trained
from paceline.learners.optimizer_recipe import Pace, RemadeOptimizer, RemadeSchedules
from paceline.learners.transforms import ClipNorm
from paceline.policies.placement.base import Placement
from paceline.sessions.batches import Batches, Queue
from paceline.sessions.cluster import ensure_ray
from paceline.sessions.connection import Connection, join
from paceline.sessions.gradients import Gradients
from paceline.sessions.launchers import run_name, started_workers
from paceline.sessions.learner import Recipe
from paceline.sessions.options import Options, workers_given
from paceline.sessions.turns import RunEnded, Turn, Turns

if TYPE_CHECKING:
    from paceline.codecs.base import Codec
    from paceline.training.checkpoint import Checkpoints

logger = logger_of(__name__)


def session(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    run: str | None = None,
    policy: Policy | None = None,
    batch_size: int | None = None,
    workers: int | tuple[int, int] | None = None,
    scheduler: LRScheduler | None = None,
    clip_norm: float | None = None,
    micro_batch: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    seed: int | None = None,
    address: str | None = None,
    timeout: float | None = None,
    journal: Path | str | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    prices: Prices | None = None,
    placement: Placement | None = None,
    codec: Codec | None = None,
    model_codec: Codec | None = None,
    buffers: Collection[str] = (),
    allow_insecure: bool = False,
) -> Session:
    """Join a run with a model, and keep the training loop.

    Every process calls this with the same arguments. The first makes the run; each later one may
    join, leave and come back at any time. Paceline takes the steps with rules like those of the
    given optimizer, which itself takes none.

    run: the name of the run; by default PACELINE_RUN, which `paceline launch` sets, or "main".
    policy: decides between the processes; by default `sync()`.
    batch_size: the global batch, divided among all processes.
    workers: how many processes must join before training begins; or (least, most). By default the
        number that `paceline launch` or torchrun has started.
    scheduler: of the optimizer, advanced once for each step of the run. Do not call its `step`.
    clip_norm: clips the gradient of the whole batch to this norm.
    micro_batch: the most samples of a batch; `step` adds up the gradients of a task's batches.
    steps, epochs: when the run ends; without them it ends when all processes have left.
    address: of a Ray cluster; by default RAY_ADDRESS, which `paceline launch` sets.
    timeout: seconds a process may take for a task before another computes it.
    resume: whether a new run begins with the newest of `checkpoints`.
    Other arguments are those of `Trainer`.
    """
    if micro_batch is not None:
        check_whole("micro_batch", micro_batch)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    if timeout is not None:
        check_seconds("timeout", timeout)
    if placement is not None and placement.tiles is not None:
        raise ValueError(
            "a session's processes all have the same data, and Placed gives each its own shards; "
            "use BySpeed(), or Placed with pl.Trainer"
        )
    _check_live(model, optimizer, scheduler)
    options = Options(
        policy=policy,
        batch_size=batch_size,
        workers=workers_given(workers) or started_workers(),
        steps=steps,
        epochs=epochs,
        seed=seed,
        timeout=timeout,
        journal=None if journal is None else str(Path(journal).absolute()),
        checkpoints=checkpoints,
        resume=resume or None,
        prices=prices,
        placement=placement,
        codec=codec,
        model_codec=model_codec,
    )
    recipe = recipe_of(model, optimizer, scheduler, clip_norm, buffers)
    ensure_ray(address, allow_insecure)
    return Session(run or run_name(), model, optimizer, recipe, options, micro_batch)


def recipe_of(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    clip_norm: float | None,
    buffers: Collection[str],
) -> Recipe:
    """Return what the hub needs to take the steps that this optimizer would take."""
    parameters = [parameter for _, parameter in trained(model)]
    schedule = None
    if scheduler is not None:
        schedule = RemadeSchedules(optimizer, [Pace(scheduler, "step")], 1)
    clip = None if clip_norm is None else ClipNorm(clip_norm)
    return Recipe(
        without_base(model), RemadeOptimizer(optimizer, parameters), schedule, clip, buffers
    )


def _check_live(model: Any, optimizer: Any, scheduler: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model= is a {type(model).__name__}; give the nn.Module of your loop")
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if isinstance(model, DistributedDataParallel) or sharded:
        raise ValueError(
            "the model is shared by a group of processes (DDP or FSDP), and each process of a "
            "session is a worker of its own; use pl.local_steps(…, process_group=…), or give the "
            "plain module"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer= is a {type(optimizer).__name__}; give the torch.optim.Optimizer of your "
            "loop, made of the model's parameters"
        )
    if optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has taken steps already, and the run begins with a new "
            "state; join before its first step, or go on with a run by checkpoints= and resume=True"
        )
    if scheduler is not None and (
        not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau)
    ):
        raise ValueError(
            f"scheduler= is a {type(scheduler).__name__}; give a schedule of "
            "torch.optim.lr_scheduler that depends on steps alone"
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError("scheduler= belongs to another optimizer; make it of the one given")


class Session:
    """A process's part in a run; `session` makes it. Use it as a context manager, or `close` it.

    wasted: batches that were computed and not used: others were faster, or the guess was wrong.
    """

    def __init__(
        self,
        run: str,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        options: Options,
        micro_batch: int | None,
    ) -> None:
        self.run, self.model, self.wasted = run, model, 0
        self._optimizer, self._recipe, self._options = optimizer, recipe, options
        self._micro_batch = micro_batch
        shapes = shapes_of(recipe.model)
        self._rates = Rates(recipe.optimizer, recipe.scheduler, shapes)
        device = str(next(model.parameters()).device)
        self._flat = FlatModule(model, device, changing=recipe.buffers)
        self._gradients = Gradients(self._flat)
        self._turns: Turns | None = None
        self._connection: Connection | None = None
        self._queue: Queue | None = None
        self._turn: Turn | None = None
        self._ended: RunEnded | None = None
        self._lrs: list[Any] = [group["lr"] for group in optimizer.param_groups]
        optimizer.register_step_pre_hook(self._refuse_step)

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

    def batches(self, data: Any) -> Batches:
        """Join the run with these data; return the batch sampler for their DataLoader.

        Every process has all the data; the run decides who computes which samples.
        """
        if self._queue is not None:
            raise RuntimeError("session.batches() is called once; use its result for all epochs")
        if not hasattr(data, "__len__"):
            raise ValueError(
                f"{type(data).__name__} has no length; a session hands out samples by their index, "
                "so give a map-style dataset, or paceline.data.shards.Shards"
            )
        examples = len(data)
        self._connection, options = join(
            self.run, self._recipe, self._options, examples, self._rates.at
        )
        self._turns = self._connection.turns
        atexit.register(self.close)
        if options.batch_size is None:
            self.close()
            raise ValueError("no session has named the global batch; give batch_size=")
        stream = stream_of(data, options.seed or 0, options.batch_size)
        self._queue = Queue(examples, options.batch_size, self._micro_batch, stream)
        return Batches(self._queue, self._current, _seed)

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        count: Tensor | float | None = None,
        scaler: Any = None,
    ) -> None:
        """Give the gradient of a batch to the run; the weights are new when this returns.

        It stands in place of `optimizer.step()` and `optimizer.zero_grad()`.
        loss: the mean loss of the batch, for reports.
        count: the number of losses that this mean is over, such as the batch's tokens; by default
            its samples. The gradient is that of the mean, and a step that of the mean over all
            tokens of all processes. Give it in every process, or in none.
        scaler: the GradScaler that scaled the loss.
        """
        if self._queue is None:
            raise RuntimeError("session.step() comes after session.batches(data)")
        turn, piece = self._turn, self._queue.computed()
        if turn is None:  # the run has ended, and this batch was loaded before
            self._gradients.clear()
            return
        self._check_rates()
        finite = self._unscale(scaler)
        if piece is None or piece not in self._queue.due or turn.abandoned:
            self.wasted += 1
            self._gradients.zero()  # not what earlier batches of the turn have given
            if turn.abandoned:
                self._next()
            return
        self._queue.due.remove(piece)
        self._gradients.add(loss, count, len(piece.indices), turn.task.samples)
        if not self._queue.due:
            self._deliver(turn, finite)
            self._next()

    @property
    def ended(self) -> str:
        """Why the run ended; empty while it goes on."""
        return "" if self._ended is None else self._ended.reason

    @property
    def version(self) -> int:
        """The steps that the weights here have taken."""
        if self._ended is not None:
            return self._ended.step
        return 0 if self._turn is None else self._turn.task.version

    @property
    def worker(self) -> str | None:
        """The name of this process in the run: w0, w1, …"""
        return None if self._connection is None else self._connection.name

    def close(self) -> None:
        """Leave the run; others go on."""
        if self._connection is not None:
            self._connection.close()

    # --- turns -----------------------------------------------------------------------------------

    def _current(self) -> Turn | None:
        """Return the turn, and wait for the first; None if the run has ended."""
        if self._turn is None and self._ended is None:
            self._next()
        return self._turn

    def _next(self) -> None:
        """Wait for the next turn, and load its model."""
        assert self._turns is not None and self._queue is not None
        try:
            self._turn = self._turns.take()
        except RunEnded as end:
            self._turn, self._ended = None, end
            if end.model is not None:
                self._flat.load([end.model])
            self._gradients.clear()
            if end.failed:
                raise RuntimeError(f"run {self.run} has failed: {end.reason}") from None
            logger.info("run %s has ended: %s", self.run, end.reason)
            return
        turn = self._turn
        self._flat.load([turn.model])
        self._gradients.clear()
        self._queue.begin(turn)
        _seed(turn)
        settings = self._rates.groups(turn.task.version)
        for group, options in zip(self._optimizer.param_groups, settings, strict=True):
            group["lr"] = options["lr"]
        self._lrs = [group["lr"] for group in self._optimizer.param_groups]

    def _deliver(self, turn: Turn, finite: bool) -> None:
        """Give the turn's gradient to the worker; without one if it is not finite."""
        assert self._turns is not None
        vector, stats = self._gradients.whole() if finite else (None, {})
        samples = turn.task.samples if finite else 0
        if not self._turns.finish(turn, vector, samples, stats):
            self.wasted += 1

    # --- gradients -------------------------------------------------------------------------------

    def _unscale(self, scaler: Any) -> bool:
        """Undo a GradScaler; return whether all gradients are finite."""
        if scaler is None:
            return True
        scaler.unscale_(self._optimizer)
        found = scaler._found_inf_per_device(self._optimizer)
        finite = not any(value.item() for value in found.values())
        scaler.update()
        return finite

    # --- refusals --------------------------------------------------------------------------------

    def _refuse_step(self, *_: Any) -> None:
        raise RuntimeError(
            "optimizer.step() was called, and the run takes the steps; call session.step(loss) in "
            "its place, or pl.local_steps(…) to keep the optimizer's own steps"
        )

    def _check_rates(self) -> None:
        now = [group["lr"] for group in self._optimizer.param_groups]
        if now != self._lrs:
            raise RuntimeError(
                f"the learning rate was changed from {self._lrs[0]} to {now[0]} in the loop, and "
                "the run takes the steps; give session(scheduler=…), and do not call its step"
            )


def _seed(turn: Turn) -> None:
    """Seed random layers by the samples, so that any worker computes the same gradient."""
    torch.default_generator.manual_seed(turn.seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(turn.seed)
