"""The one call most users make: a learner, a policy and an engine, trained until an end."""

from __future__ import annotations

import contextlib
import copy
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import count
from math import inf, isclose, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.callbacks import FAILED, Callback, Live, Progress, ProgressLine, progress_of
from paceline.checkpoint import CheckpointError, Checkpoints, Snapshot, Unreachable
from paceline.checkpoint.files import Files
from paceline.checkpoint.fits import check_coordinator, check_engine, check_model, check_server
from paceline.combine import (
    check_callbacks,
    check_gossip,
    check_letters,
    check_policy,
    check_prices,
    check_robust,
    innermost,
    tiles_of,
    with_placement,
)
from paceline.core.coordinator import Coordinator, drive
from paceline.core.journal import Header, Journal
from paceline.core.logs import logger_of, tell_left_out
from paceline.core.protocol import MAIN, Interrupted, Policy, Prices, Step, WorkerId
from paceline.core.state import describe, load_state, save_state
from paceline.engines.base import Job, TrainingEngine
from paceline.engines.simulator import Simulator
from paceline.learners.arrays import Timing
from paceline.learners.base import Learner, Server
from paceline.learners.robust import Robust, RobustServer
from paceline.live import LiveView
from paceline.policies.gossip import Gossip
from paceline.policies.placement import Placement
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter
from paceline.run import Run
from paceline.swarm import Ends, Swarm

if TYPE_CHECKING:  # which need torch, and scipy
    from paceline.codecs.base import Codec
    from paceline.planner.auto import Auto
    from paceline.planner.choose import Plan

logger = logger_of(__name__)


