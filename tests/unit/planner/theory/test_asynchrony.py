from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from math import exp, inf, log, pi

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.delays.models import Delay
from paceline.planner.theory.asynchrony import Asynchrony, asynchrony
from paceline.planner.theory.kernels import Atoms, Blend, Kernel, erlang, exponential, fixed
from paceline.planner.theory.responses import kernel_of
from paceline.planner.theory.sdde import boundary, mean_square_boundary, rate
from paceline.planner.theory.staleness import bound
from tests.oracles import discrete


def test_what_it_says_of_equal_workers() -> None:
    plan = Asynchrony(40, fixed(2.0), learning_rate=0.01, curvature=2.0, noise=3.0)
    assert plan.arrivals == 20
    assert plan.gain == pytest.approx(0.8)
    assert plan.damping == pytest.approx(0.4)
    assert plan.rate == pytest.approx(0.472964 / 2, abs=1e-6)
    assert plan.root.imag == pytest.approx(1.193497 / 2, abs=1e-6)
    assert plan.safe
    assert plan.stable
    # V = (η s² / 2λ) tan(π/4 + x/2)
    assert plan.variance == pytest.approx(0.01 * 3.0 / 4.0 * 2.46496, rel=1e-5)
    level = 2 * plan.variance
    expected = log(100 / plan.variance - 1) / (2 * plan.rate)
    assert plan.hitting_time(100.0, level) == pytest.approx(expected)
    assert plan.hitting_time(100.0, plan.variance) == inf


def test_safe_is_sufficient_and_not_necessary() -> None:
    """Between π/2 and its own boundary, 2.274, Erlang-4 converges."""
    between = Asynchrony(100, erlang(4, 1.0), 0.02)
    assert (between.safe, between.stable) == (False, True)
    beyond = Asynchrony(120, erlang(4, 1.0), 0.02, noise=1.0)
    assert (beyond.safe, beyond.stable, beyond.variance) == (False, False, inf)
    assert beyond.hitting_time(1.0, 0.5) == inf
    assert Asynchrony(120, erlang(4, 1.0), 0.02).variance == inf
    assert between.variance == 0.0


def test_the_gain_does_not_depend_on_who_is_slow() -> None:
    """Little's law: η λ M, whatever the response times."""
    delays: list[Delay] = [
        pl.delays.Fixed(1.0),
        pl.delays.Exponential(5.0),
        pl.delays.Erlang(2, 0.3),
        pl.delays.LogNormal(1.0, 1.0),
    ]
    plan = asynchrony(delays, 4, learning_rate=0.1)
    assert plan.gain == pytest.approx(0.4)
    assert plan.arrivals == pytest.approx(sum(1 / delay.mean for delay in delays))
    assert plan.damping * plan.kernel.mean == pytest.approx(0.4)
    assert asynchrony(pl.delays.Exponential(2.0), 9, 0.1).kernel == exponential(2.0)
    by_name = asynchrony({"w0": pl.delays.Fixed(1.0), "w1": pl.delays.Fixed(4.0)}, 2, 0.1)
    assert by_name.kernel == Atoms((1.0, 4.0), (0.8, 0.2))


