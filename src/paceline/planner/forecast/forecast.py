"""Forecasts the cost of a policy until a loss: time, money, bytes, and the risk of divergence.

The policy itself runs on a simulator of the profiled workers, and SGD runs on a quadratic with the
measured loss, curvature and noise. This is plain SGD: for an optimizer with momentum β, the
learning rate here is that of the optimizer divided by 1 - β.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.coordinator import Coordinator, drive
from paceline.core.journal import Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import MAIN, Want
from paceline.engines.base import Job
from paceline.planner.forecast.encoded import shrinkage, unknown_of
from paceline.planner.forecast.fitted import Fitted
from paceline.planner.forecast.predict import predicted_seconds
from paceline.planner.forecast.quadratic import LOST, Modes, Reads, descend, modes_of
from paceline.planner.forecast.stability import instability
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.measure.profile import Profile, Surface
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

STEEPER = (1.0, 1.25, 1.5)
"""Multiples of the measured curvature, which grows in training, to test a learning rate on."""
MOST = 20_000
"""Steps after which a target counts as not reached."""
FACTOR = 1.5
"""Factor between simulation and theory above which the forecast warns."""

COSTS = ("seconds", "dollars", "bytes")

_EVENTS = 4000  # events of a simulation for the cost per step only
_BEYOND, _LEAST = 2, 30  # steps to simulate for the risk: multiple of those to the target; minimum
_CHECKED = 200  # steps whose delays theory uses, and whose stability is tested


@dataclass(frozen=True)
class Forecast:
    """Medians over seeds, with intervals of 90 %; `inf` if the target is not reached.

    If the steps to the target are unknown, all but the cost of a step is nan.

    risk: the share of simulations that diverge. Each seed is simulated at the measured curvature,
        and at 1.25 and 1.5 times it. A seed that diverges at a measured curvature, or misses the
        target there, counts in full. A real net may leave a region that is too sharp.
    theory: the seconds by theory alone; nan if theory does not cover the policy.
    how: the method of the forecast, and whether theory agrees.
    per_step: the seconds, dollars and bytes of a step.
    unknown: why the steps to the target are unknown; "" if they are known.
    unstable: how the policy diverges at the sharpest curvature measured; "" if it does not.
    relative_steps: of stale gradients, relative to fresh ones, as measured in training.
    """

    seconds: float
    dollars: float
    bytes: float
    steps: float
    risk: float
    intervals: Mapping[str, tuple[float, float]]
    theory: float
    how: str
    target: float
    learning_rate: float
    seeds: int
    per_step: Mapping[str, float] = field(default_factory=dict)
    unknown: str = ""
    unstable: str = ""
    relative_steps: float = 1.0

    def __str__(self) -> str:
        if self.unknown:
            low, high = self.intervals["seconds_per_step"]
            return (
                f"{self.per_step['seconds']:.4g} s a step [{low:.4g}-{high:.4g}], "
                f"${self.per_step['dollars']:.3g} and {self.per_step['bytes'] / 1e6:.3g} MB a step "
                f"({self.how}); the steps to a loss are unknown: {self.unknown}{_more(self)}"
            )
        low, high = self.intervals["seconds"]
        return (
            f"{self.seconds:.4g} s [{low:.4g}-{high:.4g}], {self.steps:.0f} steps, "
            f"${self.dollars:.3g}, {self.bytes / 1e6:.3g} MB, risk {self.risk:.0%} ({self.how})"
            f"{_more(self)}{'; it ' * bool(self.unstable)}{self.unstable}"
        )

    def about(self) -> dict[str, Any]:
        """Return the forecast as plain data, for a journal's header."""
        data = asdict(self)
        data["intervals"] = {name: [*map(_plain, pair)] for name, pair in self.intervals.items()}
        data["per_step"] = {name: _plain(value) for name, value in self.per_step.items()}
        return {name: _plain(value) for name, value in data.items()}


def _more(found: Forecast) -> str:
    """Return how many more steps stale gradients need; "" if there are none."""
    if found.relative_steps == 1:
        return ""
    if found.relative_steps == inf:
        return "; with gradients this stale the loss hardly fell, as measured"
    return f"; {found.relative_steps:.2f} times the steps of fresh gradients, as measured"


def _plain(value: Any) -> Any:
    """Return None for inf and nan, which JSON cannot hold, as of a target that is not reached."""
    return None if isinstance(value, float) and not isfinite(value) else value


