"""Forecasts against runs, theory, and the same policies with all their arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf, isnan

import numpy as np
import pytest

import paceline as pl
from paceline.delays.models import Delay
from paceline.planner.forecast.encoded import shrinkage
from paceline.planner.forecast.fitted import Fitted
from paceline.planner.forecast.predict import predicted_seconds
from paceline.planner.forecast.quadratic import Modes, Read, descend, modes_of
from paceline.planner.forecast.stability import grows
from paceline.planner.forecast.timeline import Timeline
from tests.oracles import discrete

BATCH = 48
QUADRATIC = pl.learners.Quadratic((1.0, 0.3) * 8 + (0.1,) * 16, noise=0.3, lr=0.2, batch_size=BATCH)
DELAYS: list[Delay] = [
    pl.delays.Exponential(0.01),
    pl.delays.ShiftedExponential(0.01, 0.02),
    pl.delays.Fixed(0.05),
    pl.delays.Erlang(4, 0.02),
]
LINKS = [pl.delays.Link(0.05, 1e4, 2e3)] * 4
POLICIES = {
    "sync": pl.sync(),
    "k_sync": pl.k_sync(3),
    "bandit": pl.bandit(2),
    "ata": pl.ata(4),
    "k_async": pl.k_async(2),
    "asynchronous": pl.asynchronous(),
    "ringmaster": pl.ringmaster(4),
    "rennala": pl.rennala(6),
    "local_sgd": pl.local_sgd(3),
    "by speed": pl.policies.Gather(placement=pl.BySpeed()),
    "among": pl.policies.OnlyWorkers(["w0", "w3"], pl.sync()),
}


def profile(
    learner: pl.learners.Quadratic = QUADRATIC, prices: pl.Prices = pl.Prices(1.0)
) -> pl.planner.Profile:
    pairs = zip(DELAYS, LINKS, strict=True)
    workers = {
        f"w{i}": pl.planner.WorkerProfile(delay, link) for i, (delay, link) in enumerate(pairs)
    }
    return pl.planner.Profile(
        workers, BATCH, learner.message_bytes, prices, pl.planner.measure_loss_surface(learner)
    )  # fmt: skip


def simulator() -> pl.Simulator:
    return pl.Simulator(4, DELAYS, LINKS, unit=1)


@pytest.mark.parametrize("name", POLICIES)
def test_steps_are_those_of_a_run_with_all_arithmetic(name: str) -> None:
    """Without noise the very same: seconds, dollars, bytes, and losses to rounding."""
    learner = replace(QUADRATIC, noise=0.0)
    found = profile(learner)
    run = pl.Trainer(
        learner, POLICIES[name], simulator(), progress=False, prices=pl.Prices(1.0), seed=3
    ).fit(steps=40)
    timeline = Timeline(POLICIES[name], found, seed=3)
    timeline.reach(40)
    losses = [float(loss[0]) for loss in descend(modes_of(found.known()), [0.2], timeline.reads, 0)]
    assert losses == pytest.approx(run.metrics["loss"], rel=1e-6)
    for step in (0, 17, 39):
        seconds, dollars, size = timeline.at(step)
        assert seconds == pytest.approx(run.metrics["seconds"][step])
        assert dollars == pytest.approx(run.metrics["dollars"][step])
        assert size == run.metrics["down_bytes"][step] + run.metrics["up_bytes"][step]


@pytest.mark.parametrize("name", POLICIES)
def test_runs_take_as_long_as_was_forecast(name: str) -> None:
    """The medians of 16 forecasts and 5 runs are within 25 %."""
    target = 0.05 * QUADRATIC.loss(np.ones(32))
    found = pl.forecast(
        POLICIES[name], profile(), learning_rate=0.2, target=target, seeds=16
    )  # fmt: skip
    taken = [
        pl.Trainer(QUADRATIC, POLICIES[name], simulator(), progress=False, seed=seed)
        .fit(steps=2000, until=lambda at: at.loss <= target)
        .seconds
        for seed in range(100, 105)
    ]
    assert found.seconds == pytest.approx(float(np.median(taken)), rel=0.25)
    assert found.intervals["seconds"][0] <= found.seconds <= found.intervals["seconds"][1]
    assert found.risk == 0
    assert "theory agrees" in found.how


@pytest.mark.parametrize("policy", [pl.sync(), pl.ringmaster(3)], ids=["sync", "ringmaster"])
def test_forecasts_of_a_real_learner_are_within_a_factor_of_two(policy: pl.policies.Gather) -> None:
    """Logistic regression, whose curvature and noise change as it learns."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1000, 10)) * np.geomspace(2, 0.3, 10)
    labels = np.sign(features @ rng.standard_normal(10) + rng.standard_normal(1000))
    learner = pl.learners.Logistic(features, labels, lr=0.2, batch_size=BATCH)
    found = pl.profile(learner, simulator(), seconds=500.0)
    for target in (0.55, 0.45):
        told = pl.forecast(policy, found, learning_rate=0.2, target=target)

        def reached(at: pl.Progress, target: float = target) -> bool:
            return at.loss <= target

        run = pl.Trainer(learner, policy, simulator(), progress=False).fit(steps=500, until=reached)
        assert told.seconds / 2 < run.seconds < told.seconds * 2


