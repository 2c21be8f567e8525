"""Checkpoints in a folder or in an object store; only complete checkpoints are ever found.

In a folder, a complete checkpoint is renamed to its final name. A store cannot rename, so its
manifest is uploaded last: a checkpoint without a manifest does not count.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.checks import check_seconds, check_whole
from paceline.core.errors import CheckpointError
from paceline.core.logs import logger_of
from paceline.training.checkpoint.files import (
    FORMAT,
    MANIFEST,
    MODEL,
    SLICED,
    Exported,
    Files,
    Snapshot,
    check_exported,
    fill,
    write_manifest,
    write_state,
)
from paceline.training.checkpoint.files import contiguous as _contiguous
from paceline.training.checkpoint.files import digest as _digest
from paceline.training.checkpoint.store import Store, Unreachable

__all__ = [
    "FORMAT",
    "CheckpointError",
    "Checkpoints",
    "Snapshot",
    "Unreachable",
    "_contiguous",
    "_digest",
    "exists",
    "flush",
    "newest",
    "put_in_place",
    "read",
    "seal",
    "write",
]
_PREFIX = "step-"
logger = logger_of(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save: one checkpoint per `every` steps and one at the end.

    path: a folder, or the URL of a store that fsspec knows: "s3://bucket/run".
    keep: the number of newest checkpoints to keep; older ones are deleted.
    options: for a store, the arguments of its fsspec file system.
    timeout: the longest time in seconds to move a file to or from a store, or for servers to write
        a checkpoint.
    key: a secret that signs checkpoints; checkpoints without this signature are refused.
    """

    path: Path | str
    every: int = 100
    keep: int = 3
    options: Mapping[str, Any] | None = field(default=None, repr=False)
    timeout: float = 600.0
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            raise ValueError(f"path={self.path!r}: use a folder, or the URL of a store")
        check_whole("every", self.every)
        check_whole("keep", self.keep)
        check_seconds("timeout", self.timeout)
        if self.options is not None and not self.is_remote:
            raise ValueError(
                f"options= are for a store, and {self.path} is a folder; leave them out"
            )
        if self.key is not None and not (isinstance(self.key, bytes) and len(self.key) >= 16):
            raise ValueError(
                "key= must be a secret of at least 16 bytes; use secrets.token_bytes(32)"
            )

    @property
    def is_remote(self) -> bool:
        return isinstance(self.path, str) and "://" in self.path

    @property
    def _store(self) -> Store:
        return Store(str(self.path), dict(self.options or {}), self.timeout)

    def folder(self, step: int) -> Path:
        return Path(self.path) / f"{_PREFIX}{step:08d}"

    def place(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return f"{self.path}/{_PREFIX}{step:08d}" if self.is_remote else str(self.folder(step))

    def check(self, model: Exported) -> None:
        """Raise `CheckpointError` if the path is not writable or the model cannot be saved."""
        check_exported(model)
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

    def save(self, snapshot: Snapshot, model: Exported) -> None:
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

    def slices(self, step: int) -> Path:
        """Make a folder in which servers write the slices of a checkpoint.

        Its name is used once: a server that is late may still write into it.
        """
        folder = self.folder(step)
        made = folder.with_name(f".{folder.name}.slices-{secrets.token_hex(4)}")
        made.mkdir(parents=True)
        return made

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
            if left not in whole:  # incomplete: its process was killed
                shutil.rmtree(left, ignore_errors=True)

    def found(self) -> list[str]:
        """Return the places of all checkpoints that have a manifest, the last written first.

        If the path is itself a checkpoint, return only that.
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
                logger.warning("%s is skipped: it has no %s", folder, MANIFEST)
        return [str(folder) for folder in reversed(_complete(Path(self.path)))]

    def load(self, model: Any) -> Any:
        """Load the tensors of the newest checkpoint into a torch module, and return the module.

        Frozen parameters keep their values, since no checkpoint has them.
        """
        if not (found := self.found()):
            raise CheckpointError(f"no checkpoint at {self.path}: no {_PREFIX}… with a manifest")
        with self.fetched(found[0]) as folder:
            tensors = dict(Files(folder, self.key).arrays(MODEL, "pt"))
        frozen = {
            n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
        }
        if differing := sorted((tensors.keys() ^ model.state_dict().keys()) - frozen):
            raise CheckpointError(
                f"{found[0]} is of another model: {differing[0]!r} is only in one of the two; give "
                "the model that was trained, with the same parameters frozen"
            )
        model.load_state_dict(tensors, strict=False)
        return model

    @contextlib.contextmanager
    def fetched(self, place: str) -> Iterator[Path]:
        """Provide the files of a checkpoint in a local folder until the block ends."""
        if not self.is_remote:
            yield Path(place)
            return
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            store = Store(place, dict(self.options or {}), self.timeout)
            store.get(Path(folder))
            try:
                yield Path(folder)
            except CheckpointError as error:  # name its place, not the local copy
                raise type(error)(str(error).replace(folder, place)) from error


def write(folder: Path, snapshot: Snapshot, model: Exported, key: bytes | None = None) -> None:
    """Write a checkpoint; a crash at any moment leaves no checkpoint or a complete one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial, snapshot, model, key)
        for file in partial.iterdir():
            flush(file)
        flush(partial)  # the file names, before the folder is renamed
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        raise
    put_in_place(partial, folder)


def seal(
    made: Path, snapshot: Snapshot, files: Mapping[str, str], key: bytes | None = None
) -> None:
    """Add the rest to a folder that has the model, and the state in slices.

    files: the hash of each file that is there, and flushed.
    """
    own = write_state(made, snapshot)
    write_manifest(made, SLICED, snapshot.step, {**files, **own}, key)
    written = {*own, MANIFEST}
    for file in made.iterdir():
        if file.name in written:
            flush(file)
        elif file.name not in files:
            file.unlink()
    flush(made)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a complete checkpoint; a crash at any moment leaves this one or the one before."""
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read(path: Path | str, key: bytes | None = None) -> Snapshot:
    """Read a checkpoint, or the newest one in a folder, after checking its hashes."""
    return Files(newest(Path(path)), key).snapshot()


def exists(path: Path | str) -> bool:
    """Return whether there is a checkpoint at a path, or in it."""
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
    """Return the complete checkpoints in a folder, in the order in which they were written."""
    folders = [*path.glob(f"{_PREFIX}*")]
    names = {folder.name for folder in folders}
    # Checkpoints that were about to be replaced when the process was killed.
    asides = path.glob(f".{_PREFIX}*.old")
    folders += [a for a in asides if a.name.removeprefix(".").removesuffix(".old") not in names]
    whole = [folder for folder in folders if (folder / MANIFEST).is_file()]
    return sorted(whole, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name))


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
