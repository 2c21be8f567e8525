"""Decentralized training in numpy: what freezes, what does not, what reaches consensus.

Graphs, triggers and mixing rules are those of the policies; the rounds are synchronous, as in the
digest's scripts: everyone sends, then mixes, then adds the gradient at the model before mixing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.gossip.graphs import Graph, complete, exponential, ring, torus
from paceline.gossip.mixing import Averaging, Difference, Mix, mixed
from paceline.gossip.triggers import Always, EventGrad, OnChange, Trigger

Floats = NDArray[np.float64]
RATE = 0.1


@dataclass
class Peers:
    """Models of all nodes, and the copies that all have of each; tensors are slices of a model."""

    graph: Graph
    models: dict[str, Floats]
    mixes: dict[str, Mix]
    triggers: dict[str, Trigger]
    tensors: Sequence[slice]
    public: dict[str, Floats] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    passes: int = 0

    def __post_init__(self) -> None:
        self.public = self.public or {node: x.copy() for node, x in self.models.items()}
        self.events = dict.fromkeys(self.models, 0)

    def run(self, passes: int, gradient: Callable[[str, Floats], Floats]) -> None:
        for _ in range(passes):
            self.passes += 1
            for node, x in self.models.items():
                x_hat = self.public[node] = self.public[node].copy()
                fired = self.triggers[node].fires(
                    self.passes,
                    {
                        "norm": [float(np.linalg.norm(x[at])) for at in self.tensors],
                        "change": [float(np.linalg.norm(x[at] - x_hat[at])) for at in self.tensors],
                    },
                    [x[at].size for at in self.tensors],
                    RATE,
                )
                for at, fire in zip(self.tensors, fired, strict=True):
                    if fire:
                        x_hat[at] = x[at]
                        self.events[node] += 1
            self.models = {
                node: mixed(x, self.public, self.mixes[node]) - RATE * gradient(node, x)
                for node, x in self.models.items()
            }

    @property
    def mean(self) -> Floats:
        return np.mean(list(self.models.values()), axis=0)  # type: ignore[no-any-return]

    @property
    def spread(self) -> float:
        """The squared distance of all models from their mean."""
        return float(sum(((x - self.mean) ** 2).sum() for x in self.models.values()))


def stale(graph: Graph) -> Callable[[str], Mix]:
    return lambda node: Averaging().mix(node, graph.weights(node), {})


def differences(graph: Graph, gamma: float) -> Callable[[str], Mix]:
    return lambda node: Difference(gamma).mix(node, graph.weights(node), {})


def peers(
    graph: Graph, mix: Callable[[str], Mix], trigger: Callable[[], Trigger], start: Floats
) -> Peers:
    models = {node: x.copy() for node, x in zip(graph.nodes, start, strict=True)}
    triggers = {node: trigger() for node in graph.nodes}
    mixes = {node: mix(node) for node in graph.nodes}
    return Peers(graph, models, mixes, triggers, [slice(0, start.shape[1])])


# --- the freeze law ------------------------------------------------------------------------------

EIGHT = ring(8)
TARGET: Floats = np.full(10, 3 / sqrt(10))  # of norm 3; all minimize |x - TARGET|^2 / 2


def to_target(node: str, x: Floats) -> Floats:
    return x - TARGET


def threshold(v: float) -> Callable[[], Trigger]:
    """|x - x̂| >= v, at the learning rate of these tests."""
    return lambda: OnChange(v / (RATE * sqrt(10)))


@pytest.mark.parametrize(
    ("v", "norm", "events"),
    [(0.05, 0.299, 20), (0.1, 0.629, 13), (0.2, 1.315, 6), (0.5, 2.6087, 0)],
)
def test_stale_averaging_freezes(v: float, norm: float, events: int) -> None:
    run = peers(EIGHT, stale(EIGHT), threshold(v), np.zeros((8, 10)))
    run.run(3000, to_target)
    for x in run.models.values():
        assert np.linalg.norm(x - TARGET) == pytest.approx(norm, abs=5e-4 if v < 0.5 else 5e-5)
    assert set(run.events.values()) == {events}
    # The law: nothing moves below (2/3) v / rate; between events x settles at x̂ - 1.5 rate grad.
    assert norm < 2 / 3 * v / RATE
    x, x_hat = run.models["w0"], run.public["w0"]
    assert x == pytest.approx(x_hat - 1.5 * RATE * (x - TARGET), abs=1e-12)
    if events == 0:
        assert np.linalg.norm(x - TARGET) == pytest.approx((2 / 3) / (2 / 3 + RATE) * 3, abs=1e-12)


@pytest.mark.parametrize(("v", "events"), [(0.05, 25), (0.1, 18), (0.2, 11), (0.5, 5)])
def test_difference_mixing_does_not(v: float, events: int) -> None:
    run = peers(EIGHT, differences(EIGHT, 1.0), threshold(v), np.zeros((8, 10)))
    run.run(3000, to_target)
    for x in run.models.values():
        assert np.linalg.norm(x - TARGET) < 1e-12
    assert set(run.events.values()) == {events}


def test_without_a_threshold_neither_freezes() -> None:
    for mix in (stale(EIGHT), differences(EIGHT, 1.0)):
        run = peers(EIGHT, mix, Always, np.zeros((8, 10)))
        run.run(500, to_target)
        assert np.linalg.norm(run.mean - TARGET) < 1e-12


def test_with_targets_of_their_own_the_mean_is_right_all_the_same() -> None:
    """Where nodes differ the cure is put to work: differences are not zero as they are above."""
    targets = np.random.default_rng(3).standard_normal((8, 10))
    own = dict(zip(EIGHT.nodes, targets, strict=True))

    def errors(mix: Callable[[str], Mix], trigger: Callable[[], Trigger]) -> tuple[float, int]:
        run = peers(EIGHT, mix, trigger, np.zeros((8, 10)))
        run.run(1000, lambda node, x: x - own[node])
        return float(np.linalg.norm(run.mean - targets.mean(0))), sum(run.events.values())

    frozen, _ = errors(stale(EIGHT), threshold(0.1))
    right, events = errors(differences(EIGHT, 0.25), threshold(0.1))
    assert right < 1e-12 < 0.02 < frozen
    assert events < 0.2 * 8 * 1000


# --- what mixing does to the mean ----------------------------------------------------------------


@pytest.mark.parametrize("graph", [ring(7), torus(3, 4), exponential(9), complete(4)])
@pytest.mark.parametrize("gamma", [0.2, 1.0])
def test_differences_keep_the_mean_however_stale_the_copies(graph: Graph, gamma: float) -> None:
    rng = np.random.default_rng(1)
    models = {node: rng.standard_normal(5) for node in graph.nodes}
    public = {node: rng.standard_normal(5) for node in graph.nodes}  # anything at all
    mean = np.mean(list(models.values()), axis=0)
    after = {n: mixed(x, public, differences(graph, gamma)(n)) for n, x in models.items()}
    assert np.mean(list(after.values()), axis=0) == pytest.approx(mean, abs=1e-14)
    dragged = {n: mixed(x, public, stale(graph)(n)) for n, x in models.items()}
    assert np.abs(np.mean(list(dragged.values()), axis=0) - mean).max() > 0.05


def test_stale_averaging_drags_the_mean_towards_old_models() -> None:
    """On a ring by 2/3 of the mean of x̂ - x."""
    rng = np.random.default_rng(2)
    models, public = ({n: rng.standard_normal(3) for n in EIGHT.nodes} for _ in range(2))
    after = [mixed(x, public, stale(EIGHT)(n)) for n, x in models.items()]
    old = np.mean([public[n] - x for n, x in models.items()], axis=0)
    expected = np.mean(list(models.values()), axis=0) + 2 / 3 * old
    assert np.mean(after, axis=0) == pytest.approx(expected, abs=1e-14)


def test_with_fresh_copies_both_rules_are_the_matrix() -> None:
    graph, rng = torus(3, 3), np.random.default_rng(4)
    models = {node: rng.standard_normal(6) for node in graph.nodes}
    expected = graph.matrix @ np.array(list(models.values()))
    for rule in (stale(graph), differences(graph, 1.0)):
        after = [mixed(x, models, rule(node)) for node, x in models.items()]
        assert np.array(after) == pytest.approx(expected, abs=1e-14)


def test_rules_as_coefficients() -> None:
    weights = ring(4).weights("w1")
    assert Averaging().mix("w1", weights, {}) == {"w0": 1 / 3, "w2": 1 / 3}
    mix = Difference(0.3).mix("w1", weights, {})
    assert mix == pytest.approx({"w0": 0.1, "w2": 0.1, "w1": -0.2})
    for graph in (ring(5), torus(3, 4), exponential(13), complete(7)):
        for node in graph.nodes:  # to the last bit: the model itself keeps the factor 1
            assert sum(Difference(0.37).mix(node, graph.weights(node), {}).values()) == 0.0


@pytest.mark.parametrize("gamma", [0.0, -0.1, 1.1, float("nan")])
def test_gamma_must_be_a_part(gamma: float) -> None:
    with pytest.raises(ValueError, match="0 < gamma <= 1"):
        Difference(gamma)


def test_nobody_is_its_own_neighbor() -> None:
    with pytest.raises(ValueError, match="'a' is among its own neighbors"):
        Difference(0.5).mix("a", {"a": 0.5, "b": 0.5}, {})


# --- EventGraD and D-PSGD ------------------------------------------------------------------------


def noisy(seed: int) -> Callable[[str, Floats], Floats]:
    """Gradients with noise that depends on node and model only."""

    def gradient(node: str, x: Floats) -> Floats:
        phase = float(int(node[1:]) + seed)
        return x - np.cos(phase * np.arange(1, len(x) + 1)) + 0.1 * np.sin(40 * x + phase)  # type: ignore[no-any-return]

    return gradient


def test_a_horizon_of_zero_is_d_psgd_bit_for_bit() -> None:
    start = np.random.default_rng(5).standard_normal((8, 12))
    run = peers(EIGHT, stale(EIGHT), lambda: EventGrad(0.0), start)
    run.tensors = [slice(0, 2), slice(2, 7), slice(7, 12)]
    run.run(200, noisy(0))
    # D-PSGD, written down without triggers, copies or rules.
    x, third = list(start), 1 / 3
    for _ in range(200):
        left_right = [sorted(((i - 1) % 8, (i + 1) % 8)) for i in range(8)]
        x = [
            (1 - 2 * third) * x[i] + (third * x[a] + third * x[b]) - RATE * noisy(0)(f"w{i}", x[i])
            for i, (a, b) in enumerate(left_right)
        ]
    assert [m.tobytes() for m in run.models.values()] == [m.tobytes() for m in x]
    assert set(run.events.values()) == {3 * 200}


def test_eventgrad_saves_messages_and_is_not_d_psgd() -> None:
    start = np.random.default_rng(5).standard_normal((8, 12))
    every, some = (
        peers(EIGHT, stale(EIGHT), lambda h=h: EventGrad(h), start)  # type: ignore[misc]
        for h in (0.0, 1.0)
    )
    every.run(200, noisy(0))
    some.run(200, noisy(0))
    assert sum(some.events.values()) < 0.8 * sum(every.events.values())
    assert any((some.models[n] != every.models[n]).any() for n in EIGHT.nodes)


# --- CHOCO ---------------------------------------------------------------------------------------


def top(x: Floats, k: int) -> Floats:
    kept = np.zeros_like(x)
    largest = np.argsort(-np.abs(x))[:k]
    kept[largest] = x[largest]
    return kept


def test_choco_reaches_consensus_and_keeps_the_mean() -> None:
    rule = differences(EIGHT, 0.1)
    start = np.random.default_rng(0).standard_normal((8, 20))
    x = dict(zip(EIGHT.nodes, start, strict=True))
    x_hat = {node: np.zeros(20) for node in EIGHT.nodes}
    spreads, drifts = {}, {}
    for at in range(1001):
        values = np.array(list(x.values()))
        spreads[at] = ((values - values.mean(0)) ** 2).sum()
        drifts[at] = np.abs(values.mean(0) - start.mean(0)).max()
        x_hat = {node: x_hat[node] + top(x[node] - x_hat[node], 2) for node in x}
        x = {node: mixed(model, x_hat, rule(node)) for node, model in x.items()}
    assert spreads[0] == pytest.approx(133.8, abs=0.05)
    assert spreads[100] == pytest.approx(0.614, abs=5e-4)
    assert spreads[500] == pytest.approx(4.3e-8, abs=5e-10)
    assert spreads[1000] == pytest.approx(6e-17, abs=5e-18)
    assert max(drifts.values()) < 1e-14


def test_choco_with_a_sum_is_choco_with_copies() -> None:
    """s_i = sum_j w_ij x̂_j, with which the papers' code needs two vectors whatever the degree."""
    graph, gamma = torus(3, 3), 0.2
    weights = graph.matrix
    x = np.random.default_rng(6).standard_normal((9, 20))
    x_hat, s = np.zeros_like(x), np.zeros_like(x)
    models = dict(zip(graph.nodes, x, strict=True))
    copies = {node: np.zeros(20) for node in graph.nodes}
    for _ in range(50):
        x = x + gamma * (s - x_hat)
        q = np.array([top(each, 2) for each in x - x_hat])
        x_hat, s = x_hat + q, s + weights @ q
        models = {n: mixed(m, copies, differences(graph, gamma)(n)) for n, m in models.items()}
        copies = {n: copies[n] + top(m - copies[n], 2) for n, m in models.items()}
    assert np.array(list(models.values())) == pytest.approx(x, abs=1e-12)


def test_a_larger_gap_is_a_faster_consensus() -> None:
    def after(graph: Graph) -> float:
        start = np.random.default_rng(7).standard_normal((16, 4))
        run = peers(graph, stale(graph), Always, start)
        run.run(20, lambda node, x: np.zeros_like(x))
        return run.spread

    by_gap: list[Any] = sorted((ring(16), torus(4, 4), exponential(16)), key=after)
    assert [g.spectral_gap for g in by_gap] == sorted(
        (g.spectral_gap for g in by_gap), reverse=True
    )
