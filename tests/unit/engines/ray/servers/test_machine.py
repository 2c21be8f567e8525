"""The recovery machine, event by event: which calls follow, and when a run cannot go on."""

from __future__ import annotations

import pytest

from paceline.core.errors import ServersLost
from paceline.engines.ray.servers.events import (
    Add,
    Apply,
    AskAnew,
    AskHeld,
    CameUp,
    CopyLost,
    GiveState,
    HeldTold,
    KeepState,
    ModelMissed,
    NotUp,
    Probe,
    Probed,
    ReadHeld,
    Redo,
    Reduce,
    Refuse,
    Remove,
    Replace,
    Report,
    ServerLost,
    ServerRaised,
    SetUp,
    Ship,
    Started,
    StepTaken,
    TakeStep,
    Trust,
)
from paceline.engines.ray.servers.links import LONGEST_INTERVAL, PROBE_BYTES, PROBE_SECONDS, Links
from paceline.engines.ray.servers.lost_results import ATTEMPTS
from paceline.engines.ray.servers.moves import PAUSE_SECONDS
from paceline.engines.ray.servers.recovery import NoRoute
from tests.unit.engines.ray.servers.script import Asked, Script, asked, task_of, token_of

SERVERS = {"s0": "A", "s1": "B"}
WORKERS = {"w0": "A", "w1": "B"}
REPORTED = (Report, {"loss": 1.0})


def script(totals: bool = False, has_arrays: bool = False, respawns: int = 9) -> Script:
    """Two servers that are up, each on the node of a worker."""
    made = Script(SERVERS, WORKERS, totals, respawns)
    made.all_started(has_arrays)
    return made


# --- steps ---------------------------------------------------------------------------------------


def test_a_step_with_two_servers() -> None:
    run = Script(SERVERS, WORKERS)
    assert run.start() == [(SetUp, "s0", 0, (0, 2)), (SetUp, "s1", 0, (2, 6))]
    assert run.started("s0") == [(Ship,)] and run.started("s1") == [(Ship,)]
    assert run.step("w0", "w1") == [(TakeStep, "s0", 1), (TakeStep, "s1", 1), (Ship,)]
    assert run.last(TakeStep, "s1").pieces.refs == ["100:2", "101:2"]
    model = run.machine.steps.model
    assert model.known and not model.whole
    assert run.taken("s1") == [(Trust, "s1")]
    assert run.taken("s0") == [(Trust, "s0"), REPORTED, (Ship,)]
    assert model.whole and model.slices == [
        run.last(TakeStep, "s0").values,
        run.last(TakeStep, "s1").values,
    ]


def test_a_step_that_needs_totals_has_two_phases() -> None:
    run = script(totals=True)
    assert run.step("w0") == [(Reduce, "s0", 1), (Reduce, "s1", 1), (Ship,)]
    assert not run.machine.steps.model.known
    assert run.reduced("s1", {"uphill": 2.0}) == []
    totals = {"uphill": 3.0}
    assert run.reduced("s0", {"uphill": 1.0}) == [
        (Apply, "s0", 1, totals),
        (Apply, "s1", 1, totals),
        (Ship,),
    ]
    assert run.taken("s0") == [(Trust, "s0")]
    assert run.taken("s1") == [(Trust, "s1"), REPORTED, (Ship,)]


def test_the_next_step_waits_for_the_version_and_for_its_state_on_another_node() -> None:
    run = script(has_arrays=True)
    assert run.step("w0") == []  # the state of the second slice is on its way
    assert run.kept(1) == [(TakeStep, "s0", 1), (TakeStep, "s1", 1), (Ship,)]
    assert run.step("w0") == []
    assert run.taken("s0", has_arrays=True) == [(Trust, "s0"), (KeepState, "s1", 0, 1, 0)]
    assert run.taken("s1", has_arrays=True) == [
        (Trust, "s1"),
        (KeepState, "s0", 1, 1, 0),
        REPORTED,
        (Ship,),
    ]
    assert run.kept(0) == []
    assert run.kept(1, life=None) == [(TakeStep, "s0", 2), (TakeStep, "s1", 2), (Ship,)]


def test_a_result_is_accepted_once_under_its_own_token() -> None:
    run, task = script(), task_of(7, "w0")
    run.answered(task)
    assert not run.machine.accept(token_of(task), 8, {"loss": 1.0})
    run.machine.drop(7, lost=False)
    assert not run.machine.results.held and not run.machine.results.expected


# --- servers that are lost -----------------------------------------------------------------------


def test_a_server_lost_in_mid_step_takes_it_again_from_the_copy_in_its_store() -> None:
    run = script()
    run.step("w0", "w1")
    run.taken("s0")
    assert run.told(ServerLost("s1", "its process died")) == [
        (Replace, "s1"),
        (SetUp, "s1", 0, (2, 6)),
    ]
    assert run.started("s1", "B") == [(TakeStep, "s1", 1), (Ship,)]
    assert run.taken("s1") == [(Trust, "s1"), REPORTED, (Ship,)]