def test_a_policy_that_looks_at_the_steps_runs_with_all_arithmetic() -> None:
    target = 1.0
    policy = pl.k_sync(pl.policies.GrowOnNoise(1, 4))
    told = pl.forecast(policy, profile(), learning_rate=0.2, target=target)
    taken = [
        pl.Trainer(QUADRATIC, policy, simulator(), progress=False, seed=seed)
        .fit(steps=2000, until=lambda at: at.loss <= target)
        .seconds
        for seed in range(5)
    ]
    assert told.seconds == pytest.approx(float(np.median(taken)), rel=0.3)
    assert isnan(told.theory)
    with pytest.raises(ValueError, match="cannot be forecast with a codec; leave Half"):
        pl.forecast(policy, profile(), learning_rate=0.2, target=target, codec=pl.codecs.Half())
    with pytest.raises(ValueError, match="adapts to dot, norm of the steps"):
        Timeline(policy, profile())


def test_too_high_a_rate_is_a_risk_and_then_a_certainty() -> None:
    tell = partial(pl.forecast, pl.sync(), profile(), target=1.0, max_steps=300, seeds=3)
    assert tell(learning_rate=0.5).risk == 0
    assert tell(learning_rate=1.5).risk == pytest.approx(1 / 3)  # at 1.5 times the curvature
    lost = tell(learning_rate=2.5)
    assert lost.risk == 1
    assert lost.seconds == inf
    assert lost.about()["seconds"] is None  # which JSON can hold
    json.dumps(lost.about(), allow_nan=False)


def test_stale_gradients_bear_less() -> None:
    """A rate that fresh gradients bear is lost with stale ones, but for a lucky start."""
    workers = {f"w{i}": pl.planner.WorkerProfile(pl.delays.Erlang(8, 0.1)) for i in range(8)}
    found = pl.planner.Profile(workers, BATCH, surface=pl.planner.measure_loss_surface(QUADRATIC))
    policy = pl.k_async(1)
    tell = partial(pl.forecast, policy, found, target=1.0, max_steps=600, seeds=2)
    assert tell(learning_rate=0.05).risk == 0
    assert tell(learning_rate=1.2).risk > 0.5
    assert pl.forecast(pl.sync(), found, learning_rate=1.2, target=2.0, seeds=2).risk == 0


def test_the_seed_settles_all() -> None:
    tell = partial(pl.forecast, pl.ringmaster(4), profile(), learning_rate=0.2, target=1.0)
    assert tell(seed=4) == tell(seed=4)
    assert tell(seed=4) != tell(seed=5)


