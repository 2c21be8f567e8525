"""Validation of a checkpoint against the trainer that resumes it.

Hashes do not suffice, since anyone can make them.
Every part is compared with the trainer's own state before the trainer loads it. A state with other
arrays, fields or types is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from math import isfinite, prod
from typing import Any

import numpy as np

from paceline.core.errors import CheckpointError
from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.core.protocol import Result, Task
from paceline.core.schema import SchemaError, load_state, same_kind
from paceline.core.state import decode
from paceline.learners.base import Saved, Server
from paceline.training.checkpoint.files import ARRAYS, MODEL, Files
from paceline.training.checkpoint.kinds import Kind, kind_of, written


def check_server(server: Server, files: Files, *, of_same_rules: bool = True) -> None:
    """Refuse arrays and settings that differ from those of this new server at that step.

    of_same_rules: whether the optimizer and its schedule must be those of the server.
    """
    center = getattr(server, "center_name", None)  # a robust server wraps a plain one
    server = getattr(server, "plain", server)
    if files.step:  # an optimizer creates its state in its first step
        server.step([1.0], [np.zeros_like(getattr(server, "vector", 0.0))], frozenset())
    mine, kinds = server.save(), files.kinds(ARRAYS)
    theirs = {n.removeprefix("server/"): k for n, k in kinds.items() if n.startswith("server/")}
    expected = {name: kind_of(array) for name, array in mine.arrays.items()}
    if "values" in expected:
        values = expected["values"]
        optional = {"previous": (values[0], (server.layout.trained,)), "age": ("I64", ())}
        if center is not None:
            optional[center] = values
        expected |= {name: kind for name, kind in optional.items() if name in theirs}
    if not of_same_rules:
        expected = {name: kind for name, kind in expected.items() if not _is_optimizers(name)}
    known = {n for n, kind in theirs.items() if n not in expected and _is_later(n, kind, server)}
    theirs = {name: kind for name, kind in theirs.items() if name not in known}
    _compare(expected, theirs, files, ARRAYS)
    exported = {name: kind_of(array) for name, array in server.export().items()}
    _compare(exported, files.kinds(MODEL), files, MODEL)
    odd = [n for n in kinds if not n.startswith(("server/", "engine/"))]
    if odd:
        raise _unfit(
            files, f"{ARRAYS} has {odd[0]!r}, which is neither of the server nor of the engine"
        )
    if files.data["engine"] is not None and "values" in expected:
        for name, kind in kinds.items():
            if name.startswith(("engine/model.", "engine/result.")) and kind != expected["values"]:
                raise _unfit(files, f"{name!r} is {_told(kind)}, not {_told(expected['values'])}")
    if of_same_rules:
        _alike(files.data["server"], mine.data, "server", files)


def check_model(server: Server, files: Files) -> None:
    """Refuse a saved model that differs from the saved state, which the server has loaded."""
    mine = server.export()
    arrays = all(isinstance(tensor, np.ndarray) for tensor in mine.values())
    for name, saved in files.arrays(MODEL, "np" if arrays else "pt"):
        if written(saved) != written(mine[name]):
            raise _unfit(files, f"{name!r} in {MODEL} differs from {ARRAYS}")


def check_coordinator(policy: Policy | None, batch: int, files: Files) -> None:
    """Refuse the state of another policy, and a ledger that contradicts itself.

    policy: None if the saved state is of another policy and is not used.
    """
    saved = files.data["coordinator"]
    if set(saved) != {"policy", "ledger"}:
        raise _unfit(
            files, f"the coordinator's state has the parts {sorted(saved)}, not policy and ledger"
        )
    ledger = Ledger(batch)
    try:
        ledger.restore(saved["ledger"])
        if policy is not None:
            load_state(copy.deepcopy(policy), saved["policy"])
    except SchemaError as error:
        raise _unfit(files, str(error)) from error
    if wrong := _contradiction(ledger, files.step):
        raise _unfit(files, f"in its ledger, {wrong}")


def check_engine(fresh: Saved, restored: Saved, files: Files) -> None:
    """Refuse a simulator state that changes when a simulator loads and saves it."""
    saved = files.data["engine"]
    _alike(saved, fresh.data, "engine", files)
    if restored.data != saved:
        raise _unfit(files, "the simulator changes the saved state of the engine when it loads it")
    state = decode(saved)
    numbers = [state["now"], state["ready"], *(at for at, _, _ in state["queue"])]
    counts = [state["order"], state["version"], *(order for _, order, _ in state["queue"])]
    if not all(type(n) in (int, float) and isfinite(n) for n in numbers):
        raise _unfit(files, "a time of the engine is not a finite number")
    if not all(type(n) is int and n >= 0 for n in counts) or state["version"] != files.step:
        raise _unfit(files, "the engine is at another step, or has an invalid count")
    if not all(isinstance(task, Task) for task in state["tasks"]):
        raise _unfit(files, "the engine has tasks of another type than Task")


def _compare(mine: Mapping[str, Kind], theirs: Mapping[str, Kind], files: Files, name: str) -> None:
    for key in chain(mine, theirs):
        if key not in theirs:
            raise _unfit(files, f"{name} has no {key!r}")
        if key not in mine:
            raise _unfit(files, f"{name} has {key!r}, which this learner does not")
        (dtype, shape), (other, found) = mine[key], theirs[key]
        flat = len(shape) and found == (prod(shape),)  # servers of model slices save flat arrays
        if dtype != other or (shape != found and not flat):
            raise _unfit(files, f"{key!r} is {_told(theirs[key])}, not {_told(mine[key])}")


def _is_optimizers(name: str) -> bool:
    return name.startswith("optimizer.")


def _is_later(name: str, kind: Kind, server: Server) -> bool:
    """Return whether an array may be one that an optimizer creates after its first step."""
    own, _, rest = name.partition(".")
    place, _, _ = rest.partition(".")
    tensors = server.layout.tensors
    if own != "optimizer" or not place.isdecimal() or int(place) >= len(tensors):
        return False
    return prod(kind[1]) <= tensors[int(place)]


def _alike(theirs: Any, mine: Mapping[str, Any], where: str, files: Files) -> None:
    """Refuse a state whose names or types differ from the trainer's own."""
    if not isinstance(theirs, dict):
        raise _unfit(files, f"the {where} has no settings")
    if differing := set(theirs) ^ set(mine):
        told = ", ".join(map(repr, sorted(differing)))
        why = f"the {where} has other settings ({told}); was it saved with other versions?"
        raise _unfit(files, why)
    for name, own in mine.items():
        item = theirs[name]
        if not same_kind(item, own):
            raise _unfit(files, f"{name} of the {where} has another type")
        if name == "groups" and len(item) != len(own):
            raise _unfit(files, f"the {where} has {len(item)} groups, not {len(own)}")
        if name == "groups":
            for one, other in zip(item, own, strict=True):
                _alike(one, other, f"{where}'s group", files)
        if name == "scheduler":
            _alike(item, own, f"{where}'s schedule", files)