def test_a_step_is_reported_once_however_often_a_server_takes_it() -> None:
    run = script(totals=True)
    run.step("w0")
    run.reduced("s0", {"uphill": 1.0})
    run.reduced("s1", {"uphill": 2.0})
    run.taken("s0")
    run.told(ServerLost("s1", "its process died"))
    assert run.started("s1", "B") == [(Reduce, "s1", 1), (Ship,)]
    # The other servers are done with it: the totals stay as they were.
    assert run.reduced("s1", {"uphill": 5.0}) == [(Apply, "s1", 1, {"uphill": 3.0})]
    assert run.taken("s1") == [(Trust, "s1"), REPORTED, (Ship,)]
    assert run.told(ServerLost("s0", "it was paused")) == [
        (Replace, "s0"),
        (SetUp, "s0", 1, (0, 2)),
    ]
    assert run.started("s0", "A") == [(Ship,)]


def test_a_server_that_never_came_up_starts_on_another_node() -> None:
    run = Script(SERVERS, WORKERS)
    run.start()
    run.told(ServerLost("s0", "did not answer in 5 s"))
    run.told(ServerLost("s1", "did not answer in 5 s"))
    assert run.placement.choose("s1", {"A", "B"}) == "A"


def test_a_server_that_is_lost_too_often_ends_the_run() -> None:
    run = script(respawns=1)
    run.told(ServerLost("s1", "its process died"))
    with pytest.raises(ServersLost, match=r"s1 was lost too often \(its node died\)") as error:
        run.told(ServerLost("s1", "its node died"))
    assert run.machine.recovery.failure is error.value


def test_states_that_a_lost_server_kept_are_kept_by_another() -> None:
    run = Script({"s0": "A", "s1": "B", "s2": "C"}, WORKERS)
    run.all_started(has_arrays=True)
    run.step("w0")
    run.kept(1)
    run.kept(2)
    for server in ("s0", "s1", "s2"):
        run.taken(server, has_arrays=True)
    for index in range(3):
        run.kept(index)
    assert run.told(ServerLost("s1", "its process died")) == [
        (KeepState, "s2", 0, 1, 0),
        (Replace, "s1"),
        (SetUp, "s1", 1, (2, 6)),
    ]


def test_the_copies_of_chunks_leave_a_server_for_several_others() -> None:
    run = Script({"s0": "A", "s1": "B", "s2": "C"}, WORKERS, chunks=2)
    run.all_started(has_arrays=True)
    for begun in [call for call in run.calls if isinstance(call, SetUp)]:
        run.told(Started(begun, True))
    keepers: dict[str, set[str]] = {name: set() for name in run.nodes}
    for copy in [call for call in run.calls if isinstance(call, KeepState)]:
        keepers[run.machine.steps.slots[copy.index].server].add(copy.keeper)
    assert keepers == {"s0": {"s1", "s2"}, "s1": {"s0", "s2"}, "s2": {"s0", "s1"}}


def test_an_exception_replaces_a_server_and_the_same_one_again_reaches_the_user() -> None:
    run, error = script(), ZeroDivisionError("an optimizer's own fault")
    run.step("w0")
    assert run.told(ServerRaised("s1", run.machine.steps.slots[1], "it raised", error)) == [
        (Replace, "s1"),
        (SetUp, "s1", 0, (2, 6)),
    ]
    run.started("s1", "A")
    with pytest.raises(ZeroDivisionError):
        run.told(ServerRaised("s1", run.machine.steps.slots[1], "it raised", error))
    assert run.machine.recovery.failure is error


def test_an_exception_at_a_later_step_counts_anew() -> None:
    run = script()
    for _ in range(2):
        run.step("w0")
        run.told(
            ServerRaised("s1", run.machine.steps.slots[1], "it raised", OSError("no such file"))
        )
        run.started("s1", "B")
        run.taken("s0")
        assert run.taken("s1")[-2:] == [REPORTED, (Ship,)]


def test_an_exception_does_not_count_for_the_next_step_of_another_slice() -> None:
    run = Script(SERVERS, WORKERS, chunks=2)
    run.all_started()
    for begun in [call for call in run.calls if isinstance(call, SetUp)]:
        run.told(Started(begun, False))
    run.step("w0")
    first, second = run.machine.steps.slots.of("s1")
    takes = [call for call in run.calls if isinstance(call, TakeStep) and call.slot is second]
    run.told(StepTaken(takes[-1], {}, False, ()))
    for slot in (first, second):  # each of them at its own step, for the first time
        run.told(ServerRaised("s1", slot, "it raised", OSError("no such file")))
    assert run.machine.recovery.failure is None
    with pytest.raises(OSError, match="no such file"):
        run.told(ServerRaised("s1", second, "it raised", OSError("no such file")))


