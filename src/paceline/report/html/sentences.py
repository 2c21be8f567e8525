"""Three sentences on a run, and the warnings for the reader of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from statistics import median
from typing import Any

from paceline.report.evaluations import Evaluation, best_of
from paceline.report.html.collect import UNFINISHED, Record, missing
from paceline.report.html.svg import plain
from paceline.report.metrics import Meter
from paceline.report.text import FORGOTTEN, in_bytes, in_dollars
from paceline.report.words import in_time, number

_SLOW = 0.67  # of the median speed; a slower worker counts as slow
_CANCELLED = 0.5  # of a worker's tasks; above it, its speed is too uncertain
_STUCK = 3.0  # times the median task time; a longer first task is reported


def losses(meter: Meter) -> list[float]:
    """Return the losses that are finite."""
    return [loss for loss in meter.columns["loss"] if isfinite(loss)]


def diverged(meter: Meter) -> bool:
    """Return whether the last reported loss is not finite."""
    return meter.last_loss is not None and not isfinite(meter.last_loss)


def duration(meter: Meter) -> float:
    """Return the seconds until the last step, since the run was (re)started."""
    seconds = meter.columns["seconds"]
    return seconds[-1] - meter.began if seconds else 0.0


@dataclass(frozen=True)
class Reached:
    """The time at which the loss reached the forecast's target, and the costs until then."""

    seconds: float
    steps: float
    dollars: float
    bytes: float


def reached(forecast: Mapping[str, Any], meter: Meter) -> Reached | None:
    """Return the first step whose loss reaches the target, None if there is none."""
    columns = meter.columns
    for i, loss in enumerate(columns["loss"]):
        if loss <= forecast["target"]:
            sent = columns["down_bytes"][i] + columns["up_bytes"][i]
            at = columns["seconds"][i], columns["step"][i]
            return Reached(*at, columns["dollars"][i], sent)
    return None


def reached_before(forecast: Mapping[str, Any], meter: Meter) -> bool:
    """Return whether a run had reached the target when it was resumed."""
    losses = meter.columns["loss"]
    return bool(meter.began and losses and losses[0] <= forecast["target"])


def within(value: float, interval: tuple[float | None, float | None]) -> bool:
    """Return whether a value is in an interval; None stands for infinity: not reached."""
    low, high = interval
    return low is not None and low <= value and (high is None or value <= high)


def three(record: Record) -> list[str]:
    """Return sentences on the course of a run, its slow workers and waste, and its cost."""
    return [_happened(record), _worked(record), _cost(record)]


def _happened(record: Record) -> str:
    meter = record.meter
    steps, known = len(meter.columns["step"]), losses(meter)
    who = number(len(record.workers), "node" if record.is_decentralized else "worker")
    if not steps:
        text = f"No step was taken by {who} in {in_time(record.end - meter.began)}"
    else:
        text = f"{who} took {number(steps, 'step')} in {in_time(duration(meter))}"
        if diverged(meter) and not known:
            text += ", with a loss that was never a finite number"
        elif diverged(meter):
            text += (
                f", in which the loss went from {plain(known[0])} to {meter.last_loss}: the last "
                "one is not a finite number"
            )
        elif not known:
            text += ", with a loss that is not known"
        elif len(known) == 1:
            text += f", with a loss of {plain(known[0])}"
        else:
            way = "fell" if known[-1] < known[0] else "went"
            text += f", in which the loss {way} from {plain(known[0])} to {plain(known[-1])}"
    if record.reason == UNFINISHED:
        return f"{text}; the journal does not say that the run has ended."
    return f"{text}; it ended with “{record.reason}”."


def evaluated(name: str, evaluations: Sequence[Evaluation]) -> str:
    """Return a sentence on a metric; the first metric also has a best value."""
    last = evaluations[-1]
    times = number(len(evaluations), "evaluation")
    text = f"{name} was {plain(last.metrics[name])} at step {last.step:,}, the last of {times}"
    best = best_of(evaluations) if last.first[0] == name else None
    if best is None:
        return f"{text}."
    if best is last:
        return f"{text}, and never better."
    return f"{text}; the best was {plain(best.metrics[name])} at step {best.step:,}."


def slowest(record: Record) -> tuple[str, float, float] | None:
    """Return the slowest worker, its speed, and that over the median of the others."""
    now = record.end
    speeds = {name: tally.speed(now) for name, tally in record.workers.items()}
    speeds = {name: speed for name, speed in speeds.items() if speed}
    if len(speeds) < 2:
        return None
    name = min(speeds, key=lambda each: speeds[each])
    others = median(speed for other, speed in speeds.items() if other != name)
    return (name, speeds[name], speeds[name] / others) if others else None


