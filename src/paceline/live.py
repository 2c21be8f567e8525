"""A run while it goes on: a table of all workers, in a terminal or a notebook.

It is drawn from a thread of its own, so that it moves also while everybody waits for somebody.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from paceline.callbacks import Callback, Live, Progress, ProgressLine
from paceline.core.logs import logger_of
from paceline.report.glance import MANY, Glance, Row, as_html, glance, sparkline

if TYPE_CHECKING:  # of the extra [live], loaded when a run begins
    from rich.text import Text

logger = logger_of(__name__)

EVERY = 0.25
"""Seconds from one picture to the next on a terminal."""
EVERY_NOTEBOOK = 1.0
"""The same in a notebook, where each is sent as a message."""

_PATIENCE = 5.0  # seconds for the picture that is being drawn when a run ends
_LINES = 9  # that are not workers, at most
_BAR = 8  # characters
_COLUMNS = {  # name: width, from the one that is left out last to the first
    **{"worker": 6, "state": 16, "speed": 5, "wasted": 6, "used": 4, "delay": 5},
    **{"": _BAR, "up": 7, "down": 7, "seen": 6},
}
_WORDS = ("worker", "state", "")
_SHOWN = ("worker", "state", "speed", "", "used", "wasted", "delay", "up", "down", "seen")
_STYLES = {"computing": "", "late": "bold yellow", "idle": "dim", "there": "dim", "gone": "red"}
_SLOW = 0.5  # of the quickest: a bar that is shorter has another color


@dataclass(frozen=True)
class Noted:
    """What only steps tell: the epoch, and when the loss was at the target of the forecast."""

    epoch: float = nan
    reached: float | None = None


def moment(live: Live) -> float:
    """Return the seconds of a run; before its first task the engine's clock may not go yet."""
    total = live.total
    return live.now() if total.started or total.worker_seconds else total.began


def last(live: Live) -> float:
    """Return when something was heard of a run last."""
    steps = live.total.columns["seconds"][-1:]
    return max([live.total.began, *steps, *(tally.seen for tally in live.workers().values())])


def look(
    live: Live, now: float, noted: Noted = Noted(), most: int = MANY, reason: str = ""
) -> Glance:
    """Look at a run. `reason`: why it ended, if it did."""
    return glance(
        live.total,
        live.workers(),
        live.header,
        now,
        nodes=len(live.meters),
        most=most,
        epoch=noted.epoch,
        reached=noted.reached,
        reason=reason,
    )