class Trainer:
    """Trains a learner under a policy on an engine.

    policy: a policy; or a plan, whose first policy and codec are then used; or "auto", to measure
        engine and learner first, plan for a target, and plan anew when workers change (see `Auto`).
        The learning rate is the learner's always.
    target: with "auto", the loss to be reached in the least time.
    seed: all randomness derives from it: which samples, random layers, simulated delays.
    min_workers: how many must have joined before training begins; by default all.
    checkpoints: where and how often to save; see `resume`.
    journal: a file for the journal, kept in memory otherwise.
    progress: True for a line, "live" for a table of all workers (see `LiveView`), False for none.
    prices: what hours and bytes cost, for all workers alike or for each of w0, w1, …
    placement: how the batch is shared out and where the data live: `BySpeed()`, `Placed(tiles)`;
        by default all get equal shares, of data that all can read.
    codec: what results are encoded with on their way: `Feedback(TopK(0.01))`, `BFloat16()`, …
    down: what models are encoded with on theirs, as changes of a copy that both ends keep:
        `TopK(0.1)`, `Int8()`, …
    robust: what is done in the place of the mean, so that a few wrong results cannot spoil a step:
        `TrimmedMean(1)`, `MultiKrum(1)`, `CenteredClip(radius)`.
    """

    def __init__(
        self,
        learner: Learner,
        policy: Policy | Plan | Literal["auto"],
        engine: TrainingEngine,
        *,
        target: float | None = None,
        seed: int = 0,
        callbacks: Sequence[Callback] = (),
        min_workers: int | None = None,
        checkpoints: Checkpoints | None = None,
        journal: Path | str | None = None,
        progress: bool | Literal["live"] = True,
        prices: Prices | None = None,
        placement: Placement | None = None,
        codec: Codec | None = None,
        down: Codec | None = None,
        robust: Robust | None = None,
    ) -> None:
        if isinstance(policy, str):
            if placement is not None:
                raise ValueError('policy="auto" shares the batch out itself: leave placement= out')
            policy = _planned(policy, learner, engine, target, prices, codec, seed)
        elif target is not None:
            raise ValueError('target= is for policy="auto"; say when to end by fit(until=…)')
        self._plan = found = _plan_of(policy)
        if found is not None:
            _compare_rates(found.learning_rate, learner)
            codec = found.codec if codec is None else codec
            policy = found.policy if policy is found else policy
        policy = cast(Policy, policy)
        if codec is not None and hasattr(innermost(policy), "code"):
            raise ValueError(
                "a gradient code decodes from results as they are; leave codec= out, or use a "
                "policy that averages, such as k_sync"
            )
        self._codec, self._down = codec, down
        given = placement or getattr(innermost(policy), "placement", None)
        if isinstance(innermost(policy), Gossip):
            check_gossip(policy, placement, down, checkpoints, min_workers, engine.size)
            check_letters(policy, learner, codec)
        elif given is not None:
            policy = with_placement(policy, given, engine.size)
        self._tiles = tiles_of(given, learner)
        self._learner, self._policy, self._engine, self._seed = learner, policy, engine, seed
        self._min_workers = engine.size if min_workers is None else min_workers
        if not 1 <= self._min_workers <= engine.size:
            raise ValueError(
                f"min_workers={min_workers}: this engine has {engine.size} workers; "
                f"use 1 to {engine.size}"
            )
        check_policy(policy, learner, engine.size)
        self._prices = prices or Prices()
        check_prices(self._prices, policy, learner, engine.size)
        check_callbacks(callbacks)
        self._callbacks = _shown(progress, callbacks)
        self._checkpoints, self._journal_path = checkpoints, journal
        self._robust = robust
        if robust is not None:
            check_robust(robust, policy, engine.size)
        self._server = self._make_server()
        self._arithmetic = not isinstance(learner, Timing)
        self._snapshot: Snapshot | None = None
        self._saved: str | None = None

    @classmethod
    def from_lightning(
        cls,
        module: Any,
        datamodule_or_dataloader: Any,
        policy: Policy | Plan | Literal["auto"],
        engine: TrainingEngine,
        *,
        batch_size: int | None = None,
        **trainer_options: Any,
    ) -> Trainer:
        """Make a trainer of a LightningModule and its data; see `lightning_learner`.

        The batch size of the DataLoader, or the one given, is that of all workers together.
        """
        from paceline.learners.lightning import lightning_learner

        learner = lightning_learner(module, datamodule_or_dataloader, batch_size=batch_size)
        return cls(learner, policy, engine, **trainer_options)

    @property
    def learner(self) -> Learner:
        return self._learner

    @property
    def engine(self) -> TrainingEngine:
        return self._engine

    @property
    def prices(self) -> Prices:
        return self._prices

    @property
    def seed(self) -> int:
        return self._seed

    def fit(
        self,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        until: Callable[[Progress], bool] | None = None,
    ) -> Run:
        """Train until the first of the given ends; all count from the very start of training.

        So after a resume in epoch 7, `fit(epochs=10)` trains three more. Ctrl-C ends the run as
        an end would, with what was learned.
        """
        ends = self._ends(epochs, steps, seconds, until)
        if isinstance(self._policy, Gossip):
            return self._fit_peers(self._policy, ends, until)
        started = MinWorkers(0 if self._is_under_way() else self._min_workers, self._policy)
        policy = Until(started, **ends)
        coordinator = self._coordinator(policy)
        path = coordinator.journal.path
        meter = Meter.begin(coordinator.journal.header, None if path is None else path.parent)
        job = Job(
            self._learner,
            self._server,
            policy.wants | {"loss"},
            self._seed,
            coordinator.ledger.now,
            coordinator.ledger.version,
            self._min_workers,
            self._tiles,
            self._codec,
            self._down,
        )
        save_state(coordinator.policy)  # what cannot be saved is told now, not after hours
        if self._checkpoints is not None:
            self._checkpoints.check()
        ended = _Reason()
        with contextlib.ExitStack() as finally_:
            finally_.callback(ended.tell, self._callbacks)
            finally_.callback(tell_left_out)
            live = Live(coordinator.journal.header, {MAIN: meter}, meter, self._engine.now)
            for callback in self._callbacks:
                callback.started(live)
            finally_.callback(meter.close)
            finally_.callback(coordinator.journal.close)
            finally_.callback(self._engine.close)
            try:
                self._engine.open(job, self._snapshot.engine if self._snapshot else None)
                self._drive(coordinator, meter, until)
                self._snapshot = self._take(coordinator)
            except BaseException:
                self._server = self._make_server()  # back to where the books are
                if self._snapshot is not None:
                    self._server.load(self._snapshot.server)
                raise
            ended.text = reason = coordinator.ledger.stopped or "unknown"
            if self._checkpoints is not None and self._is_sound(meter):
                self._save(self._checkpoints, self._snapshot)
        model = self._server.model()
        learned, journals = innermost(coordinator.policy), {MAIN: coordinator.journal}
        return Run(model, meter.arrays(), meter, journals, policy, reason, learned)

    def resume(self, path: Path | str | Checkpoints, *, missing_ok: bool = False) -> Trainer:
        """Continue from a checkpoint, or from the newest good one in a folder of them.

        The trainer must be made like the one that saved it. One that is damaged or does not fit is
        passed over with a warning, unless the path is its own. On the simulator, and on Ray under
        `sync`, the trajectory is bit for bit the one that was interrupted. With `missing_ok` a
        run without checkpoints begins at the beginning.
        """
        if isinstance(self._policy, Gossip):
            raise ValueError("a run without a main node cannot be resumed yet; see checkpoints=")
        saves = self._saves_at(path)
        found = saves.found()
        if not found and missing_ok:
            return self
        if not found:
            raise CheckpointError(
                f"no checkpoint at {saves.path}: no step-… folder with a manifest; to begin at the "
                "beginning then, use resume(…, missing_ok=True)"
            )
        refused = []
        for place in found:
            try:
                with saves.fetched(place) as folder:
                    snapshot, server = self._taken(place, folder, saves.key)
            except (_OtherRun, Unreachable):
                raise
            except CheckpointError as error:
                if found == [str(saves.path)]:
                    raise
                refused.append(str(error))
                logger.warning("%s is passed over: %s", place, error)
                continue
            self._snapshot, self._server, self._saved = snapshot, server, place
            return self
        raise CheckpointError(
            f"none of the checkpoints at {saves.path} is good: {'; '.join(refused)}"
        )

    def _saves_at(self, path: Path | str | Checkpoints) -> Checkpoints:
        """Return what is known of checkpoints at a path."""
        if isinstance(path, Checkpoints):
            return path
        known = self._checkpoints
        if known is not None and f"{path}/".startswith(f"{known.path}/"):
            return replace(known, path=path)  # with the same options and key
        return Checkpoints(path)

    def _taken(self, place: str, folder: Path, key: bytes | None) -> tuple[Snapshot, Server]:
        """Return the state in a checkpoint, and a server that has it; all else stays as it is."""
        try:
            files = Files(folder, key)
            self._compare_about(place, files.data["about"])
            check_coordinator(self._policy, self._learner.batch_size, files)
            check_server(self._make_server(), files)
            snapshot, server = files.snapshot(), self._make_server()
            server.load(snapshot.server)
            check_model(server, files)
            if not isinstance(self._engine, Simulator):  # work in flight is handed out again
                return replace(snapshot, engine=None), server
            if snapshot.engine is not None:
                self._compare_engine(place, snapshot, server, files)
        except CheckpointError:
            raise
        except Exception as error:  # a forged state may fail anywhere in what is made of it
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{place} does not fit this run: {why}; use another") from error
        return snapshot, server

    def _compare_about(self, place: str, theirs: Mapping[str, Any]) -> None:
        mine = self._about()
        if differing := {k: (theirs.get(k), v) for k, v in mine.items() if theirs.get(k) != v}:
            told = "; ".join(f"{k} was {a!r} and is {b!r}" for k, (a, b) in differing.items())
            raise _OtherRun(f"{place} is not of this run: {told}; make the trainer alike")

    def _compare_engine(self, place: str, snapshot: Snapshot, server: Server, files: Files) -> None:
        """Have a simulator like ours take over what was saved, to see whether it does."""
        job = Job(
            self._learner, server, frozenset(), self._seed, 0.0, snapshot.step,
            self._min_workers, self._tiles, self._codec, self._down,
        )  # fmt: skip
        assert snapshot.engine is not None
        workers = snapshot.engine.data.get("workers")
        if isinstance(workers, dict) and len(workers) != self._engine.size:
            raise _OtherRun(
                f"{place} is not of this run: the saved run had {len(workers)} workers and this "
                f"simulator has {self._engine.size}; make it alike"
            )
        engines = [copy.copy(self._engine), copy.copy(self._engine)]
        for engine, saved in zip(engines, (None, snapshot.engine), strict=True):
            engine.open(job, saved)
        fresh, restored = (engine.save() for engine in engines)
        assert fresh is not None and restored is not None
        check_engine(fresh, restored, files)

    # --- the parts of fit ------------------------------------------------------------------------

    def _is_under_way(self) -> bool:
        """Tell whether workers were given tasks that go on, so that none is waited for."""
        if self._snapshot is None or self._snapshot.engine is None:
            return False
        books: Mapping[str, Any] = self._snapshot.coordinator["ledger"]["fields"]
        return int(books["_next_id"]["value"]) > 0

    def _fit_peers(
        self, policy: Gossip, ends: dict[str, float], until: Callable[[Progress], bool] | None
    ) -> Run:
        """Train without a main node; ends count over all nodes."""

        def journal(node: WorkerId) -> Path | None:
            path = None if self._journal_path is None else Path(self._journal_path)
            return None if path is None else _unused(path.with_stem(f"{path.stem}-{node}"), None)

        about = {**self._about(), "engine": repr(self._engine), "versions": _versions()}
        codec, prices, nodes = self._codec, self._prices, self._engine.size
        swarm = Swarm(
            self._learner, policy, self._tiles, codec, self._seed, about, prices, journal
        )  # fmt: skip
        engine, ended = self._engine.peers(), _Reason()
        with contextlib.ExitStack() as finally_:
            finally_.callback(ended.tell, self._callbacks)
            finally_.callback(tell_left_out)
            live = Live(swarm.header, swarm.meter.nodes, swarm.meter.total, engine.now)
            for callback in self._callbacks:
                callback.started(live)
            finally_.enter_context(_ctrl_c(engine.stop))
            limits = Ends(ends["steps"] * nodes, ends["samples"], ends["seconds"], until)
            ended.text = swarm.train(engine, limits, self._callbacks)
        total = swarm.meter.total
        model, figures = swarm.mean(), total.arrays()
        return Run(
            model, figures, total, swarm.journals, swarm.policy, ended.text, swarm.policy, swarm
        )  # fmt: skip

    def _ends(
        self,
        epochs: float | None,
        steps: int | None,
        seconds: float | None,
        until: Callable[[Progress], bool] | None,
    ) -> dict[str, float]:
        if epochs is None and steps is None and seconds is None and until is None:
            raise ValueError("fit() needs an end: epochs=…, steps=…, seconds=… or until=…")
        ends = {"steps": inf if steps is None else steps}
        ends["seconds"] = inf if seconds is None else seconds
        ends["samples"] = inf
        if epochs is not None:
            if self._learner.examples is None:
                raise ValueError("this learner has no epochs; use steps=… or seconds=…")
            ends["samples"] = epochs * self._learner.examples
        return ends

    def _coordinator(self, policy: Until) -> Coordinator:
        """Make the coordinator, where the snapshot left off if there is one."""
        batch, snapshot = self._learner.batch_size, self._snapshot
        size, prices = self._learner.message_bytes, self._prices
        coordinator = Coordinator(policy, batch)
        state = None
        if snapshot is not None:
            assert isinstance(coordinator.policy, Until)
            assert isinstance(coordinator.policy.inner, MinWorkers)
            load_state(coordinator.policy.inner.inner, snapshot.coordinator["policy"])
            coordinator.ledger.restore(snapshot.coordinator["ledger"])
            coordinator.ledger.stopped = None
            if snapshot.engine is None:
                coordinator.ledger.abandon()
        coordinator.ledger.message_bytes, coordinator.ledger.prices = size, prices
        if snapshot is not None:  # with today's prices, not those it was saved with
            state = coordinator.state()
        about = {**self._about(), "engine": repr(self._engine), "versions": _versions()}
        if self._plan is not None:
            about["forecast"] = self._plan.about()
        path = self._journal_path
        if path is not None:
            path = _unused(Path(path), None if snapshot is None else snapshot.step)
        tiles = () if self._tiles is None else tuple(self._tiles.sizes.tolist())
        header = Header(describe(policy), batch, about, state, size, prices, tiles)
        coordinator.journal = Journal(header, path)
        return coordinator

    def _drive(
        self,
        coordinator: Coordinator,
        meter: Meter,
        until: Callable[[Progress], bool] | None,
    ) -> None:
        def stop(reason: str) -> None:
            now = max(self._engine.now(), coordinator.ledger.now)
            meter.observe(coordinator.handle(now, Interrupted(reason)))

        assert isinstance(coordinator.policy, Until)
        if (reached := coordinator.policy.reached(coordinator.ledger)) is not None:
            stop(reached)  # before an event is taken from the engine, which would be lost
        examples = self._learner.examples
        with _ctrl_c(self._engine.interrupt):
            for _, entry in drive({MAIN: coordinator}, self._engine):
                meter.observe(entry)
                if not any(isinstance(command, Step) for command in entry.commands):
                    continue
                progress = progress_of(
                    meter, examples, len(coordinator.ledger.workers), self._model, stop
                )
                for callback in self._callbacks:
                    callback.stepped(progress)
                if until is not None and until(progress):
                    stop("the condition of until holds")
                if not self._is_sound(meter):
                    stop(f"the loss is {progress.loss} at step {progress.step}")
                saves = self._checkpoints
                due = saves is not None and progress.step % saves.every == 0
                if saves is not None and due and self._is_sound(meter):
                    self._save(saves, self._take(coordinator))

    def _make_server(self) -> Server:
        server = self._learner.server()
        return server if self._robust is None else RobustServer(server, self._robust)

    def _is_sound(self, meter: Meter) -> bool:
        """Tell whether the last loss is a number; a model that has lost it is not worth saving."""
        losses = meter.columns["loss"]
        return not self._arithmetic or not losses or isfinite(losses[-1])

    def _model(self) -> Any:
        """Return a copy of the model as it is now."""
        self._engine.settle()
        return self._server.model()

    def _take(self, coordinator: Coordinator) -> Snapshot:
        assert isinstance(coordinator.policy, Until)
        assert isinstance(coordinator.policy.inner, MinWorkers)
        state = {
            "policy": save_state(coordinator.policy.inner.inner),
            "ledger": save_state(coordinator.ledger),
        }
        self._engine.settle()
        return Snapshot(
            coordinator.ledger.version,
            self._about(),
            state,
            self._server.save().copy(),
            self._engine.save(),
        )

    def _save(self, checkpoints: Checkpoints, snapshot: Snapshot) -> None:
        """Save, or say why not: a store that is away for a while does not end a run of hours."""
        place = checkpoints.place(snapshot.step)
        if self._saved == place:  # at the last step, and then at the end; or resumed from it
            return
        try:
            checkpoints.save(snapshot, self._server.export())
        except CheckpointError as error:
            logger.warning("step %d is not saved: %s", snapshot.step, error)
            return
        self._saved = place
        logger.info("saved %s", place)
        try:
            checkpoints.prune()
        except (CheckpointError, OSError) as error:
            logger.warning("older checkpoints are not deleted: %s", error)

    def _about(self) -> dict[str, Any]:
        """What a resumed run must have in common with the first."""
        return {
            **self._learner.about(),
            "seed": self._seed,
            "policy": describe(self._policy),
            **({} if self._codec is None else {"codec": describe(self._codec)}),
            **({} if self._down is None else {"down": describe(self._down)}),
            **({} if self._robust is None else {"robust": describe(self._robust)}),
        }


