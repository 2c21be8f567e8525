"""The state of callbacks in a checkpoint: plain data in the JSON file, tensors in their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.core.logs import logger_of
from paceline.core.state import decode, encode
from paceline.report.callbacks import Callback, State
from paceline.training.checkpoint.kinds import is_array

logger = logger_of(__name__)

_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError)


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by the names of their classes; later ones of a class have a number."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        count = sum(type(other).__name__ == kind for other in found.values())
        found[f"{kind}-{count + 1}" if count else kind] = callback
    return found


def states_of(callbacks: Sequence[Callback]) -> dict[str, State]:
    """Return the states of those callbacks that have one."""
    found = {name: callback.state() for name, callback in named(callbacks).items()}
    return {name: state for name, state in found.items() if state is not None}


def restore_states(
    callbacks: Sequence[Callback], states: Mapping[str, State], model: Callable[[], Any]
) -> None:
    """Hand each state to its callback; raise `CheckpointError` if it does not fit."""
    known = named(callbacks)
    for name, state in states.items():
        if name not in known:
            logger.warning("the saved state of %s is not used: there is no such callback", name)
            continue
        try:
            known[name].restore(state, model)
        except _DAMAGE as error:
            raise CheckpointError(
                f"the saved state of {name} does not fit ({type(error).__name__}: {error}); give "
                "the callback the settings that it was saved with, or use another checkpoint"
            ) from error


def plain(states: Mapping[str, State]) -> dict[str, Any]:
    """Return all but the tensors as JSON data."""
    return {
        name: {"data": encode(dict(state.data)), "torch": not _is_numpy(state)}
        for name, state in states.items()
    }


def tensors_of(states: Mapping[str, State]) -> dict[str, Any]:
    """Return the tensors of all states, all of numpy or all of torch, in one dictionary."""
    found = {f"{n}/{key}": each for n, s in states.items() for key, each in s.tensors.items()}
    if all(map(is_array, found.values())):
        return found
    from paceline.learners.flat import as_tensor

    return {key: as_tensor(each) if is_array(each) else each for key, each in found.items()}


def read_states(
    data: Mapping[str, Any], arrays: Callable[[str], Iterable[tuple[str, Any]]]
) -> dict[str, State]:
    """Return the states of a checkpoint.

    arrays: yields the tensors of all states, as those of "np" or "pt".
    """
    kind = "pt" if any(each["torch"] for each in data.values()) else "np"
    found = dict(arrays(kind)) if data else {}
    states = {}
    for name, each in data.items():
        mark = f"{name}/"
        tensors = {k.removeprefix(mark): t for k, t in found.items() if k.startswith(mark)}
        if kind == "pt" and not each["torch"]:
            tensors = {key: tensor.numpy() for key, tensor in tensors.items()}
        states[name] = State(decode(each["data"]), tensors)
    return states


def _is_numpy(state: State) -> bool:
    return all(map(is_array, state.tensors.values()))