def forecast(
    policy: Policy,
    profile: Profile,
    *,
    learning_rate: float,
    target: float,
    codec: Codec | None = None,
    seeds: int = 8,
    max_steps: int = MOST,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
) -> Forecast:
    """Forecast a run of a policy until its loss is at the target.

    If the optimizer is not SGD, or the profile has no curvature, only the cost of a step is
    forecast; the result's `unknown` says so.

    codec: of results. Of Half, BFloat16, Int8, and these or TopK under Feedback, the loss of
        accuracy is known. TopK is simulated as sending random numbers, which is worse. Of other
        codecs, such as Lazy, and of local steps with `overlap`, only the cost of a step is
        forecast.
    seeds: the number of simulated runs.
    max_steps: steps after which the target counts as not reached.
    on_progress: called after each seed with the share that is done.
    """
    target, unknown = float(target), unknown_of(profile, codec)
    if not unknown and any(work.overlap for work in policy.works()):
        unknown = "how many more rounds local steps take with overlap=True is not modeled"
    if not unknown:
        check_target(profile, target)
    if not (isfinite(learning_rate) and learning_rate > 0) or seeds < 1 or max_steps < 1:
        raise ValueError(
            f"learning_rate={learning_rate}, seeds={seeds}, max_steps={max_steps}: use a learning "
            "rate > 0, and at least one seed and one step"
        )
    if policy.decentralized:
        raise ValueError(
            "a decentralized run cannot be forecast: its nodes take steps of their own, and the "
            "loss depends on how they mix. Simulate it with your learner, as in "
            "pl.Trainer(learner, policy, profile.engine()), or give a policy with a coordinator"
        )
    if policy.wants and codec is not None:
        raise ValueError(
            f"a policy that adapts to the steps cannot be forecast with a codec; leave {codec} "
            "out, or use a fixed k"
        )
    if unknown:
        steps = [timed(policy, profile, codec, seed + place) for place in range(seeds)]
        relative = relative_steps(profile, steps[0], target)
        return summed_steps([*map(step_costs, steps)], unknown, target, learning_rate, relative)
    case = Case(policy, profile, learning_rate, target, codec, max_steps)
    runs = []
    for place in range(seeds):
        runs.append(case.simulate(seed + place))
        if on_progress is not None:
            on_progress((place + 1) / seeds)
    return summed(runs, case.theory(seed), target, learning_rate)


@dataclass(frozen=True)
class Case:
    """A policy with its profile, learning rate, target and codec, to forecast."""

    policy: Policy
    profile: Profile
    learning_rate: float
    target: float
    codec: Codec | None = None
    max_steps: int = MOST

    def simulate(self, seed: int) -> Outcome:
        """Simulate one run until the target."""
        modes = modes_of(self.profile.known(), self.target)
        if self.policy.wants:
            return _watched(self, modes, seed)
        shrunk, kept = shrinkage(self.codec, self.profile)
        return _timed(self, Timeline(self.policy, self.profile, seed, shrunk), modes, kept, seed)

    def instability(self, timeline: Timeline) -> str:
        """Return how the steps diverge at the largest curvature measured; "" if they do not."""
        surface, momentum = self.profile.known(), self.profile.momentum
        if not surface.sharpest and not momentum:
            return ""  # the simulation at the measured curvature shows it
        timeline.reach(_LEAST)
        if timeline.staleness > 0:  # whether a random sequence diverges takes longer to see
            timeline.reach(_CHECKED)
        return instability(timeline.reads, surface.top, self.learning_rate, momentum)

    def theory(self, seed: int) -> float:
        """Return the seconds until the target by theory; nan if theory does not cover the case."""
        shrunk, kept = shrinkage(self.codec, self.profile)
        if self.policy.wants or kept < 1:
            return nan
        timeline = Timeline(self.policy, self.profile, seed, shrunk)
        timeline.reach(_CHECKED)
        if is_measured(self.profile, timeline):
            return nan
        modes = modes_of(self.profile.known(), self.target)
        return predicted_seconds(modes, timeline, self.learning_rate, self.target)


def check_target(profile: Profile, target: float) -> Surface:
    """Return the surface; refuse a target below its floor, or not below the first loss."""
    surface = profile.known()
    if not surface.floor < target < surface.loss:
        raise ValueError(
            f"target={target}: it must be below the first loss, {surface.loss:.4g}, and above "
            f"{surface.floor:.4g}, the floor of the profile; pl.profile(floor=…) sets another "
            "floor"
        )
    return surface


