"""Slow links are found as by the definition, in time that does not grow with nodes cubed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from statistics import median, median_low
from typing import Any

import pytest

from paceline.core.protocol import Task, Work
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.servers.links import SLOW_FACTOR, SLOW_SECONDS, Links, slow_nodes
from paceline.engines.ray.servers.pieces import pieces_of
from paceline.engines.ray.servers.slices import Copy, Kept, Result, Slot, Step, Version
from paceline.engines.ray.servers.transfers import ask_all
from paceline.engines.ray.worker import Token
from paceline.learners.base import Layout

Arrivals = Sequence[tuple[str, Sequence[float]]]


def by_definition(sources: Sequence[str], arrivals: Arrivals, one_way: bool) -> dict[str, bool]:
    ways = [(a, b, t) for b, times in arrivals for a, t in zip(sources, times, strict=True)]
    ways = [way for way in ways if way[0] != way[1]]
    slow = {}
    for node, _ in arrivals:
        mine = [t for *ends, t in ways if node in ends]
        others = [t for *ends, t in ways if node not in ends]
        if mine and others:
            usual = median(others)
            bound = max(SLOW_FACTOR * usual, usual + SLOW_SECONDS)
            out = [(b, t) for a, b, t in ways if a == node]
            into = [(a, t) for a, b, t in ways if b == node]
            most = [
                median_low(t for _, t in each)
                for each in (out, into)
                if len({e for e, _ in each}) > 1
            ]
            slow[node] = any(t > bound for t in (min(mine), *(most if one_way else ())))
    return slow


@pytest.mark.parametrize("seed", range(300))
def test_links_are_slow_as_by_the_definition(seed: int) -> None:
    """With few nodes and few different times, so that nodes and ranks coincide."""
    rng = random.Random(seed)
    nodes = "abcdef"[: rng.randint(1, 6)]
    factor = {node: rng.choice([1.0, 1.0, 1.0, 20.0]) for node in nodes}
    sources = rng.choices(nodes, k=rng.randint(0, 7))
    arrivals = [
        (end, [rng.choice([0.0, 0.01, 0.02, 0.26, 1.0]) * factor[end] * factor[s] for s in sources])
        for end in rng.choices(nodes, k=rng.randint(0, 7))
    ]
    for one_way in (False, True):
        found = slow_nodes(sources, arrivals, one_way=one_way)
        assert found == by_definition(sources, arrivals, one_way)


def test_one_slow_node_of_four_is_found() -> None:
    nodes = list("abcd")
    arrivals = [(b, [1.0 if "c" in (a, b) else 0.1 for a in nodes]) for b in nodes]
    assert slow_nodes(nodes, arrivals) == {"a": False, "b": False, "c": True, "d": False}


def test_slices_that_leave_one_after_the_other_tell_a_slow_link() -> None:
    """From c a slice arrives after 0.4, 0.8 and 1.2 s; to c all wait for no other."""
    nodes = list("abcd")
    leaves = dict(zip(("a", "b", "d"), (0.4, 0.8, 1.2), strict=True))
    arrivals = [
        (b, [leaves[b] if a == "c" and b != "c" else 0.3 if b == "c" else 0.15 for a in nodes])
        for b in nodes
    ]
    found = slow_nodes(nodes, arrivals, one_way=True)
    assert found == {"a": False, "b": False, "c": True, "d": False}
    assert not any(slow_nodes(nodes, arrivals).values())


def test_one_slow_step_is_enough_for_a_node_whose_ways_took_longer_before() -> None:
    slots, step = step_of(4)
    ways = [(f"n{i}", f"n{j}") for i in range(4) for j in range(i)]
    for slot in slots:
        late = [1.0 if "n3" in (f"n{slot.index}", r.node) else 0.1 for r in step.results]
        step.done[slot.index] = late
    for slow, counts in (("n3", [0, 0, 0, 2]), ("n1", [0, 0, 0, 1])):
        links = Links()
        assert links.suspect({way: 0.3 if slow in way else 0.05 for way in ways}, 0) is None
        for slot in slots:
            slot.slow = 0
        links.watch(step, slots, lambda slot: f"n{slot.index}", NODES)
        assert [slot.slow for slot in slots] == counts


NODES = [f"n{i}" for i in range(64)]  # more have workers than have results in the step


def step_of(count: int) -> tuple[list[Slot], Step]:
    """So many slices and a step of as many results, all on nodes of their own."""
    spans = Layout(4 * count - 2).spans(count)
    slots = [Slot(i, span, f"s{i}", Copy(0, [span], [])) for i, span in enumerate(spans)]
    model = Version(0, spans, [])
    results = [
        Result(
            Token("", f"w{i}", 0, i),
            Task(i, f"w{i}", Work(), 0, 0.0, 8, 8 * i),
            model,
            spans,
            [object() for _ in range(count)],
            f"n{i}",
        )
        for i in range(count)
    ]
    rng = random.Random(1)
    done: dict[int, Sequence[float]] = {
        i: [rng.uniform(0.3, 0.4) for _ in range(count)] for i in range(count)
    }
    return slots, Step(1, [1.0] * count, results, {}, model, done=done)


def test_a_slow_link_is_found_though_the_first_slice_is_shorter() -> None:
    """A node at a tenth of the rate; each transfer takes as long as its bytes need."""
    slots, step = step_of(4)
    for slot in slots:
        length = slot.span[1] - slot.span[0]
        rates = [0.1 if "n3" in (f"n{slot.index}", r.node) else 1.0 for r in step.results]
        step.done[slot.index] = [0.01 * length / rate for rate in rates]
    Links().watch(step, slots, lambda slot: f"n{slot.index}", NODES)
    assert [slot.slow for slot in slots] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("part", "leaves"), [(0.15, True), (0.21, False), (0.26, False), (0.3, True), (0.9, True)]
)
def test_a_server_stays_behind_a_slow_link_only_if_that_saves_a_fifth_of_its_bytes(
    part: float, leaves: bool
) -> None:
    """Among 4 nodes whose workers are all awaited, a server stays with about a quarter."""
    _, step = step_of(4)
    bounds = [0, *(int(1000 * (1 - part) * i / 3) for i in (1, 2, 3)), 1000]
    slots = [
        Slot(i, (a, b), f"s{i}", Copy(0, [(a, b)], [])) for i, (a, b) in enumerate(pairwise(bounds))
    ]
    for slot in slots:
        step.done[slot.index] = [
            (slot.span[1] - slot.span[0]) * (0.01 if "n3" in (f"n{slot.index}", r.node) else 0.001)
            for r in step.results
        ]
    Links().watch(step, slots, lambda slot: f"n{slot.index}", NODES[:4])
    assert [bool(slot.slow) for slot in slots] == [False, False, False, leaves]
    slots[0].states[0] = Kept("s1", 0)  # copies take up what that saves
    Links().watch(step, slots, lambda slot: f"n{slot.index}", NODES[:4])
    assert slots[3].slow


def test_a_slow_worker_among_the_first_results_is_found_by_when_they_were_ready() -> None:
    """Pushed results leave before the step, which waits for the answer of the slow worker."""
    slots, step = step_of(4)
    answers = [0.0, 0.1, 0.2, 3.0]
    step.began = 3.0
    for result, at in zip(step.results, answers, strict=True):
        result.answered, result.pushed = at, True
    for slot in slots:
        arrived = [
            at + (4.0 if "n3" in (f"n{slot.index}", result.node) else 0.3)
            for result, at in zip(step.results, answers, strict=True)
        ]
        step.done[slot.index] = step.arrivals(slot.index, [at - step.began for at in arrived])
    Links().watch(step, slots, lambda slot: f"n{slot.index}", NODES)
    assert [slot.slow for slot in slots] == [0, 0, 0, 2]  # at once: seconds longer
    step.results[0].pushed = False
    assert step.arrivals(0, [0.25, 0.1, 0.1, 0.1])[0] == 0.25


def spent(count: int) -> float:
    """Return the seconds of a step that the driver needs for watching links and for pieces."""
    slots, step = step_of(count)

    def once() -> float:
        begin = time.process_time()
        Links().watch(step, slots, lambda slot: f"n{slot.index}", NODES)
        for slot in slots:
            pieces_of(step, slot)
        return time.process_time() - begin

    return min(once() for _ in range(5))


def loop(count: int) -> float:
    """Return the seconds of a plain loop over results and servers."""

    def once() -> float:
        begin = time.process_time()
        found = []
        for i in range(count):
            for j in range(count):
                found.append((i, j))
        return time.process_time() - begin

    return min(once() for _ in range(5))


def test_the_drivers_work_per_step_grows_with_results_times_servers() -> None:
    """At 64 by 64: about 20 times a plain loop that makes a pair for each result and server.

    With a median over all ways for each server, and a look at each span for each piece, it was
    2,000 times.
    """
    assert spent(64) < 100 * loop(64)


def test_pieces_are_those_that_meet_the_slice_however_results_were_cut() -> None:
    slots, step = step_of(4)
    others = [(0, 3), (3, 9), (9, 14)]
    step.results[1].spans, step.results[1].slices = others, ["a", "b", "c"]
    found = pieces_of(step, slots[2])  # from 6 to 10
    assert found.at == [[(0, 4)], [(-3, 3), (3, 8)], [(0, 4)], [(0, 4)]]
    own = [result.slices[2] for result in step.results]
    assert found.refs == [own[0], "b", "c", own[2], own[3]]
    assert [result.task.id for result in found.results] == [0, 1, 1, 2, 3]
    step.results.pop(1)
    assert pieces_of(step, slots[2]).at is None


class Ref:
    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.answer


def test_all_are_asked_at_once_and_one_deadline_is_for_all() -> None:
    now = [0.0]
    calls, refs = Calls(clock=lambda: now[0]), {name: Ref() for name in "abc"}
    found: list[dict[str, Any]] = []
    ask_all(calls, refs, 10.0, found.append)
    refs["a"].answer.set_result(1)
    refs["b"].answer.set_exception(RuntimeError("lost"))
    for _ in range(2):
        calls.wait(now[0])
    assert not found
    now[0] = 10.0
    calls.wait(10.0)
    assert found == [{"a": 1}]
    refs["c"].answer.set_result(3)
    calls.wait(10.0)
    assert found == [{"a": 1}]  # too late
    ask_all(calls, {}, 10.0, found.append)
    assert found[1:] == [{}]


def test_no_results_have_no_slow_links() -> None:
    assert slow_nodes([], []) == {}
