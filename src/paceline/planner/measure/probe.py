"""Makes a profile: from a short run that measures, or from the journals of any runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paceline.core.coordinator import Coordinator, drive, run
from paceline.core.journal import Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Joined,
    Prices,
    Start,
    Stop,
    Task,
    TaskId,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.core.state import describe
from paceline.delays.fit import fit_workers, observe
from paceline.delays.links import Link
from paceline.delays.models import Fixed
from paceline.delays.observe import blocks
from paceline.engines.base import Job, TrainingEngine
from paceline.learners.arrays import Quadratic, TimingOnly
from paceline.learners.base import Array, Learner
from paceline.planner.measure.budget import Budget, OnProgress
from paceline.planner.measure.curvature import Curvature, NoCurvature, Spectrum, measure_curvature
from paceline.planner.measure.gradient_spectrum import gradient_spectrum
from paceline.planner.measure.profile import (
    SGD,
    Profile,
    Surface,
    WorkerProfile,
    keeps_momentum,
)
from paceline.planner.measure.stale_training import StaleTraining, compared, diverged, smoothed
from paceline.policies.named import rennala, ringmaster
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec
    from paceline.learners.optimize import Shapes


LONGEST = 5
"""Limit of a measurement, in multiples of its seconds, for workers without a first result."""
EDGE = 1.98
"""Multiple of 1 / rate up to which curvature grows in training (the edge of stability is at 2)."""
SCHEDULED = 0, 100, 1000
"""Steps whose largest learning rate stands for that of a schedule."""
LOCAL, PARTS = Work(steps=2), Work(parts={0: 1.0})  # work that not all learners support


@dataclass
class Probe(Policy):
    """Gives each worker a number of tasks, and discards all results: the model does not change.

    seconds: time limit from the moment when all workers have had a first result, which may take
        long because it includes loading.
    """

    samples: int
    tasks: int
    seconds: float
    _given: dict[WorkerId, int] = field(default_factory=dict, init=False)
    _warm: set[WorkerId] = field(default_factory=set, init=False)
    _began: float = field(default=inf, init=False)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        self._warm |= {result.task.worker for result in view.held.values()}
        if self._began == inf and self._warm >= set(view.workers):
            self._began = view.now
        for id in list(view.held):
            yield Discard(id)
        if view.now >= self._began + self.seconds:
            yield Stop(f"{self.seconds:g} seconds")
            return
        for worker in list(view.idle):
            given = self._given.get(worker, 0)
            if given < self.tasks:
                self._given[worker] = given + 1
                yield Assign(worker, Work(samples=self.samples))
        if not view.running:
            yield Stop(f"{self.tasks} tasks each")


def profile(
    learner: Learner,
    engine: TrainingEngine,
    *,
    seconds: float = 30.0,
    tasks: int = 60,
    prices: Prices | None = None,
    floor: float = 0.0,
    sizes: bool = True,
    warm: int = 100,
    seed: int = 0,
    loss_seconds: float = 120.0,
    on_progress: OnProgress | None = None,
) -> Profile:
    """Measure an engine's workers and a learner's loss, for `pl.plan`.

    Each worker computes shares of 1/n of the batch at its own speed; the time of more samples is
    assumed to grow in proportion. The learner itself does not change. With an optimizer other than
    SGD the curvature is not measured, since it does not tell the steps to a target.

    seconds: on the engine's clock, from the first results of all workers on; `sizes` adds a third.
    tasks: limit of tasks of each worker.
    floor: the loss of the best model.
    sizes: whether to send encoded messages as well, which separates latency from bandwidth.
    warm: steps of training, for at most `seconds` seconds, before loss and curvature are measured
        again: in most nets the curvature grows severalfold. As many steps with stale gradients
        tell what these cost. 0 skips the training.
    loss_seconds: wall-clock seconds for measuring the loss and its curvature, and half as many
        again for each training. On slow models fewer samples are used; if even that takes
        longer, the profile has no curvature, and its notes say so.
    on_progress: called with the name of the measurement, and the share of it that is done.
    """
    if not seconds > 0 or tasks < 1:
        raise ValueError(f"seconds={seconds}, tasks={tasks}: use seconds > 0 and tasks >= 1")
    if not loss_seconds > 0:
        raise ValueError(f"loss_seconds={loss_seconds}: use a number > 0")
    engine.fleet.check_fixed("a profile")
    prices = engine.fleet.prices() if prices is None else prices
    told = on_progress or (lambda what, share: None)
    with contextlib.ExitStack() as stack:
        if hasattr(engine, "__enter__"):  # it then keeps its processes between runs
            stack.enter_context(cast("contextlib.AbstractContextManager[Any]", engine))
        told("workers", 0.0)
        journals = [_probe(learner, engine, seconds, tasks, seed, prices, None, None)]
        if sizes and learner.message_bytes and not isinstance(learner, TimingOnly):
            from paceline.codecs.quantize import Int8

            more = seconds / 6, max(tasks // 3, 2)
            for number, down in enumerate((None, Int8()), 1):
                told("messages of other sizes", (number - 1) / 2)
                journals.append(
                    _probe(learner, engine, *more, seed + number, prices, Int8(), down)
                )  # fmt: skip
        # On other engines cancelled work ends between micro-batches, if there are any.
        ends = getattr(
            engine, "interruptible", isinstance(getattr(learner, "micro_batch", None), int)
        )
        found = replace(profile_of(*journals, skip=1 if tasks > 1 else 0), interruptible=ends)
        found = replace(
            found,
            local_steps=_can(learner, LOCAL),
            codes=_can(learner, PARTS),
            optimizer=optimizer_of(learner),
        )
        if isinstance(learner, TimingOnly):
            return found
        surface = None
        if is_sgd(learner):
            try:
                surface = measure_loss_surface(
                    learner, floor=floor, seconds=0.75 * loss_seconds, on_progress=told
                )  # fmt: skip
            except NoCurvature as error:
                found = replace(found, notes=(*found.notes, f"without curvature: {error}"))
            found = replace(found, surface=surface)
        if not warm or (surface is not None and surface.plain):
            return found
        training = _Training(learner, engine, seconds, seed, loss_seconds / 2, told)
        later, losses, _ = training.run("training", rennala(engine.size), warm)
        found = replace(found, stale_training=_stale(found, training, losses))
    if surface is None:
        return found
    return _with_training(found, learner, surface, later, losses, loss_seconds / 4, told)


def _stale(
    found: Profile, training: _Training, fresh: Sequence[float]
) -> StaleTraining | None:  # fmt: skip
    """Train as many steps with stale gradients; None if there is nothing to compare."""
    learner, steps = training.learner, len(fresh)
    if found.size < 2 or not steps or not np.isfinite(fresh).all():
        return None
    try:  # a schedule may begin lower
        rates = [learner.rate(version) for version in range(steps)]
        lr = sgd_equivalent_lr(learner) * sum(rates) / steps / max(map(learner.rate, SCHEDULED))
    except ValueError:  # another optimizer, whose rate is not changed, or a rate of 0
        lr = float((found.optimizer or {}).get("lr", 0.0))
    if not lr > 0:
        return None
    # Without a bound, the results of the slowest workers alone may diverge.
    policy, what = ringmaster(found.size), "training with stale gradients"
    # The first results of all workers report the loss of the first model.
    _, stale, ages = training.run(what, policy, steps + found.size, bounded=True)
    return compared(lr, fresh, stale, ages)


def _with_training(
    found: Profile,
    learner: Learner,
    surface: Surface,
    later: Array,
    losses: Sequence[float],
    seconds: float,
    told: OnProgress,
) -> Profile:
    """Add to the profile the losses of some training steps, and the curvature after them."""
    what = "curvature after training"
    told(what, 0.0)
    try:
        budget = Budget(seconds, partial(told, what))
        then = measure_curvature(learner, at=later, samples=256, steps=12, budget=budget)
    except NoCurvature as error:
        note = f"the curvature is known at the first model only: {error}"
        if not np.isfinite(later).all() or not np.isfinite(losses).all():
            note = (
                f"with a learning rate of {learner.rate(0):g} training diverges within "
                f"{len(losses)} steps, so that the curvature is known at the first model only; "
                "profile again with the plan's learning rate"
            )
        return replace(found, surface=surface, notes=(*found.notes, note))
    surface = replace(surface, sharpest=then.top)
    with contextlib.suppress(ValueError):  # raised for a schedule whose rate is 0
        rate = sgd_equivalent_lr(learner)
        curve = (*smoothed(losses), (len(losses), then.loss))
        surface = replace(surface, trained=(rate, curve))
        if then.loss < surface.loss:  # the loss fell, so this is not too sharp
            surface = replace(surface, sharpest=min(then.top, EDGE / rate))
    return replace(found, surface=surface)


def _can(learner: Learner, work: Work) -> bool:
    try:
        learner.check(work)
    except ValueError:  # such as local steps without an outer optimizer
        return False
    return True


@dataclass(frozen=True)
class _Training:
    """Some steps of training from the first model, on a copy of the learner.

    seconds: limit on the engine's clock.
    limit: of wall-clock seconds.
    """

    learner: Learner
    engine: TrainingEngine
    seconds: float
    seed: int
    limit: float
    on_progress: OnProgress

    def run(
        self, what: str, policy: Policy, steps: int, bounded: bool = False
    ) -> tuple[Array, list[float], list[float]]:
        """Return the model after the steps, and the loss and the staleness that each reports.

        bounded: whether it ends early if the loss diverges.
        """
        self.on_progress(what, 0.0)
        learner, engine = self.learner, self.engine
        budget = Budget(self.limit, partial(self.on_progress, what))
        policy = Until(MinWorkers(engine.size, policy), steps, self.seconds)
        header = Header("", learner.batch_size)
        coordinator = Coordinator(policy, learner.batch_size, Journal(header, keep=False))
        server, meter = learner.server(), Meter.begin(header)
        wants, size = frozenset[Want]({"loss"}), engine.size
        engine.open(
            Job(learner=learner, server=server, wants=wants, seed=self.seed, min_workers=size)
        )
        losses = meter.columns["loss"]
        try:
            for _, entry in drive({MAIN: coordinator}, engine):
                meter.observe(entry)
                budget.report(len(losses) / steps)
                if losses and (budget.is_over or (bounded and diverged(losses[-1], losses[0]))):
                    break
            engine.settle()
        finally:
            engine.close()
        return np.array(server.vector), list(losses), list(meter.columns["staleness"])


def _probe(
    learner: Learner,
    engine: TrainingEngine,
    seconds: float,
    tasks: int,
    seed: int,
    prices: Prices,
    codec: Codec | None,
    down: Codec | None,
) -> Journal:
    share = max(round(learner.batch_size / engine.size), 1)
    policy = Until(MinWorkers(engine.size, Probe(share, tasks, seconds)), seconds=LONGEST * seconds)
    header = Header("Probe()", learner.batch_size, None, None, learner.message_bytes, prices)
    coordinator = Coordinator(policy, learner.batch_size, Journal(header))
    job = Job(
        learner=learner,
        server=learner.server(),
        seed=seed,
        min_workers=engine.size,
        codec=codec,
        model_codec=down,
    )
    engine.open(job)
    try:
        run({MAIN: coordinator}, engine)
    finally:
        engine.close()
    return coordinator.journal


def optimizer_of(learner: Learner) -> dict[str, Any] | None:
    """Return the name and the settings of a learner's optimizer, and of its outer one if any.

    None for a learner without an optimizer of its own, such as `Quadratic`, which takes SGD steps.
    """
    inner, outer = getattr(learner, "optimizer", None), getattr(learner, "outer", None)
    if inner is None:
        return None
    from paceline.learners.optimize import settings_of

    shapes: Shapes = learner.shapes  # type: ignore[attr-defined]
    found = settings_of(inner, shapes)
    if outer is None:
        return found
    kept = {"kept": True} if getattr(learner, "keeps_inner_state", False) else {}
    return {**found, **kept, "outer": settings_of(outer, shapes)}


def is_sgd(learner: Learner) -> bool:
    """Return whether a learner steps by SGD, with momentum or without, also at the outer step.

    A momentum that workers keep between tasks is another optimizer.
    """
    found = optimizer_of(learner) or {}
    return not keeps_momentum(found) and all(
        each.get("name", SGD) == SGD for each in (found, found.get("outer", {}))
    )


def sgd_equivalent_lr(learner: Learner) -> float:
    """Return the learning rate of plain SGD that moves as far as the optimizer in the long run.

    It is the largest learning rate of the schedule at the steps 0, 100 and 1000, divided by 1 - β
    if there is momentum. With an outer optimizer it is the product of both learning rates.
    """
    rate = max(map(learner.rate, SCHEDULED))
    outer, inner = getattr(learner, "outer", None), getattr(learner, "optimizer", None)
    for make in (outer, inner):
        if make is None:
            continue
        from paceline.learners.optimize import Rates, settings_of

        shapes: Shapes = learner.shapes  # type: ignore[attr-defined]
        schedule = getattr(learner, "inner_scheduler", None) if make is inner else None
        rates, group = Rates(make, schedule, shapes), settings_of(make, shapes)
        if group["name"] != SGD:
            raise ValueError(
                "forecasts are for SGD only, with or without momentum, and the learning rate of "
                f"{describe(make)} means something else; compare short runs instead"
            )
        # The server keeps its momentum; workers restart theirs with each task.
        rate /= 1 - group.get("momentum", 0.0) if make is outer or outer is None else 1.0
        rate *= max(map(rates.at, SCHEDULED)) if outer is not None and make is inner else 1.0
    if not rate > 0:
        raise ValueError(
            "the learning rate is 0 at the steps 0, 100 and 1000, so nothing can be planned; "
            "give the learning rate of most steps to pl.plan(…, learning_rate=…)"
        )
    return rate


def measure_loss_surface(
    learner: Learner,
    curvature: Curvature | None = None,
    floor: float = 0.0,
    *,
    seconds: float = inf,
    on_progress: OnProgress | None = None,
) -> Surface:
    """Return the surface of a learner's loss; measure its curvature unless it is given.

    floor: the loss of the best model, which cannot be measured at the first model.
    seconds: limit of wall-clock time; raises `NoCurvature` if it is too short.
    on_progress: called with the name of the measurement, and the share of it that is done.
    """
    told = on_progress or (lambda what, share: None)
    if curvature is None:
        told("curvature", 0.0)
        curvature = measure_curvature(
            learner, budget=Budget(2 / 3 * seconds, partial(told, "curvature"))
        )  # fmt: skip
    plain, pull = isinstance(learner, Quadratic), cast("Spectrum", ())
    if not plain and curvature.gradient_norm:
        what = "where the gradient points"
        told(what, 0.0)
        with contextlib.suppress(NoCurvature):  # no time left: continue without it
            pull = gradient_spectrum(learner, budget=Budget(seconds / 3, partial(told, what)))
    figures = curvature.loss, curvature.gradient_norm, curvature.noise, curvature.spectrum
    return Surface(*figures, curvature.parameters, floor, pull, plain)


def profile_of(
    *journals: Journal,
    learner: Learner | None = None,
    curvature: Curvature | None = None,
    floor: float = 0.0,
    skip: int | None = None,
) -> Profile:
    """Return a profile from journals of the same workers, under any policy.

    learner: its loss is measured; `curvature`: use this measurement instead.
    floor: the loss of the best model.
    skip: tasks to leave out each time a worker has joined; see `fit_workers`.
    """
    if not journals:
        raise ValueError("profile_of got no journal; give at least one, such as run.journal")
    header = journals[-1].header
    fits = fit_workers(*journals, skip=skip)
    joined = {e.event.worker for each in journals for e in each if isinstance(e.event, Joined)}
    names = sorted({*fits, *joined}, key=lambda name: (len(name), name))
    if not any(found.compute for found in fits.values()):
        raise ValueError("no worker has finished a task in these journals; measure for longer")
    seen = [(name, task) for each in journals for name, ts in observe(each).items() for task in ts]
    workers: dict[WorkerId, WorkerProfile] = {}
    notes = []
    for name in names:
        fit = fits.get(name)
        if fit is None or (compute := fit.compute) is None or fit.communication is None:
            waited = [task.response / task.samples for worker, task in seen if worker == name]
            if not waited:
                raise ValueError(
                    f"{name} never had a task in these journals, so that nothing is known of its "
                    "speed; profile it, or plan without it"
                )
            # A lower bound suffices: any plan leaves out a worker this slow.
            workers[name] = WorkerProfile(Fixed(sum(waited)))
            notes.append(f"{name} never finished a task, and is taken to need {sum(waited):.3g} s "
                         "for a sample; profile for longer to know")  # fmt: skip
            continue
        way = fit.communication
        link = Link(way.latency, way.down, way.up)
        workers[name] = WorkerProfile(
            compute.bounded, link, compute.observations, compute.autocorrelation
        )
        if compute.note:
            notes.append(f"{name}: {compute.note}")
    sizes = {(task.got, task.sent) for _, task in seen}
    if len(sizes) == 1 and header.message_bytes and any(w.link.latency for w in workers.values()):
        notes.append(
            "all messages were of one size, so that latency and bandwidth are not told apart, and "
            "codecs seem to save no time; pl.profile() sends messages of several sizes"
        )
    if any(task.work.overlap for each in journals for task in _started(each)):
        notes.append(
            "messages that traveled during local steps (overlap=True) were not measured, so links "
            "seem faster than they are; pl.profile() measures them"
        )
    surface = None
    if curvature is not None or (learner is not None and is_sgd(learner)):
        surface = _surface(learner, curvature, floor)
    return Profile(
        workers,
        header.batch,
        header.message_bytes,
        header.prices,
        surface,
        tuple(notes),
        interruptible=not blocks([task for _, task in seen]) and not any(map(_goes_on, journals)),
        local_steps=learner is None or _can(learner, LOCAL),
        codes=learner is None or _can(learner, PARTS),
        optimizer=None if learner is None else optimizer_of(learner),
    )


def _started(journal: Journal) -> Iterator[Task]:
    """Yield the tasks of a journal."""
    for entry in journal:
        yield from (command.task for command in entry.commands if isinstance(command, Start))


def _goes_on(journal: Journal) -> bool:
    """Return whether a worker completed a task after it was cancelled."""
    tasks: dict[TaskId, Task] = {}
    given_up: set[TaskId] = set()
    for entry in journal:
        event = entry.event
        late = isinstance(event, Finished) and event.task in given_up
        if late and event.samples >= tasks[event.task].computed:  # type: ignore[union-attr]
            return True
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
            elif isinstance(command, Cancel) and command.task in tasks:
                given_up.add(command.task)
    return False


def _surface(learner: Learner | None, curvature: Curvature | None, floor: float) -> Surface:
    if learner is not None:
        return measure_loss_surface(learner, curvature, floor)
    assert curvature is not None
    figures = curvature.loss, curvature.gradient_norm, curvature.noise, curvature.spectrum
    return Surface(*figures, curvature.parameters, floor)
