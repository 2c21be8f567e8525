"""A server that keeps all others waiting with a step gives its slice to another node's server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.engines.ray.servers.events import (
    Add,
    AskAnew,
    AskHeld,
    GiveState,
    KeepState,
    MayBeLate,
    Probe,
    ReadHeld,
    Redo,
    Reduce,
    Remove,
    Replace,
    Report,
    ServerLost,
    SetUp,
    Ship,
    StateKept,
    TakeStep,
    Trust,
    Watch,
)
from paceline.engines.ray.servers.links import PROBE_SECONDS
from tests.unit.engines.ray.servers.script import Script, asked

SERVERS, WORKERS = {"s0": "A", "s1": "B", "s2": "C"}, {"w0": "A", "w1": "B", "w2": "C"}
REPORTED = (Report, {"loss": 1.0})


def late(
    *,
    has_arrays: bool = False,
    totals: bool = False,
    workers: tuple[str, ...] = ("w0", "w1"),
    direct: bool = False,
) -> Script:
    """Take a step along results of some workers, with which the server s2 is late.

    has_arrays: of the optimizer's state. Then it is the second step.
    """
    run = Script(SERVERS, WORKERS, totals, direct=direct)
    run.all_started(has_arrays)
    if has_arrays:
        run.kept(1)
        run.kept(2)
        run.step(*workers)
        for server in SERVERS:
            run.taken(server, has_arrays=True)
        for index in range(3):
            run.kept(index)
    run.step(*workers)
    run.now += 0.5
    for server in ("s0", "s1"):
        if totals:
            run.reduced(server, {})
        else:
            run.taken(server, has_arrays=has_arrays)
    return run


TAKEN_OVER = [
    (ReadHeld, "w1", 0, (6, 10)),
    (SetUp, "s0", 0, (6, 10)),
    (Remove, "s2"),
    (AskAnew,),
]


def test_the_server_of_another_node_takes_the_step() -> None:
    run = late()
    call = run.calls[-1]
    assert asked(call) == (Watch, "s2", 1) and isinstance(call, Watch) and call.seconds == 20.0
    assert run.watched() == TAKEN_OVER
    assert run.last(SetUp, "s0").cut == run.last(SetUp, "s1").cut  # it keeps its own slice
    assert run.started("s0") == [(TakeStep, "s0", 1), (Ship,)]
    assert run.last(TakeStep, "s0").pieces.refs == ["100:6", "101:6"]
    assert run.taken("s0") == [(Trust, "s0"), REPORTED, (Ship,)]
    assert run.machine.steps.model.whole


def test_the_model_is_cut_anew_before_the_next_step_and_the_link_probed() -> None:
    run = late()
    run.watched()
    run.started("s0")
    run.taken("s0")
    run.now += PROBE_SECONDS
    calls = run.step("w0", "w1")
    assert calls[:2] == [(SetUp, "s0", 1, (0, 3)), (SetUp, "s1", 1, (3, 10))]
    assert [call[:3] for call in calls[2:]] == [
        (Probe, "left out", [("C", "A"), ("B", "A")]),
        (Ship,),
    ]
    assert run.last(SetUp, "s0").cut != run.last(SetUp, "s2").cut
    assert run.last(SetUp, "s1").copy.spans == [(2, 6), (6, 10)]


@pytest.mark.parametrize("direct", [True, False])
def test_a_result_on_its_way_through_a_slow_link_is_computed_elsewhere(direct: bool) -> None:
    run = late(direct=direct)
    run.watched()
    run.started("s0")
    run.taken("s0")
    calls = run.step("w0", "w2")  # w2 is on the node whose server is left out
    redone = [call for call in run.calls if isinstance(call, Redo)]
    assert [(redo.task.worker, redo.avoid) for redo in redone] == [("w2", "C")] * direct
    calls = [*run.started("s0"), *run.started("s1")]
    if direct:
        assert (TakeStep, "s0", 2) not in calls and not run.machine.steps.model.known
        calls = run.answered(replace(redone[0].task, worker="w1"))
    assert (TakeStep, "s0", 2) in calls and (TakeStep, "s1", 2) in calls
    run.taken("s0")
    run.taken("s1")
    run.step("w0", "w2")  # the next one left later
    assert len([call for call in run.calls if isinstance(call, Redo)]) == direct


def test_a_link_that_was_quick_in_the_step_before_says_nothing_of_results_on_their_way() -> None:
    run = Script(SERVERS, WORKERS, direct=True)
    run.all_started()
    run.computing = 2.0
    run.step(*WORKERS)
    for server in SERVERS:
        run.taken(server, [0.05] * 3)
    run.step("w0", "w1")
    run.now += 0.5
    run.taken("s0")
    run.taken("s1")
    run.watched()
    run.started("s0")
    run.taken("s0")
    run.step("w0", "w2")
    assert [call.task.worker for call in run.calls if isinstance(call, Redo)] == ["w2"]


def test_a_server_that_answers_in_time_keeps_its_slice() -> None:
    run = late()
    assert run.taken("s2") == [(Trust, "s2"), REPORTED, (Ship,)]
    assert run.watched() == []
    run.step("w0", "w1")
    assert run.watched() == []  # this is the next step


@pytest.mark.parametrize(("took", "seconds"), [(0.5, 2.0), (4.0, 8.0), (15.0, 30.0)])
def test_slower_steps_are_watched_longer_and_first_steps_too(took: float, seconds: float) -> None:
    """The process of a server that has just started still loads its modules."""
    run = Script(SERVERS, WORKERS)
    run.all_started()
    for first in (True, False):
        run.step("w0")
        run.now += took
        run.taken("s0")
        run.taken("s2")
        call = run.calls[-1]
        assert isinstance(call, Watch) and call.server == "s1"
        assert call.seconds == (max(seconds, 20.0) if first else seconds)
        run.taken("s1")


@pytest.mark.parametrize("nodes", ["AB", "ABA", "ABAB"])
def test_on_two_nodes_no_server_is_late(nodes: str) -> None:
    run = Script({f"s{i}": node for i, node in enumerate(nodes)}, WORKERS)
    run.all_started()
    run.step("w0")
    for index in range(len(nodes) - 1):
        run.taken(f"s{index}")
    assert not watches(run)


def test_a_slice_that_only_the_late_node_has_stays_there() -> None:
    run = late(workers=("w2",))
    assert run.watched() == []
    assert run.taken("s2")[1:] == [REPORTED, (Ship,)]


def test_a_server_that_waits_for_a_result_or_starts_again_is_not_late() -> None:
    run = late()
    run.unusable("s2", bad={0: "it is not finite"})
    assert run.watched() == []
    run = late()
    run.told(ServerLost("s2", "its process died"))
    assert run.watched() == []


def watches(run: Script) -> list[Watch]:
    return [call for call in run.calls if isinstance(call, Watch)]


def test_a_server_that_has_started_again_is_watched_anew() -> None:
    run = late()
    before = watches(run)[-1]
    run.told(ServerLost("s2", "its process died"))
    run.now += 1.5
    run.started("s2", "C")
    assert run.told(MayBeLate(before)) == []  # it has just begun
    assert run.watched() == TAKEN_OVER and watches(run)[-1].seconds == 20.0


def test_a_server_is_watched_anew_once_a_lost_result_is_there() -> None:
    run = late()
    run.unusable("s2", bad={0: "it is not finite"})
    count = len(watches(run))
    (task,) = [call.task for call in run.calls if isinstance(call, Redo)]
    run.answered(task)
    assert len(watches(run)) == count + 1


def test_no_task_gets_the_slice_of_the_late_server() -> None:
    run = late()
    assert run.machine.steps.model.known
    run.watched()
    assert not run.machine.steps.model.known
    run.started("s0")
    assert run.machine.steps.model.known


def test_a_watch_keeps_no_object() -> None:
    assert all(isinstance(each, str | int | float) for each in vars(watches(late())[-1]).values())


def test_a_late_server_on_a_node_that_will_be_taken_away_returns_elsewhere() -> None:
    run = late()
    run.machine.leave({"C"})
    run.watched()
    assert not run.machine.links.left_out
    run.started("s0")
    run.taken("s0")
    run.worker_of["w3"] = "D"
    assert (Add, "s2") in run.step("w0", "w1")


def test_a_copy_that_holds_up_a_step_is_made_elsewhere() -> None:
    run = late(has_arrays=True)
    run.taken("s2", has_arrays=True)
    run.kept(0)
    run.kept(2)
    states = dict(run.machine.steps.slots[1].states)
    assert run.step("w0", "w1") == [(Watch, "s2", 2)]  # it has not the state of s1
    assert run.watched() == [(KeepState, "s0", 1, 2, 1)]
    assert run.machine.steps.slots[1].states == states  # what s2 keeps is not lost
    assert run.kept(1)[0] == (TakeStep, "s0", 3)


def test_the_watch_of_a_step_does_not_find_a_copy_late() -> None:
    run = late(has_arrays=True)
    of_the_step = watches(run)[-1]
    run.taken("s2", has_arrays=True)
    run.kept(0)
    run.kept(2)
    run.step("w0", "w1")
    assert run.told(MayBeLate(of_the_step)) == []  # its copy has had no time yet
    assert watches(run)[-1].copy and run.watched()


def test_the_state_comes_from_its_keeper_which_takes_the_slice() -> None:
    run = late(has_arrays=True)
    # s2 kept the state of s1, and was about to keep the next one
    assert run.watched() == [
        (KeepState, "s0", 1, 2, 0),
        (GiveState, "s0", 2, 1),
        (ReadHeld, "w1", 1, (6, 10)),
        (SetUp, "s0", 1, (6, 10)),
        (Remove, "s2"),
        (AskAnew,),
    ]
    assert run.started("s0", has_arrays=True) == [
        (KeepState, "s1", 2, 1, 0),
        (TakeStep, "s0", 2),
        (Ship,),
    ]


def test_what_a_late_server_says_of_a_copy_no_longer_counts() -> None:
    run = late(has_arrays=True)
    before = next(call for call in run.calls if asked(call)[:4] == (KeepState, "s2", 1, 2))
    run.watched()
    assert isinstance(before, KeepState)
    slot = run.machine.steps.slots[1]
    run.told(StateKept(before, None))
    assert slot.keeper == "s0" and slot.copied == 1
    run.kept(1)
    assert slot.keeper is None and slot.copied == 2


def test_the_results_may_still_have_to_be_added_up() -> None:
    run = late(totals=True)
    assert run.watched() == TAKEN_OVER
    assert run.started("s0") == [(Reduce, "s0", 1), (Ship,)]


def test_both_slices_are_recovered_if_their_server_is_lost() -> None:
    run = late()
    mine = run.machine.steps.slots[2].newest
    run.watched()
    assert run.told(ServerLost("s0", "its process died")) == [
        (Replace, "s0"),
        (SetUp, "s0", 1, (0, 2)),
        (SetUp, "s0", 0, (6, 10)),  # from the copy that the late server has left
    ]
    assert run.last(SetUp, "s0").copy is mine


def test_a_copy_that_is_lost_is_searched_elsewhere_once_the_late_node_is_lost_too() -> None:
    run = late()
    run.watched()
    run.lost.add("C")
    assert run.told(ServerLost("s0", "its process died"))[-1] == (AskHeld, "s0")


@pytest.mark.parametrize("node", ["A", "B"])
def test_a_node_with_two_slices_can_be_taken_away(node: str) -> None:
    run = late()
    run.watched()
    run.started("s0")
    run.taken("s0")
    run.machine.leave({node})
    stays = "s1" if node == "A" else "s0"
    assert run.last(SetUp, stays).span == (0, 10)
    assert [call.server for call in run.calls if isinstance(call, Remove)] == [
        "s2",
        "s0" if node == "A" else "s1",
    ]
