"""What a policy will take until a loss is reached: time, money, bytes, and the risk to diverge.

The policy itself runs on a simulator of the profiled workers, and SGD on a quadratic that has the
measured figures of the loss. This is plain SGD: of an optimizer with momentum β the learning rate
is meant divided by 1 - β.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.coordinator import Coordinator, drive
from paceline.core.journal import Header, Journal
from paceline.core.protocol import MAIN, Policy, Want
from paceline.engines.base import Job
from paceline.planner.fitted import Fitted
from paceline.planner.predict import predicted_seconds
from paceline.planner.profile import Profile, Surface
from paceline.planner.quadratic import LOST, Modes, Reads, descend, modes_of
from paceline.planner.timeline import Timeline
from paceline.policies.gossip import Gossip
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

STEEPER = (1.0, 1.25, 1.5)
"""Times the measured curvature: as it grows in training, a learning rate must bear some more."""
MOST = 20_000
"""Steps after which a target counts as not reached."""
FACTOR = 1.5
"""By which simulation and theory may differ before it is said."""

_BEYOND, _LEAST = 2, 30  # times the steps to the target, and steps, that are looked at for the risk
_SHARP = 400  # steps that are looked at where the loss is sharpest
_CHECKED = 200  # steps that theory is told the delays of


@dataclass(frozen=True)
class Forecast:
    """Medians over seeds, with intervals of 90 %; `inf` where the target is not reached.

    risk: the share of seeds, at the measured curvature, at 1.25 and 1.5 times it, and where the
        loss was sharpest later, with which training diverges, or at the measured one does not
        reach the target. A net may escape from where it is too sharp for a learning rate.
    theory: the seconds by theory alone; nan if it says nothing of such a policy.
    how: by what it was found, and whether theory agrees.
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

    def __str__(self) -> str:
        low, high = self.intervals["seconds"]
        return (
            f"{self.seconds:.4g} s [{low:.4g}-{high:.4g}], {self.steps:.0f} steps, "
            f"${self.dollars:.3g}, {self.bytes / 1e6:.3g} MB, risk {self.risk:.0%} ({self.how})"
        )

    def about(self) -> dict[str, Any]:
        """Return it as plain data, for a journal's header."""
        data = asdict(self)
        data["intervals"] = {name: [*map(_plain, pair)] for name, pair in self.intervals.items()}
        return {name: _plain(value) for name, value in data.items()}


def _plain(value: Any) -> Any:
    """Return None for what JSON has no number for: a target that is not reached."""
    return None if isinstance(value, float) and not isfinite(value) else value


def forecast(
    policy: Policy,
    profile: Profile,
    *,
    learning_rate: float,
    target: float,
    codec: Codec | None = None,
    seeds: int = 8,
    most: int = MOST,
    seed: int = 0,
    told: Callable[[float], None] | None = None,
) -> Forecast:
    """Forecast a run of a policy until its loss is at the target.

    codec: of results; what it costs in accuracy is known of Half, BFloat16, Int8, and of these or
        TopK under Feedback, where TopK is taken to send numbers at random, which is worse.
    seeds: simulated.
    most: steps, after which the target counts as not reached.
    told: which share is done, after each seed.
    """
    target = float(target)
    check_target(profile, target)
    if not (isfinite(learning_rate) and learning_rate > 0) or seeds < 1 or most < 1:
        raise ValueError(
            f"learning_rate={learning_rate}, seeds={seeds}, most={most}: use a learning rate > 0, "
            "and at least one seed and one step"
        )
    if isinstance(policy, Gossip):
        raise ValueError("a run without a main node cannot be forecast yet; give another policy")
    if policy.wants and codec is not None:
        raise ValueError(
            f"a policy that looks at the steps is forecast without a codec; leave {codec} out, or "
            "give a fixed k"
        )
    case = Case(policy, profile, learning_rate, target, codec, most)
    runs = []
    for place in range(seeds):
        runs.append(case.simulate(seed + place))
        if told is not None:
            told((place + 1) / seeds)
    return summed(runs, case.theory(seed), target, learning_rate)


@dataclass(frozen=True)
class Case:
    """What is to be forecast."""

    policy: Policy
    profile: Profile
    learning_rate: float
    target: float
    codec: Codec | None = None
    most: int = MOST

    def simulate(self, seed: int) -> Outcome:
        """Simulate one run until the target."""
        modes = modes_of(self.profile.known(), self.target)
        if self.policy.wants:
            return _watched(self, modes, seed)
        shrunk, kept = shrinkage(self.codec, self.profile)
        return _timed(self, Timeline(self.policy, self.profile, seed, shrunk), modes, kept, seed)

    def theory(self, seed: int) -> float:
        """Return the seconds until the target by theory; nan where it says nothing."""
        shrunk, kept = shrinkage(self.codec, self.profile)
        if self.policy.wants or kept < 1:
            return nan
        timeline = Timeline(self.policy, self.profile, seed, shrunk)
        timeline.reach(_CHECKED)
        modes = modes_of(self.profile.known(), self.target)
        return predicted_seconds(modes, timeline, self.learning_rate, self.target)