@dataclass(frozen=True)
class Outcome:
    """The cost of one simulated run, and whether it diverged at each steepness.

    unstable: how it diverges at the sharpest curvature measured; "" if it does not.
    relative_steps: of stale gradients, as measured; see `Forecast`.
    """

    seconds: float
    dollars: float
    bytes: float
    steps: float
    lost: Sequence[bool]
    unstable: str = ""
    relative_steps: float = 1.0

    @property
    def risk(self) -> float:
        """The share of steepnesses at which it diverged; 1 if it did at a measured curvature."""
        return 1.0 if self.unstable or self.lost[0] else sum(self.lost) / len(self.lost)


def _timed(case: Case, timeline: Timeline, modes: Modes, kept: float, seed: int) -> Outcome:
    """Take the steps of a timeline, which is simulated as far as needed.

    After the target the steps are repeated, to see whether a higher curvature diverges.
    """
    found: tuple[float, float, float] | None = None
    taken = 0

    def reads() -> Iterator[Reads]:
        for step in range(case.max_steps):
            if found is None:
                timeline.reach(step + 1)
            elif step >= max(_BEYOND * taken, _LEAST):
                return
            yield timeline.reads[step % len(timeline)]

    losses = np.zeros(len(STEEPER))
    rates = [case.learning_rate * times for times in STEEPER]
    bearable = replace(modes, sharpest=0.0)
    for step, losses in enumerate(descend(bearable, rates, reads(), seed, kept)):
        if found is None and losses[0] <= case.target:
            found, taken = timeline.at(step), step + 1
        if found is None and losses[0] == inf:
            break
    lost = (losses > modes.floor + modes.excess).tolist()
    unstable = case.instability(timeline)
    steps = float(taken) if found else inf
    given = timeline, case.target, case.learning_rate
    relative = relative_steps(case.profile, *given)
    if is_measured(case.profile, timeline):
        steps = stale_steps(relative, modes, *given, case.max_steps, seed, kept)
        found = timeline.at(int(steps) - 1) if steps < inf else None
    if found is None:
        return Outcome(inf, inf, inf, inf, [True, *lost[1:]], unstable, relative)
    return Outcome(*found, steps, lost, unstable, relative)


def is_measured(profile: Profile, timeline: Timeline) -> bool:
    """Return whether a policy has stale gradients whose cost was measured in training."""
    return profile.stale_training is not None and timeline.staleness > 0


