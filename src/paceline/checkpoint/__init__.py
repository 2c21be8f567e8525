"""Checkpoints in a folder or in an object store, of which only whole ones are ever found.

In a folder, a checkpoint appears under its name when it is complete. In a store, where nothing can
be renamed, its manifest comes last: without one it is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import FORMAT, MANIFEST, CheckpointError, Files, Snapshot, fill
from paceline.checkpoint.files import contiguous as _contiguous
from paceline.checkpoint.files import digest as _digest
from paceline.checkpoint.store import Store, Unreachable
from paceline.core.logs import logger_of
from paceline.learners.base import Array

__all__ = [
    "FORMAT",
    "CheckpointError",
    "Checkpoints",
    "Snapshot",
    "Unreachable",
    "_contiguous",
    "_digest",
    "exists",
    "newest",
    "read",
    "write",
]
_PREFIX = "step-"
logger = logger_of(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go: one `every` so many steps and one at the end, the newest `keep`.

    path: a folder, or the URL of a store that fsspec knows: "s3://bucket/run".
    options: for a store, what its fsspec file system is made with.
    timeout: seconds that moving a file to or from a store may take.
    key: a secret that checkpoints are signed with; others are then refused.
    """

    path: Path | str
    every: int = 100
    keep: int = 3
    options: Mapping[str, Any] | None = field(default=None, repr=False)
    timeout: float = 600.0
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"every={self.every}, keep={self.keep}: use at least 1")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: use more than 0 seconds")
        if self.options is not None and not self.is_remote:
            raise ValueError(f"options= are for a store, and {self.path} is a folder")
        if self.key is not None and not (isinstance(self.key, bytes) and len(self.key) >= 16):
            raise ValueError("key= is a secret of at least 16 bytes: secrets.token_bytes(32)")

    @property
    def is_remote(self) -> bool:
        return isinstance(self.path, str) and "://" in self.path

    @property
    def _store(self) -> Store:
        return Store(str(self.path), dict(self.options or {}), self.timeout)

    def folder(self, step: int) -> Path:
        return Path(self.path) / f"{_PREFIX}{step:08d}"

    def place(self, step: int) -> str:
        """Say where the checkpoint of a step is, or would be."""
        return f"{self.path}/{_PREFIX}{step:08d}" if self.is_remote else str(self.folder(step))

    def check(self) -> None:
        """Raise `CheckpointError` if nothing can be written there."""
        if self.is_remote:
            self._store.check()
            return
        try:
            Path(self.path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.path}: {error}; use another folder"
            ) from error

    def save(self, snapshot: Snapshot, model: Mapping[str, Array]) -> None:
        """Write a checkpoint; raise `CheckpointError` if that fails."""
        signed = () if self.key is None else (self.key,)
        try:
            if not self.is_remote:
                write(self.folder(snapshot.step), snapshot, model, *signed)
                return
            with tempfile.TemporaryDirectory(prefix="paceline-") as made:
                fill(Path(made), snapshot, model, *signed)
                self._store.put(Path(made), f"{_PREFIX}{snapshot.step:08d}")
        except OSError as error:
            raise CheckpointError(
                f"{self.place(snapshot.step)} cannot be written: {error}"
            ) from error

    def prune(self) -> None:
        if self.is_remote:
            store = self._store
            for name in store.complete(_PREFIX)[: -self.keep]:
                store.remove(name)
            return
        whole = _complete(Path(self.path))
        for old in whole[: -self.keep]:
            shutil.rmtree(old)
        for left in Path(self.path).glob(f".{_PREFIX}*"):
            if left not in whole:  # but half of one, of a process that was killed
                shutil.rmtree(left, ignore_errors=True)

    def found(self) -> list[str]:
        """Return the places of all checkpoints that have a manifest, the last written first.

        If the path is that of a checkpoint itself, it is the only one.
        """
        if self.is_remote:
            if self._store.has(MANIFEST):
                return [str(self.path)]
            names = self._store.complete(_PREFIX)
            return [f"{self.path}/{name}" for name in reversed(names)]
        if (Path(self.path) / MANIFEST).is_file():
            return [str(self.path)]
        for folder in sorted(Path(self.path).glob(f"{_PREFIX}*")):
            if not (folder / MANIFEST).is_file():
                logger.warning("%s is passed over: it has no %s", folder, MANIFEST)
        return [str(folder) for folder in reversed(_complete(Path(self.path)))]

    @contextlib.contextmanager
    def fetched(self, place: str) -> Iterator[Path]:
        """Have the files of a checkpoint in a folder on this machine for a while."""
        if not self.is_remote:
            yield Path(place)
            return
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            store = Store(place, dict(self.options or {}), self.timeout)
            store.get(Path(folder))
            try:
                yield Path(folder)
            except CheckpointError as error:  # told of where it is, not of the copy
                raise type(error)(str(error).replace(folder, place)) from error


def write(
    folder: Path, snapshot: Snapshot, model: Mapping[str, Array], key: bytes | None = None
) -> None:
    """Write a checkpoint; a crash at any moment leaves either none or a whole one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial, snapshot, model, key)
        for file in partial.iterdir():
            _flush(file)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a disk that is full may need the room
        raise
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read(path: Path | str, key: bytes | None = None) -> Snapshot:
    """Read a checkpoint, or the newest one in a folder of them, after checking its hashes."""
    return Files(newest(Path(path)), key).snapshot()


def exists(path: Path | str) -> bool:
    """Tell whether there is a checkpoint at a path, or in it."""
    return (Path(path) / MANIFEST).is_file() or bool(_complete(Path(path)))


def newest(path: Path) -> Path:
    """Return the checkpoint at a path: the path itself, or the newest one in it."""
    if (path / MANIFEST).is_file():
        return path
    complete = _complete(path)
    if not complete:
        raise CheckpointError(f"no checkpoint at {path}: no {_PREFIX}… folder with a manifest")
    return complete[-1]


def _complete(path: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, in the order in which they were written."""
    folders = [*path.glob(f"{_PREFIX}*")]
    names = {folder.name for folder in folders}
    # One that was just about to be replaced when the process was killed.
    asides = path.glob(f".{_PREFIX}*.old")
    folders += [a for a in asides if a.name.removeprefix(".").removesuffix(".old") not in names]
    whole = [folder for folder in folders if (folder / MANIFEST).is_file()]
    return sorted(whole, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name))


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _flush(path: Path) -> None:
    """Have the disk keep what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
