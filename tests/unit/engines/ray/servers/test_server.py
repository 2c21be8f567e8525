"""A server takes each step once and in turn, and puts results together however they were cut."""

from __future__ import annotations

import gc
import hashlib
import pickle
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import paceline as pl
from paceline.engines.ray.place import Place
from paceline.engines.ray.servers.server import Server, Slice, Unusable, _put_together
from paceline.engines.ray.servers.shared_folder import is_answered, offer
from paceline.engines.ray.transport.incoming import GivenUp, Incoming
from paceline.engines.ray.worker import Gone, Worker
from paceline.learners.base import Layout, Span


class Ref:
    """A reference to something that may not be there yet."""

    def __init__(self, value: Any = None) -> None:
        self._future: Future[Any] = Future()
        if value is not None:
            self._future.set_result(value)

    def future(self) -> Future[Any]:
        return self._future


def serving(version: int = 3) -> Server:
    server = Server()
    shard = pl.learners.Quadratic((1.0, 1.0), lr=0.5).server()
    server._slices[0] = Slice(shard, (0, 2), version)
    return server


def results(*vectors: Sequence[float]) -> list[Ref]:
    return [Ref(np.array(vector)) for vector in vectors]


def test_a_step_adds_up_and_steps() -> None:
    server = serving()
    refs = results([1.0, 0.0], [0.0, 2.0])
    done, values, _ = server.step(4, ([0.5, 0.5], ["norm"], None, refs, 5.0, None))
    assert values.tolist() == [0.75, 0.5]
    sums, has_arrays, seconds = done
    assert sums["norm"] == pytest.approx(1.25) and not has_arrays and len(seconds) == 2


@pytest.mark.parametrize("version", [2, 3, 5])
def test_only_the_next_step_is_taken(version: int) -> None:
    server = serving()
    with pytest.raises(RuntimeError, match="at version 3 cannot make version"):
        server.step(version, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))
    assert server._slices[0].shard.vector.tolist() == [1.0, 1.0]


def test_a_repeated_step_is_not_taken_twice() -> None:
    server = serving()
    server.step(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))
    with pytest.raises(RuntimeError, match="at version 4 cannot make version 4"):
        server.step(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))


def test_nothing_is_applied_that_was_not_added_up() -> None:
    server = serving()
    with pytest.raises(RuntimeError, match="came before its reduce"):
        server.apply(4, {})
    server.reduce(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))
    server.apply(4, {})
    with pytest.raises(RuntimeError, match="came before its reduce"):
        server.apply(5, {})


def test_a_result_that_does_not_come_leaves_everything_as_it_was() -> None:
    server, late = serving(), Ref()
    with pytest.raises(Unusable) as error:
        server.step(4, ([1.0, 1.0], [], None, [*results([1.0, 1.0]), late], 0.01, None))
    assert error.value.late == [1] and not error.value.lost
    _, values, _ = server.step(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))
    assert values.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.array([np.nan, 1.0]), "not finite"),
        (np.array([1.0, -np.inf]), "not finite"),
        (np.array([1.0]), "shape (1,) instead of (2,)"),
        (np.array([1.0, 1.0], np.float32), "float32 instead of float64"),
        ([1.0, 1.0], "shape list"),
    ],
)
def test_a_bad_slice_is_refused_before_anything_is_added(bad: Any, why: str) -> None:
    server = serving()
    refs = [*results([1.0, 0.0]), Ref(bad)]
    with pytest.raises(Unusable) as error:
        server.step(4, ([0.5, 0.5], [], None, refs, 5.0, None))
    assert list(error.value.bad) == [1] and why in error.value.bad[1]
    copy = pickle.loads(pickle.dumps(error.value))  # noqa: S301  our own
    assert copy.bad == error.value.bad and why in str(copy)
    _, values, _ = server.step(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))
    assert values.tolist() == [0.5, 0.5]


def test_pieces_that_were_cut_elsewhere_are_put_together() -> None:
    whole = np.arange(12.0)
    pieces = [whole[0:5], whole[5:9], whole[3:12]]
    at = [[(-4, 1), (1, 5)], [(-1, 8)]]  # of two results, in a slice from 4 to 8
    first, second = _put_together(np.empty(4), at, pieces)
    assert first.tolist() == second.tolist() == [4, 5, 6, 7]


def test_what_is_kept_is_given_until_it_is_too_old() -> None:
    server = Server()
    for version in (1, 2, 3):
        server.keep((0, 7), version, 2, ({}, {"version": version}), 1.0)
    assert server.give((0, 7), 3)[1] == {"version": 3}
    for slot, version in (((0, 7), 1), ((1, 7), 3), ((0, 6), 3)):
        with pytest.raises(Gone):
            server.give(slot, version)


def set_up(server: Server, cut: int, span: Span) -> None:
    """Have a server start from version 3 of a slice."""
    learner = pl.learners.Quadratic((1.0, 1.0), lr=0.5)
    part, like = np.array([3.0, 4.0])[span[0] : span[1]], learner.server()
    state: Any = {}, like.save().data
    around = None, (None, None), (0, cut), [span]
    server.set_up(learner.server, Layout(2), span, 3, *around, part, state)


def test_arrivals_are_timed_from_this_run_on_though_the_one_before_had_the_same_versions() -> None:
    now = [0.0]
    server = Server(lambda: now[0], place=lambda: Place("n0", 1, ""))
    for cut in (7, 8):
        set_up(server, cut, (0, 2))
        (_, _, seconds), _, _ = server.step(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))
        assert seconds == [0.0]
        now[0] += 100.0