def test_codecs_shorten_messages() -> None:
    found = profile()
    plain = pl.forecast(pl.sync(), found, learning_rate=0.2, target=1.0)
    half = pl.forecast(pl.sync(), found, learning_rate=0.2, target=1.0, codec=pl.codecs.Int8())
    assert half.seconds < plain.seconds
    assert half.steps == plain.steps
    surface = replace(found.known(), parameters=100_000)
    large = replace(found, message_bytes=400_000, surface=surface)
    shrunk, kept = shrinkage(pl.codecs.BFloat16(), large)
    assert shrunk == pytest.approx(0.5, rel=0.01)
    assert kept == 1.0
    shrunk, kept = shrinkage(pl.codecs.Feedback(pl.codecs.TopK(0.1)), large)
    assert 0.1 < shrunk < 0.25
    assert kept == 0.1
    double = replace(large, message_bytes=800_000)  # as numpy's learners have
    assert shrinkage(pl.codecs.BFloat16(), double)[0] == pytest.approx(0.25, rel=0.01)
    told = pl.forecast(pl.sync(), found, learning_rate=0.2, target=1.0, codec=pl.codecs.Sign())
    assert told.unknown.startswith("the effect of Sign(") and isnan(told.seconds)
    assert told.per_step["seconds"] < plain.per_step["seconds"]


def test_what_is_not_sent_comes_later() -> None:
    """Sending a tenth of the numbers converges to the same, more slowly."""
    modes = modes_of(profile().known())
    steps = [(Read(0, 1.0, 1 / BATCH),)] * 600
    whole, part = (
        np.array([float(loss[0]) for loss in descend(modes, [0.02], steps, 0, kept)])
        for kept in (1.0, 0.1)
    )
    assert part[-1] == pytest.approx(whole[-1], rel=0.3)
    assert part[40] > whole[40]


def test_results_that_come_very_late_are_of_the_model_they_began_from() -> None:
    learner = pl.learners.Quadratic((1.0,) * 8 + (0.05,) * 8, noise=0.0, lr=0.3, batch_size=8)
    delays = [pl.delays.Fixed(1 / 8)] * 3 + [pl.delays.Fixed(10.0)]
    workers = {f"w{i}": pl.planner.WorkerProfile(each) for i, each in enumerate(delays)}
    found = pl.planner.Profile(workers, 8, surface=pl.planner.measure_loss_surface(learner))
    policy = pl.asynchronous(damping=False)
    told = pl.forecast(policy, found, learning_rate=0.3, target=1e-5, seeds=1)
    run = pl.Trainer(learner, policy, pl.Simulator(4, delays, unit=1), progress=False).fit(
        steps=1000, until=lambda at: at.loss <= 1e-5
    )
    assert told.steps == pytest.approx(run.steps, abs=2)


def test_losses_below_zero_can_be_forecast() -> None:
    found = profile()
    below = replace(found.known(), loss=1.0, floor=-2.0, plain=False)
    told = pl.forecast(
        pl.sync(), replace(found, surface=below), learning_rate=0.1, target=-1.0, seeds=2
    )  # fmt: skip
    assert 0 < told.seconds < inf
    assert below.lowered(-1.0).noise == pytest.approx(below.noise / 3)


def test_what_never_steps_or_ends_by_itself_is_refused() -> None:
    found = profile()
    more = {"learning_rate": 0.1, "target": 1.0, "seeds": 1}
    with pytest.raises(pl.errors.StalledError, match="there was no step in"):
        pl.forecast(pl.deadline(1e-6), found, **more)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stops by itself"):
        pl.forecast(pl.policies.Until(pl.sync(), steps=2), found, **more)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a decentralized run cannot be forecast: its nodes"):
        pl.forecast(pl.gossip.Gossip(pl.gossip.ring(4)), found, **more)  # type: ignore[arg-type]


def test_targets_are_checked() -> None:
    first = profile().known().loss
    for target in (0.0, first):
        with pytest.raises(ValueError, match=r"below the first loss, .* and above 0, the floor"):
            pl.forecast(pl.sync(), profile(), learning_rate=0.1, target=target)
    with pytest.raises(ValueError, match="use a learning rate > 0"):
        pl.forecast(pl.sync(), profile(), learning_rate=0.0, target=1.0)


