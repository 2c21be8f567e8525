"""Models that travel rounded: the exact values are a part of the state, and copied with it."""

from __future__ import annotations

import numpy as np
import pytest

import paceline as pl
from paceline.core.errors import ServersLost
from paceline.engines.ray.servers.events import (
    GiveState,
    KeepState,
    ServerLost,
    SetUp,
    Ship,
    StateKept,
    TakeStep,
)
from paceline.engines.ray.servers.server import Server, Slice, joined, parted
from paceline.engines.ray.servers.slices import Kept, Version
from paceline.engines.ray.servers.steps import LAG
from paceline.engines.ray.worker import Worker, pack
from paceline.learners.base import Layout, Saved
from tests.unit.engines.ray.servers.script import Asked, Script, asked, task_of, token_of
from tests.unit.engines.ray.servers.test_server import Ref

SERVERS = {"s0": "A", "s1": "B"}
WORKERS = {"w0": "A", "w1": "B"}
BOTH = [(TakeStep, "s0"), (TakeStep, "s1")]


def script() -> Script:
    """Two servers that are up, each on the node of a worker.

    The first state of the second is copied; when the first started, no other server was up.
    """
    made = Script(SERVERS, WORKERS, rounded=True)
    made.all_started(has_arrays=True)
    made.kept(1)
    return made


def taken(run: Script) -> list[Asked]:
    return [*run.taken("s0", has_arrays=True), *run.taken("s1", has_arrays=True)]


def steps_of(calls: list[Asked]) -> list[Asked]:
    return [call[:2] for call in calls if call[0] is TakeStep]


# --- copies --------------------------------------------------------------------------------------


def test_no_step_is_taken_before_the_first_copy() -> None:
    run = Script(SERVERS, WORKERS, rounded=True)
    run.all_started(has_arrays=True)
    assert run.step("w0") == []
    assert steps_of(run.kept(1)) == BOTH


def test_one_of_a_few_versions_is_copied() -> None:
    run = script()
    copied: dict[int, list[int]] = {0: [], 1: []}
    for version in range(1, 2 * LAG + 2):
        assert steps_of(run.step("w0")) == BOTH
        for call in [each for each in taken(run) if each[0] is KeepState]:
            copied[call[2]].append(version)
            run.kept(call[2])
    assert copied == {0: [1, LAG, 2 * LAG], 1: [LAG, 2 * LAG]}


def test_a_copy_that_failed_is_made_at_the_next_version() -> None:
    run = script()
    for _ in range(LAG):
        run.step("w0")
        taken(run)
    call = next(call for call in reversed(run.calls) if isinstance(call, KeepState))
    assert call.slot.index == 1 and call.version == LAG
    run.told(StateKept(call, None))
    run.step("w0")
    assert (KeepState, "s0", 1, LAG + 1) in [each[:4] for each in taken(run)]


def test_a_step_waits_if_a_copy_is_too_far_behind() -> None:
    run = script()
    for _ in range(LAG + 1):
        assert steps_of(run.step("w0")) == BOTH
        taken(run)
    assert run.step("w0") == []
    run.kept(0)
    assert steps_of(run.kept(1)) == BOTH


def test_a_step_with_a_stale_result_waits_for_all_copies() -> None:
    """Lost with its node, the result would have to be computed on a model that is lost too."""
    run = script()
    run.step("w0")
    taken(run)
    task = task_of(900, "w1")
    run.answered(task)
    run.machine.results.held[900].model = Version(0, [], [])
    begin = len(run.calls)
    run.machine.step({900: 1.0}, keep=False)
    assert [asked(call)[:4] for call in run.calls[begin:]] == [  # they are made now
        (KeepState, "s0", 1, 1)
    ]
    run.kept(0)
    assert steps_of(run.kept(1)) == BOTH
    taken(run)
    assert not steps_of(run.step("w0"))  # not before the step with the stale result is copied


# --- losses --------------------------------------------------------------------------------------


def test_a_server_whose_process_is_lost_starts_from_its_state_alone() -> None:
    run = script()
    run.step("w0", "w1")
    taken(run)
    assert run.told(ServerLost("s1", "its process died"))[-1] == (SetUp, "s1", 1, (2, 6))
    assert run.last(SetUp, "s1").copy.parts == [run.last(TakeStep, "s1").state]


