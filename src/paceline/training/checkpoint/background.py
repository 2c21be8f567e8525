"""One checkpoint that servers write while training goes on.

Servers write the state of their slices. Then a thread of the driver joins the model from these
files, writes the rest and the manifest, and renames the folder. Training waits for neither.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from paceline.core.logs import logger_of
from paceline.engines import low_priority
from paceline.engines.base import Writer
from paceline.learners.base import Places, Saved
from paceline.learners.tensor_file import Ended
from paceline.training.checkpoint import Checkpoints, Snapshot, put_in_place, seal
from paceline.training.checkpoint.files import MODEL
from paceline.training.checkpoint.slices import Values, write_model

logger = logger_of(__name__)


class Background:
    """A checkpoint under way.

    snapshot: its state, all of it but the server's.
    trained: the number of values that are trained, which come first.
    clock: in seconds.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        snapshot: Snapshot,
        places: Places,
        trained: int,
        writer: Writer,
        clock: Callable[[], float],
    ) -> None:
        self._checkpoints, self._snapshot, self._clock = checkpoints, snapshot, clock
        self._places, self._trained, self._writer = places, trained, writer
        self._until = clock() + checkpoints.timeout
        self._thread: threading.Thread | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self.failure = ""  # why there will be no such checkpoint; empty while there may be
        self.is_saved = False
        self._made = checkpoints.slices(snapshot.step)  # raises OSError
        self._writing = writer.begin(self._made, checkpoints.timeout)

    @property
    def step(self) -> int:
        return self._snapshot.step

    @property
    def under_way(self) -> bool:
        """Whether it may still be saved, or older ones are being deleted after it."""
        return not self.failure and (self._thread is None or self._thread.is_alive())

    def advance(self) -> None:
        """Go on, as far as that is possible at once."""
        if not self.under_way:
            return
        if self._writing.failure:
            self.give_up(self._writing.failure)
        elif self._clock() >= self._until:
            self.give_up(f"it took longer than Checkpoints(timeout={self._checkpoints.timeout:g})")
        elif self._writing.data is not None and self._thread is None:
            server = Saved({}, self._writing.data)
            given = replace(self._snapshot, server=server), dict(self._writing.hashes)
            self._thread = low_priority.start(
                partial(self._complete, *given), "paceline-checkpoint"
            )

    def finish(self) -> None:
        """Return when it is saved, cannot be, or its time is up."""
        if self._thread is None and self.under_way:
            self._writer.wait(self._writing, self._left())
            self.advance()
        if self._thread is not None:
            self._thread.join(self._left())
        if self.under_way:
            self.give_up("the servers did not answer in time, or the disk is too slow")

    def _left(self) -> float:
        return max(self._until - self._clock(), 0.0)

    def give_up(self, why: str) -> None:
        """End it, unless it is saved by now; what it has written so far is deleted."""
        with self._lock:
            if not self.is_saved:
                self.failure = self.failure or why
            self._ended.set()
        if self._thread is None:
            self._writer.give_up(self._writing)
            shutil.rmtree(self._made, ignore_errors=True)

    def _complete(self, snapshot: Snapshot, hashes: Mapping[str, str]) -> None:
        """Write everything but the slices. It runs in a thread of its own."""
        try:
            self._write(snapshot, hashes)
        except Exception as error:  # of the disk, or of a file that is not what it was
            shutil.rmtree(self._made, ignore_errors=True)
            with self._lock:
                self.failure = self.failure or f"{type(error).__name__}: {error}"
            return
        try:
            self._checkpoints.prune()
        except OSError as error:
            logger.warning("older checkpoints are not deleted: %s", error)

    def _write(self, snapshot: Snapshot, hashes: Mapping[str, str]) -> None:
        values = Values([self._made / name for name in hashes])
        model = self._made / MODEL
        sha = write_model(model, values, self._places, self._trained, self._ended.is_set)
        seal(self._made, snapshot, {MODEL: sha, **hashes}, self._checkpoints.key)
        with self._lock:  # so that nothing appears after it was given up
            if self._ended.is_set():
                raise Ended(str(self._made))
            put_in_place(self._made, self._checkpoints.folder(snapshot.step))
            self.is_saved = True
