"""Evaluation in parts, as Ray tasks on all nodes of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Sized
from math import fsum
from typing import Any, TypeAlias

import ray

from paceline.core.checks import check_seconds, check_whole

Part: TypeAlias = tuple[float, float]
"""A sum over some rows, and the number that it counts: rows, tokens or other weights."""
Score: TypeAlias = Callable[[Any, range], Part | Mapping[str, Part]]


def spread(
    score: Score,
    rows: int | Sized,
    *,
    parts: int | None = None,
    timeout: float = 600.0,
    retries: int = 3,
) -> Callable[[Any], dict[str, float]]:
    """Return a function for `Evaluate` that scores a model in parts, on all nodes at once.

    score: is given the model and the indices of some rows. It returns (sum, count), or one such
        pair for each metric by name. A metric is the sum of all sums over that of all counts.
    rows: the number of rows, or a dataset that has a length.
    parts: tasks to divide the rows among; None: as many as the cluster has nodes.
    timeout: seconds that an evaluation may take.
    retries: times that a part begins again because its process or its node was lost.

    The model is sent to each node once. A task reserves no CPU: it runs beside the workers.
    """
    count = rows if isinstance(rows, int) else len(rows)
    check_whole("rows", count)
    if parts is not None:
        check_whole("parts", parts)
    check_seconds("timeout", timeout)
    check_whole("retries", retries, 0)

    def evaluate(model: Any) -> dict[str, float]:
        if not ray.is_initialized():
            raise RuntimeError(
                "spread evaluates on a Ray cluster, and this process is in none; train on pl.Ray, "
                "or call ray.init() first"
            )
        wanted = parts or sum(node["Alive"] for node in ray.nodes())
        spans, until = _spans(count, max(wanted, 1)), time.monotonic() + timeout
        tasks = _Tasks(score, ray.put(model), spans, retries)
        try:
            while tasks.running:
                if not tasks.wait(until - time.monotonic()):
                    raise TimeoutError(
                        f"an evaluation in {len(spans)} parts took more than {timeout:g} s; use a "
                        "larger spread(timeout=…), more parts, or fewer rows"
                    )
        finally:
            for ref in tasks.running:  # if one has failed
                ray.cancel(ref, force=True)
        return _joined([tasks.found[index] for index in range(len(spans))])

    return evaluate


class _Tasks:
    """One task for each part. A lost one is started again here, and not by Ray.

    Ray 2.60 ends the driver if a task is cancelled while Ray itself tries it again.
    """

    def __init__(self, score: Score, model: Any, spans: Sequence[range], retries: int) -> None:
        self._score, self._model, self._spans = score, model, spans
        self._left = [retries] * len(spans)
        self.found: dict[int, Mapping[str, Part]] = {}
        self.running: dict[Any, int] = {}  # the parts of the tasks, by reference
        for index in range(len(spans)):
            self._start(index)

    def _start(self, index: int) -> None:
        self.running[_scored.remote(self._score, self._model, self._spans[index])] = index

    def wait(self, seconds: float) -> bool:
        """Wait for the next answer; return whether there was one."""
        done, _ = ray.wait(list(self.running), timeout=max(seconds, 0.0))
        for ref in done:
            index = self.running.pop(ref)
            try:
                self.found[index] = ray.get(ref, timeout=max(seconds, 0.0))
            except ray.exceptions.RayTaskError:
                raise  # of the user's function
            except ray.exceptions.RayError:
                self._left[index] -= 1
                if self._left[index] < 0:
                    raise
                self._start(index)
        return bool(done)


@ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")  # type: ignore[untyped-decorator]
def _scored(score: Score, model: Any, indices: range) -> dict[str, Part]:
    """Score some rows."""
    found = score(model, indices)
    named = found if isinstance(found, Mapping) else {"evaluation": found}
    return {name: (float(total), float(count)) for name, (total, count) in named.items()}


def _spans(rows: int, parts: int) -> list[range]:
    """Divide rows into ranges that differ in length by at most one; none is empty.

    >>> _spans(7, 3), _spans(2, 5)
    ([range(0, 2), range(2, 4), range(4, 7)], [range(0, 1), range(1, 2)])
    """
    parts = min(parts, rows)
    return [range(rows * i // parts, rows * (i + 1) // parts) for i in range(parts)]


def _joined(parts: Sequence[Mapping[str, Part]]) -> dict[str, float]:
    """Return the mean of each metric over all parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    if partial := [name for name in names if any(name not in part for part in parts)]:
        raise ValueError(
            f"score returned {partial[0]!r} for some rows only; return the same names for all"
        )
    found = {}
    for name in names:
        count = fsum(part[name][1] for part in parts)
        if not count:
            raise ValueError(f"score counted nothing for {name!r}; return (sum, count), count > 0")
        found[name] = fsum(part[name][0] for part in parts) / count
    return found
