"""Whether gradient coding pays on given workers, and with how many stragglers and messages.

Every option is simulated with the same delays, link and seed, so that all get the same draws. The
simulated time holds computing and messages; the time of encoding and decoding is added, at
measured rates. It is the same for all workers, and so delays every answer equally.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Generic, ParamSpec

from paceline.core.coordinator import Coordinator, run
from paceline.core.policy import Policy
from paceline.core.protocol import MAIN
from paceline.delays.compound import Delays, resolve
from paceline.delays.links import Link
from paceline.delays.models import Trace
from paceline.engines.base import Job
from paceline.engines.simulator import Simulator
from paceline.learners.arrays import TimingOnly
from paceline.policies.coded import Coded
from paceline.policies.coded import coded as coded_policy
from paceline.policies.named import sync
from paceline.policies.wrappers import MinWorkers, Until

LARGEST = 8  # the largest load d to try: beyond it, computing grows tenfold
WORTH = 0.05  # share of sync's time to save, or d times the computing is not worth it

_TRIED = 6  # codes that are simulated for all steps, of up to 35

# Seconds per byte, numpy on one core of a Xeon, float32 (benchmarks/coding.py measures the same).
_ENCODE = 0.5e-9  # of each part's gradient
_DECODE = 0.4e-9  # of each message
_ADD = 0.2e-9  # of each gradient, under sync

P = ParamSpec("P")


@dataclass(frozen=True)
class Option:
    """One code and its time; s = 0 with m = 1 is `sync`."""

    stragglers: int
    messages: int
    seconds: float  # of a step, on average
    times: float  # seconds relative to sync

    @property
    def load(self) -> int:
        """d: how many times as much as under sync each worker computes."""
        return self.stragglers + self.messages

    @property
    def policy(self) -> Policy:
        """A new policy, ready to run."""
        return sync() if self.load == 1 else coded_policy(self.stragglers, self.messages)

    def __str__(self) -> str:
        if self.load == 1:
            return "sync()"
        return f"coded(stragglers={self.stragglers}, messages={self.messages})"


@dataclass(frozen=True)
class Advice:
    """`sync` and the fastest codes, sorted by time, with a recommendation."""

    n: int
    options: tuple[Option, ...]

    @property
    def sync(self) -> Option:
        return next(option for option in self.options if option.load == 1)

    @property
    def quickest(self) -> Option:
        """The fastest code, whether or not it pays."""
        return next(option for option in self.options if option.load > 1)

    @property
    def pays(self) -> bool:
        """Whether a code saves enough of sync's time to be worth computing d times as much."""
        return self.quickest.times <= 1 - WORTH

    @property
    def best(self) -> Option:
        return self.quickest if self.pays else self.sync

    @property
    def policy(self) -> Policy:
        """A new policy, ready to run: the best code, or `sync` if coding does not pay."""
        return self.best.policy

    def __str__(self) -> str:
        code, without = self.quickest, self.sync
        figures = f"takes {code.seconds:.3g} s a step and sync() {without.seconds:.3g} s"
        if self.pays:
            verdict = (
                f"Coding pays on these {self.n} workers: {code} {figures}, although each worker "
                f"computes {code.load} times as much; for most deep nets, which are bound by "
                "computing, it does not pay."
            )
        else:
            verdict = (
                f"Coding does not pay on these {self.n} workers, as it does not for most deep "
                f"nets, which are bound by computing: {code}, the quickest, {figures}, since each "
                f"worker computes {code.load} times as much. Use sync()."
            )
        lines = [f"{'':35} {'s':>3} {'m':>3} {'d':>3} {'s/step':>9} {'x sync':>7}"]
        for option in self.options:
            shape = f"{option.stragglers:3} {option.messages:3} {option.load:3}"
            lines.append(f"{option!s:35} {shape} {option.seconds:9.3g} {option.times:7.2f}")
        return "\n".join([verdict, "", *lines])


