"""Data that stay: nobody's are forgotten, tiles move and samples do not, once per epoch each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.protocol import Finished, Start, Step
from paceline.data.partition.base import Partition
from paceline.report.callbacks import Callback

WORKERS, EACH = 8, 40


def sorted_shards() -> tuple[pl.learners.LeastSquares, np.ndarray]:
    """Return a regression in which each worker's rows call for another model, and its answer."""
    rng = np.random.default_rng(1)
    part = np.repeat(np.arange(WORKERS), EACH)
    rows = rng.standard_normal((WORKERS * EACH, 4))
    targets = np.einsum("ij,ij->i", rows, 2 * rng.standard_normal((WORKERS, 4))[part])
    answer = np.linalg.lstsq(rows, targets, rcond=None)[0]
    # A batch as large as the data, and no noise but who takes part.
    return pl.learners.LeastSquares(rows, targets, lr=0.02, batch_size=WORKERS * EACH), answer


SHARDS = Partition(np.repeat(np.arange(WORKERS), EACH))
TILES = Partition(np.arange(WORKERS * EACH) % 32)


class Averages(Callback):
    """Averages the model over the last steps."""

    def __init__(self, last: int) -> None:
        self._last, self.models = last, list[np.ndarray]()

    def stepped(self, progress: pl.Progress) -> None:
        self.models = [*self.models[-self._last + 1 :], progress.model()]

    @property
    def mean(self) -> np.ndarray:
        found: np.ndarray = np.mean(self.models, axis=0)
        return found


def fit(
    policy: Policy,
    placement: pl.policies.Placed,
    steps: int = 400,
    slow: float = 10.0,
    callbacks: tuple[Callback, ...] = (),
    **engine: object,
) -> pl.Run:
    delays = [pl.delays.ShiftedExponential(0.5, 0.5)] * (WORKERS - 1)
    delays = [*delays, pl.delays.Scaled(delays[0], slow)]  # type: ignore[list-item]
    simulator = pl.Simulator(WORKERS, delays, **engine)  # type: ignore[arg-type]
    learner, _ = sorted_shards()
    return pl.Trainer(
        learner, policy, simulator, progress=False, placement=placement, callbacks=callbacks
    ).fit(steps=steps)


DROPPING: dict[str, Callable[[], Policy]] = {
    "k_sync": lambda: pl.k_sync(6),
    "bandit": lambda: pl.bandit(4),
    "rennala": lambda: pl.rennala(8),
    "k_async": lambda: pl.k_async(4),
    "deadline": lambda: pl.deadline(1.5),
}


@pytest.mark.parametrize("name", DROPPING)
def test_with_a_guard_the_average_is_that_of_sync(name: str) -> None:
    """The eighth worker is ten times slower, and its data are like nobody else's."""
    _, answer = sorted_shards()
    off = {}
    for bound in (None, 1.0):
        average = Averages(200)
        placement = pl.policies.Placed(SHARDS, move=False, bound=bound)
        run = fit(DROPPING[name](), placement, callbacks=(average,))
        off[bound] = float(np.linalg.norm(average.mean - answer))
        represented = run.meter.represented()
        if bound is None:
            assert represented[7] < 0.6
        elif name != "deadline":  # which waits for nobody
            assert represented == pytest.approx(np.ones(8), abs=0.05)
    assert off[1.0] < 0.1 and off[1.0] < 0.35 * off[None], off


def test_waiting_for_everyone_has_nothing_to_correct() -> None:
    average = Averages(200)
    fit(pl.sync(), pl.policies.Placed(SHARDS, move=False), callbacks=(average,))
    assert np.linalg.norm(average.mean - sorted_shards()[1]) < 0.03


def test_what_each_part_has_had_is_right_at_every_moment() -> None:
    """From the journal alone: weight = part of the data x steps - what is owed."""
    bound, k = 2.0, 5
    run = fit(pl.k_sync(k), pl.policies.Placed(SHARDS, move=False, bound=bound), steps=200)
    tasks = {c.task.id: c.task for e in run.journal for c in e.commands if isinstance(c, Start)}
    had, steps = defaultdict[str, float](float), 0
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Step):
                steps += 1
                for id, weight in command.weights.items():
                    assert isinstance(weight, float)
                    had[tasks[id].worker] += weight
                owed = [steps / 8 - had[f"w{i}"] for i in range(8)]
                assert min(owed) > -1e-9 and max(owed) < bound / k + 1 / 8 + 1e-9
    assert run.policy.waited > 0  # type: ignore[attr-defined]
    assert run.policy.placement.missed() == {}  # type: ignore[attr-defined]


