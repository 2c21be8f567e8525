"""A result is used under the token it was expected by, and once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import paceline as pl
from paceline.core.protocol import Task, Work
from paceline.engines.ray.pool import Member
from paceline.engines.ray.reducer import DriverReducer
from paceline.engines.ray.worker import Answer, Token, pack, read, unpack

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
    server = pl.Quadratic(lr=0.25).server()
    reducer = DriverReducer(server, frozenset(), lambda stats: None)
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
    with pytest.raises(KeyError):
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
    assert unpack(pack(TOKEN, task)) == (TOKEN, task)
    reply = (tuple(TOKEN), None, 0, 0.5, {}, None)
    assert read(reply) == Answer(TOKEN, None, 0, 0.5, {})
