"""The live view of a run: a table of all workers, in a terminal or a notebook.

A separate thread draws it, so that it is updated also while all workers wait for a straggler.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from paceline.core.logs import logger_of
from paceline.report.callbacks import Callback, Live, Progress, ProgressLine
from paceline.report.glance import MANY, Glance, Row, as_html, glance, sparkline

if TYPE_CHECKING:  # from the extra [live], loaded when a run begins
    from rich.text import Text

logger = logger_of(__name__)

EVERY = 0.25
"""Seconds between two updates on a terminal."""
EVERY_NOTEBOOK = 1.0
"""The same in a notebook, where each update is sent as a message."""

_PATIENCE = 5.0  # timeout in seconds of the last update when a run ends
_LINES = 9  # the most lines that are not workers
_BAR = 8  # characters
_COLUMNS = {  # name: width; the last ones are left out first
    **{"worker": 6, "state": 16, "speed": 5, "wasted": 6, "used": 4, "stale": 5},
    **{"": _BAR, "up": 7, "down": 7, "seen": 6},
}
_WORDS = ("worker", "state", "")
_SHOWN = ("worker", "state", "speed", "", "used", "wasted", "stale", "up", "down", "seen")
_STYLES = {"computing": "", "late": "bold yellow", "idle": "dim", "there": "dim", "gone": "red"}
_SLOW = 0.5  # of the quickest speed; a shorter bar has another color


@dataclass(frozen=True)
class Noted:
    """The epoch, and the time at which the loss reached the forecast's target, from steps."""

    epoch: float = nan
    reached: float | None = None


def moment(live: Live) -> float:
    """Return the seconds of a run; before its first task the engine's clock may not run yet."""
    total = live.total
    return live.now() if total.started or total.worker_seconds else total.began


def last(live: Live) -> float:
    """Return the seconds of the last step or worker event of a run."""
    steps = live.total.columns["seconds"][-1:]
    return max([live.total.began, *steps, *(tally.seen for tally in live.workers().values())])


def look(
    live: Live, now: float, noted: Noted = Noted(), most: int = MANY, reason: str = ""
) -> Glance:
    """Return the view of a run at a moment. `reason`: why it ended, if it did."""
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
    waited: float = 0.0,
) -> Text:
    """Return the view of a run for a terminal of this size.

    waited: seconds since the engine began to start.
    """
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
        what = live.starting()
        what = f"{what} ({waited:.0f} s)" if what else "no worker has joined yet"
        lines.append(Text(what, "dim"))
    if seen.reason:
        lines.append(Text(f"ended: {seen.reason}"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _head(seen: Glance, width: int) -> Iterator[Text]:
    """Return the lines on the run as a whole."""
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
    """Return a dim name and its value, which stands out."""
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
    """Return the widths of the columns that fit, in the order in which they are shown."""
    widths = dict(_COLUMNS)
    names = [len(row.cells["worker"]) for row in (*seen.slow, *seen.quick)]
    widths["worker"] = min(max(6, *names), 16)
    while sum(widths.values()) + len(widths) - 1 > width and len(widths) > 2:
        widths.popitem()
    return {name: widths[name] for name in _SHOWN if name in widths}


def _line(row: Row, widths: Mapping[str, int]) -> Text:
    """Return the line of a worker."""
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
    """Shows all workers during a run, also between steps.

    It updates a table about four times a second on a terminal, and once a second in a notebook.
    Elsewhere it prints a line every ten seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """Make a view on a stream, by default stderr."""
        if notebook() is None:
            require_rich()
        self._stream, self._screen, self._noted = stream, _Nowhere(), Noted()
        self._live: Live | None = None
        self._ticker: _Ticker | None = None
        self._target = nan
        self._began = time.monotonic()

    _screen: _Screen

    def started(self, live: Live) -> None:
        self._live, self._noted, self._began = live, Noted(), time.monotonic()
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
        waited = time.monotonic() - self._began
        return render(self._live, now, width, height, self._noted, reason, waited)

    def _html(self, reason: str) -> str:
        assert self._live is not None
        now = last(self._live) if reason else moment(self._live)
        return as_html(look(self._live, now, self._noted, reason=reason))


def require_rich() -> None:
    """Raise an error that names the package to install, if rich is missing."""
    try:
        import rich.live  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the live view needs rich ({error}): pip install 'paceline[live]', or leave "
            'progress="live" out for a line'
        ) from None


def notebook() -> Any:
    """Return IPython if this process is the kernel of a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else ipython


def _can_draw(stream: TextIO) -> bool:
    """Return whether this is a terminal that moves its cursor and can show bars."""
    from rich.console import Console

    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    return stream.isatty() and encoding == "utf8" and not Console(file=stream).is_dumb_terminal


# --- where it is shown -------------------------------------------------------------------------


class _Screen(Protocol):
    every: float  # seconds between two updates

    def draw(self) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def end(self, reason: str) -> None: ...


class _Nowhere:
    """Shows nothing, before a run and after it."""

    every = EVERY

    def draw(self) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def end(self, reason: str) -> None: ...


class _Plain(_Nowhere):
    """Prints a line every ten seconds, or keeps it current on a terminal without bars."""

    def __init__(self, stream: TextIO) -> None:
        self._line = ProgressLine(stream)

    def stepped(self, progress: Progress) -> None:
        self._line.stepped(progress)

    def end(self, reason: str) -> None:
        self._line.ended(reason)


class _Terminal(_Nowhere):
    """Keeps a table current; other output of the process appears above it."""

    def __init__(self, stream: TextIO, picture: Callable[[int, int, str], Text]) -> None:
        from rich import live
        from rich.console import Console

        self._console, self._picture, self._reason = Console(file=stream), picture, ""
        self._display = live.Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._now,
            vertical_overflow="crop",
            redirect_stdout=sys.stdout.isatty(),  # if it is a file, leave it alone
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
    """Keeps a display current in a cell of a notebook."""

    every = EVERY_NOTEBOOK

    def __init__(self, ipython: Any, html: Callable[[str], str]) -> None:
        self._html, self._wrapped = html, ipython.display.HTML
        self._handle = ipython.display.display(self._wrapped(html("")), display_id=True)

    def draw(self) -> None:
        self._handle.update(self._wrapped(self._html("")))

    def end(self, reason: str) -> None:
        self._handle.update(self._wrapped(self._html(reason)))


class _Ticker:
    """Calls a function every so many seconds from its own thread, until it is stopped."""

    def __init__(self, call: Callable[[], None], every: float) -> None:
        self._call, self._every, self._done = call, every, threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self._every):
            try:
                self._call()
            except Exception:  # must not end a run
                logger.exception("the live view failed and is no longer drawn; the run continues")
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
