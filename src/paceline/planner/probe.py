"""From runs to a profile: from a short one that measures, or from the journal of any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.coordinator import Coordinator, drive, run
from paceline.core.journal import Header, Journal
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
from paceline.delays.models import Fixed
from paceline.delays.observe import blocks
from paceline.engines.base import Job, TrainingEngine
from paceline.engines.simulator import Link
from paceline.learners.arrays import Quadratic, Timing
from paceline.learners.base import Array, Learner
from paceline.planner.curvature import Curvature, measure_curvature
from paceline.planner.profile import Profile, Surface, WorkerProfile
from paceline.planner.pull import gradient_spectrum
from paceline.policies.named import rennala
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


LONGEST = 5
"""Times the seconds of a measurement: who has no result by then is not waited for."""
EDGE = 1.98
"""Times 1 / rate: as sharp as nets become in training (the edge of stability is at 2)."""
LOCAL, PARTS = Work(steps=2), Work(parts={0: 1.0})  # which not all learners can do


@dataclass
class Probe:
    """Gives everyone so many tasks, and throws all results away: nothing is learned.

    seconds: after everybody's first result, which may take long: something is loaded for it.
    """

    samples: int
    tasks: int
    seconds: float
    wants: frozenset[Want] = frozenset()
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
) -> Profile:
    """Measure an engine's workers and a learner's loss, for `pl.plan`.

    Workers compute shares of 1/n of the batch, each at its own pace; more samples are taken to
    last longer in proportion. The learner itself stays as it is.

    seconds: on the engine's clock, from everybody's first result on; a third as long again with
        `sizes`.
    tasks: of each worker, after which it has done enough.
    floor: the loss of the best model.
    sizes: whether to send encoded messages as well, by which latency and bandwidth are told apart.
    warm: steps of training for as many seconds at most, after which loss and curvature are
        measured again: in most nets that has grown severalfold. 0 spares it.
    """
    if not seconds > 0 or tasks < 1:
        raise ValueError(f"seconds={seconds}, tasks={tasks}: measure for some time, and some tasks")
    journals = [_probe(learner, engine, seconds, tasks, seed, prices, None, None)]
    if sizes and learner.message_bytes and not isinstance(learner, Timing):
        from paceline.codecs.quantize import Int8

        more = seconds / 6, max(tasks // 3, 2)
        for number, down in enumerate((None, Int8()), 1):
            journals.append(
                _probe(learner, engine, *more, seed + number, prices, Int8(), down)
            )  # fmt: skip
    # Elsewhere abandoned work ends between micro-batches, if there are any.
    ends = getattr(engine, "interruptible", getattr(learner, "micro_batch", None) is not None)
    found = replace(profile_of(*journals, skip=1 if tasks > 1 else 0), interruptible=ends)
    found = replace(found, local_steps=_can(learner, LOCAL), codes=_can(learner, PARTS))
    if isinstance(learner, Timing):
        return found
    surface = surface_of(learner, floor=floor)
    if warm and not surface.plain:
        later, losses = _trained(learner, engine, seconds, warm, seed)
        try:
            then = measure_curvature(learner, at=later, samples=256, steps=12)
        except ValueError:  # it is no longer finite
            note = (
                f"with a learning rate of {learner.rate(0):g} training diverges within {warm} "
                "steps, so that the curvature is known at the first model only; profile again "
                "with the plan's rate"
            )
            found = replace(found, notes=(*found.notes, note))
        else:
            surface = replace(surface, sharpest=then.top)
            with contextlib.suppress(ValueError):  # of optimizers of which the rate says little
                rate = plain_rate(learner)
                curve = (*_thinned(losses), (len(losses), then.loss))
                surface = replace(surface, trained=(rate, curve))
                if then.loss < surface.loss:  # what it has borne so far is not too sharp
                    surface = replace(surface, sharpest=min(then.top, EDGE / rate))
    return replace(found, surface=surface)


def _can(learner: Learner, work: Work) -> bool:
    try:
        learner.check(work)
    except ValueError:  # as of local steps without an outer optimizer
        return False
    return True


def _trained(
    learner: Learner, engine: TrainingEngine, seconds: float, steps: int, seed: int
) -> tuple[Array, list[float]]:
    """Return a model after some steps, of whoever is quick, and the loss of each before it."""
    policy = Until(MinWorkers(engine.size, rennala(engine.size)), steps, seconds)
    header = Header("", learner.batch_size)
    coordinator = Coordinator(policy, learner.batch_size, Journal(header, keep=False))
    server, meter = learner.server(), Meter.begin(header)
    job = Job(learner, server, frozenset({"loss"}), seed, min_workers=engine.size)
    engine.open(job)
    try:
        for _, entry in drive({MAIN: coordinator}, engine):
            meter.observe(entry)
        engine.settle()
    finally:
        engine.close()
    return np.array(server.vector), list(meter.columns["loss"])


def _thinned(losses: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield numbers of steps, each a quarter more, with the mean loss around there."""
    steps = 2
    while steps < len(losses) - 1:
        near = losses[max(round(0.8 * steps), 1) : round(1.2 * steps) + 1]
        yield steps, sum(near) / len(near)
        steps = max(steps + 1, round(1.25 * steps))