def advise(
    delays: Delays,
    n: int,
    *,
    message_bytes: int = 0,
    link: Link | Sequence[Link] = Link(),
    stragglers: int | Collection[int] = range(LARGEST),
    steps: int = 200,
    seed: int = 0,
) -> Advice:
    """Simulate `sync` and codes up to d = s + m = 8, and return which is fastest.

    All codes are simulated for a tenth of the steps, and the best six for all steps.

    delays: seconds in which a worker computes its share of the batch under `sync`, 1/n of it; one
        model for all, or one for each. Measured seconds are a `Trace` for each worker.
    n: the number of workers.
    message_bytes: the size of the model, and of a gradient before it is encoded.
    link: the workers' connections, with the bandwidth of each while all send.
    stragglers: how many a code must tolerate; of several numbers each is tried.
    steps: to simulate for each option.
    """
    if n < 2:
        raise ValueError(
            f"n={n}: in a code several workers compute the same parts; use at least 2 workers"
        )
    if steps < 1 or message_bytes < 0:
        raise ValueError(
            f"steps={steps}, message_bytes={message_bytes}: use steps >= 1, and bytes >= 0"
        )
    if isinstance(delays, Trace):
        raise ValueError(
            "one Trace for all makes all workers slow at the same time, so there are no "
            f"stragglers; give a sequence of {n} Traces, one for each worker"
        )
    resolve(delays, "w0", 0)  # raises for a value that is no model
    largest = min(n, LARGEST)
    borne = [stragglers] if isinstance(stragglers, int) else stragglers
    shapes = [(d - m, m) for d in range(2, largest + 1) for m in range(1, d + 1) if d - m in borne]
    if not shapes:
        raise ValueError(
            f"stragglers={stragglers!r} leaves no code to try with {n} workers; use some of "
            f"0 to {largest - 1}"
        )

    def seconds(policy: Policy, steps: int = steps) -> float:
        engine = Simulator(n, delays, link)
        return seconds_per_step(policy, engine, message_bytes, steps, seed)

    def seconds_of(shape: tuple[int, int], steps: int = steps) -> float:
        s, m = shape
        return seconds(coded_policy(s, m), steps) + _arithmetic(n, s + m, m, message_bytes)

    without = seconds(sync()) + n * message_bytes * _ADD
    if without <= 0:
        raise ValueError(
            "with these delays and this link a step takes no time; give delays above 0, or "
            "message_bytes and a link of finite bandwidth"
        )
    options = [Option(0, 1, without, 1.0)]
    first_look = {shape: seconds_of(shape, max(steps // 10, 1)) for shape in shapes}
    for s, m in sorted(shapes, key=lambda shape: (first_look[shape], sum(shape)))[:_TRIED]:
        total = seconds_of((s, m))
        options.append(Option(s, m, total, total / without))
    return Advice(n, tuple(sorted(options, key=lambda option: (option.seconds, option.load))))


def seconds_per_step(
    policy: Policy, engine: Simulator, message_bytes: int, steps: int, seed: int
) -> float:
    """Return the simulated seconds of a step, without arithmetic of any kind."""
    learner = TimingOnly(engine.size, message_bytes)
    coordinator = Coordinator(Until(MinWorkers(engine.size, policy), steps), engine.size)
    engine.open(Job(learner=learner, server=learner.server(), seed=seed, min_workers=engine.size))
    run({MAIN: coordinator}, engine)
    engine.close()
    return coordinator.ledger.now / steps


def _arithmetic(n: int, d: int, m: int, size: int) -> float:
    """Return the seconds of one worker's encoding and the server's decoding of all messages."""
    encode = d * size * _ENCODE
    return encode + n * size / m * _DECODE


class Advised(Generic[P]):
    """A maker of coded policies that also has the function `advise`."""

    def __init__(self, make: Callable[P, Coded]) -> None:
        self._make = make
        update_wrapper(self, make)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coded:
        return self._make(*args, **kwargs)

    advise = staticmethod(advise)

    def __repr__(self) -> str:
        return "<paceline.coded, with paceline.coded.advise>"


coded = Advised(coded_policy)
