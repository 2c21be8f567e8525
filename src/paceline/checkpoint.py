"""Checkpoints on disk: safetensors and JSON, and a manifest of hashes that is written last.

A checkpoint is a folder. It appears under its name only when complete; what is read is checked
against the manifest first. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from paceline.learners.base import Array, Saved

FORMAT = 1
_PREFIX = "step-"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not of this run."""


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go: one `every` so many steps and one at the end, the newest `keep`."""

    path: Path | str
    every: int = 100
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"every={self.every}, keep={self.keep}: use at least 1")

    def folder(self, step: int) -> Path:
        return Path(self.path) / f"{_PREFIX}{step:08d}"

    def prune(self) -> None:
        for old in _complete(Path(self.path))[: -self.keep]:
            shutil.rmtree(old)


@dataclass(frozen=True)
class Snapshot:
    """Everything a run needs to go on."""

    step: int
    about: Mapping[str, Any]
    coordinator: Mapping[str, Any]
    server: Saved
    engine: Saved | None


def write(folder: Path, snapshot: Snapshot, model: Mapping[str, Array]) -> None:
    """Write a checkpoint; a crash at any moment leaves either none or a whole one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    arrays = {f"server/{name}": array for name, array in snapshot.server.arrays.items()}
    data: dict[str, Any] = {
        "step": snapshot.step,
        "about": snapshot.about,
        "coordinator": snapshot.coordinator,
        "server": snapshot.server.data,
        "engine": None,
    }
    if snapshot.engine is not None:
        arrays |= {f"engine/{name}": array for name, array in snapshot.engine.arrays.items()}
        data["engine"] = snapshot.engine.data
    save_file(_contiguous(model), partial / "model.safetensors")
    save_file(_contiguous(arrays), partial / "state.safetensors")
    (partial / "state.json").write_text(json.dumps(data, allow_nan=False))
    files = {file.name: _digest(file) for file in sorted(partial.iterdir())}
    manifest = {"format": FORMAT, "step": snapshot.step, "sha256": files}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for file in partial.iterdir():
        _flush(file)
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read(path: Path | str) -> Snapshot:
    """Read a checkpoint, or the newest one in a folder of them, after checking its hashes."""
    folder = newest(Path(path))
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        listed: dict[str, str] = manifest["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/manifest.json cannot be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest.get('format')}, known is {FORMAT}")
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        if not (folder / name).is_file() or _digest(folder / name) != listed.get(name):
            raise CheckpointError(f"{folder / name} is not what its manifest says; use another")
    data = json.loads((folder / "state.json").read_text())
    arrays = load_file(folder / "state.safetensors")
    engine = None
    if data["engine"] is not None:
        engine = Saved(_under("engine/", arrays), data["engine"])
    return Snapshot(
        step=data["step"],
        about=data["about"],
        coordinator=data["coordinator"],
        server=Saved(_under("server/", arrays), data["server"]),
        engine=engine,
    )


def exists(path: Path | str) -> bool:
    """Tell whether there is a checkpoint at a path, or in it."""
    return (Path(path) / "manifest.json").is_file() or bool(_complete(Path(path)))


def newest(path: Path) -> Path:
    """Return the checkpoint at a path: the path itself, or the newest one in it."""
    if (path / "manifest.json").is_file():
        return path
    complete = _complete(path)
    if not complete:
        raise CheckpointError(f"no checkpoint at {path}: no {_PREFIX}… folder with a manifest")
    return complete[-1]


def _complete(path: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, in the order in which they were written."""
    whole = [p for p in path.glob(f"{_PREFIX}*") if (p / "manifest.json").is_file()]
    return sorted(whole, key=lambda p: ((p / "manifest.json").stat().st_mtime_ns, p.name))


def _contiguous(arrays: Mapping[str, Array]) -> dict[str, Array]:
    # Not ascontiguousarray, which makes a vector of a scalar (Adam's step, BatchNorm's count).
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Have the disk keep what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