# --- nodes that are lost -------------------------------------------------------------------------


def two_steps(last_is_kept: bool = True) -> Script:
    """Take two steps, and then lose node B with the server and the worker on it."""
    run = script(has_arrays=True)
    run.kept(1)
    for is_kept in (True, last_is_kept):
        run.step("w0", "w1")
        run.taken("s0", has_arrays=True)
        run.taken("s1", has_arrays=True)
        run.kept(0)
        run.kept(1, life=0 if is_kept else None)
    run.lost.add("B")
    return run


def test_a_slice_lost_with_its_node_comes_from_a_worker_and_a_keeper() -> None:
    run = two_steps()
    assert run.told(ServerLost("s1", "its node died")) == [(Remove, "s1"), (AskHeld, "s0")]
    assert not run.machine.steps.model.whole
    assert run.told(HeldTold(run.last(AskHeld, "s0"), {"w0": [0, 1]})) == [
        (GiveState, "s0", 1, 1),
        (ReadHeld, "w0", 1, (2, 6)),
        (SetUp, "s0", 1, (2, 6)),
    ]
    assert run.started("s0", "A") == [(TakeStep, "s0", 2), (Ship,)]
    assert run.taken("s0") == [(Trust, "s0"), (Ship,)]  # the step was reported before
    assert run.machine.steps.model.whole


def test_a_step_waits_until_all_slices_of_the_version_before_are_recovered() -> None:
    run = two_steps()
    run.told(ServerLost("s1", "its node died"))
    assert run.step("w0") == []
    run.told(HeldTold(run.last(AskHeld, "s0"), {"w0": [1]}))
    run.started("s0", "A")
    assert run.taken("s0") == [(Trust, "s0"), (SetUp, "s0", 2, (0, 6)), (Ship,), (Ship,)]
    assert run.started("s0", "A")[0] == (TakeStep, "s0", 3)


@pytest.mark.parametrize(("is_kept", "version"), [(True, 2), (False, 1)])
def test_a_slice_is_recovered_at_a_version_whose_state_is_kept(is_kept: bool, version: int) -> None:
    run = two_steps(is_kept)
    run.told(ServerLost("s1", "its node died"))
    calls = run.told(HeldTold(run.last(AskHeld, "s0"), {"w0": [1, 2], "w1": [1]}))
    assert calls[-1] == (SetUp, "s0", version, (2, 6))


def test_a_slice_that_no_worker_holds_is_lost_for_good() -> None:
    run = two_steps()
    run.told(ServerLost("s1", "its node died"))
    with pytest.raises(ServersLost, match="no other node has a version of its slice from 1 on"):
        run.told(HeldTold(run.last(AskHeld, "s0"), {"w0": [0]}))


def test_a_server_that_is_lost_with_its_node_returns_where_there_is_none() -> None:
    run = two_steps()
    run.told(ServerLost("s1", "its node died"))
    run.told(HeldTold(run.last(AskHeld, "s0"), {"w0": [2]}))
    run.started("s0", "A")
    assert run.step("w0") == [(SetUp, "s0", 2, (0, 6)), (Ship,)]
    run.started("s0", "A")
    run.taken("s0")
    assert (Add, "s1") not in run.step("w0")
    run.taken("s0")
    run.worker_of["w2"] = "C"  # another machine has come
    assert (Add, "s1") in run.step("w0")


def test_a_server_lost_with_its_node_is_not_also_taken_back_for_an_earlier_slow_link() -> None:
    """Added twice, it would lose the slice that it has got: the run found no end."""
    run = two_steps()
    run.machine.links.leave_out("s1", "B", run.now, 0, 0.1)
    assert "s1" in run.machine.links.left_out
    run.told(ServerLost("s1", "its node died"))
    assert "s1" not in run.machine.links.left_out


def test_without_another_server_that_is_up_the_process_is_replaced() -> None:
    run = two_steps()
    run.told(ServerLost("s0", "its process died"))
    assert (Replace, "s1") in run.told(ServerLost("s1", "its node died"))


def test_a_node_lost_while_its_server_is_idle_is_noticed_when_a_worker_misses_the_model() -> None:
    run = two_steps()
    assert run.told(ModelMissed()) == [(AskHeld, "s1")]
    assert run.told(ModelMissed()) == []


def test_a_copy_that_stays_lost_ends_the_run() -> None:
    run = Script(SERVERS, WORKERS)
    run.start()
    lost = OSError("it is lost")
    for _ in range(ATTEMPTS):
        assert run.told(CopyLost(run.last(SetUp, "s1"), lost)) == [(SetUp, "s1", 0, (2, 6))]
    with pytest.raises(ServersLost, match=r"cannot be recovered \(it is lost\)"):
        run.told(CopyLost(run.last(SetUp, "s1"), lost))


