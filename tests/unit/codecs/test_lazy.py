"""Results of which both ends keep what was last known: the same at both, and enough to train by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import paceline as pl
from paceline.codecs.base import Codec, unpack
from paceline.codecs.lazy import Known, LazySender
from paceline.codecs.uplink import Receiver, Uplink
from paceline.core.policy import Policy
from paceline.core.protocol import Finished, Task, Work
from paceline.data.partition.base import Partition
from paceline.gossip.triggers import EventGrad
from paceline.learners.arrays import ArrayServer
from paceline.learners.base import Array, Outcome, Proceed
from tests.conftest import flat, make_learner

QUIET = 48 + 8 + 1  # bytes: the header of three parts, two numbers, and the bits of up to 8 tensors
LOUD = 8 + 50 * 8  # more: a fourth part in the header, and the numbers


# --- the two ends --------------------------------------------------------------------------------

RECIPES = [
    pl.codecs.Lazy(),
    pl.codecs.Lazy(codec=pl.codecs.TopK(0.2)),
    pl.codecs.Lazy(pl.codecs.OnChange(1.0, every=4)),
    pl.codecs.Lazy(
        pl.codecs.OnChange(0.05), pl.codecs.Chain(pl.codecs.TopK(0.3), pl.codecs.Int8())
    ),
    pl.codecs.Lazy(pl.codecs.Lag(1), pl.codecs.Half()),
    pl.codecs.Lazy(EventGrad(0.9, warm=2), pl.codecs.Sign()),
]


def ends(recipe: pl.codecs.Lazy, sizes: list[int], tail: int) -> tuple[Uplink, Receiver]:
    trained = sum(sizes)
    return Uplink(recipe, trained, sizes), Receiver(recipe, trained + tail, trained, sizes)


def known(uplink: Uplink) -> NDArray[Any]:
    (sender,) = uplink._senders
    assert isinstance(sender, LazySender) and sender._known.vector is not None
    return sender._known.vector.numpy()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(RECIPES),
    st.lists(st.integers(1, 12), min_size=1, max_size=10),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_both_ends_know_the_same(
    recipe: pl.codecs.Lazy, sizes: list[int], tail: int, seed: int
) -> None:
    """Over random walks with jumps and overflows; a worker that is lost begins anew."""
    rng = np.random.default_rng(seed)
    uplink, receiver = ends(recipe, sizes, tail)
    size = sum(sizes) + tail
    vector = np.zeros(size, np.float32)
    for task in range(30):
        if rng.random() < 0.1:
            uplink, receiver = ends(recipe, sizes, tail)
        vector = vector + rng.choice([0.01, 1.0]) * rng.standard_normal(size).astype(np.float32)
        given = vector.copy()
        if rng.random() < 0.05:
            given[0] = rng.choice([nan, inf])
        model = rng.standard_normal(size).astype(np.float32)
        (packed,) = uplink.send(given, task, 0.5, [(0, size)], model)
        read = receiver.read(packed)
        assert np.array_equal(read[: sum(sizes)], known(uplink), equal_nan=True)
        assert np.array_equal(read[sum(sizes) :], given[sum(sizes) :])
        given[:] = 99.0  # a worker's buffer is used again


def test_momentum_is_averaged_by_the_worker_and_saved() -> None:
    recipe = pl.codecs.Lazy(pl.codecs.Always(), pl.codecs.TopK(0.2), momentum=0.9)
    sender, random = recipe.whole_sender([20]), torch.Generator().manual_seed(0)
    average, known = torch.zeros(0), torch.zeros(20)
    for t in range(30):
        if t == 15:  # goes on in another process
            state, sender = sender.state_dict(), recipe.whole_sender([20])
            sender.load_state_dict(state)
        gradient = torch.randn(20, generator=random)
        average = gradient.clone() if t == 0 else 0.9 * average + 0.1 * gradient
        change = average - known
        places = change.abs().topk(4).indices
        known[places] += change[places]
        sender.send(gradient, t)
        torch.testing.assert_close(sender.state_dict()["known"], known)
        gradient.zero_()  # a worker's buffer is used again


def test_momentum_removes_the_noise_that_the_differences_add() -> None:
    """EF21 amplifies the noise of small batches; EF21-SGDM has about that of SGD.

    On half the square of 20 numbers with noise of deviation 1, SGD ends at 10 times its rate.
    """

    def floor(momentum: float, rate: float = 0.005, steps: int = 3000) -> float:
        recipe = pl.codecs.Lazy(pl.codecs.Always(), pl.codecs.TopK(0.05), momentum=momentum)
        sender, random = recipe.whole_sender([20]), torch.Generator().manual_seed(1)
        known, x, total = recipe.reader([20]), torch.ones(20), 0.0
        for t in range(steps):
            gradient = x + torch.randn(20, generator=random)
            x = x - rate * known.take(sender.send(gradient, t, rate), x.dtype)
            total += float(x.square().sum()) if t >= steps // 2 else 0.0
        return total / (steps - steps // 2)

    sgd = 20 * 0.005 / 2
    assert floor(0.0) > 10 * sgd
    assert floor(0.97) < 2 * sgd


def test_a_message_is_about_some_tensors_and_as_long() -> None:
    sizes = [4, 100, 6]
    uplink, receiver = ends(pl.codecs.Lazy(pl.codecs.OnChange(1.0)), sizes, 0)
    first, second = np.ones(110), np.ones(110)
    second[0], second[104:] = 8.0, 5.0
    at = list(accumulate(sizes, initial=0))
    for task, (vector, named) in enumerate(
        [(first, [0, 1, 2]), (first, []), (second, [0, 2]), (second, [])]
    ):
        (packed,) = uplink.send(vector, task, 0.5, [(0, 110)])
        assert np.array_equal(receiver.read(packed), vector)
        told, bits, *parts, rest = unpack(packed).parts
        assert told.tolist() == [task + 1, 1] and rest.numel() == 0
        assert np.unpackbits(bits.numpy())[:3].nonzero()[0].tolist() == named
        if named:
            (values,) = parts
            expected = [vector[at[i] : at[i + 1]] for i in named]
            assert values.tolist() == np.concatenate(expected).tolist()
        else:
            assert not parts and packed.nbytes == QUIET


def test_results_stay_what_they_were() -> None:
    """A step may weigh several of one worker, as rennala's does."""
    uplink, receiver = ends(pl.codecs.Lazy(codec=pl.codecs.TopK(1.0)), [3], 0)
    sent = [np.array([1.0, 2.0, 3.0]) * task for task in range(5)]
    read = [receiver.read(uplink.send(v, t, 1.0, [(0, 3)])[0]) for t, v in enumerate(sent)]
    assert np.array_equal(read, sent)


