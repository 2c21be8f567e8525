"""What every engine promises: the same suite on the simulator and on a real Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.codecs.base import Codec
from paceline.core.coordinator import Coordinator, run
from paceline.core.policy import Policy, Wrapper
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Event,
    Finished,
    Joined,
    Left,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    TimerFired,
    View,
    Want,
)
from paceline.data.partition.base import Partition
from paceline.engines.base import Job, TrainingEngine
from paceline.report.metrics import TOTALS, Meter
from tests.conftest import flat, make_learner

TILES = Partition(np.arange(512) % 16)
OWNERS = {f"w{i}": range(4 * i, 4 * i + 4) for i in range(4)}
POLICIES: dict[str, Callable[[], Policy]] = {
    "sync": pl.sync,
    "k_sync": lambda: pl.k_sync(3),
    "k_async": lambda: pl.k_async(2),
    "asynchronous": lambda: pl.asynchronous(4),
    "rennala": lambda: pl.rennala(6),
    "ringmaster": lambda: pl.ringmaster(3),
    "ringmaster without stops": lambda: pl.ringmaster(3, stops=False),
    "ringleader": lambda: pl.policies.ringleader(most=2).placed(
        pl.policies.Placed(TILES, move=False, owners=OWNERS)
    ),
    "bandit": lambda: pl.bandit(2),
    "bandit, hedged": lambda: pl.bandit(2, hedge=1, index=pl.selection.Thompson(), discount=0.9),
    "ata": lambda: pl.ata(6),
    "coded": lambda: pl.coded(stragglers=1, messages=3),
    "by speed": lambda: pl.policies.Gather(placement=pl.BySpeed()),
    "k_sync of tiles": lambda: pl.policies.Gather(3, placement=pl.policies.Placed(TILES)),
    "tiles that stay": lambda: pl.policies.Gather(
        placement=pl.policies.Placed(TILES, move=False, owners=OWNERS)
    ),
    "growing k": lambda: pl.bandit(
        pl.policies.GrowOnNoise(1, 3, noise=0.3, memory=3, lag=2), samples=32
    ),
}
MAX_DELAY = {"k_async": 99, "asynchronous": 4, "ringmaster": 2, "ringmaster without stops": 2}
MAX_DELAY["ringleader"] = 6
REUSED = {"ringleader": 0.2}  # a step has one new result, of a quarter of the batch


@pytest.fixture(
    params=[
        "simulator",
        pytest.param("ray_workers", marks=pytest.mark.cluster),
        pytest.param("ray_servers", marks=pytest.mark.cluster),
    ]
)
def engine(request: pytest.FixtureRequest) -> Iterator[TrainingEngine]:
    if request.param == "simulator":
        yield pl.Simulator(workers=4, delays=pl.delays.Exponential(0.05))
    else:
        yield request.getfixturevalue(request.param)


def fit(engine: TrainingEngine, policy: Policy, steps: int = 30) -> pl.Run:
    return pl.Trainer(make_learner(), policy, engine, progress=False).fit(steps=steps)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains_replays_and_accounts_for_every_sample(
    engine: TrainingEngine, name: str
) -> None:
    run = fit(engine, POLICIES[name]())
    assert run.steps == 30 and run.reason == "30 steps taken"
    assert run.metrics["loss"][-5:].mean() < 0.9 * run.metrics["loss"][:3].mean()
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    assert run.metrics["staleness"].max() <= MAX_DELAY.get(name, 0)
    assert np.all(np.diff(run.metrics["seconds"]) >= 0)
    places = Counter[int | None]()
    for stretch in run.samples():
        assert stretch.offset == places[stretch.tile]  # no gap, no overlap
        places[stretch.tile] += stretch.samples
    least = REUSED.get(name, 0.75 if len(places) > 1 else 1.0)
    assert places.total() >= 30 * 64 * least


def test_every_run_tells_its_costs(engine: TrainingEngine) -> None:
    per_hour = {f"w{i}": 3600.0 * (i + 1) for i in range(4)}  # i + 1 dollars a second
    prices = pl.Prices(per_hour, per_gigabyte=1e6)
    learner, policy = make_learner(), pl.k_sync(2)
    run = pl.Trainer(learner, policy, engine, progress=False, prices=prices).fit(steps=20)
    meter, size = run.meter, learner.message_bytes
    unfinished = sum(stretch.fate == "unfinished" for stretch in run.samples())
    assert meter.started == meter.used + meter.wasted + unfinished
    assert meter.used == 2 * 20 and meter.wasted > 0
    assert meter.down_bytes == meter.started * size > 0
    arrived = sum(isinstance(entry.event, Finished) for entry in run.journal)
    assert meter.up_bytes == arrived * size >= meter.used * size
    assert 0 < meter.busy_seconds <= meter.worker_seconds
    seconds, busy, since = dict.fromkeys(per_hour, 0.0), dict[int, str](), 0.0
    waiting, started = 0.0, dict[int, float]()  # results for the driver; tasks
    for entry in run.journal:  # k_sync gives a worker one task at a time
        for worker in busy.values():
            seconds[worker] += entry.now - since
        since = entry.now
        match entry.event:
            case Finished(id, waited=waited):
                if busy.pop(id, None) is not None:  # paid for, and busy until the result was there
                    waiting += min(waited, entry.now - started[id])
            case Left(gone):
                busy = {id: worker for id, worker in busy.items() if worker != gone}
        for command in entry.commands:
            match command:
                case Start(task):
                    busy[task.id], started[task.id] = task.worker, task.since
                case Cancel(id):
                    del busy[id]
    assert meter.busy_seconds == pytest.approx(sum(seconds.values()) - waiting)
    time = sum((i + 1) * seconds[f"w{i}"] for i in range(4))
    assert meter.dollars == pytest.approx(time + 1e-3 * (meter.down_bytes + meter.up_bytes))
    again = Meter.begin(run.journal.header)
    for entry in run.journal:
        again.observe(entry)
    for figure in TOTALS:
        assert getattr(again, figure) == getattr(meter, figure), figure
        assert again.columns[figure] == run.metrics[figure].tolist()
    assert f"; ${meter.dollars:.2f}" in run.summary()


def test_sync_gives_the_same_bits_on_every_engine(engine: TrainingEngine) -> None:
    run = fit(engine, pl.sync())
    reference = fit(pl.Simulator(workers=4, delays=pl.delays.Pareto(1.0, 1.5)), pl.sync())
    assert torch.equal(flat(run.model), flat(reference.model))


def test_placed_data_give_the_same_bits_on_every_engine(engine: TrainingEngine) -> None:
    """Equal tiles that stay, with all awaited: it does not matter who is quick."""

    def model(on: TrainingEngine) -> Tensor:
        placement = pl.policies.Placed(
            TILES, move=False, max_samples=16
        )  # and so all tasks are of 16 samples
        trainer = pl.Trainer(make_learner(), pl.sync(), on, progress=False, placement=placement)
        return flat(trainer.fit(steps=20).model)

    assert torch.equal(model(engine), model(pl.Simulator(4, pl.delays.Pareto(1.0, 1.5))))


CODECS: dict[str, Callable[[], Codec]] = {
    "everything": lambda: pl.codecs.TopK(1.0),
    "bfloat16": lambda: pl.codecs.BFloat16(),
    "feedback": lambda: pl.codecs.Feedback(pl.codecs.Chain(pl.codecs.TopK(0.1), pl.codecs.Int8())),
}


@pytest.mark.parametrize("name", CODECS)
def test_results_travel_encoded(engine: TrainingEngine, name: str) -> None:
    def fit_by(policy: Policy, codec: Codec | None) -> pl.Run:
        trainer = pl.Trainer(make_learner(), policy, engine, progress=False, codec=codec)
        return trainer.fit(steps=40)

    plain, run = fit_by(pl.sync(), None), fit_by(pl.sync(), CODECS[name]())
    sent = run.meter.up_bytes / plain.meter.up_bytes
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    assert run.metrics["loss"][-5:].mean() < 0.5 * run.metrics["loss"][:3].mean()
    if name == "everything":
        assert torch.equal(flat(run.model), flat(plain.model))
        assert 1 < sent < 1.2  # and the headers
    elif name == "bfloat16":
        assert torch.allclose(flat(run.model), flat(plain.model), atol=0.02)
        assert sent < 0.7
    else:
        assert sent < 0.35
        dropping = fit_by(pl.k_sync(3), CODECS[name]())
        assert dropping.metrics["loss"][-5:].mean() < 0.5 * dropping.metrics["loss"][:3].mean()


def test_results_travel_as_far_as_they_changed(engine: TrainingEngine) -> None:
    def fit_by(policy: Policy, codec: Codec | None, steps: int = 40) -> pl.Run:
        trainer = pl.Trainer(make_learner(), policy, engine, progress=False, codec=codec)
        return trainer.fit(steps=steps)

    if getattr(engine, "servers", None) is not None:
        with pytest.raises(ValueError, match="servers see the results that a step uses"):
            fit_by(pl.sync(), pl.codecs.Lazy())
        return
    plain = fit_by(pl.sync(), None)
    same = fit_by(pl.sync(), pl.codecs.Lazy())
    assert torch.equal(flat(same.model), flat(plain.model))
    # Late results, cancelled ones, and several of one worker in a step.
    for policy in (pl.sync(), pl.k_sync(2), pl.rennala(6), pl.ringmaster(3, stops=False)):
        for codec, share in (
            (pl.codecs.Lazy(codec=pl.codecs.Chain(pl.codecs.TopK(0.2), pl.codecs.Int8())), 0.2),
            (pl.codecs.Lazy(pl.codecs.OnChange(0.4, every=10)), 0.95),
        ):
            steps = 40 if policy.k != 1 else 160
            run = fit_by(policy, codec, steps)
            assert run.metrics["loss"][-5:].mean() < 0.7 * run.metrics["loss"][:3].mean()
            arrived = sum(isinstance(entry.event, Finished) for entry in run.journal)
            assert run.meter.up_bytes < share * arrived * run.meter.message_bytes
            assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_models_travel_as_changes(engine: TrainingEngine) -> None:
    def fit_down(policy: Policy, down: Codec | None, steps: int = 40) -> pl.Run:
        trainer = pl.Trainer(make_learner(), policy, engine, progress=False, model_codec=down)
        return trainer.fit(steps=steps)

    if getattr(engine, "servers", None) is not None:
        with pytest.raises(ValueError, match="with servers a model travels as its values"):
            fit_down(pl.sync(), pl.codecs.Int8())
        return
    plain = fit_down(pl.sync(), None)
    same = fit_down(pl.sync(), pl.codecs.TopK(1.0))
    assert torch.allclose(flat(same.model), flat(plain.model), atol=1e-4)
    # Who misses three versions, as without waiting, is sent four messages.
    for policy, steps, share in (
        (pl.sync(), 40, 0.45),
        (pl.k_sync(3), 40, 0.45),
        (pl.asynchronous(4), 160, 0.8),
    ):
        run = fit_down(policy, pl.codecs.Chain(pl.codecs.TopK(0.2), pl.codecs.Int8()), steps)
        assert run.metrics["loss"][-5:].mean() < 0.6 * run.metrics["loss"][:3].mean()
        assert run.meter.down_bytes < share * run.meter.started * run.meter.message_bytes
        assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.parametrize("codec", [pl.codecs.BFloat16(), pl.codecs.Half()])
def test_rounded_both_ways_every_engine_has_the_same_bits(
    engine: TrainingEngine, codec: Codec
) -> None:
    def fit_rounded(engine: TrainingEngine) -> pl.Run:
        trainer = pl.Trainer(
            make_learner(), pl.sync(), engine, progress=False, codec=codec, model_codec=codec
        )
        return trainer.fit(steps=12)

    run, simulated = fit_rounded(engine), fit_rounded(pl.Simulator(engine.size))
    assert torch.equal(flat(run.model), flat(simulated.model))
    slices = getattr(engine, "servers", None)
    headers = 40 * (slices if isinstance(slices, int) else 1)
    each = run.meter.message_bytes / 2 + headers
    assert run.meter.down_bytes == run.meter.started * each
    assert run.meter.up_bytes == 12 * engine.size * each
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_steps_are_numbered_and_follow_their_commands(engine: TrainingEngine) -> None:
    entries = list(fit(engine, pl.asynchronous()).journal)
    versions = [entry.event.version for entry in entries if isinstance(entry.event, Stepped)]
    assert versions == list(range(1, len(versions) + 1))
    assert len(versions) >= 30 - 4  # the last ones, a step of each worker, may come after the end


def test_a_finished_task_was_started_and_is_reported_once(engine: TrainingEngine) -> None:
    started: set[int] = set()
    finished: list[int] = []
    for entry in fit(engine, pl.k_sync(2)).journal:
        if isinstance(entry.event, Finished):
            assert entry.event.task in started
            finished.append(entry.event.task)
        started |= {c.task.id for c in entry.commands if isinstance(c, Start)}
    assert len(finished) == len(set(finished))


class Alarm(Policy):
    """Sets timers out of order, moves one, clears one, and notes which it is told of."""

    def __init__(self) -> None:
        self.set_at = 0.0
        self.rang: list[tuple[str, float]] = []

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if isinstance(event, Joined) and len(view.workers) == 4:
            self.set_at = view.now
            for name, after in (("late", 0.3), ("early", 0.1), ("moved", 0.05), ("never", 0.2)):
                yield SetTimer(name, view.now + after)
            yield SetTimer("moved", view.now + 0.2)
            yield SetTimer("never", float("inf"))
        elif isinstance(event, TimerFired):
            self.rang.append((event.name, view.now))
            if event.name == "late":
                yield Stop("rang")


def test_timers_fire_in_time_and_in_order(engine: TrainingEngine) -> None:
    alarm = play(engine, Alarm()).policy
    assert isinstance(alarm, Alarm)
    assert [name for name, _ in alarm.rang] == ["early", "moved", "late"]
    for (_, at), after in zip(alarm.rang, (0.1, 0.2, 0.3), strict=True):
        assert at >= alarm.set_at + after


class Fickle(Policy):
    """Cancels each task of w0 as soon as another result is there, and gives it a new one."""

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if view.version >= 15:
            yield Stop("done")
            return
        if isinstance(event, Finished):
            yield Step({event.task: 1.0})
            for task in [t for t in view.running.values() if t.worker == "w0"]:
                yield Cancel(task.id)
        for worker in list(view.idle):
            yield Assign(worker, pl.protocol.Work(samples=8))


def test_cancelled_work_never_comes_back(engine: TrainingEngine) -> None:
    cancelled: set[int] = set()
    for entry in play(engine, Fickle()).journal:
        if isinstance(entry.event, Finished):
            late = entry.event.task in cancelled
            assert not late or not any(isinstance(c, Step) for c in entry.commands)
        cancelled |= {c.task for c in entry.commands if isinstance(c, Cancel)}
    assert cancelled


def test_several_tasks_on_one_worker_are_done_in_turn(engine: TrainingEngine) -> None:
    class Queue(Policy):
        def react(self, view: View, event: Event) -> Iterator[Command]:
            if isinstance(event, Joined) and event.worker == "w1":
                for _ in range(5):
                    yield Assign("w1", pl.protocol.Work(samples=8))
            if len(view.held) == 5:
                yield Stop("all five")

    entries = play(engine, Queue()).journal
    assert [e.event.task for e in entries if isinstance(e.event, Finished)] == [0, 1, 2, 3, 4]


@dataclass
class Curious(Wrapper):
    """Asks for statistics, and does nothing with them."""

    asked: frozenset[Want]
    inner: Policy = field(default_factory=pl.sync)

    @property
    def wants(self) -> frozenset[Want]:
        return self.asked


def test_a_product_may_be_with_an_earlier_step(engine: TrainingEngine) -> None:
    run = fit(engine, Curious(frozenset({("dot", 3)})), steps=11)
    stepped = [entry.event for entry in run.journal if isinstance(entry.event, Stepped)]
    assert len(stepped) >= 10
    assert [event.version for event in stepped if "dot" in event.stats] == [4, 7, 10]


def test_wanted_statistics_are_attached(engine: TrainingEngine) -> None:
    run = fit(engine, Curious(frozenset({"norm", "dot", "loss"})), steps=4)
    stats = [entry.event.stats for entry in run.journal if isinstance(entry.event, Stepped)]
    assert all(set(stat) == {"norm", "dot", "loss"} for stat in stats)
    assert stats[0]["dot"] == 0.0 and stats[1]["dot"] != 0.0
    assert all(stat["norm"] > 0 for stat in stats)


def test_the_users_exception_reaches_the_user(engine: TrainingEngine) -> None:
    def broken(model: nn.Module, batch: object) -> torch.Tensor:
        raise ZeroDivisionError("my own mistake")

    learner = make_learner()
    broken_learner = pl.TorchLearner(
        learner.model, broken, learner.optimizer, learner.dataset, learner.batch_size
    )
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        pl.Trainer(broken_learner, pl.sync(), engine, progress=False).fit(steps=3)


def test_resumed_sync_is_bit_for_bit_the_same(engine: TrainingEngine, tmp_path: object) -> None:
    whole = fit(engine, pl.sync(), steps=20)
    saves = pl.Checkpoints(str(tmp_path), every=7, keep=5)
    trainer = pl.Trainer(make_learner(), pl.sync(), engine, progress=False, checkpoints=saves)
    trainer.fit(steps=12)
    for path in (f"{tmp_path}/step-00000007", str(tmp_path)):
        again = pl.Trainer(make_learner(), pl.sync(), engine, progress=False).resume(path)
        run = again.fit(steps=20)
        assert torch.equal(flat(run.model), flat(whole.model))
        assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_batch_norm_and_dropout_are_the_same_on_every_engine(engine: TrainingEngine) -> None:
    def learner() -> pl.TorchLearner:
        plain = make_learner()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = nn.Sequential(
                nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
            )
        return pl.TorchLearner(model, plain.loss, plain.optimizer, plain.dataset, 64)

    one = pl.Trainer(learner(), pl.sync(), engine, progress=False).fit(steps=10)
    two = pl.Trainer(learner(), pl.sync(), pl.Simulator(4), progress=False).fit(steps=10)
    assert torch.equal(flat(one.model), flat(two.model))
    assert one.model[1].num_batches_tracked == 10


def test_deadline_steps_in_time_on_what_was_done(engine: TrainingEngine) -> None:
    learner = make_learner(micro_batch=2)
    run = pl.Trainer(learner, pl.deadline(0.2), engine, progress=False).fit(steps=8)
    assert run.steps == 8
    assert np.diff(run.metrics["seconds"]).max() < 2.0  # a step may come late, never not at all
    assert run.metrics["samples"].max() <= 4 * 64
    assert run.metrics["loss"][-1] < run.metrics["loss"][0]
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.parametrize("overlap", [False, True])
def test_diloco_trains(engine: TrainingEngine, overlap: bool) -> None:
    learner = make_learner(
        outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
        inner_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 120),
        inner_transform=pl.learners.ClipNorm(2.0),
    )
    policy = pl.local_sgd(steps=5, overlap=overlap)
    run = pl.Trainer(learner, policy, engine, progress=False).fit(steps=12)
    assert run.metrics["loss"][-1] < 0.5 * run.metrics["loss"][0]
    assert run.metrics["samples"][0] == 5 * 64


def play(engine: TrainingEngine, policy: Policy) -> Coordinator:
    """Drive a policy that stops by itself."""
    learner = make_learner()
    coordinator = Coordinator(policy, learner.batch_size)
    engine.open(Job(learner=learner, server=learner.server()))
    try:
        run({MAIN: coordinator}, engine)
    finally:
        engine.close()
    return coordinator


@pytest.mark.parametrize(("stragglers", "messages"), [(1, 1), (2, 2), (1, 3), (0, 4)])
def test_coded_steps_are_those_of_sync(
    engine: TrainingEngine, stragglers: int, messages: int
) -> None:
    """On servers each slice of a message becomes a slice of the model, wherever both are cut."""
    expected = fit(pl.Simulator(workers=4), pl.sync(), steps=15)
    run = fit(engine, pl.coded(stragglers, messages), steps=15)
    assert torch.allclose(flat(run.model), flat(expected.model), atol=1e-6)
    size = make_learner().message_bytes
    meter = run.meter
    arrived = meter.used + meter.discarded + len(meter._held)
    assert meter.up_bytes == arrived * -(-size // messages)