def render(
    live: Live,
    now: float,
    width: int,
    height: int = 25,
    noted: Noted = Noted(),
    reason: str = "",
) -> Text:
    """Return a picture of a run for a terminal of this size."""
    from rich.text import Text

    seen = look(live, now, noted, min(MANY, max(height - _LINES, 2)), reason)
    lines = [*_head(seen, width), Text()]
    if seen.slow:
        widths = _widths(seen, width)
        names = " ".join(_cell(name, name, wide) for name, wide in widths.items())
        lines += [Text(names, "dim"), *(_line(row, widths) for row in seen.slow)]
        if seen.more:
            lines += [Text(seen.more, "dim"), *(_line(row, widths) for row in seen.quick)]
    else:
        lines.append(Text("no worker has joined yet", "dim"))
    if seen.reason:
        lines.append(Text(f"ended: {seen.reason}"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _head(seen: Glance, width: int) -> Iterator[Text]:
    """Return what is of the run as a whole."""
    from rich.text import Text

    figures = dict(seen.figures)
    names = [name for name in ("step", "epoch") if name in figures]
    place = "  ".join([*(f"{name} {figures.pop(name)}" for name in names), figures.pop("seconds")])
    room = max(width - len(place) - 2, 0)
    policy = Text(seen.policy, "bold")
    policy.truncate(room, overflow="ellipsis", pad=True)
    yield Text.assemble(policy, "  ", place)
    loss = f"loss {figures.pop('loss'):<8}"
    bars = sparkline(seen.losses)[-max(width - len(loss) - 1, 1) :]
    yield Text.assemble(_named(loss), " ", (bars, "cyan"))
    told = [f"{name} {figure}" for name, figure in figures.items()]
    while len("  ".join(told)) > width and len(told) > 1:
        del told[-1]
    yield Text("  ").join(map(_named, told))
    if seen.outlook is not None:
        text, part = f"forecast {seen.outlook.text}", seen.outlook.part
        line = _named(text)
        if not isnan(part):
            room = min(max(width - len(text) - 6, 0), 30)
            line.append(f" {bar(min(part, 1.0), room)}", "green" if part <= 1 else "yellow")
            line.append(f" {part:.0%}")
        yield line


def _named(text: str) -> Text:
    """Return a name and its figure, of which that is to be seen first."""
    from rich.text import Text

    name, figure = text.split(" ", 1)
    return Text.assemble((name, "dim"), " ", figure)


def bar(part: float, width: int) -> str:
    """Return a bar that is filled in part.

    >>> bar(0.5, 8)
    '━━━━────'
    """
    full = round(part * width)
    return "━" * full + "─" * (width - full)


def _widths(seen: Glance, width: int) -> dict[str, int]:
    """Return the columns that there is room for, in the order to be shown in."""
    widths = dict(_COLUMNS)
    names = [len(row.cells["worker"]) for row in (*seen.slow, *seen.quick)]
    widths["worker"] = min(max(6, *names), 16)
    while sum(widths.values()) + len(widths) - 1 > width and len(widths) > 2:
        widths.popitem()
    return {name: widths[name] for name in _SHOWN if name in widths}


def _line(row: Row, widths: Mapping[str, int]) -> Text:
    """Return a worker."""
    from rich.text import Text

    line = Text()
    for name, wide in widths.items():
        if name:
            style = _STYLES[row.state] if name == "state" else ""
            line.append(f"{_cell(name, row.cells[name], wide)} ", style)
        else:
            text, full = bar(row.part, wide) if row.speed else " " * wide, round(row.part * wide)
            line.append(text[:full], "yellow" if row.part < _SLOW else "green")
            line.append(f"{text[full:]} ", "dim")
    line.rstrip()
    return line


def _cell(name: str, text: str, width: int) -> str:
    """Return a text in its column: words to the left, numbers to the right."""
    from rich.cells import set_cell_size

    return set_cell_size(text, width) if name in _WORDS else f"{text:>{width}}"


class LiveView(Callback):
    """Shows all workers while a run goes on, about four times a second, also between steps.

    On a terminal a table is kept current, in a notebook a display is, and elsewhere a line is
    printed now and then.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """Show it on a stream, by default stderr."""
        if notebook() is None:
            require_rich()
        self._stream, self._screen, self._noted = stream, _Nowhere(), Noted()
        self._live: Live | None = None
        self._ticker: _Ticker | None = None
        self._target = nan

    _screen: _Screen

    def started(self, live: Live) -> None:
        self._live, self._noted = live, Noted()
        forecast = (live.header.about or {}).get("forecast") or {}
        self._target = forecast.get("target", nan)
        stream = self._stream or sys.stderr
        if (shell := notebook()) is not None and self._stream is None:
            self._screen = _Notebook(shell, self._html)
        elif _can_draw(stream):
            self._screen = _Terminal(stream, self._picture)
        else:
            self._screen = _Plain(stream)
            return
        self._ticker = _Ticker(self._screen.draw, self._screen.every)

    def stepped(self, progress: Progress) -> None:
        reached = self._noted.reached
        if reached is None and progress.loss <= self._target:
            reached = progress.seconds
        self._noted = Noted(progress.epoch, reached)
        self._screen.stepped(progress)

    def ended(self, reason: str) -> None:
        ticker, self._ticker = self._ticker, None
        screen, self._screen = self._screen, _Nowhere()
        try:
            if ticker is not None:
                ticker.stop()
        finally:
            screen.end(reason)

    def _picture(self, width: int, height: int, reason: str) -> Text:
        assert self._live is not None
        now = last(self._live) if reason else moment(self._live)
        return render(self._live, now, width, height, self._noted, reason)

    def _html(self, reason: str) -> str:
        assert self._live is not None
        now = last(self._live) if reason else moment(self._live)
        return as_html(look(self._live, now, self._noted, reason=reason))


def require_rich() -> None:
    """Say what to install, if it is not."""
    try:
        import rich.live  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the live view needs rich ({error}): pip install 'paceline[live]', or leave "
            'progress="live" out for a line'
        ) from None


def notebook() -> Any:
    """Return IPython if this is a kernel of a notebook, which has loaded it; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else ipython


def _can_draw(stream: TextIO) -> bool:
    """Tell whether this is a terminal that moves its cursor and has the characters of bars."""
    from rich.console import Console

    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    return stream.isatty() and encoding == "utf8" and not Console(file=stream).is_dumb_terminal


# --- where it is shown -------------------------------------------------------------------------


class _Screen(Protocol):
    every: float  # seconds from one picture to the next

    def draw(self) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def end(self, reason: str) -> None: ...


class _Nowhere:
    """Before a run, and after it."""

    every = EVERY

    def draw(self) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def end(self, reason: str) -> None: ...


class _Plain(_Nowhere):
    """A line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._line = ProgressLine(stream)

    def stepped(self, progress: Progress) -> None:
        self._line.stepped(progress)

    def end(self, reason: str) -> None:
        self._line.ended(reason)


class _Terminal(_Nowhere):
    """A table that is kept current; what is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO, picture: Callable[[int, int, str], Text]) -> None:
        from rich import live
        from rich.console import Console

        self._console, self._picture, self._reason = Console(file=stream), picture, ""
        self._display = live.Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._now,
            vertical_overflow="crop",
            redirect_stdout=sys.stdout.isatty(),  # a file gets what is printed to it
            redirect_stderr=sys.stderr.isatty(),
        )
        self._display.start(refresh=True)

    def _now(self) -> Text:
        width, height = self._console.size
        return self._picture(width, height, self._reason)

    def draw(self) -> None:
        self._display.refresh()

    def end(self, reason: str) -> None:
        self._reason = reason
        self._display.stop()  # draws once more


class _Notebook(_Nowhere):
    """A display of a notebook's cell."""

    every = EVERY_NOTEBOOK

    def __init__(self, ipython: Any, html: Callable[[str], str]) -> None:
        self._html, self._wrapped = html, ipython.display.HTML
        self._handle = ipython.display.display(self._wrapped(html("")), display_id=True)

    def draw(self) -> None:
        self._handle.update(self._wrapped(self._html("")))

    def end(self, reason: str) -> None:
        self._handle.update(self._wrapped(self._html(reason)))


class _Ticker:
    """Calls something now and then from a thread of its own, until it is stopped."""

    def __init__(self, call: Callable[[], None], every: float) -> None:
        self._call, self._every, self._done = call, every, threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self._every):
            try:
                self._call()
            except Exception:  # which is no reason to end a run
                logger.exception("the live view failed, and is not drawn any more")
                return

    def stop(self) -> None:
        self._done.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            logger.warning(
                "the live view has not ended in %g s and is left as it is; if its terminal is "
                "stopped (Ctrl-S), Ctrl-Q lets it go on",
                _PATIENCE,
            )