def test_an_overflow_is_forgotten() -> None:
    uplink, receiver = ends(pl.codecs.Lazy(codec=pl.codecs.TopK(0.5)), [2], 0)
    for task, vector in enumerate([[1.0, 2.0], [nan, 2.0], [1.0, 2.0], [4.0, 2.0]]):
        (packed,) = uplink.send(np.array(vector), task, 1.0, [(0, 2)])
        read = receiver.read(packed)
        assert np.array_equal(read, [0.0, 2.0] if task == 0 else vector, equal_nan=True)
        assert unpack(packed).parts[0].tolist() == [task + 1, int(task in (1, 2))]


def test_a_message_that_was_missed_is_found_out() -> None:
    uplink, receiver = ends(pl.codecs.Lazy(), [2], 0)
    first, second, _ = (uplink.send(np.ones(2), task, 1.0, [(0, 2)])[0] for task in range(3))
    with pytest.raises(RuntimeError, match="message 2 of a worker arrived after message 0"):
        receiver.read(second)
    receiver.read(first)
    with pytest.raises(RuntimeError, match="message 1 of a worker arrived after message 1"):
        receiver.read(first)


@pytest.mark.parametrize("recipe", [*RECIPES, pl.codecs.Lazy(pl.codecs.Lag(1, memory=1))])
def test_a_worker_goes_on_with_the_memory_of_another(recipe: pl.codecs.Lazy) -> None:
    rng = np.random.default_rng(0)
    uplink, lengths = ends(recipe, [3, 5], 0)[0], set()
    for task in range(30):
        memory = {name: array.copy() for name, array in uplink.state_dict().items()}
        other, _ = ends(recipe, [3, 5], 0)
        other.load_state_dict(memory, [(0, 8)])
        vector, model = rng.standard_normal((2, 8)) * rng.uniform(0, 2, (2, 1))
        mine, theirs = (
            each.send(vector, task, 0.5, [(0, 8)], model)[0] for each in (uplink, other)
        )
        assert np.array_equal(mine, theirs)
        lengths.add(mine.nbytes)
    assert len(lengths) > 1 or not recipe.trigger.wants or recipe.codec is not None