# --- results that are lost or refused ------------------------------------------------------------


def test_a_result_refused_by_one_server_is_computed_again() -> None:
    run = script()
    run.step("w0", "w1")
    task, sent = task_of(101, "w1"), run.last(TakeStep, "s0").pieces.slices
    assert run.unusable("s0", bad={1: "it is not finite"}) == [
        (Refuse, token_of(task), task, "it is not finite"),
        (Redo, task),
    ]
    assert run.taken("s1") == [(Trust, "s1")]
    assert run.answered(task_of(101, "w0")) == [(TakeStep, "s0", 1)]
    pieces = run.last(TakeStep, "s0").pieces
    assert pieces.slices[0] is sent[0] and pieces.slices[1] is not sent[1]
    assert run.taken("s0") == [(Trust, "s0"), REPORTED, (Ship,)]
    assert not run.machine.results.again and not run.machine.results.held


def test_a_result_that_two_servers_refuse_is_computed_again_once() -> None:
    run = script()
    run.step("w0", "w1")
    assert len(run.unusable("s0", bad={0: "it is not finite"})) == 2
    assert run.unusable("s1", bad={0: "it is not finite"}) == []
    assert run.answered(task_of(100, "w1")) == [(TakeStep, "s0", 1), (TakeStep, "s1", 1)]


@pytest.mark.parametrize("is_bad", [False, True])
def test_an_answer_about_a_result_that_was_replaced_meanwhile_does_not_count(is_bad: bool) -> None:
    run = script()
    run.step("w0", "w1")
    run.unusable("s0", bad={1: "it is not finite"})
    run.answered(task_of(101, "w0"))
    run.lost.add("B")
    calls = run.unusable("s1", bad={1: "too short"}) if is_bad else run.unusable("s1", lost=[1])
    assert calls == [(TakeStep, "s1", 1)] and run.machine.steps.slots[1].attempts == 0


def test_a_result_is_computed_again_at_once_if_its_node_is_lost() -> None:
    run = script()
    run.step("w0", "w1")
    run.lost.add("B")
    assert run.unusable("s0", lost=[1]) == [(Redo, task_of(101, "w1"))]


def test_a_result_whose_node_is_there_is_asked_for_again_first() -> None:
    run = script()
    run.step("w0", "w1")
    for _ in range(ATTEMPTS):
        assert run.unusable("s0", lost=[1]) == [(TakeStep, "s0", 1)]
    assert run.unusable("s0", lost=[1]) == [(Redo, task_of(101, "w1"))]


def test_a_result_is_computed_once_more_if_the_worker_is_lost_that_was_to() -> None:
    run = script()
    run.step("w0", "w1")
    run.unusable("s0", bad={1: "it is not finite"})
    begin = len(run.calls)
    run.machine.drop(101, lost=True)
    run.machine.drop(7, lost=True)  # of no step
    assert [asked(call) for call in run.calls[begin:]] == [(Redo, task_of(101, "w1"))]


def test_a_result_whose_model_is_gone_ends_the_run() -> None:
    run = script()
    run.step("w0", "w1")
    run.last(TakeStep, "s0").step.results[1].model.gone = True
    with pytest.raises(ServersLost, match="task 101 is lost, and so is version 0 of the model"):
        run.unusable("s0", bad={1: "it is not finite"})


# --- slow links ----------------------------------------------------------------------------------

THREE, WORKERS_OF_THREE = {"s0": "A", "s1": "B", "s2": "C"}, {"w0": "A", "w1": "B", "w2": "C"}


AWAITED = "w0", "w1"  # where leaving out a server pays: node C has a worker that is not awaited


def seconds_to(run: Script, node: str, slow: str | None, longer: float = 1.0) -> list[float]:
    """Return the seconds of each result to a node, with one slow link."""
    nodes = [result.node for result in run.machine.steps.history.log[-1].results]
    return [longer if slow in (node, other) and node != other else 0.1 for other in nodes]


def finish(run: Script, slow: str | None = None) -> list[Asked]:
    """Have all servers take their step; return what the last one leads to."""
    calls: list[Asked] = []
    for slot in list(run.machine.steps.slots):
        calls = run.taken(slot.server, seconds_to(run, run.nodes[slot.server], slow))
    return calls


def with_slow_link(node: str) -> Script:
    """Take two steps with three servers, one of which has a slow link."""
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    for _ in range(2):
        run.step(*AWAITED)
        assert finish(run, node)[-2:] == [REPORTED, (Ship,)]
    return run