# --- the fitted quadratic ------------------------------------------------------------------------


def test_the_quadratic_has_the_measured_figures() -> None:
    spectrum = tuple((float(value), 0.01) for value in np.geomspace(1e-3, 2.0, 100))
    surface = pl.planner.Surface(3.0, 0.7, 5.0, spectrum, 5000, 1.0)
    modes = modes_of(surface)
    assert modes.excess == pytest.approx(2.0)
    gradient = modes.curvature * modes.start
    assert float(np.linalg.norm(gradient)) == pytest.approx(0.7)
    assert modes.noise.sum() == pytest.approx(5.0)
    assert modes.curvature.max() == 2.0
    assert modes.curvature.size < 400
    assert modes_of(surface, directions=1000).excess == pytest.approx(2.0)


def test_the_gradients_own_curvatures_count_if_they_explain_the_loss() -> None:
    spectrum, pull = ((0.1, 0.5), (2.0, 0.5)), ((0.5, 0.5), (1.0, 0.5))
    # g.H⁻¹g / 2 is 0.5 * 1 * (0.5 / 0.5 + 0.5 / 1.0) = 0.75
    near = modes_of(pl.planner.Surface(0.75, 1.0, 1.0, spectrum, 100, 0.0, pull))
    assert set(near.curvature[near.start > 0]) == {0.5, 1.0}
    assert set(near.curvature[near.noise > 0]) == {0.1, 2.0}
    far = modes_of(pl.planner.Surface(7.5, 1.0, 1.0, spectrum, 100, 0.0, pull))
    assert set(far.curvature[far.start > 0]) == {0.1, 2.0}


def test_the_noise_of_a_learner_fades_with_its_loss() -> None:
    """With the floor at 0 it goes to 0, so that any target is reached; else the noise stays."""
    modes = Modes(np.ones(200), np.ones(200), np.full(200, 20.0), 0.0)
    steps = [(Read(0, 1.0, 1.0),)] * 400
    fading = [float(x[0]) for x in descend(replace(modes, fades=True), [0.05], steps, 0)]
    lasting = [float(x[0]) for x in descend(modes, [0.05], steps, 0)]
    assert fading[-1] < 1e-3 * modes.excess
    assert lasting[-1] == pytest.approx(0.5 * 200 * 20 * 0.05 / 2, rel=0.3)


def test_the_sharpest_direction_decides_what_diverges_and_nothing_else() -> None:
    modes = modes_of(profile().known())
    sharp = replace(modes, sharpest=10.0)
    steps = [(Read(0, 1.0, 1 / BATCH),)] * 100
    slow, quick = (np.array(list(descend(each, [0.1, 0.25], steps, 0))) for each in (modes, sharp))
    assert np.isfinite(slow).all()
    assert quick[:, 0] == pytest.approx(slow[:, 0], rel=0.2)  # other draws of noise, not more
    assert np.isinf(quick[-1, 1])  # 0.25 * 10 is above 2


def test_a_fitted_learner_trains_as_its_modes_do() -> None:
    modes = replace(modes_of(profile().known()), noise=np.zeros(32))
    learner = Fitted(modes, 0.2, BATCH)
    run = pl.Trainer(learner, pl.local_sgd(2), pl.Simulator(4), progress=False).fit(steps=5)
    steps = [(Read(0, 1.0, 0.0, 2),)] * 5
    losses = [float(loss[0]) for loss in descend(modes, [0.2], steps, 0)]
    assert losses == pytest.approx(run.metrics["loss"], rel=1e-9)