def _probe(
    learner: Learner,
    engine: TrainingEngine,
    seconds: float,
    tasks: int,
    seed: int,
    prices: Prices | None,
    codec: Codec | None,
    down: Codec | None,
) -> Journal:
    share = max(round(learner.batch_size / engine.size), 1)
    policy = Until(MinWorkers(engine.size, Probe(share, tasks, seconds)), seconds=LONGEST * seconds)
    header = Header(
        "Probe()", learner.batch_size, None, None, learner.message_bytes, prices or Prices()
    )
    coordinator = Coordinator(policy, learner.batch_size, Journal(header))
    job = Job(
        learner, learner.server(), seed=seed, min_workers=engine.size, codec=codec, down=down
    )  # fmt: skip
    engine.open(job)
    try:
        run({MAIN: coordinator}, engine)
    finally:
        engine.close()
    return coordinator.journal


def plain_rate(learner: Learner) -> float:
    """Return the rate of plain SGD that goes as far as the learner's optimizer in the long run.

    The largest that the schedule has at the first step, the 100th and the 1000th, divided by 1 - β
    if there is momentum; with an outer optimizer that of both together.
    """
    rate = max(learner.rate(version) for version in (0, 100, 1000))
    outer, inner = getattr(learner, "outer", None), getattr(learner, "optimizer", None)
    for make in (outer, inner):
        if make is None:
            continue
        from paceline.learners.optimize import group_of

        group = group_of(make)
        if "momentum" not in group:
            raise ValueError(
                f"forecasts are of SGD, with momentum or without, and {describe(make)} is another "
                "optimizer, whose learning rate means something else; compare short runs instead"
            )
        # The server keeps its momentum, and workers begin theirs anew for each task.
        rate /= 1 - group["momentum"] if make is outer or outer is None else 1.0
        rate *= group["lr"] if outer is not None and make is inner else 1.0
    if not rate > 0:
        raise ValueError(
            "the learning rate is 0 at the steps 0, 100 and 1000, so that nothing can be planned; "
            "give the rate of most steps to pl.plan(…, learning_rate=…)"
        )
    return rate


def surface_of(learner: Learner, curvature: Curvature | None = None, floor: float = 0.0) -> Surface:
    """Return the surface of a learner's loss, measured here unless a curvature is given.

    floor: the loss of the best model, of which nothing can be measured at the first one.
    """
    found = measure_curvature(learner) if curvature is None else curvature
    plain = isinstance(learner, Quadratic)
    pull = () if plain or not found.gradient_norm else gradient_spectrum(learner)
    figures = found.loss, found.gradient_norm, found.noise, found.spectrum, found.parameters
    return Surface(*figures, floor, pull, plain)


def profile_of(
    *journals: Journal,
    learner: Learner | None = None,
    curvature: Curvature | None = None,
    floor: float = 0.0,
    skip: int | None = None,
) -> Profile:
    """Make a profile from journals of the same workers, under whatever policy.

    learner: to measure its loss; or give the curvature that was measured.
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
            # It takes longer still, and whoever is so slow is left out by any plan.
            workers[name] = WorkerProfile(Fixed(sum(waited)))
            notes.append(f"{name} never finished a task, and is taken to need {sum(waited):.3g} s "
                         "for a sample; profile for longer to know")  # fmt: skip
            continue
        way = fit.communication
        link = Link(way.latency, way.down, way.up)
        workers[name] = WorkerProfile(compute.bounded, link)
        if compute.note:
            notes.append(f"{name}: {compute.note}")
    sizes = {(task.got, task.sent) for _, task in seen}
    if len(sizes) == 1 and header.message_bytes and any(w.link.latency for w in workers.values()):
        notes.append(
            "all messages were of one size, so that latency and bandwidth are not told apart, and "
            "codecs seem to save no time; pl.profile() sends messages of several sizes"
        )
    surface = None
    if curvature is not None or learner is not None:
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
    )


def _goes_on(journal: Journal) -> bool:
    """Tell whether work that was given up was done all the same."""
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
        return surface_of(learner, curvature, floor)
    assert curvature is not None
    figures = curvature.loss, curvature.gradient_norm, curvature.noise, curvature.spectrum
    return Surface(*figures, curvature.parameters, floor)
