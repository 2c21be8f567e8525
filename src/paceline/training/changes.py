"""Resuming with other settings: which may differ, and what of the saved state remains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.core.ledger import Ledger
from paceline.core.logs import logger_of
from paceline.core.protocol import Task
from paceline.core.schema import save_state
from paceline.learners.base import Learner, Saved, Server
from paceline.policies.named import written
from paceline.policies.placement.tiles import Placed
from paceline.training.checkpoint import Snapshot
from paceline.training.checkpoint.kinds import kind_of
from paceline.training.settings import NOTES, Settings

logger = logger_of(__name__)

_RULES = ("scheduler", "transform")
ALLOWED: dict[str, tuple[str, ...]] = {
    "policy": ("policy", "workers"),
    "optimizer": (
        *("optimizer", "outer", "inner", *_RULES),
        *(f"{side}_{rule}" for side in ("inner", "outer") for rule in _RULES),
    ),
    "batch_size": ("batch_size",),
}
"""The names for `resume(allow=…)`, and the settings that each of them accepts."""
_NEVER = {
    "seed": "it orders the samples",
    "codec": "workers keep its memory of earlier results",
    "model_codec": "both ends keep its copy of the model",
    "robust": "it keeps the aggregate of the last step",
    "threads": "the bits of results depend on it",
    "examples": "positions in the data count them",
}
_MODEL = "the saved state is of that model"


class OtherRun(CheckpointError):
    """The checkpoint is complete but has other settings, as all older ones would."""


@dataclass(frozen=True)
class Change:
    """A setting that differs from the saved one."""

    name: str
    saved: Any
    given: Any

    @property
    def allowed_by(self) -> str | None:
        """The name in `allow=` that accepts it; None: nothing does."""
        return next((allow for allow, names in ALLOWED.items() if self.name in names), None)

    def __str__(self) -> str:
        name = "number of workers" if self.name == "workers" else self.name
        return f"another {name}: {self.saved} -> {self.given}"


def check_allow(allow: Collection[str]) -> frozenset[str]:
    """Return the names in `allow=`; raise ValueError for an unknown one."""
    names = [allow] if isinstance(allow, str) else list(allow)
    if unknown := [name for name in names if name not in ALLOWED]:
        raise ValueError(
            f"allow={unknown[0]!r}: known are {', '.join(map(repr, ALLOWED))}; nothing else may "
            "differ from the saved run"
        )
    return frozenset(names)


def changes_of(
    settings: Settings, place: str, saved: Mapping[str, Any], allow: frozenset[str]
) -> list[Change]:
    """Return the differences from the saved settings; refuse those that are not allowed.

    saved: the data of a checkpoint.
    """
    mine, theirs = settings.about(), saved["about"]
    names = [name for name in {**mine, **theirs} if name not in NOTES]
    found = [Change(n, theirs.get(n), mine.get(n)) for n in names if theirs.get(n) != mine.get(n)]
    if settings.engine.is_exact and isinstance(saved["engine"], dict):
        workers = saved["engine"].get("workers")
        if isinstance(workers, dict) and len(workers) != settings.engine.size:
            found.append(Change("workers", len(workers), settings.engine.size))
    if any(change.allowed_by not in allow for change in found):
        raise OtherRun(f"{place} is not of this run: {_refusal(found)}")
    decentralized = settings.policy.decentralized or "nodes" in saved["coordinator"]
    if found and decentralized:
        raise OtherRun(
            f"{place} is not of this run: {_refusal(found)}; a decentralized run accepts no "
            "changes, since each node has a state of its own"
        )
    return [
        Change("policy", theirs.get("written", change.saved), written(settings.policy))
        if change.name == "policy"
        else change
        for change in found
    ]


def _refusal(found: Collection[Change]) -> str:
    """Name all differences, and what would accept each of them."""
    told = []
    for change in found:
        remedy = f"allow={{{change.allowed_by!r}}} accepts it"
        if change.allowed_by is None:
            remedy = f"never accepted: {_NEVER.get(change.name, _MODEL)}"
        told.append(f"{change.name} was {change.saved!r} and is {change.given!r} ({remedy})")
    text = f"{'; '.join(told)}; give the Trainer the saved settings"
    names = sorted({change.allowed_by for change in found if change.allowed_by is not None})
    if names and all(change.allowed_by is not None for change in found):
        text += f", or use resume(…, allow={{{', '.join(map(repr, names))}}})"
    return text


# --- policy and ledger ---------------------------------------------------------------------------


def changed_coordinator(
    settings: Settings, place: str, snapshot: Snapshot, changes: Collection[Change]
) -> dict[str, Any]:
    """Return the coordinator's state for the new settings.

    Positions in the data stay, so that no sample is used twice. Tasks in flight are lost, and the
    policy hands them out again. Another policy begins without learned state.
    """
    names = {change.name for change in changes}
    saved = snapshot.coordinator
    ledger = Ledger()
    ledger.restore(saved["ledger"])
    _check_streams(settings, place, saved["policy"], ledger, names)
    if not settings.policy.needs_exact_results and _is_coded(ledger):
        ledger.next_offset = ledger.version * ledger.batch  # parts are counted by steps
    ledger.abandon()
    ledger.batch = settings.learner.batch_size
    policy = saved["policy"]
    if "policy" in names:
        policy = save_state(settings.policy)
        tasks = [replace(task, work=replace(task.work, tag=None)) for task in ledger.lost.values()]
        placement = settings.policy.placement
        if isinstance(placement, Placed) and not placement.move:
            tasks = list(_by_tile(tasks, ledger))
        ledger.lost = OrderedDict((task.id, task) for task in tasks)
    fitting = [(id, _fitting(settings.learner, task)) for id, task in ledger.lost.items()]
    ledger.lost = OrderedDict(fitting)
    return {"policy": policy, "ledger": save_state(ledger)}


def _is_coded(ledger: Ledger) -> bool:
    """Return whether all tasks had parts of a gradient code: these do not move the position."""
    tiles = save_state(ledger)["state"]["next_shard_offsets"]
    return ledger.version > 0 and not ledger.next_offset and not _count(tiles)


def _count(tiles: Any) -> int:
    return len(tiles["items"]) if "items" in tiles else len(tiles)


def _check_streams(
    settings: Settings, place: str, policy: Any, ledger: Ledger, names: Collection[str]
) -> None:
    """Refuse a change after which positions in the data would mean other samples."""
    before, after = (set(_digests(state)) for state in (policy, save_state(settings.policy)))
    if before != after:
        raise OtherRun(
            f"{place} is not of this run: its data shards (tiles) are others, and positions are "
            "counted in each shard; give the placement the saved partition"
        )
    if not settings.policy.needs_exact_results or not ledger.version:
        return
    if not _is_coded(ledger):
        raise OtherRun(
            f"{place} is not of this run: a gradient code takes the samples of a step by its "
            "number, and the saved policy took others; start a new run from its model"
        )
    if "batch_size" in names:
        raise OtherRun(
            f"{place} is not of this run: a gradient code finds the samples of a step by its "
            "number times batch_size; keep the saved batch_size"
        )


def _digests(state: Any) -> Iterator[str]:
    """Yield the digest of each partition in the state of a policy."""
    if isinstance(state, Mapping):
        if state.get("schema") == "partition":
            yield state["state"]["digest"]
        for part in state.values():
            yield from _digests(part)


def _by_tile(tasks: Collection[Task], ledger: Ledger) -> Iterator[Task]:
    """Yield tasks of one tile each: tiles that stay may now have different owners."""
    for task in tasks:
        if task.work.tiles is None:
            yield task
            continue
        for tile, offset, total in task.stretches():
            count = total // task.work.steps
            if count:
                work = replace(task.work, tiles={tile: count}, samples=count)
                id, ledger.next_task = ledger.next_task, ledger.next_task + 1
                yield replace(task, id=id, work=work, samples=count, tile_offsets=(offset,))


def _fitting(learner: Learner, task: Task) -> Task:
    """Return a task as this learner can do it: on the same samples, perhaps in one step."""
    work, steps = task.work, task.work.steps
    try:
        learner.check(work)
    except ValueError:
        tiles = None if work.tiles is None else {t: n * steps for t, n in work.tiles.items()}
        samples = task.samples * steps
        work = type(work)(samples=samples, shares=work.shares, tiles=tiles)
        return replace(task, work=work, samples=samples)
    return task


# --- the optimizer -------------------------------------------------------------------------------


def changed_server(
    settings: Settings, snapshot: Snapshot, changes: Collection[Change]
) -> tuple[Saved, list[str]]:
    """Return the server's state with the settings of this run, and a sentence on each change.

    The optimizer's tensors are kept if its class is the same and they fit. Schedules are at the
    step of the checkpoint.
    """
    server, saved = settings.server(), snapshot.server
    plain: Any = getattr(server, "plain", server)  # a robust server wraps a plain one
    if not hasattr(plain, "settings_at"):
        return saved, []
    own = plain.settings_at(snapshot.step)
    mentioned = any(change.allowed_by == "optimizer" for change in changes)
    same = {**saved.data, "scalars": None} == {**own, "scalars": None}
    if same and not mentioned:
        return saved, []
    told = [] if mentioned else ["another setting of the optimizer"]
    if why := _unfit(settings, snapshot, server, own):
        logger.warning("the optimizer starts without the saved state: %s", why)
        arrays = {n: array for n, array in saved.arrays.items() if not _is_state(n)}
        return Saved(arrays, own), [*told, f"the optimizer's state is new: {why}"]
    logger.info("the optimizer keeps its saved state, with other settings")
    return Saved(saved.arrays, {**own, "scalars": saved.data["scalars"]}), told


def _is_state(name: str) -> bool:
    return name.startswith("optimizer.")


def _unfit(
    settings: Settings, snapshot: Snapshot, server: Server, own: Mapping[str, Any]
) -> str | None:
    """Return why the saved state of the optimizer cannot be kept; None if it can."""
    noted, mine = snapshot.about.get("optimizer_class"), settings.notes().get("optimizer_class")
    if noted is None:  # an older checkpoint: the classes differ in the names of their settings
        groups = (snapshot.server.data["groups"][0], own["groups"][0])
        if set(groups[0]) != set(groups[1]):
            return "it is of another class"
    elif noted != mine:
        return f"it was of {noted} and the optimizer is {mine}"
    if not snapshot.step:
        return None
    plain: Any = getattr(server, "plain", server)
    plain.step([1.0], [plain.vector * 0], frozenset())
    saved = snapshot.server.arrays
    for name, array in plain.save().arrays.items():
        if not _is_state(name):
            continue
        if name not in saved:
            return f"it has no {name.split('.', 2)[2]}"
        if kind_of(saved[name])[0] != kind_of(array)[0] or saved[name].size != array.size:
            return f"its {name.split('.', 2)[2]} has another size"
    return None