def test_a_server_with_a_slow_link_is_left_out_and_taken_back() -> None:
    run = with_slow_link("C")
    assert run.step(*AWAITED) == [
        (SetUp, "s0", 2, (0, 3)),
        (SetUp, "s1", 2, (3, 10)),
        (Remove, "s2"),
        (Ship,),
    ]
    assert run.started("s0") == [(TakeStep, "s0", 3), (Ship,)]
    run.started("s1")
    finish(run)
    ways = [("C", "A"), ("B", "A")]
    probe = (Probe, "left out", ways, PROBE_BYTES[0], 0.25)
    for _ in range(3):
        run.now += PROBE_SECONDS
        assert probe in run.step(*AWAITED)
        run.told(Probed(run.last_probe(), {ways[0]: 0.01, ways[1]: 0.01}))
        finish(run)
    # Its process starts beside the steps.
    assert run.step(*AWAITED) == [
        (TakeStep, "s0", 7),
        (TakeStep, "s1", 7),
        (Add, "s2"),
        (Ship,),
    ]
    finish(run)
    assert run.told(CameUp("s2")) == []
    assert run.step(*AWAITED) == [
        (SetUp, "s0", 7, (0, 2)),
        (SetUp, "s1", 7, (2, 6)),
        (SetUp, "s2", 7, (6, 10)),
        (Ship,),
    ]
    copy = run.last(SetUp, "s1").copy  # of the slices that meet its own
    assert copy.spans == [(0, 3), (3, 10)] and len(copy.parts) == 4


# --- nodes that will be taken away ---------------------------------------------------------------


def with_a_leaving_node(node: str) -> Script:
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    run.step(*WORKERS_OF_THREE)
    finish(run)
    leave(run, node)
    return run


def leave(run: Script, *nodes: str) -> list[Asked]:
    """Tell that nodes will be taken away; return the calls that follow."""
    begin = len(run.calls)
    run.machine.leave({*nodes})
    return [asked(call) for call in run.calls[begin:]]


def test_slices_leave_before_their_node_and_a_server_returns_on_another() -> None:
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    run.step(*WORKERS_OF_THREE)
    assert leave(run, "B") == []  # in mid-step
    finish(run)
    assert run.step("w0", "w2") == [
        (SetUp, "s0", 1, (0, 3)),
        (SetUp, "s2", 1, (3, 10)),
        (Remove, "s1"),
        (Ship,),
    ]
    assert run.last(SetUp, "s2").copy.spans == [(2, 6), (6, 10)]
    run.started("s0")
    assert run.started("s2") == [(TakeStep, "s2", 2), (Ship,)]
    finish(run)
    run.lost.add("B")
    assert run.step("w0", "w2") == [(TakeStep, "s0", 3), (TakeStep, "s2", 3), (Ship,)]
    finish(run)
    run.worker_of["w1"] = "D"
    assert run.step("w0", "w2")[-2:] == [(Add, "s1"), (Ship,)]
    assert run.placement.choose("s1", run.alive()) == "D"
    finish(run)
    steps_go_on = [(TakeStep, "s0", 5), (TakeStep, "s2", 5), (Ship,)]
    assert run.step("w0", "w2") == steps_go_on
    finish(run)
    run.told(CameUp("s1"))
    assert run.step("w0", "w2")[:3] == [
        (SetUp, "s0", 5, (0, 2)),
        (SetUp, "s2", 5, (2, 6)),
        (SetUp, "s1", 5, (6, 10)),
    ]


def test_the_version_before_a_move_can_be_had_from_the_servers_that_stay() -> None:
    """A result on it may be lost with the node, and is then computed again."""
    run = with_a_leaving_node("B")
    version = run.machine.steps.model
    run.step("w0", "w1")
    run.started("s0")
    assert len(version.slices) == 3
    run.started("s2")
    assert version.spans == [(0, 3), (3, 10)] and version.whole
    assert version.slices == [run.last(SetUp, s).values for s in ("s0", "s2")]
    run.lost.add("B")
    pieces = run.last(TakeStep, "s0").pieces.results
    lost = [i for i, result in enumerate(pieces) if result.node == "B"]
    assert run.unusable("s0", lost=lost) == [(Redo, task_of(201, "w1"))]


def test_the_version_at_a_cut_is_not_given_up_while_servers_start() -> None:
    run = with_a_leaving_node("B")
    version = run.machine.steps.model
    run.started("s0")
    run.lost.add("B")
    run.told(ModelMissed())
    run.started("s2")
    assert version.whole and not version.gone


def test_states_of_a_new_cut_are_copied_as_soon_as_another_server_is_up() -> None:
    """The first server of the new cut finds no other one that could keep its state."""
    run = with_a_leaving_node("B")
    assert [c for c in run.started("s0", has_arrays=True) if c[0] is KeepState] == []
    calls = run.started("s2", has_arrays=True)
    assert {c[:3] for c in calls if c[0] is KeepState} == {
        (KeepState, "s0", 1),
        (KeepState, "s2", 0),
    }


