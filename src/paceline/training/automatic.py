"""policy="auto": measure, plan, and compare the learning rates of plan and learner."""

from __future__ import annotations

from functools import partial
from math import isclose
from typing import TYPE_CHECKING

from paceline.core.logs import logger_of
from paceline.learners.base import Learner
from paceline.report.callbacks import StageLine
from paceline.training.settings import Given, Shown

if TYPE_CHECKING:  # these need scipy
    from paceline.planner.auto import Auto
    from paceline.planner.choose import Plan

logger = logger_of(__name__)


def check_auto(policy: str, given: Given) -> None:
    """Refuse policy="auto" if no plan can be made; measure nothing yet."""
    if given.placement is not None:
        raise ValueError('policy="auto" divides the batch itself: leave placement= out')
    if policy != "auto" or given.target is None:
        raise ValueError(
            f'policy={policy!r}, target={given.target}: use policy="auto" with the loss to reach '
            "as target=…, or give a policy such as pl.sync()"
        )
    given.engine.fleet.check_fixed('policy="auto"')
    from paceline.planner.measure.probe import is_sgd, sgd_equivalent_lr

    if is_sgd(given.learner):
        sgd_equivalent_lr(given.learner)
    elif getattr(given.learner, "outer", None) is not None:
        raise ValueError(
            'policy="auto" plans local steps for SGD only, and the optimizer of this learner, or '
            "its outer one, is another: give a policy such as pl.local_sgd(16), or the plan of "
            "pl.plan(profile, local_steps=16, …)"
        )


def planned(given: Given, progress: Shown) -> Auto:
    """Measure engine and learner, and plan with the learner's learning rate.

    For an optimizer other than SGD, the plan compares the time per step and the relative steps.
    """
    from paceline.planner.auto import Auto
    from paceline.planner.choose import plan
    from paceline.planner.measure.probe import is_sgd, profile, sgd_equivalent_lr

    assert given.target is not None
    learner, codec, seed = given.learner, given.codec, given.seed
    rate = sgd_equivalent_lr(learner) if is_sgd(learner) else None
    line = StageLine() if progress else None
    shown = line or (lambda what, share: None)
    try:
        measured = profile(
            learner,
            given.engine,
            prices=given.prices,
            seed=seed,
            on_progress=lambda what, share: shown(f"measuring: {what}", share),
        )
        found = plan(
            measured,
            target=given.target,
            learning_rate=rate,
            codecs=None if codec is None else [codec],
            seed=seed,
            on_progress=partial(shown, "planning"),
        )
    finally:
        if line is not None:
            line.close()
    logger.info("%s", found)
    if found.unknown:
        logger.warning("planned by the time per step: %s", found.unknown)
    return Auto(measured, found, seed=seed)


def compare_rates(plan: Plan, learner: Learner) -> None:
    """Warn if the learning rate of a plan differs from the learner's."""
    from paceline.planner.measure.probe import sgd_equivalent_lr

    if plan.unknown:  # the time per step depends on no learning rate
        return
    wanted = plan.learning_rate
    try:
        rate = sgd_equivalent_lr(learner)
    except ValueError as error:
        logger.warning("%s", error)
        return
    if not isclose(wanted, rate, rel_tol=0.01):
        logger.warning(
            "the plan is for a learning rate of %g, and the learner has %g, momentum included: its "
            "forecast is of another run; use plan(…, learning_rate=%g), or the plan's rate",
            wanted, rate, rate,
        )  # fmt: skip
