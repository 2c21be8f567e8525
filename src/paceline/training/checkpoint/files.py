"""The files of one checkpoint: how they are written, and how they are checked before use.

Arrays are in safetensors, the rest in JSON; a manifest has the hash of each file. Nothing in them
is ever executed, and no memory is allocated for data that a file claims but does not contain.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline.core.errors import CheckpointError
from paceline.learners.base import Array, Saved
from paceline.report.callbacks import State
from paceline.training.checkpoint.callbacks import plain, read_states, tensors_of
from paceline.training.checkpoint.kinds import Kind, is_array, kind_of
from paceline.training.checkpoint.slices import in_order, joined_arrays, joined_kinds

FORMAT = 3
SLICED = 4
"""The format with a state file for each slice; everything else is as in `FORMAT`."""
MANIFEST, MODEL, ARRAYS, STATE = (
    "manifest.json",
    "model.safetensors",
    "state.safetensors",
    "state.json",
)
CALLBACKS = "callbacks.safetensors"
"""The tensors of callbacks; the file exists if there are some."""
_MOST_JSON = {MANIFEST: 2**20, STATE: 2**30}  # bytes; the ledger of a million workers has far less
_PARTS = {"step": int, "about": dict, "coordinator": dict, "server": dict}


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a run, from which it can continue."""

    step: int
    about: Mapping[str, Any]
    coordinator: Mapping[str, Any]
    server: Saved
    engine: Saved | None
    callbacks: Mapping[str, State] = field(default_factory=dict)
    lr_scale: float = 1.0


Exported: TypeAlias = Mapping[str, Any]
"""The tensors of a model by name: all numpy's, or all torch's, which has bfloat16 and others."""


def fill(folder: Path, snapshot: Snapshot, model: Exported, key: bytes | None = None) -> None:
    """Write the files of a checkpoint into an empty folder, the manifest last."""
    arrays = {f"server/{name}": array for name, array in snapshot.server.arrays.items()}
    if snapshot.engine is not None:
        arrays |= {f"engine/{name}": array for name, array in snapshot.engine.arrays.items()}
    try:
        save_model(model, folder / MODEL)
        save_file(contiguous(arrays), folder / ARRAYS)
    except SafetensorError as error:  # raised for a full disk too
        raise OSError(f"{folder}: {error}") from error
    files = {MODEL: digest(folder / MODEL), **write_state(folder, snapshot)}
    write_manifest(folder, FORMAT, snapshot.step, files | {ARRAYS: digest(folder / ARRAYS)}, key)


def write_state(folder: Path, snapshot: Snapshot) -> dict[str, str]:
    """Write everything but the arrays of server and engine; return the hash of each file."""
    (folder / STATE).write_text(state_text(snapshot))
    if tensors := tensors_of(snapshot.callbacks):
        try:
            save_model(tensors, folder / CALLBACKS)
        except SafetensorError as error:
            raise OSError(f"{folder}: {error}") from error
    names = [STATE, CALLBACKS] if tensors else [STATE]
    return {name: digest(folder / name) for name in names}


def state_text(snapshot: Snapshot) -> str:
    """Return the part of a snapshot that is in no array, as JSON."""
    data: dict[str, Any] = {
        "step": snapshot.step,
        "about": snapshot.about,
        "coordinator": snapshot.coordinator,
        "server": snapshot.server.data,
        "engine": None if snapshot.engine is None else snapshot.engine.data,
    }
    if snapshot.callbacks:
        data["callbacks"] = plain(snapshot.callbacks)
    if snapshot.lr_scale != 1.0:
        data["lr_scale"] = snapshot.lr_scale
    return json.dumps(data, allow_nan=False)


def write_manifest(
    folder: Path, format: int, step: int, files: Mapping[str, str], key: bytes | None
) -> None:
    """Write the hashes of all files, with which a checkpoint is complete."""
    manifest: dict[str, Any] = {"format": format, "step": step, "sha256": dict(files)}
    if key is not None:
        manifest["hmac"] = signature(manifest, key)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