def test_a_version_that_is_being_rescued_is_not_given_up() -> None:
    """A worker misses the model before the others have told what they hold."""
    run = two_steps(last_is_kept=False)
    run.told(ModelMissed())
    run.told(HeldTold(run.last(AskHeld, "s1"), {"w0": [1, 2]}))
    run.started("s1", "A")
    lost = [i for i, r in enumerate(run.last(TakeStep, "s1").pieces.results) if r.node == "B"]
    assert [call[0] for call in run.unusable("s1", lost=lost)] == [Redo]


def test_a_server_that_does_not_come_up_is_tried_again_later() -> None:
    run = with_a_leaving_node("B")
    assert [c[0] for c in map(asked, run.calls[-3:])] == [SetUp, SetUp, Remove]  # at once
    run.started("s0")
    run.started("s2")
    run.worker_of["w1"] = "D"
    assert run.step("w0", "w2")[-2:] == [(Add, "s1"), (Ship,)]
    run.placement.choose("s1", run.alive())
    assert run.told(NotUp("s1", "its process died")) == [(Remove, "s1")]
    for seconds, then in ((PAUSE_SECONDS - 1, []), (1.0, [(Add, "s1")])):
        finish(run)
        run.now += seconds
        assert [c for c in run.step("w0", "w2") if c[0] is Add] == then


def test_servers_that_all_leave_start_on_the_node_that_stays() -> None:
    run = Script({"s0": "A", "s1": "B"}, WORKERS_OF_THREE)
    run.all_started()
    assert [c[0] for c in leave(run, "A", "B")] == [Replace, SetUp, Replace, SetUp]
    assert {run.placement.choose(s, run.alive()) for s in ("s0", "s1")} == {"C"}


def test_servers_stay_if_all_nodes_leave() -> None:
    run = script()
    run.machine.leave({"A", "B"})
    assert run.step("w0", "w1") == [(TakeStep, "s0", 1), (TakeStep, "s1", 1), (Ship,)]
    assert run.placement.choose("s0", {"A", "B"}) in ("A", "B")


def test_a_left_out_server_returns_elsewhere_if_its_node_leaves() -> None:
    run = with_slow_link("C")
    run.step(*AWAITED)
    run.started("s0")
    run.started("s1")
    finish(run)
    run.machine.leave({"C"})
    run.worker_of["w2"] = "D"
    assert (Add, "s2") in run.step(*AWAITED)


def test_results_count_as_in_use_until_their_step_is_taken() -> None:
    run = script()
    run.answered(task_of(7, "w1"))
    assert {r.task.id for r in run.machine.results_in_use()} == {7}
    run.machine.drop(7, lost=False)
    run.step("w0", "w1")
    assert {r.task.id for r in run.machine.results_in_use()} == {100, 101}
    run.taken("s0")
    assert {r.task.id for r in run.machine.results_in_use()} == {100, 101}
    run.taken("s1")
    assert not [*run.machine.results_in_use()]


@pytest.mark.parametrize("mine", [1.0, float("inf")])
def test_a_link_that_is_still_slow_begins_to_count_anew(mine: float) -> None:
    links = Links()
    links.leave_out("s2", "C", 0.0, 0, 0.1)
    links.left_out["s2"].good = 2
    ways = [("C", "A"), ("B", "A")]
    probe = Probe("left out", ways, 2**17, links.left_out["s2"], 0.25)
    links.probed(probe, {ways[0]: mine, ways[1]: 0.01})
    assert links.left_out["s2"].good == 0 and links.take_back(script()) is None


def test_the_interval_between_probes_doubles_each_time_up_to_an_hour() -> None:
    links, intervals = Links(), []
    for _ in range(9):
        links.leave_out("s2", "C", 100.0, 0, 0.1)
        intervals.append(links.left_out["s2"].interval)
    assert intervals[:3] == [30.0, 60.0, 120.0] and intervals[-1] == LONGEST_INTERVAL
    assert links.left_out["s2"].probe_at == 100.0 + LONGEST_INTERVAL


def test_one_slow_step_leaves_no_server_out() -> None:
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    for slow in ("C", None, "C", None):
        assert (Remove, "s2") not in run.step(*AWAITED)
        finish(run, slow)


FOUR, WORKERS_OF_FOUR = (
    {f"s{i}": n for i, n in enumerate("ABCD")},
    {f"w{i}": n for i, n in enumerate("ABCD")},
)


def probed_before(slow: str, longer: float, adapts: bool = True) -> Script:
    """Have all routes probed before the first step; those of one node take six times as long."""
    run = Script(FOUR, WORKERS_OF_FOUR, adapts=adapts)
    run.machine.routes.check()
    run.all_started()
    ways = run.last_probe().ways
    calls = run.told(Probed(run.last_probe(), {w: 0.3 if slow in w else 0.05 for w in ways}))
    suspected = [("A", slow), (slow, "A"), ("B", "A")]
    assert calls == ([(Probe, "suspects", suspected, PROBE_BYTES[0], 0.0)] if adapts else [])
    if adapts:
        run.told(Probed(run.last_probe(), {w: longer if slow in w else 0.1 for w in suspected}))
    return run


