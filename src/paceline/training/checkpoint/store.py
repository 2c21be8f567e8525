"""Checkpoints in an object store, through fsspec: S3 and every other file system of fsspec.

Only the order of operations matters: a manifest is uploaded after the files that it names, and
deleted before them. No rename and no conditional write is needed. Every wait has a timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.errors import CheckpointError
from paceline.training.checkpoint.files import ARRAYS, CALLBACKS, MANIFEST, MODEL, STATE
from paceline.training.checkpoint.slices import is_slice

T = TypeVar("T")
_overdue: dict[str, threading.Thread] = {}
"""By URL, the last call that exceeded its timeout. While it runs, no other call to that URL begins:
the overdue call could overwrite the data of a later one."""
_SMALL = 60.0
"""Timeout in seconds of a listing, and of any other call that moves a few bytes."""


class Unreachable(CheckpointError):
    """A store does not answer or denies access, so that its content is unknown."""


class Store:
    """A folder in a store that holds checkpoints, or the files of one checkpoint."""

    def __init__(self, url: str, options: dict[str, Any], timeout: float) -> None:
        from fsspec.core import url_to_fs

        self._url, self._timeout = url, timeout
        try:
            self._system, root = url_to_fs(url, **options)
        except ImportError as error:
            extra = ": pip install 'paceline[s3]'" if url.startswith("s3:") else ""
            raise CheckpointError(
                f"{url} needs a package that is missing{extra} ({error})"
            ) from error
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{url} cannot be opened: {error}; use a URL that fsspec knows"
            ) from error
        self._root = root.rstrip("/")

    def check(self) -> None:
        """Raise `Unreachable` if nothing can be written."""
        probe = f"{self._root}/.paceline-probe"
        self._do("writing", partial(self._system.pipe_file, probe, b"paceline"))
        self._do("deleting", partial(self._system.rm_file, probe))

    def put(self, folder: Path, name: str) -> None:
        """Upload a checkpoint, after deleting the manifest of an older one of that name."""
        place = f"{self._root}/{name}"
        if self.has(f"{name}/{MANIFEST}"):
            self._do("deleting", partial(self._system.rm_file, f"{place}/{MANIFEST}"))
        self._do("writing", partial(self._system.makedirs, place, exist_ok=True))
        more = [CALLBACKS] if (folder / CALLBACKS).is_file() else []
        for file in (MODEL, ARRAYS, STATE, *more, MANIFEST):
            move = partial(self._system.put_file, str(folder / file), f"{place}/{file}")
            self._do(f"writing {name}/{file}", move, self._timeout)

    def get(self, folder: Path) -> None:
        """Download those files of a checkpoint that exist."""
        for file in (MANIFEST, STATE, MODEL, ARRAYS, CALLBACKS, *self._slices(self._root)):
            move = partial(self._system.get_file, f"{self._root}/{file}", str(folder / file))
            try:
                self._do(f"reading {file}", move, self._timeout)
            except FileNotFoundError:  # `Files` reports it later
                (folder / file).unlink(missing_ok=True)

    def _slices(self, place: str) -> list[str]:
        """Return the state files of slices, which a checkpoint has that was copied here."""
        try:
            files: list[str] = self._do("listing", partial(self._system.find, place))
        except FileNotFoundError:
            return []
        names = [file.rpartition("/")[2] for file in files]
        return sorted(name for name in names if is_slice(name))

    def has(self, name: str) -> bool:
        self._system.invalidate_cache()
        return bool(self._do("reading", partial(self._system.isfile, f"{self._root}/{name}")))

    def complete(self, prefix: str) -> list[str]:
        """Return the names of complete checkpoints, in the order in which they were written."""
        self._system.invalidate_cache()
        try:
            files: list[str] = self._do("listing", partial(self._system.find, self._root))
        except FileNotFoundError:
            return []
        inside = [file.removeprefix(f"{self._root}/") for file in files]
        names = [file.removesuffix(f"/{MANIFEST}") for file in inside if f"/{MANIFEST}" in file]
        found = [name for name in names if name.startswith(prefix) and "/" not in name]
        return sorted(found, key=lambda name: (self._written(name), name))

    def remove(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that it never counts as complete."""
        slices = self._slices(f"{self._root}/{name}")
        for file in (MANIFEST, STATE, MODEL, ARRAYS, CALLBACKS, *slices):
            try:
                self._do("deleting", partial(self._system.rm_file, f"{self._root}/{name}/{file}"))
            except FileNotFoundError:
                continue

    def _written(self, name: str) -> float:
        """Return when a manifest was written, by the clock of the store; 0 if it has none."""
        file = f"{self._root}/{name}/{MANIFEST}"
        try:
            at: float = self._do("reading", partial(self._system.modified, file)).timestamp()
        except (NotImplementedError, FileNotFoundError):
            return 0.0
        return at

    def _do(self, told: str, call: Callable[[], T], seconds: float = _SMALL) -> T:
        """Make a call with a timeout in seconds, since some file systems have none."""
        seconds = min(seconds, self._timeout)
        if (before := _overdue.pop(self._url, None)) is not None and before.is_alive():
            _overdue[self._url] = before
            raise Unreachable(
                f"{self._url}: an earlier call exceeded its timeout and still runs; {told} is "
                "tried when that call has ended"
            )
        answer: list[T] = []
        fault: list[BaseException] = []

        def work() -> None:
            try:
                answer.append(call())
            except BaseException as error:  # raised below, in the caller's thread
                fault.append(error)

        thread = threading.Thread(target=work, name="paceline-store", daemon=True)
        thread.start()
        thread.join(seconds)
        if answer:
            return answer[0]
        if not fault:
            _overdue[self._url] = thread
            raise Unreachable(
                f"{self._url}: {told} took more than {seconds:g} s; check the store, or increase "
                "Checkpoints(timeout=…)"
            )
        passed_on = NotImplementedError, FileNotFoundError
        if isinstance(fault[0], passed_on) and not told.startswith("writing"):
            raise fault[0]
        raise Unreachable(
            f"{self._url}: {told} failed: {type(fault[0]).__name__}: {fault[0]}; check its "
            "address, keys and permissions, and Checkpoints(options=…)"
        ) from fault[0]