THRESHOLDS = (5, 10, 15, 20, 25, 30, 40, 60, 100)
# Simulated with M = 50 per mean response time, all rows of b5: rates by gain and threshold.
SIMULATED: dict[str, dict[float, tuple[float, ...]]] = {
    "fixed": {
        1.0: (0.1359, 0.2902, 0.5398, 0.9505, 0.7965, 0.6698, 0.4701, 0.3285, 0.3285),
        2.0: (0.3225, 0.9558, 0.6687, 0.467, 0.3103, 0.1816, -0.0223, -0.1672, -0.1672),
        4.0: (0.963, 0.4599, 0.1724, -0.0317, -0.1908, -0.3217, -0.5299, -0.6782, -0.6782),
    },
    "erlang4": {
        1.0: (0.2189, 0.3714, 0.5359, 0.7419, 1.1519, 1.2661, 0.9788, 0.6612, 0.435),
        2.0: (0.4902, 1.043, 1.4991, 1.1403, 0.8915, 0.7122, 0.4686, 0.2201, 0.0783),
        4.0: (1.5575, 1.3099, 0.7798, 0.4647, 0.2562, 0.1091, -0.0775, -0.2539, -0.3151),
    },
    "exp": {
        1.0: (0.3322, 0.463, 0.5778, 0.6931, 0.8213, 0.9847, 1.4525, 1.0328, 0.6642),
        2.0: (0.7135, 1.0925, 1.7042, 2.0561, 1.7058, 1.4195, 1.0614, 0.7021, 0.4606),
        4.0: (1.7512, 2.8294, 1.9578, 1.428, 1.0984, 0.8827, 0.6213, 0.3913, 0.3127),
    },
}
# Shares that were accepted in them, and their mean delay.
ACCEPTED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "fixed": (
        (0.12, 0.22, 0.32, 0.42, 0.52, 0.62, 0.82, 1.0, 1.0),
        (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 39.99, 48.99, 48.99),
    ),
    "erlang4": (
        (0.2, 0.309, 0.398, 0.474, 0.539, 0.598, 0.696, 0.836, 0.968),
        (3.63, 7.06, 10.36, 13.49, 16.49, 19.39, 24.76, 33.92, 45.08),
    ),
    "exp": (
        (0.312, 0.412, 0.484, 0.542, 0.589, 0.629, 0.695, 0.789, 0.896),
        (2.32, 4.51, 6.61, 8.64, 10.58, 12.44, 15.98, 22.29, 32.16),
    ),
}
KERNELS: dict[str, Kernel] = {
    "fixed": fixed(1.0),
    "erlang4": erlang(4, 1.0),
    "exp": exponential(1.0),
}


@pytest.mark.parametrize(
    ("law", "median", "worst"),
    [("fixed", 0.04, 0.16), ("erlang4", 0.09, 0.51), ("exp", 0.035, 0.17)],
)
def test_bounded_staleness_against_all_simulations(law: str, median: float, worst: float) -> None:
    """Stability is always right. Rates are, except near critical damping, where 10 are applied at
    a time and half an update matters: Erlang-4 of gain 2 at S = 10 is half too fast."""
    off = []
    for gain, simulated in SIMULATED[law].items():
        plan = Asynchrony(50, KERNELS[law], gain / 50)
        for threshold, expected in zip(THRESHOLDS, simulated, strict=True):
            found = plan.bounded(threshold).rate
            assert (found > 0) == (expected > 0), (gain, threshold)
            if abs(expected) < 0.1:
                assert found == pytest.approx(expected, abs=0.017)
            else:
                off.append(abs(found / expected - 1))
    assert np.median(off) < median
    assert max(off) < worst


@pytest.mark.parametrize("law", KERNELS)
def test_acceptance_against_all_simulations(law: str) -> None:
    for threshold, share, stale in zip(THRESHOLDS, *ACCEPTED[law], strict=True):
        found = bound(KERNELS[law], 50, threshold)
        assert found.acceptance == pytest.approx(share, abs=0.016 if law == "erlang4" else 0.003)
        assert found.staleness == pytest.approx(stale, rel=0.045 if law == "erlang4" else 0.007)


def test_a_threshold_rescues_what_diverges() -> None:
    plan = Asynchrony(50, fixed(1.0), 2.0 / 50)
    assert not plan.stable
    assert plan.bounded(10).stable
    assert plan.bounded(10).workers == pytest.approx(11.0)
    assert plan.bounded(10).rate == pytest.approx(rate(0.44, fixed(1.0)))
    assert plan.bounded(49) == plan


