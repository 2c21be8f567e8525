"""The checkpoints of a run: which way each is written, and what happens if that fails.

If servers keep the model and see the folder of checkpoints, they write while training goes on.
Otherwise the driver gathers the model and writes, and training waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.core.logs import logger_of
from paceline.engines.base import Writer
from paceline.learners.base import Server
from paceline.training.checkpoint import Checkpoints, Snapshot
from paceline.training.checkpoint.background import Background
from paceline.training.settings import Settings

logger = logger_of(__name__)
LEAST_BYTES = 2**20
"""The driver gathers smaller models: that takes less time than a few files more."""
_ATTEMPTS = 3  # that fail in a row, after which servers write no more


class Saving:
    """Saves the checkpoints of one run.

    server: the job's own, for the model's layout.
    saved: the place of the newest checkpoint.
    """

    def __init__(self, settings: Settings, server: Server, saved: str | None) -> None:
        self._settings, self._server, self.saved = settings, server, saved
        self._checkpoints: Checkpoints | None = settings.given.checkpoints
        self._writer: Writer | None = None
        self._background: Background | None = None
        self._failures = 0  # in a row
        self._is_late = False  # whether the last one failed

    def open(self) -> None:
        """Find out whether servers can write. The engine's job is open."""
        saves, learner = self._checkpoints, self._settings.learner
        if saves is not None and not saves.is_remote and learner.message_bytes >= LEAST_BYTES:
            self._writer = self._settings.engine.writer(Path(saves.path))

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step: by its number, or after a failure."""
        return self._checkpoints is not None and (
            self._is_late or step % self._checkpoints.every == 0
        )

    def begin(self, snapshot: Callable[[], Snapshot]) -> bool:
        """Have servers write a checkpoint; return False if the driver has to write it.

        snapshot: returns the present state, all of it but the server's.
        """
        if self._writer is None or self._is_late:
            return False
        if self._background is not None:
            logger.warning(
                "a checkpoint is skipped, since that of step %d is still being written; use a "
                "larger Checkpoints(every=…)",
                self._background.step,
            )
            return True
        assert self._checkpoints is not None
        if (places := self._server.places()) is None:
            logger.info(
                "checkpoints are gathered and written by the driver: a hook makes tensors of the "
                "state_dict, and servers do not know it"
            )
            self._writer = None
            return False
        trained = self._server.layout.trained
        try:
            self._background = Background(
                self._checkpoints, snapshot(), places, trained, self._writer, time.monotonic
            )
        except OSError as error:
            self._failed(f"{error}")
            return False
        return True

    def advance(self) -> None:
        """Note what has become of the checkpoint under way."""
        if self._background is not None:
            self._background.advance()
            if not self._background.under_way:
                self._note(self._background)

    def _note(self, background: Background) -> None:
        """Note the end of the checkpoint under way."""
        self._background = None
        assert self._checkpoints is not None
        if background.is_saved:
            self.saved, self._failures = self._checkpoints.place(background.step), 0
            logger.info("saved %s", self.saved)
        else:
            self._failed(f"step {background.step} is not saved: {background.failure}")

    def _failed(self, why: str) -> None:
        self._is_late = True
        self._failures += 1
        logger.warning("%s; the driver writes the next checkpoint", why)
        if self._failures >= _ATTEMPTS:
            self._writer = None
            logger.warning("servers write no more checkpoints of this run, after %d failures in a "
                           "row", self._failures)  # fmt: skip

    def finish(self) -> None:
        """Wait for the checkpoint under way, and have the driver write the others."""
        if self._background is not None:
            try:
                self._background.finish()
            except Exception as error:  # of servers that are lost; the run ends in any case
                self._background.give_up(f"{type(error).__name__}: {error}")
            self._note(self._background)  # it may be saved, and still delete older ones
        self._writer = None

    def save(self, snapshot: Snapshot) -> None:
        """Save a checkpoint; only log a failure, so that a store outage does not end a run."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        place = checkpoints.place(snapshot.step)
        if self.saved == place:  # already at the last step, or resumed from it
            return
        self._is_late = False
        try:
            checkpoints.save(snapshot, self._server.export())
        except CheckpointError as error:
            logger.warning("step %d is not saved: %s", snapshot.step, error)
            return
        self.saved = place
        logger.info("saved %s", place)
        try:
            checkpoints.prune()
        except (CheckpointError, OSError) as error:
            logger.warning("older checkpoints are not deleted: %s", error)
