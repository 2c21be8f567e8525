"""Fits a delay model to each worker of a journal, by censored maximum likelihood.

A cancelled or lost task would have taken longer than it ran. It is a censored observation and
enters by its probability to take longer. Without it, slow workers look fast under policies that
wait only for the fastest workers, since only their short tasks finish. The end of the wait depends
on the other workers, and not on the worker's own time, so this censoring is independent.
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
"""Observations that a fit uses: with more, the test rejects laws that are good enough to plan."""
SIGNIFICANT = 0.01
"""The p-value from which on a law fits the data."""


@dataclass(frozen=True)
class Fit:
    """A delay model, and how well it describes the data it was fitted to.

    parameters: of the model; those of ShiftedExponential and Pareto are corrected for bias.
    intervals: of 95 %, for the parameters and for the "mean".
    log_likelihood: the maximum; nan for a `Trace`, and `inf` for constant times.
    ks: the largest distance to the (Kaplan-Meier) distribution function of the data.
    p_value: the probability of such a distance if the law were right.
    fits: whether a law describes the data; if not, `note` says why.
    drift: p-value of the early half against the late half, corrected for `autocorrelation`.
    autocorrelation: of the ranks of consecutive tasks, within each half.
    note: why no law fits, or that more than half of the tasks were censored.
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
        """The model; the observed times if its mean is infinite, as of a Pareto with alpha <= 1."""
        return self.model if isfinite(self.model.mean) else continued(*self.data)


@dataclass(frozen=True)
class Communication:
    """Seconds that a worker's messages take, and the connection that explains them.

    seconds: of all messages of a task together.
    latency, down, up: as in `Link`. If all messages have one size, `latency` holds all the time;
        if down and up cannot be separated, both bandwidths are equal.
    """

    seconds: Fit
    latency: float
    down: float
    up: float


@dataclass(frozen=True)
class FitOfWorker:
    """The fit of one worker; both models are None if it never finished a task.

    compute: seconds per sample: with `unit=1` the simulator's delay.
    observations: the number of tasks used; `censored` of them did not finish.
    warmup: tasks left out because they were among the first of a worker.
    unclear: tasks left out because their start is unknown (see `fit_workers`).
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

    skip: tasks to leave out each time a worker has joined. None: those of the first three that
        took more than three times as long as any later one.
    blocking: whether cancelled work continues unseen and delays the next task, as it does on Ray
        without micro-batches. Tasks after a cancelled one are then left out, finished or not.
        None: true if these tasks seem to communicate for longer than the others.

    With `fits = fit_workers(run.journal)`, a simulator of the same workers is
    `Simulator(8, [fits[f"w{i}"].compute.model for i in range(8)], unit=1)`.
    """
    if not journals:
        raise ValueError("fit_workers got no journal; give at least one, such as run.journal")
    if skip is not None and skip < 0:
        raise ValueError(
            f"skip={skip}: give the number of tasks to leave out, >= 0, or None to detect it"
        )
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
            # If no clear task finished, the unclear ones are better than nothing.
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
    """Fit each law by maximum likelihood, and take the best by BIC that describes the data.

    seconds: in the order of observation; the newest 2000 are used.
    censored: which of them are only lower bounds.

    If no law describes the data, the model is a `Trace` of the observed times in order. It
    replaces each censored time by a random draw from the Kaplan-Meier law of longer times.
    With fewer than 8 finished tasks no law is chosen and `fits` is False. The model is then their
    `Trace`, or if some were censored the exponential law of the same mean.

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
    rests = (
        f"{hidden} of {observations} tasks did not finish (censored): the mean depends on the "
        "law's tail"
    )
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
    """Return the p-value of newer seconds having the law of a fit: small if they have changed.

    This is the log-rank test (Mantel, 1966), which allows for censoring, corrected for the fit's
    autocorrelation. It detects changes of speed, and not of the spread alone.
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
            f"seconds[{wrong}]={times[wrong]}: give finite seconds >= 0; for a task that never "
            "finished, give the seconds after which it was cancelled, and censored=True"
        )
    if hidden.all():
        raise ValueError(
            f"none of {times.size} tasks finished, so no delay can be fitted; wait for the "
            "worker's first result, or use the model of a similar worker"
        )
    told = ~hidden | (times > 0)  # a lower bound of 0 s carries no information
    return times[told][-NEWEST:], ~hidden[told][-NEWEST:]


def _of_few(base: Fit, times: Vector, done: Flags) -> Fit:
    """Return the fit of too few seconds for a law: a `Trace`, or an exponential if censored."""
    finished = int(done.sum())
    mean = float(times.sum()) / finished
    model: Delay = (
        Exponential(mean) if finished < times.size and mean else Trace(times[done].tolist())
    )
    # The interval of exponential times, which have more spread than most.
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
        note=f"{finished} finished tasks are too few to fit a law; {ENOUGH} or more are needed",
    )