# K, rate simulated and predicted for x = 0.2, 0.6, 1.2, with M = 40 and fixed times; b7.
BATCHES = {
    1: ((0.2580, 0.2592), (0.6872, 0.6703), (0.2017, 0.1905)),
    2: ((0.2549, 0.2560), (0.6785, 0.6620), (0.1994, 0.1881)),
    4: ((0.2488, 0.2498), (0.6615, 0.6461), (0.1946, 0.1836)),
    8: ((0.2374, 0.2383), (0.6306, 0.6164), (0.1850, 0.1751)),
    20: ((0.2086, 0.2094), (0.5548, 0.5416), (0.1576, 0.1539)),
    40: ((0.1735, 0.1742), (0.4666, 0.4506), (0.1200, 0.1280)),
}


@pytest.mark.parametrize("size", BATCHES)
def test_batches(size: int) -> None:
    for x, (simulated, predicted) in zip((0.2, 0.6, 1.2), BATCHES[size], strict=True):
        learning_rate = x * size / (40 + (size - 1) / 2)
        plan = Asynchrony(40, fixed(1.0), learning_rate, noise=2.0).batched(size)
        assert plan.gain == pytest.approx(x)
        assert plan.arrivals == pytest.approx(40 / size)
        assert plan.kernel.mean == pytest.approx(1 + (size - 1) / 80)
        assert plan.noise == 2.0 / size
        assert plan.rate == pytest.approx(predicted, abs=6e-5)
        if size <= 8:
            assert plan.rate == pytest.approx(simulated, rel=0.025 if x <= 0.6 else 0.06)


def test_batches_of_a_scaled_learning_rate_keep_gain_and_noise() -> None:
    """With η scaled by K the gain is nearly kept, and so is η s² / K, and V with it."""
    one = Asynchrony(400, fixed(1.0), 0.0005, noise=1.0)
    eight = Asynchrony(400, fixed(1.0), 0.004, noise=1.0).batched(8)
    assert eight.gain == pytest.approx(one.gain, rel=0.01)
    assert eight.variance == pytest.approx(one.variance, rel=0.01)


def test_a_link_that_carries_one_at_a_time() -> None:
    """B5: X = 1, c = 0.1: throughput and delay."""
    expected = {
        1: (0.909, 1.1),
        2: (1.818, 1.1),
        5: (4.545, 1.1),
        8: (7.273, 1.1),
        11: (10.0, 1.1),
        15: (10.0, 1.5),
        20: (10.0, 2.0),
        40: (10.0, 4.0),
    }
    for workers, (throughput, delay) in expected.items():
        plan = Asynchrony(workers, fixed(1.0), 0.01).through(0.1)
        assert plan.arrivals == pytest.approx(throughput, abs=5e-4)
        assert plan.kernel.mean == pytest.approx(delay)
        assert plan.gain == pytest.approx(0.01 * workers)
    saturated = [Asynchrony(workers, fixed(1.0), 0.05).through(0.1).rate for workers in (11, 25)]
    assert saturated[1] < saturated[0]


GAINS = (0.25, 0.3679, 0.5, 0.8, 1.2, 1.5, 1.7, 2.0)
# B4: rates of single runs with M = 50, and how far the rate of the mean is from them at most.
# Memoryless and log-normal runs lose some of it to chance. At 1/e the double root of fixed delays
# is approached with 1/sqrt(M): there 1 is predicted, and 0.874 was simulated.
RUNS: dict[str, tuple[tuple[float, ...], float]] = {
    "fixed": ((0.355, 0.874, 0.809, 0.485, 0.200, 0.040, -0.050, -0.167), 0.016),
    "erlang4": ((0.365, 0.774, 0.667, 0.487, 0.315, 0.213, 0.152, 0.073), 0.013),
    "exp": ((0.451, 0.503, 0.495, 0.496, 0.480, 0.468, 0.454, 0.445), 0.056),
    "lognormal": ((0.295, 0.320, 0.330, 0.336, 0.323, 0.309, 0.303, 0.293), 0.066),
}