def test_theory_without_staleness_is_exact() -> None:
    """One mode: x² falls by (1 - η h)² a step towards η² s² / (1 - (1 - η h)²)."""
    modes = Modes(np.array([1.0]), np.array([1.0]), np.array([0.48]), 0.0)
    timeline = Timeline(pl.sync(), profile())
    timeline.reach(50)
    left = 0.2**2 * 0.48 / BATCH / (1 - 0.8**2)
    steps = np.log((0.02 - left) / (1 - left)) / (2 * np.log(0.8))  # 2 * target is x²
    seconds = predicted_seconds(modes, timeline, 0.2, 0.01)
    # A step reports the loss of the model that it began from.
    assert seconds == pytest.approx((np.ceil(steps) + 1) * timeline.seconds / 50, rel=1e-6)
    assert predicted_seconds(modes, timeline, 2.5, 0.01) == inf
    assert predicted_seconds(modes, timeline, 0.2, 0.4 * left) == inf


def timed_profile(*delays: Delay) -> pl.planner.Profile:
    """Return a profile of times only."""
    workers = {
        f"w{i}": pl.planner.WorkerProfile(delay, pl.delays.Link()) for i, delay in enumerate(delays)
    }
    return pl.planner.Profile(workers, BATCH, 8, pl.Prices(1.0), None)


def test_theory_weighs_the_delays_of_damped_asynchrony() -> None:
    """Slow workers have a staleness of about 60, and so 1/61 of the weight."""
    modes = Modes(np.array([1.0]), np.array([1.0]), np.array([0.0]), 0.0)
    delays = [pl.delays.Fixed(0.02)] * 4 + [pl.delays.Fixed(0.31)] * 4
    timeline = Timeline(pl.asynchronous(), timed_profile(*delays))
    timeline.reach(800)
    losses = [float(loss[0]) for loss in descend(modes, [0.2], timeline.reads, 0)]
    first = next(step for step, loss in enumerate(losses) if loss <= 1e-3)
    seconds = predicted_seconds(modes, timeline, 0.2, 1e-3)
    assert seconds == pytest.approx(timeline.at(first)[0], rel=0.1)


@pytest.mark.parametrize(
    ("policy", "off"), [(pl.k_async(3), 0.1), (pl.k_async(2), 0.1), (pl.asynchronous(), 0.25)]
)
def test_theory_adds_the_noise_of_weighted_results(policy: pl.policies.Gather, off: float) -> None:
    """Far beyond the start only the noise is left, which the steps of a timeline show."""
    modes = Modes(np.array([1.0]), np.array([1.0]), np.array([4.0]), 0.0)
    timeline = Timeline(policy, timed_profile(*[pl.delays.Exponential(0.02)] * 8))
    timeline.reach(2000)
    losses = [float(loss[0]) for loss in descend(modes, [0.1], timeline.repeated(12_000), 1)]
    left = float(np.mean(losses[500:]))
    assert predicted_seconds(modes, timeline, 0.1, (1 + off) * left) < inf
    assert predicted_seconds(modes, timeline, 0.1, (1 - off) * left) == inf


def test_a_loss_falls_as_it_was_seen_to() -> None:
    surface = pl.planner.Surface(
        2.0, 0.3, 0.0, tuple((h, 0.1) for h in np.geomspace(0.01, 4, 10)), 1000
    )
    for seen in (1.5, 0.8, 0.4):
        modes = modes_of(replace(surface, trained=(0.1, ((50, seen),))))
        steps = [(Read(0, 1.0, 0.0),)] * 51
        *_, last = (float(loss[0]) for loss in descend(modes, [0.1], steps, 0))
        assert last == pytest.approx(seen, rel=1e-6)
    curve = (10, 1.6), (50, 1.0), (90, 0.9)
    for target, (at, loss) in ((1.3, (30, 1.3)), (0.5, curve[2])):
        modes = modes_of(replace(surface, trained=(0.1, curve)), target)
        *_, last = (
            float(x[0]) for x in descend(modes, [0.1], [(Read(0, 1.0, 0.0),)] * (at + 1), 0)
        )
        assert last == pytest.approx(loss, rel=1e-6)
    risen = replace(surface, trained=(0.1, ((50, 3.0),)))  # says nothing
    assert np.array_equal(modes_of(risen).start, modes_of(surface).start)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("staleness", [1, 7, 30])