def test_a_server_behind_a_link_that_was_slow_before_has_no_slice_in_the_first_step() -> None:
    run = probed_before("D", 1.5)
    begun = len(run.calls)
    assert run.machine.leaves_slow_link() and not run.machine.leaves_slow_link()
    found = [asked(call) for call in run.calls[begun:]]
    assert found[-1] == (Remove, "s3")
    assert [call[:2] for call in found[:-1]] == [(SetUp, "s0"), (SetUp, "s1"), (SetUp, "s2")]
    for server in ("s0", "s1", "s2"):
        run.started(server)
    assert (TakeStep, "s0", 1) in run.step(*WORKERS_OF_FOUR)


@pytest.mark.parametrize(("computing", "returns"), [(0.4, True), (0.6, False)])
def test_it_returns_after_two_steps_unless_computing_takes_longer_than_it_saves(
    computing: float, returns: bool
) -> None:
    """A result needs 1 s, and the server had a quarter: 2 * 1/4 * 1 s. First tasks load code."""
    run = probed_before("D", 1.5)
    run.machine.leaves_slow_link()
    for server in ("s0", "s1", "s2"):
        run.started(server)
    for run.computing in (5.0, computing):
        assert (Add, "s3") not in run.step(*WORKERS_OF_FOUR)
        finish(run, "D")
    assert ((Add, "s3") in run.step(*WORKERS_OF_FOUR)) == returns
    for _ in range(3):  # once is enough: a second process would take the place of the first
        finish(run, "D")
        assert (Add, "s3") not in run.step(*WORKERS_OF_FOUR)


def test_a_server_that_is_up_again_before_its_trial_ends_is_not_started_twice() -> None:
    """Its node had no result in a step until then."""
    run = probed_before("D", 1.5)
    run.machine.leaves_slow_link()
    for server in ("s0", "s1", "s2"):
        run.started(server)
    run.machine.links.left_out["s3"].good = 3  # its link is good now
    run.computing = 0.1
    assert (Add, "s3") in run.step("w0", "w1")
    for _ in range(4):
        finish(run, "D")
        assert (Add, "s3") not in run.step(*WORKERS_OF_FOUR)


def test_a_server_left_out_on_a_node_that_dies_returns_on_another() -> None:
    run = with_slow_link("C")
    run.step(*AWAITED)
    run.started("s0")
    run.started("s1")
    finish(run)
    del run.worker_of["w2"]
    run.lost.add("C")
    assert (Add, "s2") not in run.step(*AWAITED)
    finish(run)
    run.worker_of["w3"] = "D"
    assert (Add, "s2") in run.step(*AWAITED)


@pytest.mark.parametrize(("longer", "adapts"), [(0.3, True), (1.5, False)])
def test_servers_stay_if_the_link_carries_a_result_well_or_shares_do_not_adapt(
    longer: float, adapts: bool
) -> None:
    assert not probed_before("D", longer, adapts).machine.leaves_slow_link()


def with_a_severe_link(*workers: str) -> tuple[Script, list[Asked]]:
    """Take a step whose transfers to and from node C take seconds; return the last calls, too."""
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    run.step(*workers)
    for server, node in THREE.items():
        calls = run.taken(server, seconds_to(run, node, "C", 2.5))
    return run, calls


def test_a_server_behind_a_link_slow_by_seconds_gives_its_slice_away_before_the_report() -> None:
    run, calls = with_a_severe_link(*AWAITED)
    assert [call[:2] for call in calls[1:]] == [
        (ReadHeld, "w1"),
        (SetUp, "s0"),
        (Remove, "s2"),
        (AskAnew,),
    ]
    assert run.started("s0") == [(TakeStep, "s0", 1), (Ship,)]
    # It waited for the step to be taken once, which is no fault of its own link.
    reported = run.taken("s0", [2.6, 2.5])
    assert [call[0] for call in reported] == [Trust, Report, Ship]
    calls = run.step("w0", "w1")
    assert [call[:3] for call in calls[:2]] == [(SetUp, "s0", 1), (SetUp, "s1", 1)]
    assert not any(call[0] is Remove for call in calls)


def test_without_the_values_elsewhere_it_is_left_out_before_the_next_step() -> None:
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    run.step(*AWAITED)
    del run.worker_of["w0"], run.worker_of["w1"]
    for server, node in THREE.items():
        calls = run.taken(server, seconds_to(run, node, "C", 2.5))
    assert [call[0] for call in calls] == [Trust, Report, Ship]
    assert (Remove, "s2") in run.step("w2")