def test_a_late_call_of_an_earlier_cut_changes_nothing() -> None:
    server = Server(place=lambda: Place("n0", 1, ""))
    set_up(server, 7, (0, 2))
    server.keep((1, 7), 3, 2, ({}, {}), 1.0)
    with pytest.raises(Gone):
        set_up(server, 6, (0, 1))
    server.keep((1, 6), 4, 2, ({}, {}), 1.0)
    for cut, version in ((6, 4), (7, 4)):
        with pytest.raises(Gone):
            server.give((1, cut), version)
    server.step(4, ([1.0], [], None, results([1.0, 1.0]), 5.0, None))  # the slice is the same
    server.keep((1, 8), 4, 2, ({}, {"of": "the next cut"}), 1.0)
    set_up(server, 8, (0, 2))
    assert server.give((1, 8), 4)[1] == {"of": "the next cut"}
    with pytest.raises(Gone):
        server.give((1, 7), 3)


def test_a_worker_gives_any_slice_of_a_model_that_it_holds() -> None:
    worker, model = Worker(), np.arange(10.0)
    worker._models[7] = [(0, 4), (4, 10)], [model[:4], model[4:]]
    assert worker.holds() == [7]
    for span in ((0, 10), (0, 3), (2, 6), (5, 9)):
        assert worker.held(7, span).tolist() == model[slice(*span)].tolist()
    with pytest.raises(Gone):
        worker.held(6, (0, 10))


def test_slices_come_when_all_are_there_or_the_task_is_given_up() -> None:
    refs = [Ref(1), Ref()]
    incoming = Incoming(refs, patience=5.0)
    refs[1].future().set_result(2)
    assert list(incoming) == [1, 2] and all(s >= 0 for s in incoming.seconds)
    abandoned = Incoming([Ref()], patience=5.0)
    abandoned.give_up()
    with pytest.raises(GivenUp):
        list(abandoned)


def test_slices_are_freed_with_the_last_reference_to_them() -> None:
    """Not when Python looks for circles: each may pin a result of the model's size."""
    piece = np.arange(3.0)
    freed = weakref.ref(piece)
    gc.disable()
    try:
        ref = Ref()
        incoming = Incoming([ref], patience=5.0)
        ref.future().set_result(piece)
        del piece, ref
        assert [each.tolist() for each in incoming] == [[0.0, 1.0, 2.0]]
        assert freed() is not None
        del incoming
        assert freed() is None
    finally:
        gc.enable()


def test_a_slice_that_is_lost_is_told_of() -> None:
    ref = Ref()
    incoming = Incoming([ref], patience=5.0)
    ref.future().set_exception(KeyError("lost"))
    with pytest.raises(KeyError):
        list(incoming)


# --- files ---------------------------------------------------------------------------------------


def test_a_server_writes_what_was_published_and_not_what_it_has_by_now(tmp_path: Path) -> None:
    server, token = serving(), offer(tmp_path)
    _, values, state = server.step(4, ([1.0], ["dot"], None, results([1.0, 0.0]), 5.0, None))
    published = values.copy(), ({n: a.copy() for n, a in state[0].items()}, {"groups": [1]})
    server.step(5, ([1.0], ["dot"], None, results([1.0, 0.0]), 5.0, None))
    file = tmp_path / "slice"
    sha, data = server.write(str(file), token, [Ref(each) for each in published], 5.0)
    found = load_file(file)
    assert found["server/values"].tolist() == [0.5, 1.0]
    assert found["server/previous"].tolist() == [1.0, 0.0]
    assert data == {"groups": [1]} and sha == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_server_writes_the_exact_values_where_workers_get_rounded_ones(tmp_path: Path) -> None:
    file, state = tmp_path / "slice", ({"values": np.array([0.1, 0.2])}, {"groups": [1]})
    _, data = serving().write(str(file), offer(tmp_path), [Ref(state)], 5.0)
    assert load_file(file)["server/values"].tolist() == [0.1, 0.2] and data == {"groups": [1]}


def test_a_server_writes_into_no_folder_but_the_drivers(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    token, server, refs = offer(ours), serving(), [Ref(np.ones(2)), Ref(({}, {}))]
    with pytest.raises(FileNotFoundError):
        server.write(str(theirs / "slice"), token, refs, 5.0)
    offer(theirs)  # of another run, or of another host
    with pytest.raises(FileNotFoundError, match="is another folder here"):
        server.write(str(theirs / "slice"), token, refs, 5.0)
    with pytest.raises(FileNotFoundError, match="is another folder here"):
        server.show(str(theirs), token, "s0")
    server.show(str(ours), token, "s0")
    assert is_answered(ours, token, "s0") and not is_answered(ours, token, "s1")
    assert not list(tmp_path.glob("*/slice"))


def test_an_error_of_the_disk_is_that_of_the_call(tmp_path: Path) -> None:
    server, token = serving(), offer(tmp_path)
    (tmp_path / "slice").write_text("of another server")
    with pytest.raises(FileExistsError):
        server.write(str(tmp_path / "slice"), token, [Ref(np.ones(2)), Ref(({}, {}))], 5.0)
    assert (tmp_path / "slice").read_text() == "of another server"


@pytest.mark.parametrize("servers", [0, -1, "all", 1.5])
def test_servers_that_cannot_be_are_refused(servers: Any) -> None:
    with pytest.raises(ValueError, match="use 'driver', 'spread', or a number"):
        pl.Ray(workers=2, servers=servers)


def test_an_engine_tells_of_its_servers() -> None:
    assert repr(pl.Ray(2)) == "Ray(workers=2)"
    assert repr(pl.Ray(2, servers="spread")) == "Ray(workers=2, servers='spread')"