class Files:
    """The files of a complete checkpoint; each matches its hash in the manifest."""

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.folder = folder
        manifest = self._manifest(key)
        self._slices = self._slices_of(manifest)
        self._has_tensors = CALLBACKS in manifest["sha256"]
        more = [CALLBACKS] if self._has_tensors else []
        for name in (MODEL, *(self._slices or [ARRAYS]), STATE, *more):
            file = folder / name
            if not file.is_file() or digest(file) != manifest["sha256"].get(name):
                raise CheckpointError(
                    f"{file} is missing or differs from the hash in its manifest; use another "
                    "checkpoint"
                )
        data = _parse(folder / STATE)
        wrong = [part for part, kind in _PARTS.items() if type(data.get(part)) is not kind]
        if wrong or not isinstance(data.get("engine", 0), dict | None):
            told = ", ".join(wrong or ["engine"])
            raise CheckpointError(f"{folder / STATE} has no valid {told}; use another checkpoint")
        if data["step"] != manifest["step"]:
            raise CheckpointError(
                f"{folder} says step {manifest['step']} in its manifest and {data['step']} in its "
                "state; use another checkpoint"
            )
        if self._slices and data["engine"] is not None:
            raise CheckpointError(
                f"{folder} has slices, and the state of an engine, for which it has no file; use "
                "another checkpoint"
            )
        scale = data.get("lr_scale", 1.0)
        if type(scale) is not float or scale <= 0:
            raise CheckpointError(f"{folder / STATE} has the lr_scale {scale!r}, which is not > 0")
        self.data: dict[str, Any] = data
        self.step: int = data["step"]

    def _slices_of(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return the names of the state files if there is one for each slice."""
        if manifest["format"] != SLICED:
            return []
        try:
            if found := in_order(manifest["sha256"]):
                return found
            raise ValueError("there are no slices")
        except ValueError as error:
            raise CheckpointError(f"{self.folder} is incomplete: {error}") from error

    def _manifest(self, key: bytes | None) -> dict[str, Any]:
        file = self.folder / MANIFEST
        manifest = _parse(file)
        step, hashes = manifest.get("step"), manifest.get("sha256")
        if manifest.get("format", FORMAT) not in (FORMAT, SLICED):
            raise CheckpointError(
                f"{self.folder} has format {manifest.get('format')}, and this paceline reads "
                f"{FORMAT} and {SLICED}; use the paceline that saved it, or start a new run from "
                f"{MODEL}"
            )
        if "format" not in manifest or type(step) is not int or not isinstance(hashes, dict):
            raise CheckpointError(f"{file} cannot be read: it must have format, step and sha256")
        if key is not None:
            signed = {name: value for name, value in manifest.items() if name != "hmac"}
            if not hmac.compare_digest(str(manifest.get("hmac")), signature(signed, key)):
                raise CheckpointError(
                    f"{file} is not signed with this key; use another checkpoint, or "
                    "Checkpoints(key=…) with the key that it was saved with"
                )
        return manifest

    def kinds(self, name: str) -> dict[str, Kind]:
        """Return dtype and shape of the arrays in a file, or in all slices; read headers only."""
        if name == ARRAYS and self._slices:
            try:
                return joined_kinds([self.kinds(each) for each in self._slices])
            except ValueError as error:
                raise self._unreadable(name, error) from error
        try:
            with safe_open(self.folder / name, framework="np") as opened:
                slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
                return {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        except Exception as error:  # safetensors, numpy and the OS have different errors
            raise self._unreadable(name, error) from error

    def arrays(self, name: str, framework: Literal["np", "pt"] = "np") -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each array of a file, as numpy arrays or torch tensors."""
        try:
            with safe_open(self.folder / name, framework=framework) as opened:
                for key in opened.keys():  # noqa: SIM118
                    yield key, opened.get_tensor(key)
        except Exception as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.folder / name} cannot be read: {error}")

    def _state(self) -> dict[str, Array]:
        """Return the arrays of the state, joined from slices if there are some."""
        if not self._slices:
            return dict(self.arrays(ARRAYS))
        kinds = self.kinds(ARRAYS)
        try:
            return joined_arrays([self.folder / name for name in self._slices], kinds)
        except Exception as error:
            raise self._unreadable(ARRAYS, error) from error

    def snapshot(self) -> Snapshot:
        """Return the snapshot, with its arrays loaded."""
        arrays, data, engine = self._state(), self.data, None
        if data["engine"] is not None:
            engine = Saved(_under("engine/", arrays), data["engine"])
        server = Saved(_under("server/", arrays), data["server"])
        more = self._callbacks(), float(data.get("lr_scale", 1.0))
        return Snapshot(self.step, data["about"], data["coordinator"], server, engine, *more)

    def _callbacks(self) -> dict[str, State]:
        """Return the states of callbacks; older checkpoints have none."""

        def arrays(kind: Any) -> Iterator[tuple[str, Any]]:
            return self.arrays(CALLBACKS, kind) if self._has_tensors else iter(())

        return read_states(self.data.get("callbacks", {}), arrays)


def save_model(model: Exported, file: Path) -> None:
    """Write a model's tensors, each in its own dtype."""
    if all(map(is_array, model.values())):
        save_file(contiguous(model), file)
        return
    from safetensors.torch import save_file as save_tensors

    save_tensors({name: tensor.contiguous() for name, tensor in model.items()}, file)


def check_exported(model: Exported) -> None:
    """Refuse a model that cannot be written, before it is trained."""
    for name, tensor in model.items():
        try:
            kind_of(tensor)
        except Exception as error:  # from torch, from safetensors, or from no tensor
            raise CheckpointError(
                f"{name!r} of the model cannot be saved ({type(error).__name__}: {error}); make it "
                "a dense tensor of a dtype that safetensors has, or leave checkpoints= out"
            ) from error


def contiguous(arrays: Mapping[str, Array]) -> dict[str, Array]:
    # Not ascontiguousarray, which makes a vector of a scalar (Adam's step, BatchNorm's count).
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def signature(manifest: Mapping[str, Any], key: bytes) -> str:
    """Return the HMAC of a manifest's content, whatever its layout."""
    plain = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, plain.encode(), "sha256").hexdigest()


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def _parse(file: Path) -> dict[str, Any]:
    """Read a JSON object; refuse repeated names and numbers that are not finite."""
    try:
        if file.stat().st_size > (most := _MOST_JSON[file.name]):
            raise ValueError(f"it is larger than {most} bytes")
        data = json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=_once,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} cannot be read: it is not a JSON object")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value