def _contradiction(ledger: Ledger, step: int) -> str | None:
    """Return what is wrong with a restored ledger, None if nothing is."""
    counts = {
        "version": ledger.version,
        "samples": ledger.samples,
        "next_task": ledger.next_task,
        "next_offset": ledger.next_offset,
    }
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            return f"{name} is {count!r}"
    if ledger.version != step:
        return f"the version is {ledger.version}, but the step is {step}"
    if type(ledger.now) not in (int, float) or not isfinite(ledger.now) or ledger.now < 0:
        return f"the time is {ledger.now!r}"
    for worker, busy in ledger.workers.items():
        if type(worker) is not str or type(busy) is not int or busy < 0:
            return f"a worker is {worker!r} with {busy!r} tasks"
    if any(not isinstance(result, Result) for result in ledger.held.values()):
        return "a held result is not a Result"
    held = {id: result.task for id, result in ledger.held.items()}
    for id, task in chain(ledger.running.items(), ledger.lost.items(), held.items()):
        if type(id) is not int or not isinstance(task, Task) or task.id != id:
            return f"task {id!r} is not a Task with this id"
        numbers = task.version, task.samples, task.offset
        if any(type(n) is not int or n < 0 for n in numbers) or task.version > step:
            return f"task {id} is {task}"
        if id >= ledger.next_task:
            return f"the id of task {id} is not below next_task={ledger.next_task}"
    return None


def _told(kind: Kind) -> str:
    return f"{kind[0]} {list(kind[1])}"


def _unfit(files: Files, why: str) -> CheckpointError:
    return CheckpointError(f"{files.folder} does not fit this run: {why}; use another checkpoint")
