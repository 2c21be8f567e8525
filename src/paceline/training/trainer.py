"""The trainer, the entry point of most users: it joins a learner, a policy and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.core.errors import SlicesLost, Terminated
from paceline.core.logs import logger_of
from paceline.core.policy import Policy
from paceline.core.protocol import Prices
from paceline.engines.base import TrainingEngine
from paceline.gossip.compatibility import check_gossip, check_gossip_settings
from paceline.gossip.policy import Gossip
from paceline.learners.base import Learner, Server
from paceline.learners.robust import Robust
from paceline.policies.placement.base import Placement
from paceline.report.callbacks import Callback, Progress, check_callbacks
from paceline.training.automatic import check_auto, compare_rates, planned
from paceline.training.checkpoint import Checkpoints
from paceline.training.compatibility import (
    check_arguments,
    check_limits,
    check_not_finite,
    check_policy,
    check_prices,
    check_robust,
    check_scaling,
    tiles_of,
    with_limits,
    with_placement,
)
from paceline.training.decentralized import fit_decentralized
from paceline.training.fit import Condition, Fit
from paceline.training.observers import (
    Setup,
    more_callbacks,
    tell_fitted,
    tell_fitting,
    wish_to_resume,
    wished_progress,
)
from paceline.training.restore import Start, restore
from paceline.training.run import Run
from paceline.training.settings import Given, Settings, shown

if TYPE_CHECKING:  # these need torch and scipy
    from paceline.codecs.base import Codec
    from paceline.planner.choose import Plan


logger = logger_of(__name__)

_IN_A_ROW = 3
"""How often a run goes on from one and the same step."""


class Trainer:
    """Trains a learner under a policy on an engine.

    policy: a policy; or a plan, whose first policy and codec the trainer uses; or "auto". With
        "auto" the trainer measures engine and learner, plans for a target, and replans when workers
        change (see `Auto`). The learning rate is always the learner's.
    target: with "auto", the loss to reach in the least time.
    seed: the source of all randomness: sample order, random layers, simulated delays.
    min_workers: the number of workers that must join before training begins; by default all, or
        the least count of each `Kind` of machine.
    checkpoints: where and how often to save; see `resume`.
    journal: a file for the journal, kept in memory otherwise.
    progress: True for a line, "live" for a table of all workers (see `LiveView`), False for none.
    prices: the cost of hours and bytes, one for all workers or one for each by name.
        By default the prices of the engine's kinds of machine.
    placement: how to divide the batch and where the data live: `BySpeed()`, `Placed(tiles)`.
        By default all workers get equal shares of data that all can read.
    codec: encodes results on their way to the server: `Feedback(TopK(0.01))`, `BFloat16()`, …
    model_codec: encodes models on their way to workers. `BFloat16()` and `Half()` send the values
        in two bytes each, with servers too. Any other codec (`TopK(0.1)`, `Int8()`, …) sends the
        changes of a copy that both ends keep, and needs the model in the driver.
    on_not_finite: what to do with a result that is NaN or infinite. With "stop" another worker
        computes it again, and the run ends if it is not finite there either. With "skip" its
        samples are listed as skipped in `run.samples()`, and the step takes other samples in their
        place.
    skip_limit: the number of results in a row that may be skipped before the run ends.
    backups: whether an idle worker redoes a task that is overdue, so that the first result counts;
        see `policies.Backups`. By default on real machines, and not in the simulator.
    robust: replaces the mean of the results, so that a few wrong results cannot spoil a step:
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
        model_codec: Codec | None = None,
        robust: Robust | None = None,
        on_not_finite: Literal["stop", "skip"] = "stop",
        skip_limit: int = 10,
        backups: bool | None = None,
    ) -> None:
        check_arguments(learner, policy, engine)
        self._given = Given(
            learner=learner,
            engine=engine,
            target=target,
            seed=seed,
            callbacks=tuple(callbacks),
            min_workers=min_workers,
            checkpoints=checkpoints,
            journal=journal,
            progress=progress,
            prices=engine.fleet.prices() if prices is None else prices,
            placement=placement,
            codec=codec,
            model_codec=model_codec,
            robust=robust,
            on_not_finite=on_not_finite,
            skip_limit=skip_limit,
            backups=backups,
        )
        self._start = Start()
        self._server: Server | None = None  # holds the initial model, for the first run
        self._settings: Settings | None = None
        if isinstance(policy, str):
            check_auto(policy, self._given)
        elif target is not None:
            raise ValueError('target= is for policy="auto"; say when to end by fit(until=…)')
        else:
            self._settings = self._with_policy(policy)
        if min_workers is not None and not 1 <= min_workers <= engine.size:
            raise ValueError(
                f"min_workers={min_workers}: this engine has {engine.size} workers; "
                f"use 1 to {engine.size}"
            )
        check_callbacks(callbacks)
        shown(progress, callbacks)

    def _with_policy(self, policy: Policy | Plan) -> Settings:
        """Return the settings with a policy; refuse parts that do not fit together."""
        on = self._given
        learner, engine, codec, placement = on.learner, on.engine, on.codec, on.placement
        found = _plan_of(policy)
        if found is not None:
            compare_rates(found, learner)
            codec = found.codec if codec is None else codec
        policy = policy if isinstance(policy, Policy) else policy.policy
        if codec is not None and policy.needs_exact_results:
            raise ValueError(
                "a gradient code decodes from results as they are; leave codec= out, or use a "
                "policy that averages, such as k_sync"
            )
        given = placement or policy.placement
        if policy.decentralized:
            check_gossip_settings(
                check_gossip(policy, learner, codec),
                placement=placement,
                model_codec=on.model_codec,
                checkpoints=on.checkpoints,
                robust=on.robust,
                on_not_finite=on.on_not_finite,
                all_join=(on.min_workers or engine.fleet.least) == engine.size,
            )
        elif given is not None:
            given = with_limits(given, engine.fleet)
            policy = with_placement(policy, given, engine.workers)
        settings = Settings(on, policy, codec, tiles_of(given, learner), found)
        check_policy(policy, learner, engine.workers)
        check_limits(policy, learner, engine.fleet, settings.min_workers)
        check_prices(on.prices, policy, learner, engine.workers)
        check_not_finite(on.on_not_finite, on.skip_limit, policy)
        if any(callback.scales_lr for callback in on.callbacks):
            check_scaling(policy, learner, codec)
        if on.robust is not None:
            check_robust(on.robust, policy, engine.size)
        self._server = settings.server()
        return settings

    def _settled(self) -> Settings:
        """Return the settings; with policy="auto", measure and plan at the first call."""
        if self._settings is None:
            found = planned(self._given, wished_progress(self._given.progress))
            self._settings = self._with_policy(found)
        return self._settings

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

        `batch_size`, by default that of the DataLoader, counts the samples of all workers together.
        """
        from paceline.integrations.lightning import lightning_learner

        learner = lightning_learner(module, datamodule_or_dataloader, batch_size=batch_size)
        return cls(learner, policy, engine, **trainer_options)

    @classmethod
    def from_transformers(
        cls,
        hf_trainer: Any,
        policy: Policy | Plan | Literal["auto"],
        engine: TrainingEngine,
        *,
        batch_size: int | None = None,
        **trainer_options: Any,
    ) -> Trainer:
        """Make a trainer of a `transformers.Trainer`; see `transformers_learner`.

        `batch_size` counts the samples of all workers together. By default it is
        `per_device_train_batch_size * gradient_accumulation_steps`, times the GPUs of this process.
        The default of `seed` is that of the TrainingArguments.
        """
        from paceline.integrations.transformers import transformers_learner

        learner = transformers_learner(hf_trainer, batch_size=batch_size)
        return cls(learner, policy, engine, **{"seed": hf_trainer.args.seed, **trainer_options})

    @property
    def learner(self) -> Learner:
        return self._given.learner

    @property
    def engine(self) -> TrainingEngine:
        return self._given.engine

    @property
    def prices(self) -> Prices:
        return self._given.prices

    @property
    def seed(self) -> int:
        return self._given.seed

    @property
    def step(self) -> int:
        """The step at which the next `fit` begins: 0, or that of a checkpoint or an earlier fit."""
        return self._start.step

    def fit(
        self,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        until: Callable[[Progress], bool] | None = None,
    ) -> Run:
        """Train until the first of the given ends; all count from the very start of training.

        So after a resume in epoch 7, `fit(epochs=10)` trains three more. Ctrl-C ends the run like
        any other end and keeps the model. SIGTERM does too; `fit` then raises `Terminated`, a
        `SystemExit` with code 143 and the `run`. If an exception ends training, `error.run` is the
        run so far, and the last complete model is saved as at any other end. If servers lose a
        part of the model that no node has a copy of, the run goes on from its newest checkpoint.
        """
        ends, on = self._ends(epochs, steps, seconds, until), self._given
        setup = Setup(on.learner, on.engine, on.prices, on.seed)
        tell_fitting(setup)
        if wish_to_resume():
            self._resume_own()
        try:
            run = self._fit(ends, until)
        except Terminated as end:
            tell_fitted(setup, end.run)
            raise
        tell_fitted(setup, run)
        return run

    def _fit(self, ends: dict[str, float], until: Condition | None) -> Run:
        settings, on = self._settled(), self._given
        callbacks = [*shown(wished_progress(on.progress), on.callbacks), *more_callbacks()]
        if isinstance(settings.policy, Gossip):
            return fit_decentralized(
                settings, settings.policy, ends, until, callbacks, self._start.nodes
            )
        failed = 0
        while True:
            start, server, self._server = self._start, self._server, None
            fit = Fit(settings, start, ends, until, callbacks, server)
            try:
                return fit.run()
            except SlicesLost as error:
                failed = 1 if fit.start.step > start.step else failed + 1
                if on.checkpoints is None or fit.start.snapshot is None or failed > _IN_A_ROW:
                    raise
                logger.warning("%s: the run goes on from step %d", error.why, fit.start.step)
            finally:
                self._start = fit.start

    def resume(
        self,
        path: Path | str | Checkpoints,
        *,
        missing_ok: bool = False,
        allow: Collection[str] = (),
    ) -> Trainer:
        """Continue from a checkpoint, or from the newest valid checkpoint in a folder.

        The trainer must have the same settings as the one that saved it. A folder's damaged or
        unfit checkpoints are passed over with a warning; at a path of its own, such a checkpoint
        raises. On the simulator, and on Ray under `sync`, the trajectory is bit for bit the
        interrupted one, but for what workers keep of local steps. A decentralized run starts all
        nodes again, each with its own model and at its next sample, on another trajectory. With
        `missing_ok`, a run without checkpoints begins at the beginning.

        allow: settings that may differ: "policy" (also the number of workers), "optimizer" (also
            schedules and transforms), "batch_size". Each sample is still used once per epoch.
        """
        settings = self._settled()
        self._start = restore(settings, path, missing_ok, allow) or self._start
        return self

    def _resume_own(self) -> None:
        """Resume from the trainer's own checkpoints, unless it has trained or resumed already."""
        if (saves := self._given.checkpoints) is None:
            raise ValueError(
                "this Trainer has no checkpoints, so a new driver could not continue its run; give "
                "Trainer(…, checkpoints=pl.Checkpoints(folder, every=…)), or use `paceline train`"
            )
        if self._start.snapshot is None:
            self.resume(saves, missing_ok=True)

    # --- the parts of fit ------------------------------------------------------------------------

    def _ends(
        self,
        epochs: float | None,
        steps: int | None,
        seconds: float | None,
        until: Condition | None,
    ) -> dict[str, float]:
        if epochs is None and steps is None and seconds is None and until is None:
            raise ValueError("fit() needs an end: epochs=…, steps=…, seconds=… or until=…")
        ends = {"steps": inf if steps is None else steps}
        ends["seconds"] = inf if seconds is None else seconds
        ends["samples"] = inf
        if epochs is not None:
            if self._given.learner.examples is None:
                raise ValueError("this learner has no epochs; use steps=… or seconds=…")
            ends["samples"] = epochs * self._given.learner.examples
        return ends


def _plan_of(policy: Policy | Plan) -> Plan | None:
    """Return the given plan, or the plan that the policy carries out."""
    return cast("Plan | None", policy.plan) if isinstance(policy, Policy) else policy
