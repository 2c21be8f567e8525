"""One run in progress: its coordinator, meter, server and newest snapshot."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from paceline.core.coordinator import Coordinator, drive
from paceline.core.errors import CheckpointError, Terminated
from paceline.core.journal import Header, Journal
from paceline.core.logs import logger_of, tell_left_out
from paceline.core.protocol import MAIN, Evaluated, Interrupted, LrScaled, Step, Want, WorkerId
from paceline.core.schema import load_state, save_state
from paceline.core.state import describe
from paceline.learners.base import Saved, Server
from paceline.report.callbacks import FAILED, Callback, Live, Progress, progress_of
from paceline.report.metrics import Meter
from paceline.training.checkpoint import Snapshot
from paceline.training.checkpoint.callbacks import restore_states, states_of
from paceline.training.compatibility import check_scaling
from paceline.training.restore import Start, restore
from paceline.training.run import Run
from paceline.training.saving import Saving
from paceline.training.settings import Settings, unused
from paceline.training.signals import signals

logger = logger_of(__name__)

Condition = Callable[[Progress], bool]


@dataclass
class Ending:
    """The reason why a run ended; callbacks get it after everything else is closed."""

    text: str = FAILED

    def tell(self, callbacks: Sequence[Callback]) -> None:
        errors = []
        for callback in callbacks:  # call all of them: each may have something to close
            try:
                callback.ended(self.text)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Fit:
    """Trains once, from a start to an end.

    ends: the limits of `Until`.
    until: a condition that ends the run as well.
    server: an existing server with the initial model; None: make one.
    """

    def __init__(
        self,
        settings: Settings,
        start: Start,
        ends: Mapping[str, float],
        until: Condition | None,
        callbacks: Sequence[Callback],
        server: Server | None = None,
    ) -> None:
        self._settings, self._until, self._callbacks = settings, until, callbacks
        self._snapshot, self._changed = start.snapshot, start.changed
        # A resumed run loads a new server, so that the arrays of its snapshot never change.
        fresh = server if start.snapshot is None else None
        self._progress: Progress | None = None  # after the newest step
        self._server = start.server(settings) if fresh is None else fresh
        self._saving = Saving(settings, self._server, start.saved)
        held = 0 if start.is_under_way else settings.min_workers
        self._policy = copy.deepcopy(settings.policy)  # the user's policy stays unchanged
        self._ends = settings.driven(self._policy, ends, held)
        self._recipe = settings.driven(settings.policy, ends, held)
        self._coordinator = self._make_coordinator()
        header, path = self._coordinator.journal.header, self._coordinator.journal.path
        self._meter = Meter.begin(header, None if path is None else path.parent)
        save_state(self._coordinator.policy)  # raises now, not after hours
        if (saves := settings.given.checkpoints) is not None:
            saves.check(self._server.export())

    @property
    def start(self) -> Start:
        """The start of the next run."""
        return Start(self._snapshot, self._saving.saved)

    def run(self) -> Run:
        """Train and return the result."""
        engine, meter = self._settings.engine, self._meter
        journal, ended, caught = self._coordinator.journal, Ending(), list[int]()
        with contextlib.ExitStack() as finally_:
            finally_.callback(ended.tell, self._callbacks)
            finally_.callback(tell_left_out)
            live = Live(
                journal.header,
                {MAIN: meter},
                meter,
                engine.now,
                lambda: engine.starting,
            )
            for callback in self._callbacks:
                callback.started(live)
            if self._snapshot is not None:
                restore_states(self._callbacks, self._snapshot.callbacks, self._server.model)
                if (scale := self._snapshot.lr_scale) != 1.0:
                    self._record(LrScaled(scale, "resumed"))
            finally_.callback(meter.close)
            finally_.callback(journal.close)
            finally_.callback(engine.close)
            ledger, loss = self._coordinator.ledger, frozenset[Want]({"loss"})
            job = self._settings.job(self._server, self._recipe.wants | loss, ledger)
            engine.open(job, self._snapshot.engine if self._snapshot else None)
            try:
                with signals(engine.interrupt, caught):
                    self._saving.open()
                    self._drive()
                    self._end()
                    self._saving.finish()
                    self._snapshot = self._take()
                    ended.text = ledger.stopped or "unknown"
                    if self._is_sound():
                        self._save(self._snapshot)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}{self._keep()}"
                error.run = self._result(reason)  # type: ignore[attr-defined]
                raise
        run = self._result(ended.text)
        if signal.SIGTERM in caught:
            raise Terminated(run)
        return run

    def _make_coordinator(self) -> Coordinator:
        """Return the coordinator, in the state of the snapshot if there is one."""
        given, snapshot = self._settings.given, self._snapshot
        batch, size = given.learner.batch_size, given.learner.message_bytes
        coordinator = Coordinator(self._ends, batch, copied=False)
        ledger, state = coordinator.ledger, None
        if snapshot is not None:
            load_state(self._policy, snapshot.coordinator["policy"])
            ledger.restore(snapshot.coordinator["ledger"])
            ledger.stopped = None
            if snapshot.engine is None:
                ledger.abandon()
        ledger.message_bytes, ledger.prices = size, given.prices
        if snapshot is not None:  # with this trainer's prices, not the saved ones
            state = coordinator.state()
        about, plan, path = self._settings.about_run(), self._settings.plan, given.journal
        if plan is not None and not plan.unknown:  # step times alone forecast no run
            about["forecast"] = plan.about()
        if snapshot is not None and self._changed:
            about["changed"] = {"step": snapshot.step, "settings": list(self._changed)}
        if path is not None:
            path = unused(Path(path), None if snapshot is None else snapshot.step)
        cut = self._settings.tiles
        tiles = () if cut is None else tuple(cut.sizes.tolist())
        header = Header(describe(self._recipe), batch, about, state, size, given.prices, tiles)
        coordinator.journal = Journal(header, path)
        return coordinator

    def _drive(self) -> None:
        ledger, meter, until = self._coordinator.ledger, self._meter, self._until
        if (reached := self._ends.reached(ledger)) is not None:
            self._stop(reached)  # first, since `drive` would take an event and lose it
        examples, saving = self._settings.learner.examples, self._saving
        for _, entry in drive({MAIN: self._coordinator}, self._settings.engine):
            meter.observe(entry)
            saving.advance()
            if not any(isinstance(command, Step) for command in entry.commands):
                continue
            progress = self._progress = progress_of(
                meter, examples, len(ledger.workers), self._model, self._stop, self._record
            )  # fmt: skip
            for callback in self._callbacks:
                callback.stepped(progress)
            if until is not None and until(progress):
                self._stop("the condition of until holds")
            if not self._is_sound():
                self._stop(f"the loss is {progress.loss} at step {progress.step}")
            due = saving.is_due(progress.step) and self._is_sound()
            if due and not saving.begin(self._without_server):
                self._save(self._take())

    def _stop(self, reason: str) -> None:
        now = max(self._settings.engine.now(), self._coordinator.ledger.now)
        self._meter.observe(self._coordinator.handle(now, Interrupted(reason)))

    def _record(self, event: Evaluated | LrScaled) -> None:
        """Write an event into the journal that the policy does not see."""
        if isinstance(event, LrScaled):
            on = self._settings
            check_scaling(on.policy, on.learner, on.codec)
        now = self._coordinator.ledger.now
        self._meter.observe(self._coordinator.handle(now, event))

    def _end(self) -> None:
        """Tell callbacks that no step follows."""
        if (last := self._progress) is not None:
            for callback in self._callbacks:
                callback.ending(last)

    def _is_sound(self) -> bool:
        """Return whether the last loss is finite; a model with another loss is not saved."""
        losses = self._meter.columns["loss"]
        return not self._settings.knows_loss or not losses or isfinite(losses[-1])

    def _model(self) -> Any:
        """Return a copy of the model as it is now."""
        self._settings.engine.settle()
        return self._server.model()

    def _result(self, reason: str) -> Run:
        model, meter, recipe = self._server.model(), self._meter, self._recipe
        journals = {MAIN: self._coordinator.journal}
        models = partial(dict[WorkerId, Any], {MAIN: model})
        learned, meters = self._policy.innermost, {MAIN: meter}
        return Run(model, meter.arrays(), meter, journals, recipe, reason, learned, meters, models)

    # --- snapshots -------------------------------------------------------------------------------

    def _take(self) -> Snapshot:
        """Return a snapshot that shares the server's arrays, since copies may be large."""
        taken = self._without_server()
        self._settings.engine.settle()
        return replace(taken, server=self._server.save(), engine=self._settings.engine.save())

    def _without_server(self) -> Snapshot:
        """Return the state of the coordinator alone."""
        ledger = self._coordinator.ledger
        state = {"policy": save_state(self._policy), "ledger": save_state(ledger)}
        about = {**self._settings.about(), **self._settings.notes()}
        more = states_of(self._callbacks), ledger.lr_scale
        return Snapshot(ledger.version, about, state, Saved({}, {}), None, *more)

    def _save(self, snapshot: Snapshot) -> None:
        """Have the driver save a checkpoint."""
        self._saving.save(snapshot)

    def _keep(self) -> str:
        """Keep the last complete model of a run that failed; return text to add to the error.

        Keep the newest model if all commands are carried out, its loss is finite and the engine
        can still gather it; otherwise that of `_before`. Work in flight is handed out again.
        """
        step = self._coordinator.ledger.version
        self._saving.finish()
        if self._coordinator.whole and self._is_sound():
            try:
                self._snapshot = replace(self._take(), engine=None)
                self._save(self._snapshot)
                return ""
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                if self._snapshot is not None and self._snapshot.step == step:
                    logger.warning("step %d is not saved: %s", step, told)
                    return ""
                logger.warning(
                    "step %d is lost, and the model of an earlier step is kept: %s", step, told
                )
        kept = self._before()
        self._snapshot, self._saving.saved = kept.snapshot, kept.saved
        self._server = kept.server(self._settings)
        return f" (the model is that of step {kept.step}: step {step} is incomplete)"

    def _before(self) -> Start:
        """Return the newer of the last checkpoint and the newest snapshot in memory."""
        before, found = self.start, None
        if (saved := self._saving.saved) is not None:
            try:
                found = restore(self._settings, saved, missing_ok=False)
            except CheckpointError as error:
                logger.warning("%s is not used: %s", saved, error)
        if found is None or before.step > found.step:
            return before
        return found