def without_result(record: Record) -> list[str]:
    """Return the workers that never finished a task, although they had the time."""
    tallies, now = record.workers, record.end
    took = [tally.finished_seconds / tally.finished for tally in tallies.values() if tally.finished]
    long = _STUCK * median(took) if took else inf
    return [
        name
        for name, tally in tallies.items()
        if not tally.finished + tally.late
        and (tally.wasted or (tally.running and now - tally.began > long))
    ]


def _worked(record: Record) -> str:
    meter = record.meter
    text = (
        f"Of {number(meter.started, 'task')} {meter.used:,} were used and {meter.wasted:,} wasted"
    )
    if meter.started:
        text += f" ({meter.wasted / meter.started:.0%})"
    text += f", and workers waited for {meter.waiting:.0%} of their time"
    never, found = without_result(record), slowest(record)
    if never:
        more = f" and {len(never) - 1} more" if len(never) > 1 else ""
        tally = record.workers[never[0]]
        longest = max(tally.longest, record.end - tally.began if tally.running else 0.0)
        least = "" if more else f" (it takes at least {in_time(longest)})"
        return f"{text}; {never[0]}{more} never finished a task{least}."
    if found is None:
        return f"{text}."
    name, speed, share = found
    cancelled = {
        each: tally.cancelled / (tally.cancelled + tally.finished)
        for each, tally in record.workers.items()
        if tally.finished
    }
    most = max(cancelled, key=lambda each: cancelled[each])
    if share > _SLOW and cancelled[most] > _CANCELLED:
        least = in_time(record.workers[most].longest)
        return (
            f"{text}; of {most}’s tasks {cancelled[most]:.0%} were cancelled, the most of all, "
            f"after up to {least}."
        )
    if share > _SLOW:
        return (
            f"{text}; no worker was slow: even {name} had {share:.0%} of the others’ median speed."
        )
    at_most = "at most " if record.workers[name].is_bound else ""
    return (
        f"{text}; {name} was the slowest, with {at_most}{plain(speed)} samples a second, "
        f"{share:.0%} of the others’ median."
    )


def _cost(record: Record) -> str:
    meter, parts = record.meter, []
    if meter.message_bytes or meter.down_bytes or meter.up_bytes:
        sent, got = in_bytes(meter.up_bytes), in_bytes(meter.down_bytes)
        ways = (
            f"{sent} of messages between nodes"
            if record.is_decentralized
            else f"{got} to workers and {sent} from them"
        )
        parts.append(ways)
    parts.append(f"{in_time(meter.busy_seconds)} of workers’ time")
    if meter.priced:
        parts.append(in_dollars(meter.dollars))
    text = "It took " + ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    forecast = (record.header.about or {}).get("forecast")
    return f"{text}{'' if forecast is None else _right(forecast, meter)}."


def _right(forecast: Mapping[str, Any], meter: Meter) -> str:
    """Return a clause that compares a forecast with the run."""
    target, middle = forecast["target"], forecast["seconds"]
    interval = forecast["intervals"]["seconds"]
    low, high = ("never" if each is None else in_time(each) for each in interval)
    told = (
        f"; the forecast said {'never' if middle is None else in_time(middle)} ({low} to {high}) "
        f"to a loss of {plain(target)}"
    )
    if reached_before(forecast, meter):
        return f"{told}, which was reached before this run was resumed"
    fact = reached(forecast, meter)
    if fact is None:
        return f"{told}, which was not reached"
    inside = "inside" if within(fact.seconds, interval) else "outside"
    return f"{told}, and it took {in_time(fact.seconds)}, {inside} the interval"


def warnings(record: Record) -> list[str]:
    """Return what the reader of the page must know before trusting it."""
    meter, found = record.meter, []
    if meter.began or record.header.state is not None:
        found.append(
            f"This run was resumed after {in_time(meter.began)}, at step "
            f"{meter.version - len(meter.columns['step']):,}: the metrics cover the time after "
            "that, but on an axis and beside a forecast, times and steps count from the start of "
            "the run."
        )
    if record.reason == UNFINISHED:
        found.append(
            "The journal has no end: the run still runs, was killed, or the file is cut off. The "
            "metrics cover what the journal has."
        )
    if absent := missing(record.headers):
        few = ", ".join(absent[:8]) + (", …" if len(absent) > 8 else "")
        found.append(f"The journals of {few} were not given: the metrics cover the other nodes.")
    bad = sum(not isfinite(loss) for loss in meter.columns["loss"])
    if bad and not all(isnan(loss) for loss in meter.columns["loss"]):
        found.append(
            f"The loss of {number(bad, 'step')} is not a finite number, and is left out of the "
            "curve."
        )
    represented = meter.represented()
    if len(represented) and represented.min() < FORGOTTEN:
        few = number(int((represented < FORGOTTEN).sum()), "data shard")
        what = (
            "their nodes are slow, or were lost"
            if record.is_decentralized
            else "set Placed(bound=…) if it is None, or train longer"
        )
        found.append(
            f"{few} had less than half of the weight due to their size, so the model has seen too "
            f"little of their data: {what}."
        )
    return found
