"""Results of one node are added up before they leave it, and singly if that fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.engines.ray.servers.events import Redo, Ship, SumUp, TakeStep
from paceline.engines.ray.servers.server import Server, Slice, Unusable
from paceline.engines.ray.servers.sums import weighted_sum
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import Weather, World
from tests.unit.engines.ray.servers.script import Script
from tests.unit.engines.ray.servers.test_server import Ref

WORKERS = {"w0": "A", "w1": "B", "w2": "A", "w3": "B", "w4": "C"}
"""Two on each of two nodes with a server, and one on a third node without."""


def script() -> Script:
    run = Script({"s0": "A", "s1": "B"}, WORKERS, sum_on_nodes=True)
    run.all_started()
    return run


def sent(run: Script) -> None:
    """Have the shell's part done: each sum gets a reference."""
    for call in run.calls:
        if isinstance(call, SumUp):
            for slot, each in call.results.sums.items():
                each.ref = f"sum of {call.results.node} for {slot}"


def test_servers_fetch_a_sum_from_each_other_node_that_has_a_server() -> None:
    run = script()
    made = run.step(*WORKERS)
    assert made[:2] == [(SumUp, "s0", 1), (SumUp, "s1", 1)]
    assert made[2:] == [(TakeStep, "s0", 1), (TakeStep, "s1", 1), (Ship,)]
    own, _ = (call for call in run.calls if isinstance(call, SumUp))
    assert own.results.members == [0, 2] and list(own.results.sums) == [1]
    pieces = run.last(TakeStep, "s1").pieces
    # The sum of A, then the two results of B, then the only one of C.
    assert pieces.groups == [[0], [1, 2], [3]]
    assert pieces.weights == pytest.approx([1.0, 0.2, 0.2, 0.2])
    assert [result.task.id for result in pieces.results[1:]] == [101, 103, 104]
    assert list(pieces.sums) == [0] and pieces.refs[1:] == ["101:2", "103:2", "104:2"]


def test_nothing_is_added_up_for_slices_that_were_pushed() -> None:
    run = Script({"s0": "A", "s1": "B"}, WORKERS, sum_on_nodes=True, direct=True)
    run.all_started()
    assert run.step(*WORKERS)[0] == (TakeStep, "s0", 1)
    assert run.last(TakeStep, "s1").pieces.groups == [[0, 1], [2, 3], [4]]


def test_one_worker_a_node_has_no_sums() -> None:
    run = script()
    assert run.step("w0", "w1")[0] == (TakeStep, "s0", 1)


def test_nodes_count_once_as_a_link_is_judged() -> None:
    run = script()
    run.step(*WORKERS)
    step = run.machine.steps.history.log[-1]
    assert step.arrivals(1, [3.0, 0.1, 0.2, 0.5]) == [3.0, 0.1, 3.0, 0.2, 0.5]
    assert step.arrivals(1, [3.0]) == ()  # of another call
    assert step.arrivals(1, [3.0, 0.1, 0.2, 0.5, 0.6]) == ()  # results came in several pieces


@pytest.mark.parametrize("how", ["lost", "late", "bad"])
def test_a_sum_that_fails_is_replaced_by_its_results_and_nothing_is_computed_again(
    how: str,
) -> None:
    run = script()
    run.step(*WORKERS)
    sent(run)
    failed: Any = {0: "not finite"} if how == "bad" else [0]
    assert run.unusable("s1", **{how: failed})[-1] == (TakeStep, "s1", 1)
    pieces = run.last(TakeStep, "s1").pieces
    assert pieces.groups == [[0, 1], [2, 3], [4]] and not pieces.sums
    assert pieces.refs == ["100:2", "102:2", "101:2", "103:2", "104:2"]
    run.lost.add("A")
    assert (Redo, run.last(TakeStep, "s1").step.results[0].task) in run.unusable("s1", lost=[0])


def test_a_step_that_is_taken_again_uses_the_results() -> None:
    run = script()
    run.step(*WORKERS)
    run.taken("s0")
    run.taken("s1")
    nodes = run.machine.steps.history.log[-1].nodes if run.machine.steps.history.log else None
    assert nodes is None or not any(each.sums for each in nodes)


# --- the server ----------------------------------------------------------------------------------


def serving(size: int) -> Server:
    server = Server()
    shard = pl.learners.Quadratic((1.0,) * size, lr=1.0).server()
    server._slices[0] = Slice(shard, (0, size), 0)
    return server


def test_bits_do_not_depend_on_where_the_sum_was_made() -> None:
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal(1000) for _ in range(6)]
    weights = [float(each) for each in rng.random(6)]
    groups = [[0, 1, 2], [3], [4, 5]]
    refs = [Ref(each) for each in vectors]
    _, singly, _ = serving(1000).step(1, (weights, [], None, refs, 5.0, groups))
    sums = serving(1000).sum_up(weights[:3], refs[:3], 5.0)
    some: Any = [1.0, *weights[3:]], [], None, [Ref(sums), *refs[3:]], 5.0, [[0], [1], [2, 3]]
    _, summed, _ = serving(1000).step(1, some)
    assert np.array_equal(singly, summed)
    _, in_order, _ = serving(1000).step(1, (weights, [], None, refs, 5.0, None))
    assert not np.array_equal(in_order, singly)  # or the comparison shows nothing
    assert np.allclose(in_order, singly, rtol=1e-12)


def test_sums_for_several_servers_come_apart() -> None:
    refs = [Ref(np.full(2, value)) for value in (1.0, 2.0, 3.0, 4.0)]
    first, second = serving(2).sum_up([1.0, 10.0], refs, 5.0)
    assert first.tolist() == [21.0, 21.0] and second.tolist() == [43.0, 43.0]


def test_a_sum_fails_if_a_result_does_not_come() -> None:
    with pytest.raises(Unusable, match="1 late"):
        serving(2).sum_up([1.0, 1.0], [Ref(np.ones(2)), Ref()], 0.01)


def test_spoiled_slices_make_no_sum() -> None:
    for spoiled in (np.ones(1), np.ones(2, np.float32)):
        with pytest.raises(ValueError, match="shape or type"):
            weighted_sum([1.0, 1.0], [np.ones(2), spoiled])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_keeps_the_type_of_results(dtype: Any) -> None:
    vectors = [np.linspace(0, 1, 2**17 + 3, dtype=dtype) for _ in range(3)]
    found = weighted_sum([0.5, 0.25, 0.25], vectors)
    assert found.dtype == dtype and np.array_equal(found, vectors[0])


def test_sums_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    learner = pl.learners.Quadratic((1.0, 0.5), batch_size=4)
    world = World(0, Weather(), 2, 20.0)
    engine = SimulatedRay(2, world, servers=1, sum_on_nodes=True)
    pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=1)
    assert "there are 1 servers; use servers='spread'" in caplog.text


def test_what_cannot_be_added_up_is_refused() -> None:
    with pytest.raises(ValueError, match="use servers='spread'"):
        pl.Ray(2, servers="driver", sum_on_nodes=True)
