"""The small problems: gradients against differences, noise, local steps, and the server's state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import paceline as pl
from paceline.core.protocol import Task, Want, Work
from paceline.data.sampling import Stream
from paceline.learners.arrays import NoArithmetic
from paceline.learners.base import Direction, Server
from tests.conftest import vector_of

RNG = np.random.default_rng(2)
FEATURES = RNG.normal(size=(30, 5))
LABELS = RNG.choice([-1.0, 1.0], 30)
LOGISTIC = pl.learners.Logistic(FEATURES, LABELS, l2=0.3, lr=0.5, batch_size=6)


def task(offset: int = 0, samples: int = 6, steps: int = 1, id: int = 0) -> Task:
    return Task(id, "w0", Work(samples=samples, steps=steps), 0, 0.0, samples, offset)


def always(done: int) -> bool:
    return True


# --- gradients -----------------------------------------------------------------------------------


def test_the_gradient_of_logistic_regression_is_that_of_its_loss() -> None:
    chosen = np.array([3, 7, 7, 20])
    x = RNG.normal(size=5)
    _, gradient = LOGISTIC.gradient(x, chosen)
    for i in range(5):
        shift = 1e-6 * np.eye(5)[i]
        rise = LOGISTIC.gradient(x + shift, chosen)[0] - LOGISTIC.gradient(x - shift, chosen)[0]
        assert gradient[i] == pytest.approx(rise / 2e-6, rel=1e-6, abs=1e-9)


def test_the_loss_of_logistic_regression() -> None:
    learner = pl.learners.Logistic(np.array([[2.0], [1.0]]), np.array([1.0, -1.0]), l2=0.5)
    loss, _ = learner.gradient(np.array([3.0]), np.array([0, 1]))
    expected = (np.log1p(np.exp(-6.0)) + np.log1p(np.exp(3.0))) / 2 + 0.25 * 9
    assert loss == pytest.approx(expected, rel=1e-12)


def test_the_gradient_of_the_quadratic_is_that_of_its_loss() -> None:
    learner = pl.learners.Quadratic((1.0, 0.5, 4.0), optimum=2.0)
    x = np.array([1.0, -2.0, 3.0])
    loss, gradient = learner.gradient(x, 1, np.random.default_rng(0))
    assert loss == 0.5 * (1 + 0.5 * 16 + 4 * 1)
    assert gradient.tolist() == [-1.0, -2.0, 4.0]


def test_a_task_is_the_gradient_over_its_stretch_of_the_stream() -> None:
    x = RNG.normal(size=5)
    chosen = Stream(30, seed=4).indices(27, 6)  # over an epoch's border
    loss, gradient = LOGISTIC.gradient(x, chosen)
    outcome = LOGISTIC.replica(4).compute([x], task(offset=27), always)
    assert np.array_equal(vector_of(outcome), gradient)
    assert outcome.samples == 6
    assert outcome.stats == {"loss": pytest.approx(loss, rel=1e-15)}


def test_work_that_ends_early_is_the_gradient_over_what_was_done() -> None:
    replica, x = LOGISTIC.replica(4), RNG.normal(size=5)
    cut = replica.compute([x], task(samples=6), lambda done: done < 4)
    whole = replica.compute([x], task(samples=4), always)
    assert cut.samples == whole.samples == 4
    assert np.array_equal(vector_of(cut), vector_of(whole))
    assert cut.stats == whole.stats


def test_nothing_done_is_told() -> None:
    outcome = LOGISTIC.replica(4).compute([np.zeros(5)], task(), lambda done: False)
    assert outcome.samples == 0
    assert not vector_of(outcome).any()


def test_local_steps_sum_their_gradients() -> None:
    """The change the steps make, over the rate: what a server with the same rate undoes exactly."""
    x = RNG.normal(size=5)
    outcome = LOGISTIC.replica(4).compute([x], task(offset=3, samples=2, steps=3), always)
    y, losses = x.copy(), []
    for start in (3, 5, 7):
        loss, gradient = LOGISTIC.gradient(y, Stream(30, 4).indices(start, 2))
        y -= 0.5 * gradient
        losses.append(loss)
    assert x - 0.5 * vector_of(outcome) == pytest.approx(y, rel=1e-12)
    assert outcome.samples == 6
    assert outcome.stats["loss"] == pytest.approx(np.mean(losses))


def test_the_model_given_to_a_task_is_left_as_it_is() -> None:
    x = np.ones(5)
    LOGISTIC.replica(4).compute([x], task(samples=2, steps=3), always)
    assert x.tolist() == [1.0] * 5


def test_labels_must_be_minus_one_and_one() -> None:
    with pytest.raises(ValueError, match=r"labels must be -1 or 1; for 0 and 1 use 2 \* labels"):
        pl.learners.Logistic(FEATURES, (LABELS + 1) / 2)


@pytest.mark.parametrize(
    "learner", [LOGISTIC, pl.learners.Quadratic()], ids=["Logistic", "Quadratic"]
)
def test_parts_with_local_steps_or_a_budget_are_refused(
    learner: pl.learners.Logistic | pl.learners.Quadratic,
) -> None:
    learner.check(Work(parts={0: 1.0}))
    for work in (Work(parts={0: 1.0}, steps=2), Work(parts={0: 1.0}, budget=1.0)):
        with pytest.raises(ValueError, match="use steps=1 and no budget"):
            learner.check(work)


@pytest.mark.parametrize("samples", [6, 7])
def test_parts_add_up_to_the_batch(samples: int) -> None:
    """Three parts, even or not: their mean is the gradient of all samples together."""
    x, replica = RNG.normal(size=(FEATURES.shape[1],)), LOGISTIC.replica(3)
    whole = Task(0, "w0", Work(samples=samples), 0, 0.0, samples, 12)
    parts: dict[int, float | tuple[float, ...]] = dict.fromkeys(range(3), 1 / 3)
    coded = replace(whole, work=Work(parts, n_parts=3, samples=samples))
    expected = replica.compute([x], whole, always)
    found = replica.compute([x], coded, always)
    assert found.samples == samples
    assert found.vector == pytest.approx(expected.vector)
    assert found.stats["loss"] == pytest.approx(expected.stats["loss"])
    two = replace(whole, work=Work({1: (1.0, 2.0)}, n_parts=3, samples=samples))
    one = replace(whole, work=Work({1: 1.0}, n_parts=3, samples=samples))
    message, alone = (replica.compute([x], task, always).vector for task in (two, one))
    assert message is not None and alone is not None
    padded = np.append(alone, 0.0) if alone.size % 2 else alone
    assert message == pytest.approx(padded[0::2] + 2 * padded[1::2])


# --- noise ---------------------------------------------------------------------------------------


def test_noise_is_a_pure_function_of_seed_and_draw() -> None:
    learner = pl.learners.Quadratic((1.0, 1.0), noise=1.0)

    def gradient(seed: int, draw: int, worker: str = "w0", id: int = 0) -> list[float]:
        replica = learner.replica(seed)
        replica.compute([np.zeros(2)], task(offset=99), always)  # whatever was computed before
        given = Task(id, worker, Work(samples=4), 5, 1.0, 4, draw)
        outcome = replica.compute([np.zeros(2)], given, always)
        found: list[float] = vector_of(outcome).tolist()
        return found

    assert gradient(1, 8) == gradient(1, 8) == gradient(1, 8, "w7", 3)
    assert len({tuple(gradient(seed, draw)) for seed in (1, 2) for draw in (0, 8, 16)}) == 6


def test_noise_shrinks_with_the_samples() -> None:
    learner = pl.learners.Quadratic((1.0,) * 4000, noise=2.0)
    for samples in (1, 16):
        outcome = learner.replica(0).compute([np.zeros(4000)], task(samples=samples), always)
        assert np.std(vector_of(outcome)) == pytest.approx(2 / np.sqrt(samples), rel=0.05)
        assert np.mean(vector_of(outcome)) == pytest.approx(0, abs=4 * 2 / np.sqrt(samples * 4000))


# --- the server ----------------------------------------------------------------------------------


def test_a_step_goes_against_the_weighted_sum() -> None:
    server = pl.learners.Quadratic((1.0, 1.0), start=1.0, lr=0.5).server()
    stats = server.step([0.25, 0.75], [np.array([4.0, 0.0]), np.array([0.0, 4.0])], frozenset())
    assert server.vector.tolist() == [1 - 0.5, 1 - 1.5]
    assert stats == {}
    with pytest.raises(ValueError, match="zip"):
        server.step([0.5], [], frozenset())


def test_norm_and_dot_are_told_if_wanted() -> None:
    server = pl.learners.Quadratic((1.0, 1.0)).server()
    both: frozenset[Want] = frozenset({"norm", "dot"})
    assert server.step([1.0], [np.array([3.0, 4.0])], both) == {"norm": 5.0, "dot": 0.0}
    assert server.step([2.0], [np.array([1.0, 0.0])], both) == {"norm": 2.0, "dot": 6.0}
    assert server.step([1.0], [np.array([0.0, 1.0])], frozenset({"norm"})) == {"norm": 1.0}


def test_a_saved_server_goes_on_the_same() -> None:
    learner = pl.learners.Quadratic((1.0, 1.0))
    both: frozenset[Want] = frozenset({"norm", "dot"})
    server, fresh = learner.server(), learner.server()
    server.step([1.0], [np.array([3.0, 4.0])], both)
    saved = server.save().copy()
    server.step([1.0], [np.array([1.0, 1.0])], both)  # does not reach what was saved
    fresh.load(saved)
    assert fresh.step([1.0], [np.array([1.0, 1.0])], both) == {
        "norm": pytest.approx(np.sqrt(2)),
        "dot": 7.0,
    }
    assert np.array_equal(fresh.vector, server.vector)


def test_the_model_and_the_export_are_apart_from_training() -> None:
    server = pl.learners.Quadratic().server()
    model, export = server.model(), server.export()
    server.step([1.0], [np.array([1.0])], frozenset())
    assert model.tolist() == export["x"].tolist() == [1.0]
    assert server.model().tolist() == [0.9]


def test_a_direction_that_was_not_asked_for_is_not_remembered() -> None:
    direction = Direction()
    direction.sums(np.array([1.0]), frozenset())
    assert direction.save() == {}
    assert direction.sums(np.array([1.0]), frozenset({"dot"})) == {"dot": 0.0}


# --- recipes -------------------------------------------------------------------------------------


def test_the_sizes_of_messages_and_epochs() -> None:
    assert pl.learners.Quadratic((1.0,) * 7).message_bytes == 56
    assert pl.learners.Quadratic().examples is None
    assert (LOGISTIC.message_bytes, LOGISTIC.examples) == (40, 30)


def test_timing_computes_nothing() -> None:
    learner = pl.learners.TimingOnly(batch_size=4, message_bytes=9)
    both = learner.replica(0)
    assert isinstance(both, NoArithmetic)
    outcome = both.compute([np.empty(0)], task(samples=3, steps=2), always)
    assert (outcome.vector, outcome.samples) == (None, 6)
    server: Server = learner.server()
    assert (server.model(), server.export(), server.step([1.0], [], frozenset())) == (None, {}, {})


def test_logistic_regression_learns() -> None:
    """Gradient descent on the whole data reaches the point where the gradient vanishes."""
    learner = pl.learners.Logistic(FEATURES, LABELS, l2=0.3, lr=0.5, batch_size=30)
    trainer = pl.Trainer(learner, pl.sync(), pl.Simulator(3), progress=False)
    run = trainer.fit(steps=300)
    _, gradient = learner.gradient(run.model, np.arange(30))
    assert np.linalg.norm(gradient) < 1e-9


def test_least_squares_has_the_gradient_of_its_loss() -> None:
    rng = np.random.default_rng(2)
    learner = pl.learners.LeastSquares(rng.standard_normal((9, 3)), rng.standard_normal(9))
    chosen, x = np.array([0, 4, 4, 7]), rng.standard_normal(3)
    _, gradient = learner.gradient(x, chosen)
    for i in range(3):
        step = 1e-6 * np.eye(3)[i]
        slope = (
            learner.gradient(x + step, chosen)[0] - learner.gradient(x - step, chosen)[0]
        ) / 2e-6
        assert gradient[i] == pytest.approx(slope, rel=1e-6)


def test_least_squares_finds_the_solution() -> None:
    rng = np.random.default_rng(2)
    features, solution = rng.standard_normal((64, 4)), np.array([1.0, -2.0, 3.0, 0.5])
    learner = pl.learners.LeastSquares(features, features @ solution, lr=0.3, batch_size=64)
    run = pl.Trainer(learner, pl.sync(), pl.Simulator(4), progress=False).fit(steps=200)
    assert run.model == pytest.approx(solution, abs=1e-6)
    with pytest.raises(ValueError, match="3 rows of features and 2 targets; give one target"):
        pl.learners.LeastSquares(np.zeros((3, 1)), np.zeros(2))
