"""The metrics of a run as plain data, and as a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from paceline.cli.show import table

if TYPE_CHECKING:
    from paceline.core.journal import Header
    from paceline.report.metrics import Meter


def figures(meter: Meter, header: Header, reason: str) -> dict[str, Any]:
    """Return the metrics of a run since it was (re)started."""
    columns = meter.columns
    steps = len(columns["step"])
    seconds = columns["seconds"][-1] - meter.began if steps else 0.0
    samples = sum(columns["samples"])
    losses = [loss for loss in columns["loss"] if not isnan(loss)]
    return {
        "policy": header.written,
        "steps": steps,
        "seconds": seconds,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "batch_size": header.batch,
        "samples": samples,
        "samples_per_second": samples / seconds if seconds > 0 else 0.0,
        "tasks_started": meter.started,
        "tasks_used": meter.used,
        "tasks_cancelled": meter.cancelled,
        "tasks_discarded": meter.discarded,
        "tasks_lost": meter.lost,
        "tasks_redone": meter.redone,
        "waiting": meter.waiting,
        "mean_staleness": sum(columns["staleness"]) / steps if steps else 0.0,
        "bytes_down": meter.down_bytes,
        "bytes_up": meter.up_bytes,
        "busy_seconds": meter.busy_seconds,
        "worker_seconds": meter.worker_seconds,
        "dollars": meter.dollars if meter.priced else None,
        "ended": reason,
    }


def compared(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> str:
    """Return a table with one row per run."""
    from paceline.report.text import in_bytes, in_dollars

    rows = []
    for name, run in zip(names, runs, strict=True):
        loss, dollars = run["last_loss"], run["dollars"]
        rows.append(
            [
                name,
                run["policy"],
                str(run["steps"]),
                f"{run['seconds']:.4g}",
                "–" if loss is None else f"{loss:.4g}",
                f"{run['samples_per_second']:.4g}",
                f"{run['waiting']:.0%}",
                in_bytes(run["bytes_down"] + run["bytes_up"]),
                "–" if dollars is None else in_dollars(dollars),
            ]
        )
    columns = ("journal", "policy", "steps", "seconds", "loss", "samples/s", "waiting", "bytes")
    return table([*columns, "dollars"], rows)