def check_target(profile: Profile, target: float) -> Surface:
    """Refuse a target that no model reaches, or the first one has reached."""
    surface = profile.known()
    if not surface.floor < target < surface.loss:
        raise ValueError(
            f"target={target}: it must be below the first loss, {surface.loss:.4g}, and above "
            f"{surface.floor:.4g}, the floor of the profile; another floor is given to pl.profile"
        )
    return surface


@dataclass(frozen=True)
class Outcome:
    """One seed: what it took, and whether it diverged at each steepness."""

    seconds: float
    dollars: float
    bytes: float
    steps: float
    lost: Sequence[bool]


def _timed(case: Case, timeline: Timeline, modes: Modes, kept: float, seed: int) -> Outcome:
    """Take the steps of a timeline, which is simulated as far as they go.

    Beyond the target steps are repeated, to see whether a higher curvature would be borne.
    """
    found: tuple[float, float, float] | None = None
    taken = 0

    def reads() -> Iterator[Reads]:
        for step in range(case.most):
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
    if modes.sharpest:
        lost.append(_too_sharp(case, timeline, modes.sharpest))
    if found is None:
        return Outcome(inf, inf, inf, inf, [True, *lost[1:]])
    return Outcome(*found, taken, lost)


def _too_sharp(case: Case, timeline: Timeline, curvature: float) -> bool:
    """Tell whether the steps diverge where the loss is this sharp."""
    modes = Modes(np.array([curvature]), np.ones(1), np.zeros(1), 0.0)
    timeline.reach(_LEAST)
    steps = timeline.repeated(min(len(timeline), _SHARP))
    *_, last = descend(modes, [case.learning_rate], steps, 0)
    return bool(last[0] > modes.excess)


def _watched(case: Case, modes: Modes, seed: int) -> Outcome:
    """Run a policy that looks at statistics with all its arithmetic; steepness is not varied."""
    policy, profile = case.policy, case.profile
    learner = Fitted(modes, case.learning_rate, profile.batch_size, profile.message_bytes)
    if check := getattr(policy, "check", None):
        check(profile.size, profile.batch_size)
    header = Header("", learner.batch_size, None, None, learner.message_bytes, profile.prices)
    meter, engine = Meter.begin(header), profile.engine(seed)
    held = Until(MinWorkers(engine.size, policy), case.most)
    coordinator = Coordinator(held, learner.batch_size, Journal(header, keep=False))
    wants: frozenset[Want] = policy.wants | {"loss"}
    engine.open(Job(learner, learner.server(), wants, seed, min_workers=engine.size))
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
    """Sum several runs up."""
    medians, intervals = {}, {}
    for name in ("seconds", "dollars", "bytes", "steps"):
        values = sorted(float(getattr(run, name)) for run in runs)
        low, middle, high = (values[round(q * (len(values) - 1))] for q in (0.05, 0.5, 0.95))
        medians[name], intervals[name] = middle, (low, high)
    told = [lost for run in runs for lost in run.lost]
    how = f"{len(runs)} simulated runs on a fitted quadratic"
    seconds = medians["seconds"]
    if not isnan(theory):
        both = isfinite(seconds) and seconds > 0 and theory > 0
        apart = max(theory / seconds, seconds / theory) if both else 1.0
        if isfinite(theory) != isfinite(seconds) or apart > FACTOR:
            how += f"; WARNING: theory says {theory:.4g} s, so that neither is sure"
        else:
            how += f"; theory agrees: {theory:.4g} s"
    return Forecast(
        **medians,
        risk=sum(told) / len(told),
        intervals=intervals,
        theory=theory,
        how=how,
        target=target,
        learning_rate=learning_rate,
        seeds=len(runs),
    )


def shrinkage(codec: Codec | None, profile: Profile) -> tuple[float, float]:
    """Return by how much a codec shortens results, and which share of the numbers it sends."""
    if codec is None:
        return 1.0, 1.0
    parameters = profile.known().parameters
    size = min(max(parameters, 1), 100_000)
    width = profile.message_bytes / max(parameters, 1) or 4.0  # bytes of a number as it is
    return _length(codec, size) / (size * width), _kept(codec)


def _length(codec: Codec, size: int) -> float:
    from paceline.codecs.uplink import Uplink

    noise = np.random.Generator(np.random.PCG64(0)).standard_normal(size).astype(np.float32)
    return Uplink(codec, size).send(noise, 0, 1.0, [(0, size)])[0].nbytes


def _kept(codec: Codec) -> float:
    from paceline.codecs.feedback import Feedback
    from paceline.codecs.quantize import BFloat16, Half, Int8
    from paceline.codecs.sparse import TopK

    match codec:
        case Half() | BFloat16() | Int8() | Feedback(codec=Half() | BFloat16() | Int8()):
            return 1.0
        case Feedback(codec=TopK(fraction=fraction)):
            return float(fraction)
    raise ValueError(
        f"nothing is known of what {codec} costs in accuracy; a forecast knows Half, BFloat16, "
        "Int8 and Feedback(TopK(…))"
    )