def test_steps_grow_beyond_the_boundary_of_their_polynomial(
    staleness: int, momentum: float
) -> None:
    reads = [(Read(staleness, 1.0, 0.1),)]
    exact = discrete.heavy_ball_boundary(staleness, momentum) / (1 - momentum)
    assert not grows(reads, 2.0, 0.98 * exact / 2, momentum)
    assert grows(reads, 2.0, 1.02 * exact / 2, momentum)


def test_fresh_steps_grow_beyond_two() -> None:
    for steps in (1, 3):  # local steps contract by (1 - rate h)^steps
        assert not grows([(Read(0, 1.0, 0.1, steps),)], 4.0, 0.49)
        assert grows([(Read(0, 1.0, 0.1, steps),)], 4.0, 0.51)
    assert not grows([(Read(0, 1.0, 0.1),)], 4.0, 1.2, 0.9)  # 2 (1 + β) / (1 - β) = 38


@pytest.mark.long
def test_an_unstable_policy_ranks_last_and_says_so() -> None:
    """η λ M is 6.3 for eight stale workers, above any limit here, and 0.8 for fresh gradients."""
    workers = {f"w{i}": pl.planner.WorkerProfile(pl.delays.Erlang(8, 0.1)) for i in range(8)}
    surface = replace(pl.planner.measure_loss_surface(QUADRATIC), sharpest=6.3 / 8 / 0.2)
    found = pl.planner.Profile(workers, BATCH, surface=surface)
    told = pl.forecast(pl.ringmaster(8), found, learning_rate=0.2, target=0.5, seeds=2)
    assert told.risk == 1
    assert told.seconds < inf  # if training leaves that region
    assert "diverges at a curvature of 3.94" in told.unstable
    assert "(staleness + 1) is 4.6" in told.unstable  # staler results are not used
    plan = pl.plan(found, target=0.5, learning_rate=0.2, seeds=2)
    unstable = [bool(entry.forecast.unstable) for entry in plan.entries]
    assert unstable == sorted(unstable) and not unstable[0]
    looks = [look.unstable for look in plan.looks]
    assert looks == sorted(looks) and any(looks)
    for entry in plan.entries:
        assert (f"{entry.text} diverges at" in str(plan)) is bool(entry.forecast.unstable)
    free = pl.plan(found, target=0.5, seeds=2)  # the planner may lower the rate
    assert not any(look.unstable for look in free.looks)


def test_momentum_makes_stale_steps_unstable() -> None:
    """At 0.18, between 0.1575 with β = 0.9 and 0.2091 without, for eight workers by turns."""
    workers = {f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(0.1)) for i in range(8)}
    plain = pl.planner.Profile(workers, BATCH, surface=pl.planner.measure_loss_surface(QUADRATIC))
    heavy = replace(plain, optimizer={"name": "SGD", "momentum": 0.9})
    outer = replace(plain, optimizer={"name": "SGD", "momentum": 0.9, "outer": {"name": "SGD"}})
    assert [each.momentum for each in (plain, heavy, outer)] == [0.0, 0.9, 0.0]
    for policy, found, unstable in (
        (pl.k_async(1), plain, False),
        (pl.k_async(1), heavy, True),
        (pl.k_async(1), outer, False),
        (pl.sync(), heavy, False),
    ):
        told = pl.forecast(policy, found, learning_rate=0.18, target=1.0, seeds=1)
        assert bool(told.unstable) is unstable


def test_where_it_is_too_sharp_there_is_a_risk() -> None:
    found = profile()
    sharp = replace(found, surface=replace(found.known(), sharpest=12.0))
    plain, risky = (
        pl.forecast(pl.sync(), each, learning_rate=0.2, target=1.0, seeds=2)
        for each in (found, sharp)
    )
    assert (plain.risk, risky.risk) == (0.0, 1.0)  # it is certain, and not one case of four
    assert risky.seconds == plain.seconds
    assert plain.unstable == ""
    assert risky.unstable.startswith("diverges at a curvature of 12, which was measured: lr *")
    assert risky.unstable in str(risky) and risky.about()["unstable"] == risky.unstable
