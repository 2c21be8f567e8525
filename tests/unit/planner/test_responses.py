from __future__ import annotations

from math import exp

import numpy as np
import pytest

import paceline as pl
from paceline.planner.kernels import Atoms, Blend, Gamma, Shifted, exponential, fixed
from paceline.planner.responses import MOST, kernel_of, measured, rate_weighted

POINTS = np.asarray([0.3 + 0j, 0.2 + 0.7j, 2 + 1j])


@pytest.mark.parametrize(
    "model",
    [
        pl.Fixed(2.0),
        pl.Exponential(0.7),
        pl.ShiftedExponential(0.5, 0.25),
        pl.Erlang(4, 3.0),
        pl.Trace([1.0, 3.0, 2.0]),
        pl.LogNormal(2.0, 1.0),
        pl.Pareto(1.0, 2.5),
        pl.Mixture([pl.Fixed(1.0), pl.Exponential(2.0)], [3.0, 1.0]),
        pl.Scaled(pl.Erlang(2, 1.0), 3.0),
        pl.Scaled(pl.ShiftedExponential(0.5, 0.25), 2.0),
        pl.Scaled(pl.Scaled(pl.LogNormal(1.0, 0.5), 2.0), 3.0),
        pl.Scaled(pl.Mixture([pl.Fixed(1.0), pl.Exponential(2.0)], [3.0, 1.0]), 2.0),
        pl.Scaled(pl.Scaled(pl.Mixture([pl.Fixed(1.0), pl.Exponential(2.0)], [3, 1]), 2.0), 0.5),
    ],
    ids=str,
)
def test_kernels_have_the_law_of_their_models(model: pl.Delay) -> None:
    kernel = kernel_of(model)
    assert kernel.mean == pytest.approx(model.mean, rel=1e-12)
    rng, memory = np.random.default_rng(1), dict[str, float]()
    drawn = np.asarray([model.sample(rng, 0.0, memory) for _ in range(9000)])
    for s, value in zip(POINTS, kernel.transform(POINTS), strict=True):
        assert value == pytest.approx(complex(np.exp(-s * drawn).mean()), abs=0.02)


def test_what_has_no_kernel_says_what_to_do() -> None:
    for model in (
        pl.Bursts(pl.Fixed(1.0), pl.Fixed(2.0), 1.0, 1.0),
        pl.Changed(pl.Fixed(1.0), pl.Fixed(2.0), 5.0),
    ):
        with pytest.raises(TypeError, match=r"has no kernel .* use measured\(seconds\)"):
            kernel_of(model)
    with pytest.raises(ValueError, match=r"alpha=1.0 has no finite mean.*use alpha > 1"):
        kernel_of(pl.Pareto(1.0, 1.0))


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
    kernel = kernel_of(pl.LogNormal(exp(-0.5), 1.0))
    assert isinstance(kernel, Atoms)
    assert set(kernel.weights) == {1 / MOST}
    assert np.all(np.diff(kernel.seconds) > 0)
    middle = kernel.seconds[MOST // 2 - 1], kernel.seconds[MOST // 2]
    assert middle[0] < exp(-0.5) < middle[1]
    assert isinstance(kernel_of(pl.ShiftedExponential(0.5, 0.25)), Shifted)
