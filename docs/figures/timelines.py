"""Draw timelines-light.svg and timelines-dark.svg: ten seconds of four policies, from journals.

Run it:  python docs/figures/timelines.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drawing import FOLDER, WIDTH, Drawing, Theme, save

import paceline as pl
from paceline.protocol import Cancel, Discard, Finished, Start, Step, Task

SECONDS = 10.0
SPEEDS = (0.8, 0.9, 1.0, 2.4)  # seconds for a quarter of the batch; w3 is the straggler
LATENCY = 0.1  # seconds each way
BATCH = 420  # divisible by 3, 4 and 7
POLICIES = (
    ("sync()", "waits for all", pl.sync()),
    ("k_sync(3)", "takes the first 3, cancels the rest", pl.k_sync(3)),
    ("rennala(7)", "takes 7 results of smaller tasks", pl.rennala(7)),
    ("local_sgd(3)", "3 local steps for each update", pl.local_sgd(3)),
)
LEFT, RIGHT = 52, WIDTH - 20
BAR, LANE, TITLE, GAP = 17, 22, 30, 22
TOP = 12
PANEL = TITLE + LANE * len(SPEEDS) + GAP
HEIGHT = TOP + PANEL * len(POLICIES) + 108


@dataclass
class Bar:
    """A task: when its worker computed, and whether a step used the result."""

    task: Task
    begin: float
    end: float = SECONDS
    fate: str = "running"  # then used, wasted or held


@dataclass
class Timeline:
    """The bars and the model updates of a run."""

    bars: list[Bar]
    updates: list[float]
    samples: int


def timeline(journal: pl.Journal) -> Timeline:
    """Read a run from its journal."""
    bars: dict[int, Bar] = {}
    found = Timeline([], [], 0)
    for now, event, commands in journal:
        if isinstance(event, Finished) and event.task in bars:
            bar = bars[event.task]
            if bar.fate == "running":
                bar.end, bar.fate = bar.begin + event.seconds, "held"
        for command in commands:
            match command:
                case Start(task):
                    bars[task.id] = Bar(task, now + LATENCY)
                case Cancel(task) | Discard(task):
                    bar = bars[task]
                    bar.end, bar.fate = min(bar.end, now), "wasted"
                case Step(weights):
                    found.updates.append(now)
                    for task in weights:
                        bars[task].fate = "used"
                        found.samples += bars[task].task.computed
    found.bars = list(bars.values())
    return found


def ran(policy: pl.protocol.Policy) -> pl.Journal:
    """Train for ten virtual seconds, and return the journal."""
    link = pl.delays.Link(latency=LATENCY)
    engine = pl.Simulator(4, [pl.delays.Fixed(seconds) for seconds in SPEEDS], link=link)
    learner = pl.learners.Quadratic((1.0, 0.1), noise=1.0, batch_size=BATCH)
    return pl.Trainer(learner, policy, engine, progress=False).fit(seconds=SECONDS).journal


def at(seconds: float) -> float:
    return LEFT + (RIGHT - LEFT) * seconds / SECONDS


def panel(picture: Drawing, top: float, name: str, meaning: str, found: Timeline) -> None:
    """Draw one policy: its name, a lane for each worker, and its updates."""
    theme = picture.theme
    picture.text(LEFT - 36, top + 17, name, bold=True, code=True)
    picture.text(LEFT - 36 + 10 * len(name) + 10, top + 17, meaning, color=theme.muted)
    lanes = top + TITLE
    bottom = lanes + LANE * len(SPEEDS)
    for worker in range(len(SPEEDS)):
        picture.text(LEFT - 8, lanes + LANE * worker + 14, f"w{worker}", anchor="end", size=15)
        middle = lanes + LANE * worker + BAR / 2
        picture.path(f"M{LEFT} {middle:g}H{RIGHT}", theme.plain[1], 0.5)
    for bar in found.bars:
        if bar.begin < min(bar.end, SECONDS):  # else it was cancelled on its way to the worker
            draw_bar(picture, bar, lanes + LANE * int(bar.task.worker[1:]))
    for update in found.updates:
        x = round(at(update), 1)
        picture.path(f"M{x:g} {lanes - 4:g}V{bottom:g}", theme.green[1], 2)
        picture.path(f"M{x:g} {bottom - 2:g}l-6 10h12z", theme.green[1], fill=theme.green[1])


def draw_bar(picture: Drawing, bar: Bar, y: float) -> None:
    """Draw a task: solid if its result was used, hatched if not, pale if it was under way."""
    theme = picture.theme
    x, end = round(at(bar.begin), 1), round(at(min(bar.end, SECONDS)), 1)
    if bar.fate == "wasted":
        picture.box(x, y, end - x, BAR, theme.amber, radius=2)
        picture.hatch(x, y, end - x, BAR, theme.amber[1])
        return
    pale = bar.fate in ("running", "held")
    colors = (theme.back[0], theme.blue[1]) if pale else theme.blue
    picture.box(x, y, end - x, BAR, colors, radius=2)
    steps = bar.task.work.steps
    whole = at(bar.begin + SPEEDS[int(bar.task.worker[1:])] * steps) - x
    for step in range(1, steps):
        if (mark := x + whole * step / steps) < end:
            picture.path(f"M{mark:.4g} {y:g}v{BAR}", theme.blue[1])


def legend(picture: Drawing, top: float) -> None:
    """Draw the axis and what the marks mean."""
    theme = picture.theme
    picture.path(f"M{LEFT} {top}H{RIGHT}", theme.muted)
    for second in range(0, int(SECONDS) + 1, 2):
        picture.path(f"M{at(second):g} {top}v5", theme.muted)
        label = "10 s" if second == SECONDS else str(second)
        anchor = "end" if second == SECONDS else "middle"
        place = RIGHT if second == SECONDS else at(second)
        picture.text(place, top + 21, label, anchor=anchor, size=15, color=theme.muted)
    (first, second) = (top + 38, top + 64)
    picture.box(LEFT, first, 30, BAR, theme.blue, radius=2)
    picture.text(LEFT + 38, first + 14, "computing, result used")
    picture.box(LEFT, second, 30, BAR, theme.amber, radius=2)
    picture.hatch(LEFT, second, 30, BAR, theme.amber[1])
    picture.text(LEFT + 38, second + 14, "computing, discarded")
    picture.path(f"M335 {first}v{BAR}", theme.green[1], 2)
    picture.path(f"M335 {first + BAR - 4}l-6 10h12z", theme.green[1], fill=theme.green[1])
    picture.text(353, first + 14, "model update")
    picture.box(320, second, 30, BAR, (theme.back[0], theme.blue[1]), radius=2)
    picture.text(358, second + 14, "under way at the end")


def draw(theme: Theme) -> str:
    """Draw all policies over the same ten seconds."""
    picture = Drawing(theme, HEIGHT, "Timelines of four workers under four policies")
    for place, (name, meaning, policy) in enumerate(POLICIES):
        top = TOP + PANEL * place
        found = timeline(ran(policy))
        panel(picture, top, name, meaning, found)
        count = f"{found.samples} samples used"
        picture.text(RIGHT, top + 17, count, anchor="end", color=theme.muted)
    legend(picture, TOP + PANEL * len(POLICIES))
    return picture.svg()


def main(folder: Path = FOLDER) -> None:
    save("timelines", draw, folder)


if __name__ == "__main__":
    main()
