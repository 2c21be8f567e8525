"""Answers come once, overdue calls are told of, and what is dropped is never heard of again."""

from __future__ import annotations

import time
from concurrent.futures import Future
from itertools import count
from math import inf
from typing import Any

from paceline.engines.ray.calls import Calls


class Ref:
    """A reference whose future is in our hands."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self._future


def soon() -> float:
    return time.monotonic() + 5


def test_an_answer_is_handed_over_by_wait_and_not_before() -> None:
    calls, ref, told = Calls(), Ref(), []
    calls.add(ref, 60, lambda future: told.append(future.result()), lambda: None)
    ref.future().set_result("done")
    assert told == []
    assert calls.wait(soon()) and told == ["done"]
    assert not calls.wait(inf)  # nothing can come any more


def test_a_dropped_call_is_never_heard_of() -> None:
    calls, ref, told = Calls(), Ref(), list[object]()
    call = calls.add(ref, 60, told.append, lambda: None)
    calls.drop(call)
    ref.future().set_result(1)
    assert calls.wait(soon()) and told == []


def test_an_overdue_call_is_told_of_and_its_late_answer_is_not() -> None:
    calls, ref, told = Calls(), Ref(), []
    calls.add(ref, 0.0, lambda future: told.append("answer"), lambda: told.append("overdue"))
    assert calls.wait(soon()) and told == ["overdue"]
    ref.future().set_result(1)
    assert calls.wait(soon()) and told == ["overdue"]


def test_who_is_patient_once_more_still_gets_the_answer() -> None:
    calls, ref, told = Calls(), Ref(), []
    patience = iter([True, True, False])

    def overdue() -> bool:
        told.append("overdue")
        return next(patience)

    calls.add(ref, 0.0, lambda future: told.append("answer"), overdue)
    ref2 = Ref()
    calls.add(ref2, 60, lambda future: told.append("other"), lambda: None)
    assert calls.wait(soon()) and told == ["overdue", "overdue", "overdue"]
    ref2.future().set_result(1)
    assert calls.wait(soon()) and told[-1] == "other"


def test_what_has_arrived_is_not_overdue_however_long_nobody_looked() -> None:
    calls, ref, told = Calls(), Ref(), []
    calls.add(ref, 0.0, lambda future: told.append("answer"), lambda: told.append("overdue"))
    ref.future().set_result(1)
    assert calls.wait(soon()) and told == ["answer"]


def test_the_first_to_be_overdue_is_the_first_of_all_patiences() -> None:
    calls, told = Calls(), []
    calls.add(Ref(), 60.0, lambda future: None, lambda: told.append("long"))
    calls.add(Ref(), 0.01, lambda future: None, lambda: told.append("short"))
    assert calls.wait(soon()) and told == ["short"]


def test_something_posted_is_done_by_the_next_wait() -> None:
    calls, told = Calls(), []
    calls.post(lambda: told.append("posted"))
    assert calls.wait(inf) and told == ["posted"]


def test_wait_returns_when_its_time_is_up() -> None:
    calls = Calls()
    calls.add(Ref(), 60.0, lambda future: None, lambda: None)
    assert calls.wait(time.monotonic() + 0.01)


def test_a_deadline_is_kept_although_the_inbox_is_never_empty() -> None:
    ticks = count()
    calls = Calls(clock=lambda: float(next(ticks)))
    overdue: list[str] = []
    calls.add(Ref(), 100.0, lambda future: None, lambda: overdue.append("overdue"))

    def again() -> None:
        calls.post(again)

    calls.post(again)
    for _ in range(1000):
        calls.wait(inf)
        if overdue:
            break
    assert overdue == ["overdue"] and next(ticks) < 200
