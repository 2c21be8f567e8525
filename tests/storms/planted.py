"""Faults in Paceline itself, put in on purpose: a test that finds none of them proves nothing."""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

import paceline.training.checkpoint as checkpoint
from paceline.core.coordinator import Coordinator
from paceline.core.copies import Copies
from paceline.core.journal import Entry
from paceline.core.ledger import Ledger
from paceline.core.protocol import Discard, Event, Finished, Left
from paceline.engines.checks import ResultCheck
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.job import RayJob
from paceline.engines.ray.pool import Pool
from paceline.engines.ray.reducer import DriverReducer
from paceline.engines.ray.servers.lost_results import LostResults
from paceline.engines.ray.servers.recovery import Recovery
from paceline.engines.ray.servers.server import Server
from paceline.engines.ray.servers.steps import Steps
from paceline.training.fit import Fit
from tests.storms.storm import Violation

Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def planted(
    bug: str, bugs: Mapping[str, Callable[[], list[Patch]]] | None = None
) -> Iterator[None]:
    """Have a bug while this lasts.

    bugs: from which it is; by default those of a run with a central coordinator.
    """
    patches = (BUGS if bugs is None else bugs)[bug]()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, broken in patches:
        setattr(owner, name, broken)
    try:
        yield
    finally:
        for owner, name, whole in before:
            setattr(owner, name, whole)


STORMS = 100
"""In so many storms a planted bug has to be found."""
# A seed that finds a bug which many others do not find is tried first. It only saves time.
_FINDS = {
    "write in place": 62,
    "publish a slice of the version before": 14,
    "look at deadlines only when idle": 21,
    "tell of a death once": 36,
    "leave servers on nodes without a route": 18,
}


def found(play: Callable[[int, Path], object], bug: str, folder: Path) -> tuple[int, str]:
    """Play storms until one breaks a promise; return its seed and what was said."""
    first = _FINDS.get(bug, 0)
    for seed in (first, *(seed for seed in range(STORMS) if seed != first)):
        try:
            play(seed, folder / str(seed))
        except Violation as violation:
            return seed, str(violation)
    raise LookupError(f"{bug!r} was not found in {STORMS} storms")


def _forget_lost() -> list[Patch]:
    return [(Ledger, "_lose", lambda self, tasks: list(tasks))]


def _count_both_results() -> list[Patch]:
    """The results of an overdue task and of its copy are both used."""
    return [(Copies, "others", lambda self, task: [])]


def _redo_on_other_samples() -> list[Patch]:
    whole = Ledger._again

    def broken(self: Any, command: Any, id: int) -> Any:
        task = whole(self, command, id)
        if task.copy_of is None or task.work.tiles is not None:
            return task
        offset, self.next_offset = self.next_offset, self.next_offset + task.computed
        return replace(task, offset=offset)

    return [(Ledger, "_again", broken)]


def _lose_what_a_copy_computes() -> list[Patch]:
    """A task counts as lost with its worker, though another worker computes it."""

    def broken(self: Any, worker: str) -> list[Any]:
        return [self._end(id) for id in list(self._tasks.get(worker, ()))]

    return [(Ledger, "_end_all", broken)]


def _say_nothing_of_a_death() -> list[Patch]:
    whole = RayJob._lose

    def broken(self: Any, member: Any, why: str, distrust: bool = False) -> None:
        whole(self, member, why, distrust)
        self._events = type(self._events)(e for e in self._events if not isinstance(e, Left))

    return [(RayJob, "_lose", broken)]


def _wait_for_ever() -> list[Patch]:
    return [(RayJob, "_overdue", lambda self, *given: True)]


def _add_in_order_of_arrival() -> list[Patch]:
    whole = DriverReducer.step

    def broken(self: Any, weights: Any, keep: bool) -> None:
        arrived = list(self._results._held)
        whole(self, {id: weights[id] for id in sorted(weights, key=arrived.index)}, keep)

    return [(DriverReducer, "step", broken)]


def _accept_every_result() -> list[Patch]:
    return [(ResultCheck, "fault", lambda self, *given: None)]


