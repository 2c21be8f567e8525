"""Gradient coding: step as soon as the held results decode to the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

from paceline.codes.base import Code, Collector, NotDecodable
from paceline.codes.hybrid import hybrid
from paceline.core.checks import check_whole
from paceline.core.errors import WrongGradients
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Assign,
    Cancel,
    Coefficients,
    Command,
    Discard,
    Event,
    Finished,
    Left,
    Step,
    TaskId,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.core.schema import converted

_NOISE = 1e-4  # of the sketches' size: the difference that rounding alone may cause


@dataclass
class Coded(Policy):
    """Gives each worker a row of a gradient code: parts of the batch that other workers share.

    The code cuts the batch into parts. All workers with a part compute it on the same samples. Each
    worker sends one combination of its parts, m times shorter than the model. The step is taken as
    soon as the results decode, and the other tasks are cancelled. Every step uses the whole batch,
    so the trajectory is that of `sync`, up to rounding.

    code: a code with one row per worker; or a function that makes a code for a number of workers.
        The function makes a new code for the connected workers once a row had no worker for
        `patience` steps. It also does so when there are more workers than rows.
    wait: the number of results to decode from, for an approximate code. None: the code decides.
        It takes n - s results, and `Replicated` takes fewer as soon as every group has answered.
    verify: extra results beyond those that suffice to decode. With 1, a wrong gradient of a worker
        is detected and the step fails. With 2, the wrong result is identified and left out, and
        its worker is counted in `suspects`. At most the code's stragglers. It takes n decodings a
        step, so use it for at most some hundred workers.

    The row of a worker that left goes to a worker without a row. If there is none and the other
    rows do not suffice, a worker that has returned its own result computes that row as well.
    """

    code: Code | Callable[[int], Code]
    wait: int | None = None
    verify: int = 0
    patience: int = 5
    suspects: dict[WorkerId, int] = field(default_factory=dict, init=False)
    _made: Code | None = field(default=None, init=False, repr=False)
    _collector: Collector | None = field(default=None, init=False, repr=False)
    _seats: dict[WorkerId, int] = field(default_factory=dict, init=False, repr=False)
    _vacant: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # since version
    _round: int = field(default=-1, init=False, repr=False)
    _answers: dict[int, TaskId] = field(default_factory=dict, init=False, repr=False)
    _open: dict[int, None] = field(default_factory=dict, init=False, repr=False)  # unassigned rows
    _short: bool = field(default=False, init=False, repr=False)  # too few rows have a worker
    _resumed: bool = field(default=False, init=False, repr=False)
    _idle: frozenset[int] = field(default=frozenset(), init=False, repr=False)  # without parts
    _seated: int = field(default=0, init=False, repr=False)  # rows with a worker and parts
    schema = converted("coded", 1, "n", "suspects", "seats", "vacant", "round", "answers")

    needs_exact_results = True

    @property
    def wants(self) -> frozenset[Want]:
        return frozenset({"sketch"} if self.verify else ())

    def works(self) -> tuple[Work]:
        return (Work(parts={0: 1.0}),)

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Raise ValueError if the code does not fit these workers and this batch."""
        n = len(workers)
        code = self.code(n) if callable(self.code) else self.code
        if code.n != n:
            raise ValueError(
                f"the code has {code.n} rows and this engine {n} workers; make it for "
                f"{n}, or give Coded a function that makes one for any number"
            )
        if batch < code.parts:
            raise ValueError(
                f"batch_size={batch} cannot be cut into {code.parts} parts; use at least that many"
            )
        if self.wait is not None and not 1 <= self.wait <= n:
            raise ValueError(
                f"wait={self.wait}: {n} workers return at most {n} results; use wait from 1 to "
                f"{n}, or no wait= to take {n - code.stragglers}"
            )
        if self.verify and (not code.exact or self.wait is not None):
            raise ValueError(
                f"verify={self.verify}: estimates of an approximate code differ even if all "
                "workers are right; use an exact code, and no wait="
            )
        if not 0 <= self.verify <= code.stragglers:
            raise ValueError(
                f"verify={self.verify}: this code tolerates {code.stragglers} stragglers; use "
                f"verify from 0 to {code.stragglers}"
            )

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if self._resumed:
            self._compare(view, event)
        if isinstance(event, Left) and event.worker in self._seats:
            self._vacate(view, event.worker)
        if isinstance(event, Finished):
            yield from self._take(view, event.task)
        if not view.workers:
            return
        self._begin(view)
        if self._is_ready():
            yield Step(self._weights(view))
            for id in list(view.held):
                yield Discard(id)
            for id in list(view.running):
                yield Cancel(id)
            self._begin(view)
        yield from self._hand_out(view)

    # --- answers ---------------------------------------------------------------------------------

    def _take(self, view: View, id: TaskId) -> Iterator[Command]:
        result = view.held[id]
        row = result.task.work.tag
        assert isinstance(row, int) and self._collector is not None
        if view.staleness(result) or not result.samples or row in self._answers:
            yield Discard(id)
            if not view.staleness(result) and row not in self._answers:
                self._open[row] = None  # it returned no sample: assign the row again
            return
        self._answers[row] = id
        self._collector.add(row)

    def _is_ready(self) -> bool:
        assert self._made is not None and self._collector is not None
        if self.wait is not None:
            return len(self._answers) >= max(min(self.wait, self._seated), 1)
        return self._collector.ready and len(self._answers) >= self._enough()

    def _enough(self) -> int:
        """Return the number of results that `verify` needs, whichever workers are missing."""
        assert self._made is not None
        if not self.verify:
            return 0
        working = self._made.n - len(self._idle)
        return min(working - self._made.stragglers + self.verify, working)

    def _weights(self, view: View) -> dict[TaskId, Coefficients]:
        """Return the decoder's coefficients, divided by the number of parts to get the mean."""
        assert self._made is not None
        rows = dict.fromkeys(sorted(self._answers))  # sums do not depend on the arrival order
        if self.verify:
            for row in self._wrong(view):
                worker = view.held[self._answers[row]].task.worker
                self.suspects[worker] = self.suspects.get(worker, 0) + 1
                del rows[row]
        parts = self._made.parts
        return {
            self._answers[row]: tuple(weight / parts for weight in weights)
            for row, weights in sorted(self._made.decode(rows).items())
        }

    def _wrong(self, view: View) -> list[int]:
        """Return the rows whose results contradict the others; raise if they are ambiguous."""
        code, rows = self._made, sorted(self._answers)
        assert code is not None
        sketches = {row: view.held[self._answers[row]].stats["sketch"] for row in rows}
        if broken := [row for row in rows if not isfinite(sketches[row])]:
            # If more are not finite, training itself has diverged, which the loss shows.
            return broken if len(broken) <= self.verify else []
        noise = _NOISE * max(abs(value) for value in sketches.values())

        def total(leaving_out: tuple[int, ...]) -> tuple[float, ...] | None:
            """Return the sketch of each block of the sum, decoded without some rows."""
            try:
                decoder = code.decode([row for row in rows if row not in leaving_out])
            except NotDecodable:
                return None
            pairs = [(weights, sketches[row]) for row, weights in decoder.items()]
            return tuple(sum(w[u] * s for w, s in pairs) for u in range(code.messages))

        def agree(totals: list[tuple[float, ...] | None]) -> bool:
            known = [each for each in totals if each is not None]
            return all(max(block) - min(block) <= noise for block in zip(*known, strict=True))

        if agree([total(()), *(total((row,)) for row in rows)]):
            return []
        alone = [
            row
            for row in rows
            if agree([total((row,)), *(total((row, other)) for other in rows if other != row)])
        ]
        if len(alone) != 1:
            raise WrongGradients(
                f"the answers of step {view.version + 1} contradict each other, and "
                f"{len(alone) or 'more than one'} of them may be wrong; verify=2 and a code with "
                "more stragglers identify one wrong worker"
            )
        return alone

    def _collect(self) -> None:
        """Rebuild the collector from the held results."""
        if self._made is not None:
            self._collector = self._made.collector()
            for row in self._answers:
                self._collector.add(row)

    def _compare(self, view: View, event: Event) -> None:
        """After a resume, reconcile rows and results with the ledger of a restarted engine."""
        self._resumed = False
        there = {*view.workers}
        if isinstance(event, Finished):  # a worker that drains leaves after its result
            there.add(view.held[event.task].task.worker)
        for worker in [worker for worker in self._seats if worker not in there]:
            self._vacant[self._seats.pop(worker)] = view.version
        self._answers = {row: id for row, id in self._answers.items() if id in view.held}
        self._collect()
        if self._made is not None:
            self._look_around(view)

    # --- rows ------------------------------------------------------------------------------------

    def _begin(self, view: View) -> None:
        """Start a round at a new version; give free rows to workers without a row."""
        if self._round != view.version:
            away = any(view.version - since >= self.patience for since in self._vacant.values())
            spare = not self._vacant and len(view.workers) > len(self._seats)
            if self._made is None or (callable(self.code) and (away or spare)):
                self._make(view)
            assert self._made is not None
            self._round, self._answers = view.version, {}
            self._collect()
            self._look_around(view)
        self._seat(view)

    def _make(self, view: View) -> None:
        """Make the code for the connected workers, and free all rows."""
        self._take_code(len(view.workers))
        assert self._made is not None
        self._seats, self._vacant = {}, dict.fromkeys(range(self._made.n), view.version)

    def _take_code(self, n: int) -> None:
        code = self._made = self.code(n) if callable(self.code) else self.code
        self._idle = frozenset(row for row in range(code.n) if not code.row(row))

    def _seat(self, view: View) -> None:
        if self._vacant and len(self._seats) < len(view.workers):
            for worker in view.workers:
                if worker not in self._seats and self._vacant:
                    row = min(self._vacant)
                    del self._vacant[row]
                    self._seats[worker] = row
            self._look_around(view)

    def _vacate(self, view: View, worker: WorkerId) -> None:
        self._vacant[self._seats.pop(worker)] = view.version
        self._look_around(view)

    def _look_around(self, view: View) -> None:
        """Find the rows to assign: those of connected workers, and vacant rows if these do not
        suffice to decode."""
        assert self._made is not None
        watch = self._made.collector()
        there = [*self._seats.values(), *(row for row in self._answers if row in self._vacant)]
        working = [row for row in there if row not in self._idle]
        decodes = any([watch.add(row) for row in working])
        self._short = bool(self._vacant) and not (decodes and len(working) >= self._enough())
        self._seated = sum(row not in self._idle for row in self._seats.values())
        tasks = [*view.running.values(), *(result.task for result in view.held.values())]
        given = {task.work.tag for task in tasks if not view.staleness(task)}
        rows = sorted([*self._seats.values(), *(self._vacant if self._short else ())])
        self._open = {row: None for row in rows if row not in given}

    def _hand_out(self, view: View) -> Iterator[Command]:
        if not self._open:
            return
        holders = {row: worker for worker, row in self._seats.items()}
        for row in list(self._open):
            if row in self._idle:  # its worker is too slow for any part
                del self._open[row]
                continue
            worker = holders.get(row)
            if worker is None:  # vacant: any idle worker
                worker = next((w for w in view.idle if self._seats.get(w) not in self._open), None)
            if worker is not None and worker in view.idle:
                del self._open[row]
                yield self._assign(view, worker, row)

    def _assign(self, view: View, worker: WorkerId, row: int) -> Assign:
        assert self._made is not None
        parts = self._made.row(row)
        return Assign(worker, Work(parts, self._made.parts, view.batch, tag=row))

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "n": None if self._made is None else self._made.n,
            "suspects": self.suspects,
            "seats": self._seats,
            "vacant": self._vacant,
            "round": self._round,
            "answers": self._answers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        n = state["n"]
        if n is not None:
            self._take_code(n)
        self.suspects, self._seats, self._vacant = (
            state["suspects"],
            state["seats"],
            state["vacant"],
        )
        self._round, self._answers = state["round"], state["answers"]
        self._resumed = True  # `_compare` recomputes the rest
        self._collect()


def code_for(n: int, stragglers: int, messages: int) -> Code:
    """Return an exact code for n workers, with less redundancy if n is too small."""
    d = min(stragglers + messages, n)
    return hybrid(n, d, min(messages, d))


def coded(stragglers: int = 1, messages: int = 1, verify: int = 0) -> Coded:
    """Take every step on the whole batch, even if any `stragglers` workers are missing.

    Gradient coding: Tandon et al., 2017, arXiv 1612.03301. With messages shorter than the model:
    Ye and Abbe, 2018, arXiv 1802.03475. From any linear code: Kadhe, Koyluoglu and Ramchandran,
    2020, arXiv 2005.07184. Each worker computes d = stragglers + messages parts, d times as much
    as under `sync`, and sends 1/messages of the model's size.
    verify: as in `Coded`.
    """
    check_whole("stragglers", stragglers, 0)
    check_whole("messages", messages)
    make = partial(code_for, stragglers=stragglers, messages=messages)
    return Coded(make, verify=verify)
