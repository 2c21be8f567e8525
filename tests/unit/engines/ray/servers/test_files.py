"""Files that servers write: when they are asked to, and what becomes of files if one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.engines.base import Writing
from paceline.engines.ray.servers.events import (
    ServerLost,
    SliceNotWritten,
    SliceWritten,
    TakeStep,
    WriteSlice,
)
from tests.unit.engines.ray.servers.script import Asked, Script

FILES = ["state-00000-of-00002.safetensors", "state-00001-of-00002.safetensors"]


def script() -> Script:
    made = Script({"s0": "A", "s1": "B"}, {"w0": "A", "w1": "B"})
    made.all_started()
    return made


def begun(run: Script) -> Writing:
    writing = Writing(run.machine.steps.model.number, Path("folder"))
    run.machine.files.begin(writing, "token", 5.0)
    return writing


def files(calls: list[Asked]) -> list[Asked]:
    return [call for call in calls if call[0] is WriteSlice]


def told(run: Script, server: str, data: dict[str, Any] | None = None) -> None:
    call = run.last(WriteSlice, server)
    run.told(SliceWritten(call, f"sha of {server}", data or {}))


def test_a_version_is_written_once_it_is_whole_and_before_the_next_step() -> None:
    run = script()
    run.step("w0", "w1")
    writing = begun(run)
    assert not files([(type(call),) for call in run.calls])
    run.step("w0")  # waits behind it
    run.taken("s0")
    calls = run.taken("s1")
    assert files(calls) == [(WriteSlice, "s0", 1, FILES[0]), (WriteSlice, "s1", 1, FILES[1])]
    kinds = [call[0] for call in calls]
    assert kinds.index(WriteSlice) < kinds.index(TakeStep)
    parts = run.last(WriteSlice, "s1").copy.parts
    assert [p is q for p, q in zip(parts, run.machine.steps.slots[1].newest.parts, strict=True)]
    run.taken("s0")
    run.taken("s1")  # the next version is whole, and the files are of the one before
    told(run, "s1")
    assert writing.under_way and writing.hashes == {}
    told(run, "s0")
    assert not writing.under_way and not writing.failure
    assert writing.hashes == {FILES[0]: "sha of s0", FILES[1]: "sha of s1"}
    assert list(writing.hashes) == FILES and writing.data == {}


def test_a_version_that_is_whole_already_is_written_at_once() -> None:
    run = script()
    begun(run)
    assert [call.server for call in run.calls if isinstance(call, WriteSlice)] == ["s0", "s1"]


def test_the_scalars_of_all_slices_are_put_together() -> None:
    run = Script({"s0": "A", "s1": "B"}, {"w0": "A"})
    run.machine.files._layout = type(run.machine.files._layout)(4, (3, 1))
    run.all_started()
    writing = begun(run)
    told(run, "s1", {"scalars": {"0": {"step": 1}, "1": {"step": 2}}, "groups": [1]})
    told(run, "s0", {"scalars": {"0": {"step": 1}}, "groups": [1]})
    assert writing.data == {"scalars": {"0": {"step": 1}, "1": {"step": 2}}, "groups": [1]}


def test_one_failure_ends_the_files_and_late_answers_change_nothing() -> None:
    run = script()
    writing = begun(run)
    run.told(SliceNotWritten(run.last(WriteSlice, "s1"), "No space left on device"))
    assert writing.failure == f"server s1 did not write {FILES[1]}: No space left on device"
    told(run, "s0")
    told(run, "s1")
    assert writing.data is None and not writing.hashes
    assert not run.machine.recovery.failure  # and the servers are as they were
    assert run.step("w0")[:2] == [(TakeStep, "s0", 1), (TakeStep, "s1", 1)]


def test_a_server_that_is_lost_in_mid_step_delays_the_files_until_the_version_is_whole() -> None:
    run = script()
    run.step("w0")
    writing = begun(run)
    run.taken("s0")
    run.told(ServerLost("s1", "killed"))
    assert not files(run.started("s1", node="B"))
    assert len(files(run.taken("s1"))) == 2 and writing.under_way


def test_what_is_given_up_frees_its_slices() -> None:
    run = script()
    writing = begun(run)
    run.machine.files.give_up(writing)
    assert writing.failure and run.machine.files._order is None
    later = begun(run)
    run.machine.files.give_up(writing)
    assert later.under_way


def test_the_next_files_replace_those_under_way() -> None:
    run = script()
    first = begun(run)
    second = begun(run)
    assert first.failure == "another version is written instead" and second.under_way
