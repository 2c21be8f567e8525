"""Evaluation of the model during a run: early stopping, averaged weights, the best model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.checks import check_whole
from paceline.core.logs import logger_of
from paceline.learners.copies import copied, filled
from paceline.report.callbacks import Callback, Live, Progress, State
from paceline.report.evaluations import Evaluation, Metrics, Mode
from paceline.training.plateau import Plateau, PlateauScale

if TYPE_CHECKING:  # which needs torch
    from paceline.learners.average import MovingAverage

logger = logger_of(__name__)

_KEPT = 1000  # evaluations that a checkpoint has, the newest
_PATIENCE = 600.0  # seconds that the end of a run waits for an evaluation


class Evaluate(Callback):
    """Evaluates the model of a run every so many steps.

    function: is given a copy of the model, in `eval()` mode if it has one. It returns a number, or
        numbers by name; the first of them decides what is best.
    every: steps between two evaluations.
    mode: whether the smallest or the largest number is best.
    patience: evaluations in a row without a new best after which the run ends; None: it goes on.
    average: the decay of an exponential moving average of the weights, per step. The average is
        then evaluated in place of the weights.
    average_every: steps between two updates of the average, each of which copies the model.
    background: evaluate in a thread, while training goes on. One evaluation runs at a time, and
        those that fall due meanwhile are left out. Early stopping then comes some steps late.
    plateau: reduces the learning rate when the first metric stops improving.
    log: is called with the step and the metrics by name, such as `tracker.log`.

    The metrics are in the journal, and so in `run.summary()` and in the report.

    A checkpoint has the average, the best model, and the newest thousand evaluations. A resumed run
    continues with them. An evaluation that a thread has not finished is left out.
    """

    def __init__(
        self,
        function: Callable[[Any], float | Metrics],
        every: int = 100,
        *,
        mode: Mode = "min",
        patience: int | None = None,
        average: float | None = None,
        average_every: int = 1,
        background: bool = False,
        plateau: Plateau | None = None,
        log: Callable[[int, Metrics], None] | None = None,
    ) -> None:
        check_whole("every", every)
        check_whole("average_every", average_every)
        if patience is not None:
            check_whole("patience", patience)
        if mode not in ("min", "max"):
            raise ValueError(f'mode={mode!r}: use "min" or "max"')
        if average is not None and not 0 < average < 1:
            raise ValueError(f"average={average}: use a decay between 0 and 1, such as 0.999")
        if not callable(function):
            raise ValueError(
                f"Evaluate was given a {type(function).__name__}; give a function of the model "
                "that returns a number, or numbers by name"
            )
        self._function, self._every, self._mode, self._patience = function, every, mode, patience
        self._average, self._average_every = average, average_every
        self._background, self._log, self._plateau = background, log, plateau
        self._lock = threading.Lock()  # of what the thread changes
        self._thread: threading.Thread | None = None
        self._reset()

    def _reset(self) -> None:
        self.history: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.best_model: Any = None
        self._bad = 0  # evaluations since the best
        self._untold: list[Evaluation] = []  # not in the journal yet
        self._averaged = self._new_average()
        self._scale = None if self._plateau is None else PlateauScale(self._plateau, self._mode)
        self._error: Exception | None = None

    def _new_average(self) -> MovingAverage | None:
        if self._average is None:
            return None
        from paceline.learners.average import MovingAverage

        return MovingAverage(self._average**self._average_every)

    @property
    def scales_lr(self) -> bool:
        return self._plateau is not None

    def started(self, live: Live) -> None:
        self._reset()

    def stepped(self, progress: Progress) -> None:
        self._raise()
        self._tell(progress)
        if self._averaged is not None and progress.step % self._average_every == 0:
            self._averaged.update(progress.model())
        with self._lock:
            hopeless = self._patience is not None and self._bad >= self._patience
        if hopeless:
            progress.stop(f"no better evaluation in {self._patience}")
        elif progress.step % self._every == 0:
            self._begin(progress)
            self._tell(progress)
            if not self._background and self._patience is not None and self._bad >= self._patience:
                progress.stop(f"no better evaluation in {self._patience}")

    def ending(self, progress: Progress) -> None:
        self._join()
        self._raise()
        self._tell(progress)

    def ended(self, reason: str) -> None:
        self._join()
        self._raise()

    def state(self) -> State:
        with self._lock:
            history, best, model, bad = self.history[-_KEPT:], self.best, self.best_model, self._bad
        average = None if self._averaged is None else self._averaged.model
        tensors = {f"best/{name}": tensor for name, tensor in copied(model).items()}
        tensors |= {f"average/{name}": tensor for name, tensor in copied(average).items()}
        data = {
            "history": [_plain(each) for each in history],
            "best": None if best is None else _plain(best),
            "bad": bad,
            "plateau": None if self._scale is None else self._scale.state(),
        }
        return State(data, tensors)

    def restore(self, state: State, model: Callable[[], Any]) -> None:
        parts: dict[str, dict[str, Any]] = {"best": {}, "average": {}}
        for name, tensor in state.tensors.items():
            part, _, own = name.partition("/")
            parts[part][own] = tensor
        data = state.data
        self.history = [Evaluation(*each) for each in data["history"]]
        self.best = None if data["best"] is None else Evaluation(*data["best"])
        self._bad = int(data["bad"])
        if self._scale is not None and data["plateau"] is not None:
            self._scale.restore(data["plateau"])
        if parts["best"]:
            self.best_model = filled(model(), parts["best"])
        if parts["average"] and self._averaged is not None:
            self._averaged.restore(filled(model(), parts["average"]))

    def _tell(self, progress: Progress) -> None:
        """Record the evaluations that are done. Only the driver's thread may write the journal."""
        with self._lock:
            done, self._untold = self._untold, []
        for each in done:
            progress.evaluated(each.metrics, each.step, each.mode)
            if self._scale is not None and self._scale.evaluate(each.first[1]):
                scale, reason = self._scale.scale, f"{each.first[0]} is on a plateau"
                told = progress.step + 1, scale, reason
                logger.info("step %d has the learning rate times %g, since %s", *told)
                progress.scale_lr(scale, reason)

    def _join(self) -> None:
        """Wait for the evaluation in its thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=_PATIENCE)
            if thread.is_alive():
                logger.warning("an evaluation still ran %g s after the run's end", _PATIENCE)

    def _raise(self) -> None:
        """Raise what the function raised in its thread."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, progress: Progress) -> None:
        """Evaluate the model now, or in a thread if none is busy."""
        if self._background and self._thread is not None and self._thread.is_alive():
            return
        average = None if self._averaged is None else self._averaged.model
        model = progress.model() if average is None else copy.deepcopy(average)
        if callable(evaluating := getattr(model, "eval", None)):
            evaluating()
        if not self._background:
            return self._evaluate(model, progress.step, progress.seconds)
        arguments = model, progress.step, progress.seconds
        self._thread = threading.Thread(target=self._beside, args=arguments, daemon=True)
        self._thread.start()

    def _beside(self, model: Any, step: int, seconds: float) -> None:
        try:
            self._evaluate(model, step, seconds)
        except Exception as error:
            with self._lock:
                self._error = error

    def _evaluate(self, model: Any, step: int, seconds: float) -> None:
        found = self._function(model)
        metrics = dict(found) if isinstance(found, Mapping) else {"evaluation": found}
        metrics = {name: float(value) for name, value in metrics.items()}
        if not metrics:
            raise ValueError("the function of Evaluate returned no number; return at least one")
        done = Evaluation(step, seconds, metrics, self._mode)
        with self._lock:
            self.history.append(done)
            self._untold.append(done)
            if done.is_better(self.best):
                self.best, self.best_model, self._bad = done, model, 0
            else:
                self._bad += 1
        logger.info("step %d: %s", step, ", ".join(f"{n} {v:g}" for n, v in metrics.items()))
        if self._log is not None:
            self._log(step, metrics)


def _plain(done: Evaluation) -> list[Any]:
    return [done.step, done.seconds, dict(done.metrics), done.mode]
