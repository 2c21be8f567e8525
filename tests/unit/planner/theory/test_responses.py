from __future__ import annotations

from math import exp

import numpy as np
import pytest

import paceline as pl
from paceline.delays.models import Delay
from paceline.planner.theory.kernels import Atoms, Blend, Gamma, Shifted, exponential, fixed
from paceline.planner.theory.responses import MOST, kernel_of, measured, rate_weighted

POINTS = np.asarray([0.3 + 0j, 0.2 + 0.7j, 2 + 1j])


@pytest.mark.parametrize(
    "model",
    [
        pl.delays.Fixed(2.0),
        pl.delays.Exponential(0.7),
        pl.delays.ShiftedExponential(0.5, 0.25),
        pl.delays.Erlang(4, 3.0),
        pl.delays.Trace([1.0, 3.0, 2.0]),
        pl.delays.LogNormal(2.0, 1.0),
        pl.delays.Pareto(1.0, 2.5),
        pl.delays.Mixture([pl.delays.Fixed(1.0), pl.delays.Exponential(2.0)], [3.0, 1.0]),
        pl.delays.Scaled(pl.delays.Erlang(2, 1.0), 3.0),
        pl.delays.Scaled(pl.delays.ShiftedExponential(0.5, 0.25), 2.0),
        pl.delays.Scaled(pl.delays.Scaled(pl.delays.LogNormal(1.0, 0.5), 2.0), 3.0),
        pl.delays.Scaled(
            pl.delays.Mixture([pl.delays.Fixed(1.0), pl.delays.Exponential(2.0)], [3.0, 1.0]), 2.0
        ),
        pl.delays.Scaled(
            pl.delays.Scaled(
                pl.delays.Mixture([pl.delays.Fixed(1.0), pl.delays.Exponential(2.0)], [3, 1]), 2.0
            ),
            0.5,
        ),
    ],
    ids=str,
)
def test_kernels_have_the_law_of_their_models(model: Delay) -> None:
    kernel = kernel_of(model)
    assert kernel.mean == pytest.approx(model.mean, rel=1e-12)
    rng, memory = np.random.default_rng(1), dict[str, float]()
    drawn = np.asarray([model.sample(rng, 0.0, memory) for _ in range(9000)])
    for s, value in zip(POINTS, kernel.transform(POINTS), strict=True):
        assert value == pytest.approx(complex(np.exp(-s * drawn).mean()), abs=0.02)


def test_what_has_no_kernel_says_what_to_do() -> None:
    for model in (
        pl.delays.Bursts(pl.delays.Fixed(1.0), pl.delays.Fixed(2.0), 1.0, 1.0),
        pl.delays.Changed(pl.delays.Fixed(1.0), pl.delays.Fixed(2.0), 5.0),
    ):
        with pytest.raises(TypeError, match=r"has no kernel .* use measured\(seconds\)"):
            kernel_of(model)
    with pytest.raises(ValueError, match=r"alpha=1.0 has no finite mean.*use alpha > 1"):
        kernel_of(pl.delays.Pareto(1.0, 1.0))


def test_long_samples_keep_their_mean() -> None:
    seconds = np.random.default_rng(2).lognormal(size=1003).tolist()
    kernel = measured(seconds)
    assert len(kernel.seconds) == MOST
    assert kernel.mean == pytest.approx(np.mean(seconds), rel=1e-12)
    assert measured(seconds[:5]) == Atoms(sorted(seconds[:5]))
    assert measured([1.0, 2.0, 9.0], most=1).seconds == (4.0,)
    with pytest.raises(ValueError, match="most=0: keep at least 1"):
        measured(seconds, 0)


def test_unequal_workers_count_by_their_rates() -> None:
    """Means 1 and 4: the first delivers 4 of 5 gradients, and E delay = M / Λ."""
    assert rate_weighted([fixed(1.0), fixed(4.0)]) == Atoms((1.0, 4.0), (0.8, 0.2))
    blend = rate_weighted([fixed(1.0), exponential(4.0)])
    assert blend == Blend([fixed(1.0), exponential(4.0)], [0.8, 0.2])
    for kernel in (blend, rate_weighted([fixed(1.0), fixed(4.0)])):
        assert kernel.mean == pytest.approx(2 / 1.25)
    means = [1 + i for i in range(10)]
    assert rate_weighted([exponential(m) for m in means]).mean == pytest.approx(10 / 2.928968254)
    assert rate_weighted([exponential(2.0)] * 7) == Gamma(1, 2.0)
    with pytest.raises(ValueError, match=r"kernels\[1\] has mean 0.0"):
        rate_weighted([fixed(1.0), fixed(0.0)])


def test_heavy_tails_are_cut_into_equally_likely_parts() -> None:
    kernel = kernel_of(pl.delays.LogNormal(exp(-0.5), 1.0))
    assert isinstance(kernel, Atoms)
    assert set(kernel.weights) == {1 / MOST}
    assert np.all(np.diff(kernel.seconds) > 0)
    middle = kernel.seconds[MOST // 2 - 1], kernel.seconds[MOST // 2]
    assert middle[0] < exp(-0.5) < middle[1]
    assert isinstance(kernel_of(pl.delays.ShiftedExponential(0.5, 0.25)), Shifted)


def test_measured_times_with_weights() -> None:
    assert measured([3.0, 1.0], weights=[1.0, 3.0]) == Atoms((1.0, 3.0), (0.75, 0.25))
    rng = np.random.default_rng(0)
    seconds, weights = rng.random(1000), rng.random(1000)
    grouped = measured(seconds.tolist(), 10, weights.tolist())
    assert len(grouped.seconds) == 10
    assert grouped.mean == pytest.approx(np.average(seconds, weights=weights))