def test_with_nobody_missing_it_is_sync() -> None:
    def model(placement: pl.policies.Placed | None) -> np.ndarray:
        engine, (learner, _) = pl.Simulator(8, pl.delays.Fixed(1.0)), sorted_shards()
        trainer = pl.Trainer(learner, pl.sync(), engine, progress=False, placement=placement)
        return trainer.fit(steps=30).model  # type: ignore[no-any-return]

    # All of them are of all data in each step.
    assert model(pl.policies.Placed(SHARDS, move=False)) == pytest.approx(model(None), rel=1e-9)
    assert model(pl.policies.Placed(TILES)) == pytest.approx(model(None), rel=1e-9)


def used(run: pl.Run) -> dict[int, list[tuple[int, int]]]:
    """Return the stretches of each tile that steps have used, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for stretch in run.samples():
        if stretch.fate == "used":
            assert stretch.tile is not None
            found.setdefault(stretch.tile, []).append((stretch.offset, stretch.samples))
    return {tile: sorted(places) for tile, places in found.items()}


@pytest.mark.parametrize("policy", [pl.sync(), pl.k_sync(6)], ids=["sync", "k_sync"])
def test_every_sample_once_per_epoch_whoever_leaves(policy: Policy) -> None:
    """A worker is lost for good, another for a while: their tiles go on where they were."""
    schedule: list[tuple[float, pl.protocol.Joined | pl.protocol.Left]] = [
        (7.3, pl.protocol.Left("w2")),
        (12.1, pl.protocol.Left("w4")),
        (30.2, pl.protocol.Joined("w4")),
    ]
    learner, _ = sorted_shards()
    learner = pl.learners.LeastSquares(learner.features, learner.targets, batch_size=32)
    engine = pl.Simulator(8, [pl.delays.ShiftedExponential(0.5, 0.2)], schedule=schedule)
    placement = pl.policies.Placed(TILES)
    run = pl.Trainer(learner, policy, engine, progress=False, placement=placement).fit(steps=200)
    progress = []
    for tile, places in used(run).items():
        end = 0
        for draw, samples in places:
            assert draw == end, f"tile {tile}: no gap, no overlap"
            end = draw + samples
        progress.append(end)
    assert len(progress) == 32
    # Of about 200. Under sync no tile is ahead of the others; who is dropped falls behind in
    # samples, and weighs the more.
    assert max(progress) - min(progress) <= (8 if policy.k is None else 40)  # type: ignore[attr-defined]
    owners = {w: len(t) for w, t in run.policy.placement._owned.items()}  # type: ignore[attr-defined]
    assert "w2" not in owners and owners["w4"] >= 1 and sum(owners.values()) == 32
    assert run.metrics["samples"].mean() == pytest.approx(32, rel=0.1)


def test_tiles_move_to_the_quick_and_samples_do_not() -> None:
    run = fit(pl.sync(), pl.policies.Placed(TILES), steps=60)
    owners = {w: len(t) for w, t in run.policy.placement._owned.items()}  # type: ignore[attr-defined]
    assert owners["w7"] == 1 and min(owners[f"w{i}"] for i in range(7)) >= 3
    assert np.diff(run.metrics["seconds"])[-20:].mean() < 4.0  # 10 with four tiles
    assert 0 < run.policy.placement.moved < 32  # type: ignore[attr-defined]
    assert run.meter.represented() == pytest.approx(np.ones(32), abs=0.02)


def test_tiles_that_stay_wait_for_their_owner_and_are_reported() -> None:
    schedule = [(3.0, pl.protocol.Left("w5"))]
    run = fit(
        pl.sync(), pl.policies.Placed(SHARDS, move=False), steps=100, slow=1.0, schedule=schedule
    )
    missed = run.policy.placement.missed()  # type: ignore[attr-defined]
    assert list(missed) == [5] and missed[5] > 80
    represented = run.meter.represented()
    assert represented[5] < 0.2 and represented.argmin() == 5
    assert "WARNING: 1 data shard had less than half of it" in run.summary()
    assert "no worker had shard 5 (9" in run.summary()
    back = [(3.0, pl.protocol.Left("w5")), (20.0, pl.protocol.Joined("w5"))]
    run = fit(pl.sync(), pl.policies.Placed(SHARDS, move=False), steps=300, slow=1.0, schedule=back)
    assert run.meter.represented().min() > 0.85
    assert "WARNING" not in run.summary()
    places = used(run)[5]
    assert [draw for draw, _ in places] == [0, *np.cumsum([n for _, n in places])[:-1]]


def test_held_up_steps_do_not_let_results_pile_up() -> None:
    run = fit(
        pl.rennala(4), pl.policies.Placed(SHARDS, move=False, bound=0.5), steps=100, slow=50.0
    )
    assert run.metrics["results"].max() <= 12
    assert run.policy.waited > 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("move", [True, False])
def test_resumed_it_goes_on_the_same(tmp_path: Path, move: bool) -> None:
    def trainer(folder: Path | None = None) -> pl.Trainer:
        saves = None if folder is None else pl.Checkpoints(folder, every=10)
        engine = pl.Simulator(8, [pl.delays.Exponential(1.0), pl.delays.Exponential(3.0)])
        return pl.Trainer(
            sorted_shards()[0], pl.k_sync(6), engine, progress=False, checkpoints=saves,
            placement=pl.policies.Placed(TILES, move=move),
        )  # fmt: skip

    whole = trainer().fit(steps=40)
    trainer(tmp_path).fit(steps=20)
    rest = trainer().resume(tmp_path).fit(steps=40)
    assert rest.model.tolist() == whole.model.tolist()
    assert pl.protocol.replay(rest.driven_policy, rest.journal) == rest.journal


def test_another_partition_is_no_resume(tmp_path: Path) -> None:
    def trainer(tiles: Partition) -> pl.Trainer:
        saves = pl.Checkpoints(tmp_path, every=5)
        return pl.Trainer(
            sorted_shards()[0], pl.sync(), pl.Simulator(8), progress=False, checkpoints=saves,
            placement=pl.policies.Placed(tiles),
        )  # fmt: skip

    trainer(TILES).fit(steps=5)
    with pytest.raises(pl.errors.CheckpointError, match="policy was"):
        trainer(SHARDS).resume(tmp_path)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: pl.policies.Placed(TILES, bound=-1), "bound=-1"),
        (lambda: pl.policies.Placed(TILES, every=0), "every=0"),
        (lambda: pl.policies.Placed(Partition([0, 2])), "data shard 1 in tiles= is empty"),
        (
            lambda: pl.policies.Placed(SHARDS, owners={"w0": [0, 1]}),
            "each of the data shards 0 to 7 exactly once",
        ),
        (
            lambda: trained(pl.sync(), pl.policies.Placed(Partition([0, 1] * 160))),
            r"2 data shards \(tiles\) for 8 workers",
        ),
        (
            lambda: trained(pl.sync(), pl.policies.Placed(Partition(range(8)))),
            "have 8 samples together",
        ),
        (lambda: trained(pl.asynchronous(), pl.policies.Placed(TILES)), "damping=False"),
        (
            lambda: trained(
                pl.sync(), pl.policies.Placed(SHARDS, move=False, owners={"w0": list(range(8))})
            ),
            "no data shard to w1, w2, w3, w4, w5, w6, w7",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def trained(policy: Policy, placement: pl.policies.Placed) -> pl.Trainer:
    return pl.Trainer(sorted_shards()[0], policy, pl.Simulator(8), placement=placement)


def test_a_learner_without_data_has_no_tiles() -> None:
    with pytest.raises(ValueError, match="no dataset"):
        pl.Trainer(
            pl.learners.Quadratic(), pl.sync(), pl.Simulator(8), placement=pl.policies.Placed(TILES)
        )


def test_finished_tasks_name_what_they_drew() -> None:
    run = fit(pl.sync(), pl.policies.Placed(TILES), steps=3)
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                task = command.task
                assert task.work.tiles and sum(task.work.tiles.values()) == task.samples
    assert any(isinstance(entry.event, Finished) for entry in run.journal)