def test_a_slice_lost_with_its_node_comes_from_a_keeper_and_never_from_workers() -> None:
    run = script()
    for step in range(LAG + 2):
        run.step("w0", "w1")
        taken(run)
        if step == LAG - 1:
            run.kept(0)  # the first one; then that of this version
            run.kept(0)
            run.kept(1)
    run.lost.add("B")
    calls = run.told(ServerLost("s1", "its node died"))
    assert calls[-2:] == [(GiveState, "s0", 1, LAG), (SetUp, "s0", LAG, (2, 6))]
    assert len(run.last(SetUp, "s0").copy.parts) == 1
    assert not run.machine.steps.model.whole
    assert (TakeStep, "s0", LAG + 1) in run.started("s0", "A", has_arrays=True)
    assert (TakeStep, "s0", LAG + 2) in run.taken("s0", has_arrays=True)
    assert (Ship,) in run.taken("s0", has_arrays=True)
    assert run.machine.steps.model.whole


def test_a_state_is_copied_at_once_if_its_keeper_is_on_the_node_of_its_server_now() -> None:
    run = Script(SERVERS | {"s2": "C"}, WORKERS, rounded=True)
    run.all_started(has_arrays=True)
    for index in range(3):
        if run.machine.steps.slots[index].keeper:
            run.kept(index)
    run.step("w0", "w1")
    taken(run)
    run.taken("s2", has_arrays=True)
    for index in range(3):
        if run.machine.steps.slots[index].keeper:
            run.kept(index)
    kept = next(iter(run.machine.steps.slots[1].states.values()))
    assert isinstance(kept, Kept)
    run.lost.add("B")
    run.told(ServerLost("s1", "its node died"))
    calls = run.started("s1", run.nodes[kept.server], has_arrays=True)
    assert (KeepState, 1) in [(call[0], call[2]) for call in calls if call[0] is KeepState]
    assert run.machine.steps.slots[1].copied == -1


def test_a_slice_whose_keeper_is_lost_too_ends_the_run() -> None:
    run = script()
    run.machine.steps.slots[1].states.clear()
    run.lost.add("B")
    with pytest.raises(ServersLost, match="no other node has a version of its slice from 0 on"):
        run.told(ServerLost("s1", "its node died"))


def test_steps_are_forgotten_although_slices_are_copied_at_different_versions() -> None:
    run = script()
    for index in (0, 1, 0, 1, 0, 1, 0, 1):
        run.step("w0")
        taken(run)
        run.kept(index)
    history = run.machine.steps.history
    assert history.base.number >= 5 and len(history.log) <= LAG
    assert all(min(slot.states) >= history.base.number for slot in run.machine.steps.slots)


# --- in the processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_state_is_parted_and_joined(is_rounded: bool) -> None:
    saved = [Saved({"values": np.full(2, i), "velocity": np.ones(2)}, {"i": i}) for i in (0, 1)]
    parts = [part for each in saved for part in parted(each, is_rounded)]
    assert len(parts) == (2 if is_rounded else 4)
    for one, other in zip(joined(parts, 2), saved, strict=True):
        assert one.data == other.data and set(one.arrays) == set(other.arrays)
        assert one.arrays["values"] is other.arrays["values"]


def test_a_server_publishes_rounded_values_and_steps_on_exact_ones() -> None:
    learner, codec = pl.learners.Quadratic((1.0, 1.0), lr=0.5), pl.codecs.BFloat16()
    server = Server()
    server._slices[0] = Slice(learner.server(), (0, 2), 0)
    server._model_codec, server._trained = codec, 1  # the second value is untrained
    values = np.array([1.001, 1.001])
    for version in (1, 2):
        gradient = np.array([1e-3, 1e-3])
        _, packed, (arrays, _) = server.step(version, ([1.0], [], None, [Ref(gradient)], 5.0, None))
        values = (np.ones(2) if version == 1 else values) - 0.5 * gradient
        assert np.array_equal(arrays["values"], values)
        worker = Worker()
        worker._down, worker._layout = codec, Layout(2, (1,))
        (read,) = worker._opened([packed], [(0, 2)])
        assert read[0] == 1.0 and read[1] == values[1] and read.dtype == values.dtype


def test_a_worker_computes_on_rounded_slices_and_holds_none() -> None:
    from paceline.codecs.downlink import rounded

    learner, codec = pl.learners.Quadratic((1.0, 1.0, 1.0)), pl.codecs.BFloat16()
    worker = Worker(place=lambda: None)  # type: ignore[arg-type, return-value]
    worker._replica, worker._rate = learner.replica(0), learner.rate
    worker._down, worker._layout = codec, Layout(3)
    model = np.array([1.001, 2.003, 3.007])
    spans = [(0, 2), (2, 3)]
    slices = [Ref(rounded(codec, model[start:stop], (start, stop), 3)) for start, stop in spans]
    task = task_of(1, "w0")
    order = pack(token_of(task), task, [], spans, [(0, 3)], False, 5.0)
    _, gradient = worker.compute_slices(order, slices)
    exact = learner.replica(0).compute([np.array([1.0, 2.0, 3.0])], task, lambda done: True).vector
    assert np.array_equal(gradient, exact) and worker.holds() == []  # type: ignore[arg-type]
