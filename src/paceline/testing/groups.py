"""Linux control groups, which freeze or slow down several processes together; needs root."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

_PERIOD = 100_000  # microseconds; the kernel's smallest quota is a hundredth of it
_numbers = itertools.count()


def missing() -> str | None:
    """Return what this machine lacks for `Group`, or None if it lacks nothing."""
    if os.geteuid() != 0:
        return "control groups need root"
    if _freezer() is None or _processor() is None:
        return "there is no control group that freezes and limits processes"
    return None


class Group:
    """Processes that can be frozen and limited to so many cores while the group is entered.

    Their child processes are in the group too. On exit, each process returns to its previous group
    if that still exists, and is free otherwise.
    """

    def __init__(self, pids: Iterable[int] = (), cores: float | None = None) -> None:
        self._pids, self._cores = tuple(pids), cores
        self._name = f"paceline{os.getpid()}n{next(_numbers)}"
        self._folders: list[Path] = []
        self._before: dict[tuple[Path, int], Path] = {}

    def __enter__(self) -> Self:
        if reason := missing():
            raise RuntimeError(
                f"{reason}; skip tests that need Group if missing() returns a reason"
            )
        self._folders = [_child(root, self._name) for root in (_freezer(), _processor()) if root]
        self.add(*self._pids)
        if self._cores is not None:
            self.limit(self._cores)
        return self

    def __exit__(self, *error: object) -> None:
        self.thaw()
        for folder in set(self._folders):
            self._empty(folder)
        self._folders = []
        self._before.clear()

    def add(self, *pids: int) -> None:
        """Add processes; those that have ended are left out."""
        for folder in set(self._folders):
            for pid in pids:
                with suppress(ProcessLookupError, FileNotFoundError):
                    before = _group_of(pid, folder.parent)
                    if before != folder:
                        self._before[folder, pid] = before
                    _write(folder / "cgroup.procs", str(pid))

    def limit(self, cores: float) -> None:
        """Limit all processes together to so many cores."""
        if not 0.01 <= cores <= 1024:
            raise ValueError(f"cores={cores} is not within 0.01 and 1024; try 0.5")
        folder, quota = self._folders[1], int(cores * _PERIOD)
        if (folder / "cpu.max").exists():
            _write(folder / "cpu.max", f"{quota} {_PERIOD}")
        else:
            _write(folder / "cpu.cfs_period_us", str(_PERIOD))
            _write(folder / "cpu.cfs_quota_us", str(quota))

    def freeze(self) -> None:
        """Stop all processes at once; they cannot notice it."""
        self._hold(True)

    def thaw(self) -> None:
        """Continue all processes."""
        self._hold(False)

    def _hold(self, still: bool) -> None:
        folder = self._folders[0]
        if (folder / "cgroup.freeze").exists():
            _write(folder / "cgroup.freeze", f"{still:d}")
        else:
            _write(folder / "freezer.state", "FROZEN" if still else "THAWED")

    def _empty(self, folder: Path) -> None:
        """Return the processes of a group to their previous groups, and remove it."""
        until = time.monotonic() + 5
        while True:
            for pid in (folder / "cgroup.procs").read_text().split():
                before = self._before.get((folder, int(pid)), folder.parent)
                if not before.is_dir():
                    before = folder.parent
                with suppress(ProcessLookupError):
                    _write(before / "cgroup.procs", pid)
            try:
                return folder.rmdir()
            except OSError:  # a process is just starting or ending
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)


def _mounts() -> list[tuple[str, Path, list[str]]]:
    """Return kind, mount point and options of each control group hierarchy."""
    found = []
    with suppress(FileNotFoundError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, kind, options, *_ = line.split()
            if kind in ("cgroup", "cgroup2"):
                found.append((kind, Path(where), options.split(",")))
    return found


def _freezer() -> Path | None:
    """Return the hierarchy that can freeze processes; version 2 always can."""
    for kind, where, options in sorted(_mounts(), reverse=True):
        if kind == "cgroup2" or "freezer" in options:
            return where
    return None


def _processor() -> Path | None:
    """Return the hierarchy that can limit the use of cores."""
    for kind, where, options in _mounts():
        if kind == "cgroup" and "cpu" in options:
            return where
        if kind == "cgroup2" and "cpu" in (where / "cgroup.controllers").read_text().split():
            _write(where / "cgroup.subtree_control", "+cpu")
            return where
    return None


def _child(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(exist_ok=True)
    return folder


def _group_of(pid: int, root: Path) -> Path:
    """Return the group of a process in the hierarchy that is mounted at a folder."""
    kinds = next(options for _, where, options in _mounts() if where == root)
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        if set(names.split(",")) & set(kinds) or (not names and _is_new(root)):
            return root / place.lstrip("/")
    return root


def _is_new(root: Path) -> bool:
    """Return whether a folder is of version 2, which has one hierarchy for all purposes."""
    return (root / "cgroup.controllers").exists()


def _write(file: Path, text: str) -> None:
    with open(file, "w", encoding="ascii") as opened:
        opened.write(text)
