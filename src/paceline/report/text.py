"""A run in a few lines of text."""

from __future__ import annotations

from math import isnan

from paceline.report.metrics import Meter


def summary(meter: Meter, reason: str, batch: int) -> str:
    """Say what was done, what it used, and what was wasted, all since the run was (re)started."""
    columns = meter.columns
    steps = len(columns["step"])
    seconds = columns["seconds"][-1] - meter.began if steps else 0.0
    samples = sum(columns["samples"])
    losses = [loss for loss in columns["loss"] if not isnan(loss)]
    title = f"{steps} steps in {seconds:.4g} s"
    if losses:
        title += f", loss {losses[0]:.4g} -> {losses[-1]:.4g}"
    wasted = meter.cancelled + meter.discarded + meter.lost
    per_step = samples / steps if steps else 0.0
    per_second = samples / seconds if seconds > 0 else 0.0
    delay = sum(columns["delay"]) / steps if steps else 0.0
    lines = [
        f"{title} (ended: {reason})",
        f"  samples   {samples} used, {per_step:.4g} a step (batch_size {batch}), "
        f"{per_second:.4g} a second",
        f"  tasks     {meter.started} started, {meter.used} used, {wasted} wasted "
        f"({meter.cancelled} cancelled, {meter.discarded} discarded, {meter.lost} lost of which "
        f"{meter.redone} done again)",
        f"  waiting   {meter.waiting:.0%} of the workers' time; mean delay {delay:.3g} versions",
    ]
    return "\n".join(lines)


def throughput(meter: Meter) -> float:
    """Return the samples used per second so far."""
    seconds = meter.columns["seconds"]
    return meter.samples_used / seconds[-1] if seconds and seconds[-1] > 0 else 0.0