def _write_in_place() -> list[Patch]:
    """The checkpoint is there under its name before it is whole."""

    def broken(folder: Path, snapshot: Any, model: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"server/{n}": a for n, a in snapshot.server.arrays.items()}
        data = {
            "step": snapshot.step, "about": snapshot.about, "coordinator": snapshot.coordinator,
            "server": snapshot.server.data, "engine": None,
        }  # fmt: skip
        save_file(checkpoint._contiguous(model), folder / "model.safetensors")
        save_file(checkpoint._contiguous(arrays), folder / "state.safetensors")
        (folder / "state.json").write_text(json.dumps(data))
        files = {file.name: checkpoint._digest(file) for file in sorted(folder.iterdir())}
        manifest = {"format": checkpoint.FORMAT, "step": snapshot.step, "sha256": files}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        for file in folder.iterdir():
            checkpoint.flush(file)

    return [(checkpoint, "write", broken)]


def _draw_again_after_a_crash() -> list[Patch]:
    whole = Ledger.restore

    def broken(self: Any, data: Any) -> None:
        whole(self, data)
        self.next_offset = 0

    return [(Ledger, "restore", broken)]


def _be_one_version_too_patient() -> list[Patch]:
    whole = Ledger.staleness
    return [(Ledger, "staleness", lambda self, item: max(whole(self, item) - 1, 0))]


def _count_a_result_twice() -> list[Patch]:
    """Every fence is down, from the inbox to the books."""
    record, seen = Ledger.record, dict[int, Any]()

    def take(self: Any, call: Any, future: Any, at: float) -> None:
        for calls in self._open.values():
            calls.pop(call, None)
        call.answered(future)

    def hold(self: Any, now: float, event: Event) -> Any:
        known = seen.get(event.task) if isinstance(event, Finished) else None
        if known is not None and known.task.id not in {*self.held, *self.running}:
            self.held[known.task.id] = known
            self.held_shares += known.task.work.shares
            worker = known.task.worker
            self._results[worker] = self._results.get(worker, 0) + 1
            return (event,)
        news = record(self, now, event)
        if isinstance(event, Finished) and event.task in self.held:
            seen[event.task] = self.held[event.task]
        return news

    def accept(self: Any, answer: Any) -> bool:
        self._expected.pop(answer.token.task, None)
        self._results.hold(answer.token.task, answer.vector, answer.stats)
        return True

    def finished(self: Any, member: Any, future: Any) -> None:
        answer = future.result(timeout=0) if future.exception(timeout=0) is None else None
        if answer is not None and self._pool.is_current(member) and member.busy is None:
            self.reducer.accept(_read(answer))
            self._events.append(Finished(answer[0][3], answer[2], answer[3], answer[4]))
            return
        _FINISHED(self, member, future)

    return [
        (Calls, "_take", take),
        (Ledger, "record", hold),
        (RayJob, "_finished", finished),
        (DriverReducer, "accept", accept),
    ]


def _leave_processes_behind() -> list[Patch]:
    return [(Pool, "end", lambda self: self.members.clear())]


def _forget_what_was_in_flight() -> list[Patch]:
    whole = Ledger.abandon

    def broken(self: Any) -> None:
        whole(self)
        self.lost.clear()

    return [(Ledger, "abandon", broken)]


def _keep_every_order() -> list[Patch]:
    class Kept(dict[int, Any]):
        def pop(self, key: int, *default: Any) -> Any:
            return self.get(key, *default)

    whole = RayJob.begin

    def broken(self: Any) -> None:
        self._orders = Kept()
        whole(self)

    return [(RayJob, "begin", broken)]


def _throw_away_what_came_twice() -> list[Patch]:
    whole = Coordinator.handle

    def broken(self: Any, now: float, event: Event) -> Entry:
        twice = isinstance(event, Finished) and event.task in self.ledger.held
        entry = whole(self, now, event)
        if twice:
            entry = Entry(now, event, (Discard(event.task),))  # type: ignore[union-attr]
        return entry

    return [(Coordinator, "handle", broken), *_come_twice()]


def _come_twice() -> list[Patch]:
    """Not a bug by itself: results reach the books as often as they come."""
    whole = RayJob._finished

    def broken(self: Any, member: Any, future: Any) -> None:
        before = len(self._events)
        whole(self, member, future)
        if len(self._events) > before and isinstance(self._events[-1], Finished):
            self._events.append(self._events[-1])

    return [(RayJob, "_finished", broken)]


def _count_the_dead() -> list[Patch]:
    whole = Ledger.record

    def broken(self: Any, now: float, event: Event) -> Any:
        if isinstance(event, Left):
            self.now = now
            return ()
        return whole(self, now, event)

    return [(Ledger, "record", broken)]