class _OtherRun(CheckpointError):
    """It is whole, and of a run that was made in another way: an older one would be too."""


@dataclass
class _Reason:
    """Why a run ended, to be told when all else is closed."""

    text: str = FAILED

    def tell(self, callbacks: Sequence[Callback]) -> None:
        errors = []
        for callback in callbacks:  # all of them: each may have something to close
            try:
                callback.ended(self.text)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _shown(progress: bool | Literal["live"], callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks with one that shows the progress, unless one of them does."""
    if progress not in (True, False, "live"):
        raise ValueError(
            f'progress={progress!r}: use True for a line, "live" for a table of all workers, or '
            "False for nothing"
        )
    if not progress or any(isinstance(callback, LiveView) for callback in callbacks):
        return [*callbacks]
    if progress == "live":  # first, so that it ends even if another callback fails to
        return [LiveView(), *callbacks]
    return [*callbacks, ProgressLine()]


def _plan_of(policy: Policy | Plan) -> Plan | None:
    """Return the plan that it is or does, without loading what only planning needs."""
    found = getattr(policy, "plan", policy)
    return cast("Plan", found) if hasattr(found, "looks") and hasattr(found, "forecast") else None


def _compare_rates(planned: float, learner: Learner) -> None:
    """Warn if a plan is for another learning rate than the learner's."""
    from paceline.planner.probe import plain_rate

    try:
        rate = plain_rate(learner)
    except ValueError as error:
        logger.warning("%s", error)
        return
    if not isclose(planned, rate, rel_tol=0.01):
        logger.warning(
            "the plan is for a learning rate of %g, and the learner has %g, momentum included: its "
            "forecast is of another run; use plan(…, learning_rate=%g), or the plan's rate",
            planned, rate, rate,
        )  # fmt: skip


def _planned(
    policy: str,
    learner: Learner,
    engine: TrainingEngine,
    target: float | None,
    prices: Prices | None,
    codec: Codec | None,
    seed: int,
) -> Auto:
    """Measure, and plan with the learning rate that the learner has."""
    if policy != "auto" or target is None:
        raise ValueError(
            f'policy={policy!r}, target={target}: use policy="auto" with the loss to be reached as '
            "target=…, or give a policy such as pl.sync()"
        )
    from paceline.planner.auto import Auto
    from paceline.planner.choose import plan
    from paceline.planner.probe import plain_rate, profile

    measured = profile(learner, engine, prices=prices, seed=seed)
    rate, codecs = plain_rate(learner), None if codec is None else [codec]
    found = plan(measured, target=target, learning_rate=rate, codecs=codecs, seed=seed)
    logger.info("%s", found)
    return Auto(measured, found, seed=seed)


def _unused(path: Path, step: int | None) -> Path:
    """Return a name for a journal that is not taken: an earlier one is never overwritten."""
    stem = path.stem if step is None else f"{path.stem}-{step}"
    names = (path.with_stem(stem if n == 1 else f"{stem}.{n}") for n in count(1))
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def _ctrl_c(interrupt: Callable[[str], None]) -> Iterator[None]:
    """Make the first Ctrl-C an event, so that it never strikes in the middle of something.

    The second one is as rude as ever. Threads other than the main one get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupt("interrupted by the user")

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _versions() -> dict[str, str]:
    """Name what a run was made with."""
    found = {"python": platform.python_version()}
    for package in ("paceline", "torch", "ray", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
