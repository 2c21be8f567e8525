"""A result is used under the token it was expected by, and once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.codecs.uplink import Uplink
from paceline.core.protocol import Task, Work
from paceline.engines.ray.pool import Member
from paceline.engines.ray.reducer import DriverReducer
from paceline.engines.ray.worker import Answer, Token, Worker, pack, read, unpack
from paceline.engines.results import Results

TOKEN = Token("run", "w1", 0, 7)
TASK = Task(7, "w1", Work(), 0, 0.0, 4, 0)


class Silent:
    """An actor that takes every call and never answers."""

    @property
    def compute(self) -> Silent:
        return self

    def remote(self, *order: object) -> None: ...


def answer(token: Token) -> Answer:
    return Answer(token, np.ones(1), 4, 0.5, {"loss": 1.0})


def expecting() -> tuple[DriverReducer, np.ndarray]:
    server = pl.learners.Quadratic(lr=0.25).server()
    reducer = DriverReducer(Results(server, frozenset()), lambda stats: None)
    send(reducer, TOKEN)
    return reducer, server.vector


def send(reducer: DriverReducer, token: Token) -> None:
    member = Member(token.worker, token.incarnation, Silent())
    reducer.dispatch(member, token, replace(TASK, id=token.task), reducer.publish())


@pytest.mark.parametrize(
    "token",
    [
        TOKEN._replace(run="another"),
        TOKEN._replace(worker="w2"),
        TOKEN._replace(incarnation=1),
        TOKEN._replace(task=8),
    ],
)
def test_a_foreign_answer_is_not_taken(token: Token) -> None:
    reducer, _ = expecting()
    assert not reducer.accept(answer(token))
    assert reducer.accept(answer(TOKEN))  # which does not harm the right one


def test_a_repeated_answer_is_not_taken_and_never_applied_twice() -> None:
    reducer, model = expecting()
    assert reducer.accept(answer(TOKEN))
    assert not reducer.accept(answer(TOKEN))
    reducer.step({7: 1.0}, keep=False)
    assert model.tolist() == [0.75]
    assert not reducer.accept(answer(TOKEN))
    with pytest.raises(RuntimeError, match=r"results of tasks \[7\] are missing"):
        reducer.step({7: 1.0}, keep=False)


def test_what_was_dropped_is_not_expected_any_more() -> None:
    reducer, _ = expecting()
    reducer.drop(7)
    assert not reducer.accept(answer(TOKEN))


def test_a_lost_task_is_taken_from_the_one_who_redoes_it_alone() -> None:
    reducer, _ = expecting()
    again = Token("run", "w1", 1, 9)
    reducer.drop(7)
    send(reducer, again)
    assert not reducer.accept(answer(TOKEN))
    assert reducer.accept(answer(again))


@pytest.mark.parametrize(
    "work", [Work(), Work(parts={3: 0.5, 1: -2.0}, samples=4, steps=5, budget=1.5, tag=("a", 1))]
)
def test_a_task_survives_its_way_to_the_worker(work: Work) -> None:
    task = Task(7, "w1", work, 3, 1.25, 4, 96, attempt=2)
    assert unpack(pack(TOKEN, task, [3], "n1")) == (TOKEN, task, [[3], "n1"])
    reply: tuple[object, ...] = (tuple(TOKEN), None, 0, 0.5, {}, None)
    assert read(reply) == Answer(TOKEN, None, 0, 0.5, {})


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([pl.codecs.TopK(0.4), None]))
def test_both_ends_of_lazy_results_stay_alike(seed: int, codec: pl.codecs.TopK | None) -> None:
    """Whatever is cancelled, repeated, of a former life, or lost with its worker."""
    rng = np.random.default_rng(seed)
    recipe = pl.codecs.Lazy(pl.codecs.OnChange(2.0), codec)
    server = pl.learners.Quadratic((1.0,) * 10, lr=0.1).server()
    reducer = DriverReducer(Results(server, frozenset(), recipe), lambda stats: None, encoded=True)
    lives = {f"w{i}": 0 for i in range(3)}
    uplinks = {name: Uplink(recipe, 10) for name in lives}
    answers: list[Answer] = []
    vector = np.zeros(10)
    for task in range(60):
        name = f"w{rng.integers(3)}"
        token = Token("run", name, lives[name], task)
        send(reducer, token)
        if cancelled := rng.random() < 0.3:
            reducer.drop(task)
        if rng.random() < 0.15:  # with what it was computing
            reducer.drop(task, lost=True)
            lives[name] += 1
            uplinks[name] = Uplink(recipe, 10)
            continue
        vector = vector + rng.standard_normal(10) * rng.choice([0.1, 1.0])
        packed = None  # it was told in time that nobody waits
        if not cancelled or rng.random() < 0.7:
            (packed,) = uplinks[name].send(vector, task, 1.0, [(0, 10)])
        answers.append(Answer(token, packed, 4, 0.5, {"loss": 1.0}))
        assert reducer.accept(answers[-1]) is not cancelled
        assert not reducer.accept(answers[rng.integers(len(answers))])
        assert not reducer.accept(answers[-1]._replace(token=token._replace(run="another")))
        if not cancelled:
            held = reducer.vector(task)
            assert held is not None
            assert np.array_equal(held, uplinks[name].state_dict()["0.known"])
            if codec is None:
                assert np.linalg.norm(held - vector) < 2.0 * np.sqrt(10)
            if rng.random() < 0.5:
                reducer.step({task: 1.0}, keep=False)


def test_what_was_abandoned_is_not_sent() -> None:
    """So that both ends go on from what was known before."""
    learner = pl.learners.Quadratic((1.0, 1.0))
    worker = Worker()
    worker._rate, worker._replica = learner.rate, learner.replica(0)
    worker._uplink = Uplink(pl.codecs.Lazy(), 2)
    for task, abandoned in ((7, False), (8, True), (9, False)):
        token = TOKEN._replace(task=task)
        if abandoned:
            worker.abandon(token.pack())
        order = pack(token, replace(TASK, id=task), [])
        told = read(worker.compute(order, np.full(2, float(task))))
        assert (told.vector is None, told.sent is None) == (abandoned, abandoned)
        expected = [7.0 if abandoned else float(task)] * 2
        assert worker._uplink.state_dict()["0.known"].tolist() == expected
