"""From runs to a profile: from a short one that measures, or from the journal of any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.coordinator import Coordinator, run
from paceline.core.journal import Header, Journal
from paceline.core.protocol import (
    MAIN,
    Assign,
    Command,
    Discard,
    Event,
    Prices,
    Stop,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.delays.fit import fit_workers, observe
from paceline.delays.models import Fixed
from paceline.engines.base import Job, TrainingEngine
from paceline.engines.simulator import Link
from paceline.learners.arrays import Quadratic, Timing
from paceline.learners.base import Array, Learner
from paceline.planner.curvature import Curvature, measure_curvature
from paceline.planner.profile import Profile, Surface, WorkerProfile
from paceline.planner.pull import gradient_spectrum
from paceline.policies.named import rennala
from paceline.policies.wrappers import MinWorkers, Until

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


@dataclass
class Probe:
    """Gives everyone so many tasks, and throws all results away: nothing is learned."""

    samples: int
    tasks: int
    wants: frozenset[Want] = frozenset()
    _given: dict[WorkerId, int] = field(default_factory=dict, init=False)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        for id in list(view.held):
            yield Discard(id)
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

    seconds: on the engine's clock; a third as long again with `sizes`.
    tasks: of each worker, after which it has done enough.
    floor: the loss of the best model.
    sizes: whether to send encoded messages as well, by which latency and bandwidth are told apart.
    warm: steps of training for as many seconds at most, after which the curvature is measured
        again: in most nets it has grown severalfold. 0 spares it.
    """
    if not seconds > 0 or tasks < 1:
        raise ValueError(f"seconds={seconds}, tasks={tasks}: measure for some time, and some tasks")
    journals = [_probe(learner, engine, seconds, tasks, seed, prices, None, None)]
    if sizes and learner.message_bytes and not isinstance(learner, Timing):
        from paceline.codecs.quantize import Int8

        more = seconds / 6, max(tasks // 3, 1)
        for number, down in enumerate((None, Int8()), 1):
            journals.append(
                _probe(learner, engine, *more, seed + number, prices, Int8(), down)
            )  # fmt: skip
    # Elsewhere abandoned work ends between micro-batches, if there are any.
    ends = getattr(engine, "interruptible", getattr(learner, "micro_batch", None) is not None)
    found = replace(profile_of(*journals), interruptible=ends, local_steps=_can_local(learner))
    if isinstance(learner, Timing):
        return found
    surface = surface_of(learner, floor=floor)
    if warm and not surface.plain:
        later = _trained(learner, engine, seconds, warm, seed)
        sharpest = measure_curvature(learner, at=later, samples=256, steps=12).top
        surface = replace(surface, sharpest=sharpest)
    return replace(found, surface=surface)


def _can_local(learner: Learner) -> bool:
    try:
        learner.check(Work(steps=2))
    except ValueError:  # as of a TorchLearner without an outer optimizer
        return False
    return True


def _trained(
    learner: Learner, engine: TrainingEngine, seconds: float, steps: int, seed: int
) -> Array:
    """Return a model after some steps, of whoever is quick."""
    policy = Until(MinWorkers(engine.size, rennala(engine.size)), steps, seconds)
    coordinator = Coordinator(policy, learner.batch_size, Journal(keep=False))
    server = learner.server()
    engine.open(Job(learner, server, seed=seed, min_workers=engine.size))
    try:
        run({MAIN: coordinator}, engine)
        engine.settle()
    finally:
        engine.close()
    return np.array(server.vector)


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
    policy = Until(MinWorkers(engine.size, Probe(share, tasks)), seconds=seconds)
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
) -> Profile:
    """Make a profile from journals of the same workers, under whatever policy.

    learner: to measure its loss; or give the curvature that was measured.
    floor: the loss of the best model.
    """
    if not journals:
        raise ValueError("profile_of got no journal; give at least one, such as run.journal")
    header = journals[-1].header
    fits = fit_workers(*journals)
    names = sorted(fits, key=lambda name: (len(name), name))
    seen = [(name, task) for each in journals for name, ts in observe(each).items() for task in ts]
    workers: dict[WorkerId, WorkerProfile] = {}
    notes = []
    for name in names:
        compute, communication = fits[name].compute, fits[name].communication
        if compute is None or communication is None:
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
        link = Link(communication.latency, communication.down, communication.up)
        workers[name] = WorkerProfile(compute.model, link)
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
        local_steps=learner is None or _can_local(learner),
    )


def _surface(learner: Learner | None, curvature: Curvature | None, floor: float) -> Surface:
    if learner is not None:
        return surface_of(learner, curvature, floor)
    assert curvature is not None
    figures = curvature.loss, curvature.gradient_norm, curvature.noise, curvature.spectrum
    return Surface(*figures, curvature.parameters, floor)