@pytest.mark.parametrize("longer", [1.0, 2.5])
def test_no_server_is_left_out_if_its_worker_is_awaited_anyway(longer: float) -> None:
    """The link would carry a whole result and then a whole model: more than with the server."""
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    for _ in range(4):
        assert not any(call[0] is Remove for call in run.step(*WORKERS_OF_THREE))
        for server, node in THREE.items():
            calls = run.taken(server, seconds_to(run, node, "C", longer))
        assert calls[-2:] == [REPORTED, (Ship,)]


@pytest.mark.parametrize(("computing", "leaves"), [(1.2, False), (1.5, True)])
def test_a_server_behind_a_slow_link_leaves_if_shares_adapt_and_computing_takes_longer(
    computing: float, leaves: bool
) -> None:
    """It has f = 0.4 of the model, and sends the other 0.6 of its result in a second. So a whole
    one takes L = 1.7 s, and a server there costs 2 f L = 1.33 s."""
    run = Script(THREE, WORKERS_OF_THREE, adapts=True)
    run.computing = computing
    run.all_started()
    for _ in range(2):
        assert not any(call[0] is Remove for call in run.step(*WORKERS_OF_THREE))
        finish(run, "C")
    assert ((Remove, "s2") in run.step(*WORKERS_OF_THREE)) is leaves


@pytest.mark.parametrize(("computing", "again"), [(0.9, True), (1.1, False)])
def test_a_result_on_a_slow_link_is_computed_elsewhere_if_that_takes_less_time(
    computing: float, again: bool
) -> None:
    run = Script(THREE, WORKERS_OF_THREE, direct=True)
    run.computing = computing
    run.all_started()
    for _ in range(2):
        run.step("w0", "w2")
        finish(run, "C")  # a result from there takes a second
    calls = run.step("w0", "w2")
    assert (Remove, "s2") in calls
    assert ((Redo, task_of(301, "w2")) in calls) is again


def test_an_answer_of_the_cut_before_is_not_used() -> None:
    """A server that was starting when the model was cut anew answers for its former slice."""
    run = with_slow_link("C")
    run.told(ServerLost("s0", "its process died"))
    before = run.last(SetUp, "s0")
    run.step(*AWAITED)
    assert run.told(Started(before, False)) == []
    assert run.told(CopyLost(before, OSError("it is lost"))) == []
    assert run.told(ServerRaised("s0", before.slot, "it raised", OSError("it raised"))) == []
    assert run.started("s0", "A") == [(TakeStep, "s0", 3), (Ship,)]


def test_a_server_whose_step_is_followed_by_a_new_cut_is_not_fed_for_its_former_slice() -> None:
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    run.step("w0", "w2")
    finish(run, "B")
    run.step("w0", "w2")
    run.step("w0", "w2")  # waits for the one before
    assert finish(run, "B")[2:] == [
        (SetUp, "s0", 2, (0, 3)),
        (SetUp, "s2", 2, (3, 10)),
        (Remove, "s1"),
        (Ship,),
        (Ship,),
    ]


# --- routes --------------------------------------------------------------------------------------


def probe_twice(run: Script, cut: tuple[str, str]) -> list[Asked]:
    """Have a route fail in two probes."""
    run.told(ModelMissed())
    first = run.last_probe()
    found = {way: float("inf") if way == cut else 0.01 for way in first.ways}
    assert run.told(Probed(first, found)) == [(Probe, "failed routes", [cut], PROBE_BYTES[0], 0.0)]
    return run.told(Probed(run.last_probe(), {cut: float("inf")}))


def test_slices_that_come_late_have_the_routes_probed() -> None:
    run = script()
    run.step("w0", "w1")
    probe = (Probe, "routes", [("A", "B")], PROBE_BYTES[0], 0.0)
    assert run.unusable("s0", late=[1]) == [probe, (TakeStep, "s0", 1)]
    assert run.unusable("s0", late=[1]) == [(TakeStep, "s0", 1)]  # a moment ago
    run.now += 11.0
    assert run.unusable("s0", late=[1]) == [probe, (TakeStep, "s0", 1)]


def test_servers_move_from_nodes_that_cannot_fetch_from_each_other() -> None:
    run = Script(THREE, WORKERS_OF_THREE)
    run.all_started()
    assert probe_twice(run, ("A", "B")) == [
        (Replace, "s0"),
        (SetUp, "s0", 0, (0, 2)),
        (Replace, "s1"),
        (SetUp, "s1", 0, (2, 6)),
    ]


def test_a_route_that_failed_once_is_no_reason_to_move() -> None:
    run = script()
    run.told(ModelMissed())
    run.told(Probed(run.last_probe(), {("A", "B"): float("inf")}))
    assert run.told(Probed(run.last_probe(), {("A", "B"): 0.1})) == []


def test_no_route_from_any_node_ends_the_run() -> None:
    run = script()
    with pytest.raises(NoRoute, match="each other: A and B, so no node") as error:
        probe_twice(run, ("A", "B"))
    assert run.machine.recovery.failure is error.value
