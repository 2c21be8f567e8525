"""A run in a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from paceline.report.evaluations import evaluations_line
from paceline.report.metrics import Meter

_SHOWN = 0.01  # of the workers' time; the summary reports waits for the driver from this share on
FORGOTTEN = 0.5  # of the due weight; below it, a model has seen too little of a data shard


def summary(meter: Meter, reason: str, batch: int, nodes: int | None = None) -> str:
    """Return a summary of the work done, used and wasted, and its cost, since the (re)start.

    nodes: the number of nodes of a decentralized run.

    A started task counts as a model down, and an arrived result as a result up. A worker is busy
    from a task's start until its result, cancellation or loss; see `Meter` for the limits.
    """
    columns = meter.columns
    steps = len(columns["step"])
    seconds = columns["seconds"][-1] - meter.began if steps else 0.0
    samples = sum(columns["samples"])
    losses = [loss for loss in columns["loss"] if not isnan(loss)]
    title = f"{steps} steps in {seconds:.4g} s"
    if nodes is not None:
        title = f"{steps} steps of {_number(nodes, 'node')} in {seconds:.4g} s"
    last = losses[-1] if losses and meter.last_loss is None else meter.last_loss
    if last is not None:  # it is nan if the run diverged
        title += f", loss {losses[0] if losses else last:.4g} -> {last:.4g}"
    per_step = samples / steps if steps else 0.0
    per_second = samples / seconds if seconds > 0 else 0.0
    staleness = sum(columns["staleness"]) / steps if steps else 0.0
    stale = "" if nodes is not None else f"; mean staleness {staleness:.3g} versions"
    part = meter.driver_seconds / meter.worker_seconds if meter.worker_seconds else 0.0
    driver = f", {part:.0%} for the driver and its callbacks" if part >= _SHOWN else ""
    lines = [
        f"{title} (ended: {reason})",
        f"  samples   {samples} used, {per_step:.4g} a step (batch_size {batch}), "
        f"{per_second:.4g} a second",
        f"  tasks     {meter.started} started, {meter.used} used, {meter.wasted} wasted "
        f"({meter.cancelled} cancelled, {meter.discarded} discarded, {meter.lost} lost of which "
        f"{meter.redone} done again)",
        f"  waiting   {meter.waiting:.0%} of the workers' time{driver}{stale}",
    ]
    if meter.evaluations:
        lines.append(evaluations_line(meter.evaluations))
    if meter.samples_skipped:
        lines.append(f"  skipped   {meter.samples_skipped} samples, whose results were not finite")
    if meter.states_lost:
        lines.append(f"  restarted {meter.states_lost} inner optimizers, without a kept state")
    represented = meter.represented()
    if len(represented):
        least, most = int(represented.argmin()), int(represented.argmax())
        lines.append(
            f"  data      {len(represented)} shards, {represented[least]:.0%} (shard {least}) to "
            f"{represented[most]:.0%} (shard {most}) of the weight due to their sizes"
        )
        if represented[least] < FORGOTTEN:
            few = _number(int((represented < FORGOTTEN).sum()), "data shard")
            lines.append(
                f"            WARNING: {few} had less than half of it; "
                + (
                    "set Placed(bound=…) if it is None, or train longer"
                    if nodes is None
                    else "their nodes are slow, or were lost"
                )
            )
    if meter.message_bytes:
        down, up = in_bytes(meter.down_bytes), in_bytes(meter.up_bytes)
        told = f"{down} down, {up} up" if nodes is None else f"{up} sent, {down} received"
        lines.append(f"  messages  {told}")
    cost = f"{_count(meter.busy_seconds)} busy worker-seconds of {_count(meter.worker_seconds)}"
    if meter.priced:
        idle = ", idle time included" if meter.prices.idle else ""
        cost += f"; {in_dollars(meter.dollars)}{idle}"
    lines.append(f"  cost      {cost}")
    return "\n".join(lines)


def speeds_line(speeds: Mapping[str, float]) -> str:
    """Return the speeds of the slowest and the quickest workers, in samples a second.

    >>> speeds_line({"w0": 5.5, "w1": 22.0, "w2": 11.0})
    '  speeds    w0 5.5, w2 11, w1 22 samples a second'
    """
    told = [f"{worker} {speed:.3g}" for worker, speed in sorted(speeds.items(), key=lambda s: s[1])]
    if len(told) > 8:
        told = [*told[:4], "…", *told[-3:]]
    return f"  speeds    {', '.join(told) or 'none known'} samples a second"


def placed_line(moved: int | None, waited: int, missed: Mapping[int, float]) -> str:
    """Return a line on tiles (data shards) that stay with their workers.

    >>> placed_line(3, 1, {5: 80.2})
    '  placement 3 shards moved, 1 step waited for data; no worker had shard 5 (80 steps)'
    """
    line = "  placement " + ("" if moved is None else f"{_number(moved, 'shard')} moved, ")
    line += f"{_number(waited, 'step')} waited for data"
    if missed:
        worst = max(missed, key=lambda tile: missed[tile])
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        line += f"; no worker had shard {worst} ({missed[worst]:.0f} steps){more}"
    return line


def changed_line(changed: Mapping[str, Any]) -> str:
    """Return a line on a run that was resumed with other settings.

    >>> changed_line({"step": 120, "settings": ["another policy: k_sync(7) -> k_sync(5)"]})
    '  resumed   at step 120 with another policy: k_sync(7) -> k_sync(5)'
    """
    return f"  resumed   at step {changed['step']} with {'; '.join(changed['settings'])}"


def forecast_line(forecast: Mapping[str, Any], meter: Meter) -> str:
    """Return forecast and actual seconds until the loss reached the target."""
    middle, low, high = (
        "never" if seconds is None else f"{seconds:.4g}"
        for seconds in (forecast["seconds"], *forecast["intervals"]["seconds"])
    )
    target = forecast["target"]
    told = f"  forecast  {middle} s [{low}-{high}] to a loss of {target:g}"
    columns = meter.columns
    if meter.began and columns["loss"] and columns["loss"][0] <= target:
        return f"{told}, which was reached before this run was resumed"
    for loss, seconds in zip(columns["loss"], columns["seconds"], strict=True):
        if loss <= target:
            return f"{told}, took {seconds:.4g} s"
    return f"{told}, which was not reached"


def _number(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")


def in_bytes(count: float) -> str:
    """Return a number of bytes with a readable unit.

    >>> in_bytes(512), in_bytes(1_234_567), in_bytes(999_999)
    ('512 B', '1.23 MB', '1 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def in_dollars(amount: float) -> str:
    """Return an amount in dollars and cents, or with two significant digits if below $0.1.

    >>> in_dollars(1234.567), in_dollars(0.999), in_dollars(0.01234), in_dollars(0)
    ('$1234.57', '$1.00', '$0.012', '$0.00')
    """
    return f"${amount:.2f}" if amount >= 0.1 or not amount else f"${amount:.2g}"


def _count(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1000 else f"{seconds:.4g}"


def throughput(meter: Meter) -> float:
    """Return the samples used per second so far."""
    seconds = meter.columns["seconds"]
    return meter.samples_used / seconds[-1] if seconds and seconds[-1] > 0 else 0.0