def relative_steps(
    profile: Profile, timeline: Timeline, target: float, rate: float | None = None
) -> float:
    """Return the steps of a policy with stale gradients relative to fresh ones, as measured.

    It is 1 without stale gradients, or if the profile has no training with them. A policy that
    gives stale results a lower weight has a lower learning rate for them.

    rate: None for that of the measurement.
    """
    measured = profile.stale_training
    if measured is None or not timeline.staleness:
        return 1.0
    reads = [read for each in timeline.reads[len(timeline) // 2 :] for read in each]
    weight = sum(read.weight for read in reads)
    staleness = sum(read.age * read.weight for read in reads) / weight
    each = weight / (len(timeline) - len(timeline) // 2)  # of a step
    return measured.ratio(staleness, target, each * (measured.lr if rate is None else rate))


def stale_steps(
    relative: float,
    modes: Modes,
    timeline: Timeline,
    target: float,
    rate: float,
    max_steps: int,
    seed: int,
    kept: float,
) -> float:
    """Return the steps to the target with fresh gradients, times the measured ratio.

    A run reports the loss of the models that its results began from.
    """
    fresh = (tuple(each._replace(age=0) for each in r) for r in timeline.repeated(max_steps))
    bearable = replace(modes, sharpest=0.0)
    for step, (loss,) in enumerate(descend(bearable, [rate], fresh, seed, kept)):
        if loss <= target:
            steps = (step + 1) * relative + timeline.staleness
            return float(ceil(steps)) if steps <= max_steps else inf
        if loss == inf:
            break
    return inf


def _watched(case: Case, modes: Modes, seed: int) -> Outcome:
    """Run a policy that uses statistics on the fitted quadratic, at the measured curvature only."""
    policy, profile = case.policy, case.profile
    learner = Fitted(modes, case.learning_rate, profile.batch_size, profile.message_bytes)
    policy.check([*profile.workers], profile.batch_size)
    header = Header("", learner.batch_size, None, None, learner.message_bytes, profile.prices)
    meter, engine = Meter.begin(header), profile.engine(seed)
    held = Until(MinWorkers(engine.size, policy), case.max_steps)
    coordinator = Coordinator(held, learner.batch_size, Journal(header, keep=False))
    wants: frozenset[Want] = policy.wants | {"loss"}
    engine.open(
        Job(
            learner=learner,
            server=learner.server(),
            wants=wants,
            seed=seed,
            min_workers=engine.size,
        )
    )
    losses = meter.columns["loss"]
    for _, entry in drive({MAIN: coordinator}, engine):
        meter.observe(entry)
        if losses and losses[-1] <= case.target:
            size = meter.down_bytes + meter.up_bytes
            return Outcome(entry.now, meter.dollars, size, len(losses), [False])
        if losses and not losses[-1] - modes.floor < LOST * modes.excess:
            break
    return Outcome(inf, inf, inf, inf, [True])


def summed(runs: Sequence[Outcome], theory: float, target: float, learning_rate: float) -> Forecast:
    """Return the forecast of several runs."""
    medians, intervals = {}, {}
    for name in ("seconds", "dollars", "bytes", "steps"):
        values = sorted(float(getattr(run, name)) for run in runs)
        low, middle, high = (values[round(q * (len(values) - 1))] for q in (0.05, 0.5, 0.95))
        medians[name], intervals[name] = middle, (low, high)
    unstable = [run.unstable for run in runs if run.unstable]
    how = f"{len(runs)} simulated runs on a fitted quadratic"
    seconds = medians["seconds"]
    if not isnan(theory):
        both = isfinite(seconds) and seconds > 0 and theory > 0
        apart = max(theory / seconds, seconds / theory) if both else 1.0
        if isfinite(theory) != isfinite(seconds) or apart > FACTOR:
            how += f"; WARNING: theory says {theory:.4g} s, so neither is certain"
        else:
            how += f"; theory agrees: {theory:.4g} s"
    return Forecast(
        seconds=medians["seconds"],
        dollars=medians["dollars"],
        bytes=medians["bytes"],
        steps=medians["steps"],
        risk=sum(run.risk for run in runs) / len(runs),
        intervals=intervals,
        theory=theory,
        how=how,
        target=target,
        learning_rate=learning_rate,
        seeds=len(runs),
        per_step={name: medians[name] / max(medians["steps"], 1) for name in COSTS},
        unstable=unstable[0] if 2 * len(unstable) >= len(runs) else "",
        relative_steps=sum(run.relative_steps for run in runs) / len(runs),
    )


# --- where the steps to a target are unknown -----------------------------------------------------


def timed(policy: Policy, profile: Profile, codec: Codec | None, seed: int) -> Timeline:
    """Return 10 to 80 steps of a policy, fewer with more workers."""
    timeline = Timeline(policy, profile, seed, shrinkage(codec, profile)[0])
    timeline.reach(min(max(_EVENTS // profile.size, 10), 80))
    return timeline


def step_costs(timeline: Timeline) -> tuple[float, ...]:
    """Return the mean seconds, dollars and bytes of a step."""
    return tuple(each / len(timeline) for each in timeline.at(len(timeline) - 1))


def summed_steps(
    costs: Sequence[Sequence[float]],
    unknown: str,
    target: float,
    learning_rate: float,
    relative_steps: float = 1.0,
) -> Forecast:
    """Return the forecast of the cost of a step, over seeds."""
    ordered = [sorted(column) for column in zip(*costs, strict=True)]
    low, middle, high = (
        [values[round(q * (len(values) - 1))] for values in ordered] for q in (0.05, 0.5, 0.95)
    )
    return Forecast(
        seconds=nan,
        dollars=nan,
        bytes=nan,
        steps=nan,
        risk=nan,
        intervals={"seconds_per_step": (low[0], high[0])},
        theory=nan,
        how=f"{len(costs)} simulated runs",
        target=target,
        learning_rate=learning_rate,
        seeds=len(costs),
        per_step=dict(zip(COSTS, middle, strict=True)),
        unknown=unknown,
        relative_steps=relative_steps,
    )