@pytest.mark.parametrize("law", RUNS)
def test_rates_against_all_simulated_runs(law: str) -> None:
    kernel = KERNELS.get(law, kernel_of(pl.delays.LogNormal(exp(-0.5), 1.0)))
    simulated, off = RUNS[law]
    for gain, expected in zip(GAINS, simulated, strict=True):
        at_double_root = law == "fixed" and gain == 0.3679
        allowed = 0.127 if at_double_root else off
        assert Asynchrony(50, kernel, gain / 50).rate == pytest.approx(expected, abs=allowed)


def test_mean_trajectory_of_events() -> None:
    """B4: x after 4 response times, averaged over runs of 20 memoryless workers, gain 0.8."""
    rng = np.random.default_rng(3)
    runs, workers = 3000, 20
    times = rng.exponential(size=(runs, workers))
    read = np.ones((runs, workers))
    x = np.ones(runs)
    rows = np.arange(runs)
    while True:
        first = times.argmin(axis=1)
        now = times[rows, first]
        going = now < 4.0
        if not going.any():
            break
        x = np.where(going, x - 0.04 * read[rows, first], x)
        read[rows, first] = x
        times[rows, first] = np.where(going, now + rng.exponential(size=runs), inf)
    a, decay = 0.8, 0.5
    frequency = (4 * a - 1) ** 0.5 / 2
    # z² + z + a = 0, from x = 1 and x' = -a.
    exact = exp(-decay * 4) * (
        np.cos(4 * frequency) + (decay - a) / frequency * np.sin(4 * frequency)
    )
    assert x.mean() == pytest.approx(exact, abs=0.024 + 3 * x.std() / runs**0.5)
    assert abs(exact) > 0.06


@pytest.mark.parametrize(
    ("law", "kernel", "simulated"),
    [
        ("fixed", fixed(1.0), 2.40),
        ("erlang", erlang(4, 1.0), 2.137),
        ("exp", exponential(1.0), 1.791),
    ],
)
def test_variance_of_events(law: str, kernel: Kernel, simulated: float) -> None:
    """B4: 20 workers, gain 0.8, as a factor of η s² / 2λ."""
    rng = np.random.default_rng(5)
    count, workers, step = 120_000, 20, 0.04
    draws = {
        "fixed": np.ones(count),
        "erlang": rng.gamma(4, 0.25, count),
        "exp": rng.exponential(1.0, count),
    }[law].tolist()
    noises = rng.normal(size=count).tolist()
    queue = [(at, worker) for worker, at in enumerate(rng.random(workers).tolist())]
    heapq.heapify(queue)
    read = [0.0] * workers
    x, last, total, length = 0.0, 0.0, 0.0, 0.0
    for update in range(count):
        now, worker = queue[0]
        if update > 2000:
            total += x * x * (now - last)
            length += now - last
        last = now
        x -= step * (read[worker] + noises[update])
        read[worker] = x
        heapq.heapreplace(queue, (now + draws[update], worker))
    factor = total / length / (step / 2)
    assert factor == pytest.approx(simulated, rel=0.1)
    plan = Asynchrony(workers, kernel, step, noise=1.0)
    assert plan.variance / (step / 2) == pytest.approx(factor, rel=0.12)


def test_few_workers_by_turns() -> None:
    """The exact variance is that of d = M - 1, which M, as d + 1/2, overstates."""
    for workers in (5, 20, 100):
        plan = Asynchrony(workers, fixed(1.0), 0.8 / workers, noise=1.0)
        exact = discrete.variance(0.8 / workers, workers - 1, (0.8 / workers) ** 2)
        assert 0 < plan.variance / exact - 1 < 0.6 / workers


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"Asynchrony got learning_rate=0.0, which must be .* > 0"):
        Asynchrony(4, fixed(1.0), 0.0)
    with pytest.raises(ValueError, match=r"the mean delay is 0.0 s, which must be finite and > 0"):
        Asynchrony(4, fixed(0.0), 0.1)
    with pytest.raises(ValueError, match="workers=0: use at least 1"):
        asynchrony(pl.delays.Fixed(1.0), 0, 0.1)
    plan = Asynchrony(4, fixed(1.0), 0.1)
    with pytest.raises(ValueError, match="size=0: an update needs at least 1"):
        plan.batched(0)
    with pytest.raises(ValueError, match="seconds=inf: give what one gradient takes"):
        plan.through(inf)
    assert plan.gain < pi / 2