def test_silence_has_an_end() -> None:
    uplink, _ = ends(pl.codecs.Lazy(pl.codecs.OnChange(1.0, every=5)), [3], 0)
    lengths = [uplink.send(np.zeros(3), t, 0.1, [(0, 3)])[0].nbytes for t in range(15)]
    assert [t + 1 for t, length in enumerate(lengths) if length > QUIET] == [5, 10, 15]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: pl.codecs.Lazy(codec=pl.codecs.Feedback(pl.codecs.TopK(0.1))),
            "give Lazy the codec without error feed",
        ),
        (lambda: pl.codecs.Lazy(codec=pl.codecs.Lazy()), "has error feedback"),
        (
            lambda: pl.codecs.Lazy(
                codec=pl.codecs.Chain(pl.codecs.RandomK(0.1, scaled=True), pl.codecs.Half())
            ),
            "scaled=False",
        ),
        (
            lambda: pl.codecs.Lazy(pl.codecs.OnChange(1.0), pl.codecs.TopK(0.1, (3, 4))),
            "is for vectors of one size",
        ),
        (lambda: pl.codecs.Feedback(pl.codecs.Lazy()).sender(3), "only Trainer.codec=….* keeps"),
        (
            lambda: pl.codecs.Chain(pl.codecs.TopK(0.1), pl.codecs.Lazy()).sender(9),
            "only Trainer.codec=….* keeps",
        ),
        (lambda: pl.codecs.Lazy().encode(torch.zeros(3), 0), "only Trainer.codec=….* keeps"),
        (
            lambda: Uplink(pl.codecs.Lazy(), 4).send(np.zeros(4), 0, 1.0, [(0, 2), (2, 4)]),
            "cannot encode results that are cut",
        ),
        (
            lambda: Uplink(pl.codecs.Lazy(pl.codecs.Lag(1)), 4).send(np.zeros(4), 0, 1.0, [(0, 4)]),
            "model=",
        ),
        (
            lambda: trainer(pl.sync(), pl.Simulator(2), model_codec=pl.codecs.Lazy()).fit(steps=2),
            "model_codec=Lazy",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_sizes_are_kept_where_all_tensors_go_together() -> None:
    recipe = pl.codecs.Lazy(pl.codecs.Lag(1), pl.codecs.TopK(0.5, (3, 4)))
    uplink, receiver = ends(recipe, [3, 4], 0)
    (packed,) = uplink.send(np.arange(7.0), 0, 1.0, [(0, 7)], np.zeros(7))
    assert receiver.read(packed).tolist() == [0, 1, 2, 0, 0, 5, 6]


# --- in the simulator ----------------------------------------------------------------------------


def trainer(policy: Policy, engine: pl.Simulator, **more: Any) -> pl.Trainer:
    return pl.Trainer(make_learner(), policy, engine, progress=False, **more)


LOSSES: list[tuple[float, pl.protocol.Joined | pl.protocol.Left]] = [
    *(
        (0.4, pl.protocol.Left("w1")),
        (0.7, pl.protocol.Joined("w1")),
        (0.9, pl.protocol.Left("w3")),
        (1.1, pl.protocol.Joined("w3")),
    ),
    *((1.2, pl.protocol.Left("w1")), (1.5, pl.protocol.Joined("w1"))),
]


@pytest.mark.parametrize("interruptible", [True, False])
@pytest.mark.parametrize(
    "policy",
    [pl.k_sync(2), pl.k_async(2), pl.rennala(6), pl.ringmaster(2), pl.ringmaster(2, stops=False)],
    ids=["k_sync", "k_async", "rennala", "ringmaster", "ringmaster without stops"],
)
@pytest.mark.parametrize("recipe", [RECIPES[3], RECIPES[4]], ids=["some", "all"])
def test_losses_and_late_results_leave_both_ends_alike(
    recipe: pl.codecs.Lazy, policy: Policy, interruptible: bool
) -> None:
    engine = pl.Simulator(
        4,
        pl.delays.PerWorker([pl.delays.Exponential(scale) for scale in (0.02, 0.05, 0.1, 0.3)]),
        pl.delays.Link(0.01, up=20_000),  # so that messages are cancelled on their way, too
        schedule=LOSSES,
        interruptible=interruptible,
    )
    run = trainer(policy, engine, codec=recipe).fit(seconds=4.0)
    assert run.meter.lost + run.meter.wasted > 2
    numbers = []
    for name, worker in engine._workers.items():
        assert worker.uplink is not None
        mine, theirs = worker.uplink.state_dict(), engine._results._receiver(name)._reader
        assert isinstance(theirs, Known)
        if theirs.vector is not None:
            assert np.array_equal(mine["0.known"], theirs.vector.numpy()) and theirs.vector.any()
        assert mine.get("0.number", 0) == theirs.number
        numbers.append(theirs.number)
    assert sum(numbers) > 30
    on_their_way = {w.run.task.id for w in engine._workers.values() if w.run and w.run.news}
    assert set(engine._results._held) == on_their_way | set(run.meter._held)


@pytest.mark.parametrize(
    "policy", [pl.sync(), pl.rennala(6), pl.k_async(2)], ids=["sync", "rennala", "k_async"]
)
def test_everything_sent_is_as_without_a_codec(policy: Policy) -> None:
    plain, lazy = (
        trainer(policy, pl.Simulator(4, pl.delays.Exponential(0.05)), codec=codec).fit(steps=20)
        for codec in (None, pl.codecs.Lazy())
    )
    assert torch.equal(flat(plain.model), flat(lazy.model))


def test_what_is_not_trained_goes_as_it_is() -> None:
    def learner() -> pl.TorchLearner:
        plain = make_learner()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        return pl.TorchLearner(model, plain.loss, plain.optimizer, plain.dataset, 64)

    plain, lazy = (
        pl.Trainer(learner(), pl.sync(), pl.Simulator(4), progress=False, codec=codec).fit(steps=9)
        for codec in (None, pl.codecs.Lazy())
    )
    assert torch.equal(flat(plain.model), flat(lazy.model))
    assert lazy.model[1].num_batches_tracked == 9


@pytest.mark.parametrize("recipe", [RECIPES[3], RECIPES[4]], ids=["some", "all"])
def test_resumed_it_goes_on_the_same(tmp_path: Path, recipe: pl.codecs.Lazy) -> None:
    """Both ends, the trigger's memory and messages on their way are part of a checkpoint."""

    def make(**more: Any) -> pl.Trainer:
        engine = pl.Simulator(4, pl.delays.Exponential(0.05), pl.delays.Link(up=2_000))
        return trainer(pl.k_async(2), engine, codec=recipe, **more)

    whole = make().fit(steps=40)
    make(checkpoints=pl.Checkpoints(tmp_path, every=10)).fit(steps=23)
    rest = make().resume(tmp_path).fit(steps=40)
    assert torch.equal(flat(rest.model), flat(whole.model))


def test_a_short_message_is_quickly_there() -> None:
    """The simulator's clock knows of what is not sent, and of nothing else."""

    def seconds(codec: Codec) -> float:
        engine = pl.Simulator(1, pl.delays.Fixed(1.0), pl.delays.Link(up=100.0))
        run = pl.Trainer(Halves(), pl.sync(), engine, progress=False, codec=codec).fit(steps=10)
        assert run.metrics["seconds"][-1] == pytest.approx(10 + run.meter.up_bytes / 100)
        return float(run.metrics["seconds"][-1])

    dense, rare = (
        seconds(pl.codecs.Lazy()),
        seconds(pl.codecs.Lazy(pl.codecs.OnChange(1e6, every=5))),
    )
    assert dense - rare == pytest.approx(8 * LOUD / 100)


# --- problems of the literature ------------------------------------------------------------------


@dataclass(frozen=True)
class Halves:
    """Worker m has f_m(x) = x.H_m x / 2 - b_m.x, and the model minimizes their mean."""

    hessians: tuple[Any, ...] = (np.eye(50),)
    offsets: tuple[Any, ...] = (np.zeros(50),)
    start: Any = None
    lr: float = 0.1
    examples: None = None

    @property
    def batch_size(self) -> int:
        return len(self.hessians)

    @property
    def message_bytes(self) -> int:
        return 8 * len(self.offsets[0])

    def replica(self, seed: int, tiles: Partition | None = None) -> Halves:
        return self

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        (x,), m = model, int(task.worker[1:])
        return Outcome(self.hessians[m] @ x - self.offsets[m], task.samples, {"loss": 0.0})

    def server(self) -> ArrayServer:
        zeros = np.zeros(len(self.offsets[0]))
        return ArrayServer(zeros if self.start is None else self.start, self.lr)

    def rate(self, version: int) -> float:
        return self.lr

    def check(self, work: Work) -> None: ...

    def about(self) -> dict[str, Any]:
        return {"learner": "Halves"}

    def fit(self, steps: int, codec: Codec | None) -> pl.Run:
        engine = pl.Simulator(len(self.hessians), pl.delays.Exponential(1.0))
        return pl.Trainer(self, pl.sync(), engine, progress=False, codec=codec).fit(steps=steps)


def test_lag_uploads_127_times_and_gradient_descent_1035() -> None:
    """The digest's oracle, E3: 9 workers, ever less smooth, to a gap of 1e-8."""
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.standard_normal((50, 50)))
    y = rng.standard_normal(50)
    of = [1.3**m * np.outer(q[:, m], q[:, m]) + np.eye(50) for m in range(9)]
    hessians, offsets = tuple(a.T @ a for a in of), tuple(a.T @ y for a in of)
    hessian, offset = sum(hessians), sum(offsets)
    best = np.linalg.solve(hessian, offset)
    # Steps are along the mean, and so 9 times as long.
    learner = Halves(hessians, offsets, lr=9 / np.linalg.eigvalsh(hessian)[-1])

    def gap(run: pl.Run) -> float:
        return float((run.model - best) @ hessian @ (run.model - best) / 2)

    for codec, steps, count in (
        (pl.codecs.Lazy(), 115, 1035),
        (pl.codecs.Lazy(pl.codecs.Lag(workers=1)), 75, 127),
    ):
        run = learner.fit(steps, codec)
        assert gap(run) < 1e-8 < gap(learner.fit(steps - 1, codec))
        sent = [e.event.sent for e in run.journal if isinstance(e.event, Finished)]
        assert len(sent) == 9 * steps
        assert set(sent) <= {QUIET, QUIET + LOUD} and sent.count(QUIET + LOUD) == count
        assert run.meter.up_bytes == sum(filter(None, sent))


def test_ef21_converges_where_the_largest_alone_diverge() -> None:
    """Example 1 of Beznosikov et al. (2020, arXiv 2002.12410): |x| grows by 11/6 rate a step."""
    hessians = tuple(
        2 * np.outer(a, a) + np.eye(3) / 2 for a in ([-3, 2, 2], [2, -3, 2], [2, 2, -3])
    )
    learner = Halves(hessians, (np.zeros(3),) * 3, np.ones(3), lr=0.03)
    alone = learner.fit(200, pl.codecs.TopK(1 / 3)).model
    assert alone == pytest.approx((1 + 0.03 * 11 / 6) ** 200)
    assert (
        np.linalg.norm(learner.fit(400, pl.codecs.Lazy(codec=pl.codecs.TopK(1 / 3))).model) < 1e-6
    )
