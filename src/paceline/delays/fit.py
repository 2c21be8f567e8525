"""From a journal to a delay model for each worker, by censored maximum likelihood.

A task that was cancelled or lost is known to have taken longer than until then. It is a censored
observation and enters by its probability to take longer; without it slow workers look quick
wherever only the fastest are awaited, since of them only their quick tasks finish. Who else is
awaited does not depend on a worker's own time, so this censoring is independent of what it hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri

from paceline.core.journal import Journal
from paceline.core.protocol import WorkerId
from paceline.delays.empirical import PRECISION, continued, distance, drift, is_constant, log_rank
from paceline.delays.laws import ENOUGH, NORMAL, STRONG, Flags, Interval, Vector, fitted
from paceline.delays.models import Delay, Exponential, Fixed, Trace
from paceline.delays.observe import Observation, blocks, connection, observe, warmups

__all__ = [
    "ENOUGH",
    "NEWEST",
    "SIGNIFICANT",
    "Communication",
    "Fit",
    "FitOfWorker",
    "Observation",
    "drifted",
    "fit",
    "fit_workers",
    "observe",
]

NEWEST = 2000
"""Observations that a fit looks at: with more, the test rejects what is close enough to plan by."""
SIGNIFICANT = 0.01
"""A law fits while data as far from it as these have at least this probability."""


@dataclass(frozen=True)
class Fit:
    """A delay model, and how well it describes what it was fitted to.

    parameters: of the model. ShiftedExponential and Pareto have theirs corrected for bias.
    intervals: of 95 %, for the parameters and for the "mean".
    log_likelihood: at its maximum; nan for a `Trace`, and `inf` for what is constant.
    ks: the largest distance to the data's (Kaplan-Meier) distribution function.
    p_value: the probability of such a distance, if the law were right.
    fits: whether a law was found that describes the data; if not, `note` says why. It also says
        where more than half of the tasks were given up.
    drift: p-value of the early half against the late half, corrected for `autocorrelation`.
    autocorrelation: of the ranks of consecutive tasks, within each half.
    """

    model: Delay
    parameters: Mapping[str, float]
    intervals: Mapping[str, Interval]
    log_likelihood: float
    ks: float
    p_value: float
    fits: bool
    observations: int
    censored: int
    drift: float = 1.0
    autocorrelation: float = 0.0
    note: str = ""
    data: tuple[Vector, Flags] = field(
        default_factory=lambda: (np.empty(0), np.empty(0, bool)), repr=False, compare=False
    )

    @property
    def kind(self) -> str:
        """The name of the law."""
        return type(self.model).__name__

    @property
    def bounded(self) -> Delay:
        """The model, or what was observed where that has no mean, as a Pareto of alpha <= 1."""
        return self.model if isfinite(self.model.mean) else continued(*self.data)


@dataclass(frozen=True)
class Communication:
    """Seconds that a worker's messages take, and the connection that explains them.

    seconds: of a task's messages together.
    latency, down, up: as in `Link`. Where all messages are of one size, all is in `latency`; where
        down and up cannot be told apart, both bandwidths are the same.
    """

    seconds: Fit
    latency: float
    down: float
    up: float


@dataclass(frozen=True)
class FitOfWorker:
    """What the journals tell of one worker; None where it never finished a task.

    compute: seconds per sample: with `unit=1` the simulator's delay.
    observations: tasks that were used, of which `censored` were given up.
    warmup: tasks that were left out because they were a worker's first.
    unclear: tasks left out because nobody knows when they began (see `fit_workers`).
    """

    compute: Fit | None
    communication: Communication | None
    observations: int
    censored: int
    warmup: int = 0
    unclear: int = 0


def fit_workers(
    *journals: Journal, skip: int | None = None, blocking: bool | None = None
) -> dict[WorkerId, FitOfWorker]:
    """Fit a model to each worker, from one journal or from several of the same workers.

    skip: tasks to leave out each time a worker has joined; None: those of the first three that
        took more than three times as long as any later one.
    blocking: whether cancelled work goes on unseen and delays the task behind it, as it does on
        Ray without micro-batches. Tasks behind a cancelled one are then left out, finished or
        not. None: told by whether they seem to communicate for longer than the others.

    With `fits = fit_workers(run.journal)`, the same workers simulated are
    `Simulator(8, [fits[f"w{i}"].compute.model for i in range(8)], unit=1)`.
    """
    if not journals:
        raise ValueError("fit_workers got no journal; give at least one, such as run.journal")
    if skip is not None and skip < 0:
        raise ValueError(f"skip={skip}: give the tasks to leave out, >= 0, or None to have it told")
    found: dict[WorkerId, list[Observation]] = {}
    for journal in journals:
        for worker, tasks in observe(journal).items():
            found.setdefault(worker, []).extend(tasks)
    if blocking is None:
        blocking = blocks([task for tasks in found.values() for task in tasks])
    fits = {}
    for worker, tasks in found.items():
        kept = tasks[:]
        if blocking:
            clear = [task for task in tasks if not task.after]
            # Without a finished task behind a finished one, those are better than nothing.
            kept = clear if any(not task.censored for task in clear) else kept
        unclear = len(tasks) - len(kept)
        cold = warmups(kept) if skip is None else skip
        warm = [task for task in kept if task.turn >= cold]
        fits[worker] = _fit_worker(warm, len(kept) - len(warm), unclear)
    return fits


def _fit_worker(tasks: Sequence[Observation], warmup: int, unclear: int) -> FitOfWorker:
    finished = [task for task in tasks if not task.censored]
    counts = len(tasks), len(tasks) - len(finished), warmup, unclear
    if not finished:
        return FitOfWorker(None, None, *counts)
    link = connection(finished)
    communication = Communication(fit([task.communication for task in finished]), *link)
    seconds = [
        (task.seconds - _way(task, *link) if task.censored else task.seconds) / task.samples
        for task in tasks
    ]
    compute = fit(np.maximum(seconds, 0.0), [task.censored for task in tasks])
    return FitOfWorker(compute, communication, *counts)


def _way(task: Observation, latency: float, down: float, up: float) -> float:
    return 2 * latency + task.got / down + task.sent / up


def fit(seconds: ArrayLike, censored: ArrayLike | None = None) -> Fit:
    """Fit each law by maximum likelihood, and take the likeliest by BIC that describes the data.

    seconds: in the order in which they were observed; the newest 2000 are used.
    censored: which of them are only known to be exceeded.

    If no law describes them, the model is a `Trace`: what was observed, in its order, where each
    censored value is continued at random by the Kaplan-Meier law of those that took longer.
    With fewer than 8 finished tasks no law is chosen: the model is their `Trace`, or if some were
    censored the exponential law of the same mean, and `fits` is False.

    >>> fit([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]).model
    Fixed(seconds=0.5)
    """
    times, done = _checked(seconds, censored)
    observations, hidden = times.size, int(times.size - done.sum())
    changed, autocorrelation = drift(times, done)
    base = Fit(
        *(Fixed(0.0), {}, {}, inf, 0.0, 1.0, True, observations, hidden),
        *(changed, autocorrelation, "", (times, done)),
    )
    finished = times[done]
    if done.sum() >= ENOUGH and is_constant(times, done):
        value = float(np.median(finished))
        around = float(finished.min()), float(finished.max())
        return replace(
            base,
            model=Fixed(value),
            parameters={"seconds": value},
            intervals={"seconds": around, "mean": around},
        )
    if done.sum() < ENOUGH or finished.max() <= 0:
        return _of_few(base, times, done)
    laws = sorted(fitted(times, done), key=lambda law: law.score(times.size))
    tests = [(law, *distance(law, times, done)) for law in laws]
    rests = f"{hidden} of {observations} tasks were given up: the mean rests on the law's tail"
    for law, ks, p_value in tests:
        close = law.score(observations) - laws[0].score(observations) <= STRONG
        if p_value >= SIGNIFICANT and close:
            return replace(
                base,
                model=law.model,
                parameters=law.parameters(),
                intervals=law.intervals,
                log_likelihood=law.log_likelihood,
                ks=ks,
                p_value=p_value,
                note=rests if 2 * hidden > observations else "",
            )
    law, ks, p_value = tests[0]
    trace = continued(times, done)
    error = NORMAL * float(np.std(trace.seconds)) / sqrt(done.sum())
    return replace(
        base,
        model=trace,
        intervals={"mean": (max(trace.mean - error, 0.0), trace.mean + error)},
        log_likelihood=float("nan"),
        ks=ks,
        p_value=p_value,
        fits=False,
        note=f"no law describes these {observations} seconds; the best, {law.model}, has ks="
        f"{ks:.3f} with p={p_value:.1g}",
    )


def drifted(fit: Fit, seconds: ArrayLike, censored: ArrayLike | None = None) -> float:
    """Return the p-value of newer seconds being like those of a fit: small if they have changed.

    It is the log-rank test (Mantel, 1966), which allows for censoring, made less sure by the
    fit's autocorrelation. It sees changes of speed, and not of the spread alone.
    """
    times, done = _checked(seconds, censored)
    before, known = fit.data
    if isinstance(fit.model, Fixed):
        allowed = PRECISION * fit.model.seconds
        off = np.where(done, abs(times - fit.model.seconds), times - fit.model.seconds)
        if (off <= allowed).all():
            return 1.0
    return log_rank((before, known), (times, done), fit.autocorrelation)


def _checked(seconds: ArrayLike, censored: ArrayLike | None) -> tuple[Vector, Flags]:
    times = np.array(seconds, dtype=np.float64)
    hidden = np.zeros(times.shape, bool) if censored is None else np.array(censored, dtype=bool)
    if times.ndim != 1 or hidden.shape != times.shape:
        raise ValueError(
            f"seconds of shape {times.shape} and censored of shape {hidden.shape}: give one flag "
            "for each value, both in a row"
        )
    if not np.all(np.isfinite(times) & (times >= 0)):
        wrong = int(np.argmin(np.isfinite(times) & (times >= 0)))
        raise ValueError(
            f"seconds[{wrong}]={times[wrong]}: give finite seconds >= 0; a task that never "
            "finished is censored at the seconds after which it was given up"
        )
    if hidden.all():
        raise ValueError(
            f"none of {times.size} tasks finished, so that no delay can be fitted; wait for the "
            "worker's first result, or take the model of one like it"
        )
    told = ~hidden | (times > 0)  # a task that takes longer than 0 s is no news
    return times[told][-NEWEST:], ~hidden[told][-NEWEST:]


def _of_few(base: Fit, times: Vector, done: Flags) -> Fit:
    """Describe too few seconds for a law: by themselves, or if some are hidden by their mean."""
    finished = int(done.sum())
    mean = float(times.sum()) / finished
    model: Delay = (
        Exponential(mean) if finished < times.size and mean else Trace(times[done].tolist())
    )
    # That of exponential times, which are more spread than most.
    low, high = (2 * finished * mean / float(chdtri(2 * finished, p)) for p in (0.025, 0.975))
    return replace(
        base,
        model=model,
        parameters={"mean": mean} if isinstance(model, Exponential) else {},
        intervals={"mean": (low, high)},
        log_likelihood=float("nan"),
        p_value=float("nan"),
        ks=float("nan"),
        fits=False,
        note=f"{finished} finished tasks tell no law; at least {ENOUGH} do",
    )