def test_the_largest_rate_is_where_it_diverges() -> None:
    for delays in (
        pl.delays.Fixed(2.0),
        pl.delays.Erlang(4, 1.0),
        [pl.delays.Fixed(1.0), pl.delays.Fixed(3.0)],
    ):
        limit = pl.planner.max_stable_lr(delays, 6, 5.0)
        assert asynchrony(delays, 6, 0.99 * limit, 5.0).stable
        assert not asynchrony(delays, 6, 1.01 * limit, 5.0).stable
        assert limit >= 0.999 * np.pi / 2 / (6 * 5.0)  # for all laws
    memoryless = pl.planner.max_stable_lr(pl.delays.Exponential(1.0), 6, 5.0)
    assert memoryless == pytest.approx(4.0 / (6 * 5.0))
    assert asynchrony(pl.delays.Exponential(1.0), 6, memoryless, 5.0).stable  # in the mean
    with pytest.raises(ValueError, match="give the largest, finite and > 0"):
        pl.planner.max_stable_lr(pl.delays.Fixed(1.0), 6, -1.0)


def second_moments(workers: int, gain: float) -> float:
    """Return the factor of E x² per update with memoryless times, exactly.

    A random worker j of M applies its gradient: x -> x - η r_j, then r_j = x. The moments E x²,
    E x r_i, E r_i² and E r_i r_l of all workers follow a linear map.
    """
    eta, each = gain / workers, 1 / workers
    square = np.array([1.0, -2 * eta, eta**2, 0.0])
    other = np.array([0.0, 1.0, 0.0, -eta])  # E x r_i of a worker that was not drawn
    rows = [
        square,
        each * square + (1 - each) * other,
        each * square + (1 - each) * np.array([0.0, 0.0, 1.0, 0.0]),
        2 * each * other + (1 - 2 * each) * np.array([0.0, 0.0, 0.0, 1.0]),
    ]
    return float(abs(np.linalg.eigvals(np.array(rows))).max())


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 50])
def test_the_mean_square_of_memoryless_workers(workers: int) -> None:
    found = mean_square_boundary(exponential(3.0), workers)
    assert second_moments(workers, 0.999 * found) < 1 < second_moments(workers, 1.001 * found)
    # The general formula, on a kernel that has no closed form.
    blend = Blend([exponential(1.0), exponential(1.0 + 1e-9)], [0.5, 0.5])
    assert mean_square_boundary(blend, workers) == pytest.approx(found, rel=1e-6)


def growth_of_runs(law: str, workers: int, gain: float) -> float:
    """Return the mean growth of ln |x| per response time, over runs of the events themselves."""
    rng = np.random.default_rng(1)
    runs, updates, warm = 40, 3000, 500
    draw = DRAWS[law]
    times, read, x = draw(rng, (runs, workers)), np.ones((runs, workers)), np.ones(runs)
    rows, total = np.arange(runs), 0.0
    for update in range(updates):
        first = times.argmin(axis=1)
        x = x - gain / workers * read[rows, first]
        read[rows, first] = x
        times[rows, first] += draw(rng, (runs,))
        if update % 50 == 49:  # rescale, so that nothing overflows
            size = np.maximum(np.abs(x), np.abs(read).max(axis=1))
            total += float(np.log(size).mean()) if update >= warm else 0.0
            x, read = x / size, read / size[:, None]
    return total / (updates - warm) * workers


DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "exponential": lambda rng, size: rng.exponential(1.0, size),
    "erlang2": lambda rng, size: rng.gamma(2, 0.5, size),
    "two": lambda rng, size: np.where(rng.random(size) < 0.5, 0.1, 1.9),
}


@pytest.mark.parametrize(("workers", "diverges"), [(4, 4.3), (8, 5.4), (16, 7.3)])
def test_single_runs_of_memoryless_workers(workers: int, diverges: float) -> None:
    """Runs were seen to diverge from 4.3, 5.4 and 7.3; the limit is 0.77 to 0.85 of that."""
    limit = pl.planner.max_stable_lr(pl.delays.Exponential(1.0), workers, 1.0) * workers
    assert 0.75 * diverges < limit < 0.9 * diverges
    assert growth_of_runs("exponential", workers, 0.95 * limit) < 0
    assert growth_of_runs("exponential", workers, 1.4 * limit) > 0


@pytest.mark.parametrize(
    ("law", "kernel"), [("erlang2", erlang(2, 1.0)), ("two", Atoms((0.1, 1.9)))]
)
@pytest.mark.parametrize("workers", [2, 6])
def test_single_runs_below_the_limit_converge(law: str, kernel: Kernel, workers: int) -> None:
    limit = mean_square_boundary(kernel, workers)
    assert pi / 2 < limit < boundary(kernel)
    assert growth_of_runs(law, workers, 0.97 * limit) < 0
    assert growth_of_runs(law, workers, boundary(kernel)) > 0  # where the mean still converges


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_momentum_lags_and_bears_less(workers: int, momentum: float) -> None:
    """The exact boundary of heavy ball, with d = M - 1, is that of its polynomial."""
    exact = discrete.heavy_ball_boundary(workers - 1, momentum)
    assert discrete.heavy_ball(0.999 * exact, workers - 1, momentum) < 1
    assert discrete.heavy_ball(1.001 * exact, workers - 1, momentum) > 1
    limit = pl.planner.max_stable_lr(pl.delays.Fixed(3.0), workers, 2.0, momentum) * 2.0
    assert limit < exact
    # Fixed times count as a staleness of M, where M - 1/2 would be closest.
    assert limit > (1 - 1.02 / workers) * exact
    # Below this product every law is stable.
    assert limit >= (1 - momentum) * pi / 2 / (workers + momentum / (1 - momentum)) * 0.999999


def test_dividing_by_one_minus_momentum_is_not_safe() -> None:
    """Eight workers, 0.9: 0.753 of plain SGD's, and a quarter below what is safe for plain SGD."""
    exact = discrete.heavy_ball_boundary(7, 0.9) / 0.1
    assert exact / discrete.boundary(7) == pytest.approx(0.753, abs=5e-4)
    assert (pi / 2 / 8) / exact == pytest.approx(1.25, abs=0.01)
    plain, heavy = (pl.planner.max_stable_lr(pl.delays.Fixed(1.0), 8, 1.0, b) for b in (0.0, 0.9))
    assert heavy / 0.1 < 0.75 * plain


def square(model: torch.nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(batch[0])
    return 0.5 * (found**2).mean()


@pytest.mark.parametrize(("factor", "grows"), [(0.95, False), (1.05, True)])
def test_runs_of_a_learner_with_momentum(factor: float, grows: bool) -> None:
    """Eight equal workers, by turns, each step with a gradient of 7 versions ago."""
    lr = factor * discrete.heavy_ball_boundary(7, 0.9)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    data = torch.utils.data.TensorDataset(torch.ones(8, 1))
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    learner = pl.TorchLearner(model, square, optimizer, data, batch_size=8)
    policy = pl.asynchronous(damping=False)
    run = pl.Trainer(learner, policy, pl.Simulator(8, pl.delays.Fixed(1.0)), progress=False).fit(
        steps=600
    )
    early, late = (run.metrics["loss"][part].max() for part in (slice(50, 150), slice(500, 600)))
    assert late > 2 * early if grows else late < 0.5 * early