def _let_a_server_step_twice() -> list[Patch]:
    whole = Server.apply

    def broken(self: Any, version: int, totals: Any) -> Any:
        if version % 5 == 0:
            self._turn(version).apply(totals)
        return whole(self, version, totals)

    return [(Server, "apply", broken)]


def _start_a_server_without_its_state() -> list[Patch]:
    """The slice is taken over, and the optimizer's memory is not."""
    whole = Server.set_up

    def broken(self: Any, *given: Any) -> Any:
        *fixed, values, (arrays, data) = given  # of the last part, if there are several
        empty = {name: array * 0 for name, array in arrays.items()}
        return whole(self, *fixed, values, (empty, data))

    return [(Server, "set_up", broken)]


def _publish_a_slice_of_the_version_before() -> list[Patch]:
    whole = Steps._publish

    def broken(self: Any, step: Any, slot: Any) -> Any:
        made = whole(self, step, slot)
        if slot.index == 1 and step.version % 5 == 0:
            step.model.slices[slot.index] = slot.newest.parts[0]
        return made

    return [(Steps, "_publish", broken)]


def _let_a_bad_slice_in() -> list[Patch]:
    def broken(self: Any, packed: Any, spans: Any, dtype: Any) -> Any:
        if self._codec is None:
            return packed
        return [self._received(self._codec, p, s) for p, s in zip(packed, spans, strict=True)]

    return [(Server, "_checked", broken)]


def _use_a_refused_slice_again() -> list[Patch]:
    """Its worker is replaced, and its result is not computed again."""

    def broken(self: Any, result: Any) -> None:
        self._results.again.pop(result.task.id, None)

    return [(LostResults, "compute_again", broken)]


def _end_the_run_for_one_exception_in_a_server() -> list[Patch]:
    def broken(self: Any, event: Any) -> None:
        raise event.error

    return [(Recovery, "raised", broken)]


def _leave_servers_on_nodes_without_a_route() -> list[Patch]:
    return [(Recovery, "lose_cut_off", lambda self, found: None)]


def _read(answer: Any) -> Any:
    from paceline.engines.ray.worker import read

    return read(answer)


_FINISHED = RayJob._finished


def _end_without_a_checkpoint() -> list[Patch]:
    whole = Fit._save

    def broken(self: Any, snapshot: Any) -> None:
        saves = self._settings.given.checkpoints
        if saves is not None and snapshot.step % saves.every == 0:
            whole(self, snapshot)

    return [(Fit, "_save", broken)]


def _end_the_run_for_one_exception() -> list[Patch]:
    return [(RayJob, "_is_users_fault", lambda self, member: True)]


def _look_at_deadlines_only_when_idle() -> list[Patch]:
    def broken(self: Any, until: float) -> bool:
        first = min([until, *(next(iter(c)).deadline for c in self._open.values() if c)])
        if first == inf and self._inbox.empty():
            return False
        try:
            self._inbox.get(timeout=min(max(first - self._clock(), 0.0), 3600.0))()
        except queue.Empty:
            self._expire(self._clock())
        return True

    return [(Calls, "wait", broken)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    bug.__name__.strip("_").replace("_", " "): bug
    for bug in (
        _forget_lost,
        _say_nothing_of_a_death,
        _wait_for_ever,
        _add_in_order_of_arrival,
        _accept_every_result,
        _write_in_place,
        _draw_again_after_a_crash,
        _be_one_version_too_patient,
        _count_a_result_twice,
        _leave_processes_behind,
        _forget_what_was_in_flight,
        _keep_every_order,
        _throw_away_what_came_twice,
        _count_the_dead,
        _let_a_server_step_twice,
        _start_a_server_without_its_state,
        _publish_a_slice_of_the_version_before,
        _end_without_a_checkpoint,
        _end_the_run_for_one_exception,
        _look_at_deadlines_only_when_idle,
        _count_both_results,
        _redo_on_other_samples,
        _lose_what_a_copy_computes,
    )
}

SERVER_BUGS: dict[str, Callable[[], list[Patch]]] = {
    bug.__name__.strip("_").replace("_", " "): bug
    for bug in (
        _let_a_bad_slice_in,
        _use_a_refused_slice_again,
        _end_the_run_for_one_exception_in_a_server,
        _leave_servers_on_nodes_without_a_route,
    )
}
"""To be looked for in runs with servers."""
