"""The live view: what it says of many states, and that it leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from rich.console import Console

import paceline as pl
from paceline.core.journal import Entry, Header
from paceline.core.protocol import Cancel, Event, Finished, Joined, Left, Start, Step, Task, Work
from paceline.report.callbacks import Live, Progress
from paceline.report.glance import as_html, glance, in_short, sparkline
from paceline.report.live import LiveView, Noted, moment, render
from paceline.report.metrics import Meter
from paceline.report.words import in_seconds

THREAD = "paceline-live"


class Books:
    """A run that is told entry by entry."""

    def __init__(self, header: Header | None = None) -> None:
        self.header = header or Header("k_sync(2)", 8, message_bytes=1000)
        self.meter = Meter.begin(self.header)
        self.now, self._id = 0.0, 0

    def see(self, now: float, event: Event, *commands: Start | Step | Cancel) -> None:
        self.now = now
        told = [
            Start(replace(each.task, since=now)) if isinstance(each, Start) else each
            for each in commands
        ]
        self.meter.observe(Entry(now, event, tuple(told)))

    def start(self, worker: str, samples: int = 4) -> Start:
        self._id += 1
        work = Work(samples=samples)
        return Start(Task(self._id, worker, work, self.meter.version, self.now, samples, 0))

    def live(self) -> Live:
        return Live(self.header, {"main": self.meter}, self.meter, lambda: self.now)


def of(books: Books, now: float, width: int = 80, height: int = 25, **more: object) -> list[str]:
    """Return the lines that are drawn."""
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(render(books.live(), now, width, height, **more))  # type: ignore[arg-type]
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= height
    return lines


def two(loss: float = 0.5, header: Header | None = None) -> Books:
    """Return a run of two workers, of which w1 is slow, after a step on both."""
    books = Books(header)
    books.see(0.0, Joined("w0"))
    books.see(0.0, Joined("w1"), books.start("w0"), books.start("w1"))
    books.see(1.0, Finished(1, 4, 1.0, {"loss": loss}))
    books.see(4.0, Finished(2, 4, 4.0, {"loss": loss}), Step({1: 0.5, 2: 0.5}), books.start("w0"))
    return books


def test_before_anybody_has_joined() -> None:
    lines = of(Books(), 0.0)
    assert lines[0].startswith("k_sync(2)") and lines[0].endswith("step 0  –")
    assert lines[1] == "loss –"
    assert lines[-1] == "no worker has joined yet"


def test_before_the_first_result_it_is_seen_who_computes() -> None:
    books = Books()
    books.see(0.0, Joined("w0"), books.start("w0"))
    books.see(1.0, Joined("w1"))
    lines = of(books, 3.25)
    assert lines[-2].startswith("w0     computing 3.2 s      –")
    assert lines[-2].endswith("0 B    1 kB  3.2 s")
    assert lines[-1].startswith("w1     idle                 –")
    assert lines[-1].endswith("2.2 s")


def test_figures_of_each_worker() -> None:
    lines = of(two(), 6.5)
    assert lines == [
        "k_sync(2)                                                          step 1  6.5 s",
        "loss 0.5      ▁",
        "waiting 38%  samples/s 2  wasted 0%  workers 2",
        "",
        "worker state            speed          used wasted stale      up    down   seen",
        "w0     computing 2.5 s   2.29 ━━━━━━━━  29%     0%   0.0    1 kB    2 kB  5.5 s",
        "w1     idle                 1 ━━━━──── 100%     0%   0.0    1 kB    1 kB  2.5 s",
    ]


def test_who_is_late_and_who_is_gone_is_marked() -> None:
    books = two()
    books.see(5.0, Left("w1"))
    text = render(books.live(), 20.0, 80)
    marked = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    assert marked["computing 16 s"] == "bold yellow"  # a task takes them 2.5 s
    assert marked["gone 16 s"] == "red"
    assert "workers 1" in text.plain


def test_wasted_work_is_counted() -> None:
    books = two()
    books.see(5.0, Finished(3, 4, 1.0, {"loss": 0.4}), Step({3: 1.0}), books.start("w1"))
    books.see(6.0, Joined("w2"), Cancel(4))
    lines = of(books, 6.0)
    assert lines[-2].split()[-8:-6] == ["50%", "0.0"]  # one was used, one was not
    assert "wasted 25%" in lines[2]


@pytest.mark.parametrize("loss", [nan, inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    assert of(two(loss), 6.0)[1] == f"loss {loss}      ×"


def test_prices_and_epochs_are_told_if_there_are_any() -> None:
    header = Header("sync()", 8, message_bytes=1000, prices=pl.Prices(per_hour=3600.0))
    lines = of(two(header=header), 6.0, noted=Noted(epoch=0.25))
    assert lines[0].endswith("step 1  epoch 0.25  6.0 s")
    assert "cost $5.00" in lines[2]
    assert "cost" not in "".join(of(two(), 6.0))


def forecast(seconds: float | None = 20.0) -> Header:
    known = {"target": 0.2, "seconds": seconds, "intervals": {"seconds": [15.0, None]}}
    return Header("sync()", 8, {"forecast": known, "policy": "Gather(k=2)"})


def test_a_forecast_and_how_far_it_is() -> None:
    books = two(header=forecast())
    line = of(books, 5.0)[3]
    assert line.startswith("forecast loss 0.2 in 20 s [15 s-never] ━━━━") and line.endswith("25%")
    assert of(books, 30.0)[3].endswith("150%")
    line = of(books, 30.0, noted=Noted(reached=18.0))[3]
    assert "reached in 18 s" in line and line.endswith("100%")
    assert of(two(header=forecast(None)), 5.0)[3] == "forecast loss 0.2 in never [15 s-never]"
    assert of(books, 5.0)[0].startswith("Gather(k=2) ")  # as its user gave it


def many(workers: int) -> Books:
    books = Books()
    for number in range(workers):
        books.see(0.0, Joined(f"w{number}"), books.start(f"w{number}"))
    for number in range(workers):
        books.see(1.0 + number, Finished(number + 1, 4, 1.0, {"loss": 0.5}))
    return books


@pytest.mark.parametrize(("width", "height"), [(80, 25), (60, 25), (40, 12), (200, 50), (24, 12)])
def test_of_many_workers_the_slowest_and_the_quickest(width: int, height: int) -> None:
    lines = of(many(64), 70.0, width, height)
    assert sum(line.startswith("w") for line in lines[5:]) == min(height - 9, 16) - 1
    assert lines[5].startswith("w63 ") and lines[-1].startswith("w0 ")
    hidden = 64 - (min(height - 9, 16) - 1)
    assert any(line.startswith(f"… {hidden} more: {hidden} "[:width].rstrip()) for line in lines)


def test_sixteen_are_shown_in_their_order() -> None:
    lines = of(many(16), 70.0, 100, 30)
    assert [line.split()[0] for line in lines[5:]] == [f"w{number}" for number in range(16)]


def test_narrow_terminals_have_fewer_columns() -> None:
    assert of(two(), 6.0, 60)[4].split() == ["worker", "state", "speed", "used", "wasted", "stale"]
    assert of(two(), 6.0, 30)[4].split() == ["worker", "state", "speed"]
    long = Header("a" * 100, 8)
    assert of(two(header=long), 6.0, 40)[0].endswith("a…  step 1  6.0 s")


def test_markup_in_names_is_text() -> None:
    books = Books(Header("[bold]x[/bold]", 8))
    books.see(0.0, Joined("[red]w"))
    lines = of(books, 1.0)
    assert lines[0].startswith("[bold]x[/bold]") and lines[-1].startswith("[red]w")


def test_a_picture_takes_little_time() -> None:
    books, console = many(64), Console(width=80, height=50, file=io.StringIO())
    took = []
    for _ in range(20):
        began = time.perf_counter()
        console.print(render(books.live(), 70.0, 80, 50))
        took.append(time.perf_counter() - began)
    assert min(took) < 0.02


def test_texts_have_room() -> None:
    for exponent in range(-5, 12):
        for digits in (1.0, 1.2345, 9.9999):
            assert len(in_short(digits * 10.0**exponent)) <= 5
    for seconds in (0.0, 9.94, 9.96, 99.9, 599.4, 599.6, 5969.0, 5971.0, 1e6):
        assert len(in_seconds(seconds)) <= 6
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "▁▁"


# --- of real runs ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """What a terminal gets."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    yield
    assert THREAD not in [thread.name for thread in threading.enumerate()]


class Watch(pl.Callback):
    """Waits until there is another picture, in the middle of a run."""

    def __init__(self, stream: Terminal) -> None:
        self._stream = stream

    def stepped(self, progress: Progress) -> None:
        assert THREAD in [thread.name for thread in threading.enumerate()]
        if progress.step == 2:
            before, end = len(self._stream.getvalue()), time.monotonic() + 30
            while len(self._stream.getvalue()) == before and time.monotonic() < end:
                time.sleep(0.01)
            assert len(self._stream.getvalue()) > before


def test_it_moves_between_two_steps() -> None:
    stream = Terminal()
    watching = [LiveView(stream), Watch(stream)]
    engine = pl.Simulator(3)
    pl.Trainer(pl.learners.Quadratic(batch_size=6), pl.sync(), engine, callbacks=watching).fit(
        steps=3
    )
    shown = stream.getvalue()
    assert "no worker has joined yet" in shown and "step 2" in shown
    assert "ended: 3 steps taken" in shown
    assert shown.count("\033[?25l") == shown.count("\033[?25h") == 1  # the cursor is back


def test_nodes_without_a_main_one_are_workers() -> None:
    stream = Terminal()
    policy = pl.gossip.Gossip(pl.gossip.ring(4))
    run = pl.Trainer(
        pl.learners.Quadratic(batch_size=8), policy, pl.Simulator(4), callbacks=[LiveView(stream)]
    ).fit(steps=5)
    last = stream.getvalue()[stream.getvalue().rindex("Gossip") :]
    assert [f"w{number} " in last for number in range(4)] == [True] * 4
    assert "step 5" in last
    assert run._repr_html_().count("<tr") == 2 + 1 + 4


class Broken(pl.Callback):
    def __init__(self, where: str) -> None:
        self._where = where

    def started(self, live: Live) -> None:
        self._fail("started")

    def stepped(self, progress: Progress) -> None:
        self._fail("stepped")

    def ended(self, reason: str) -> None:
        self._fail("ended")

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise LookupError(where)


@pytest.mark.parametrize("where", ["started", "stepped", "ended"])
def test_nothing_is_left_running_after_an_error(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    engine, broken = pl.Simulator(2), Broken(where)
    trainer = pl.Trainer(
        pl.learners.Quadratic(batch_size=2), pl.sync(), engine, callbacks=[broken], progress="live"
    )
    with pytest.raises(LookupError, match=where):
        trainer.fit(steps=3)
    assert sys.stderr is stream  # and not what draws above the table
    assert stream.getvalue().count("\033[?25h") == 1
    assert ("ended: failed" in stream.getvalue()) == (where != "ended")


def test_one_view_for_several_runs() -> None:
    stream = Terminal()
    view = LiveView(stream)
    for steps in (2, 4):
        learner = pl.learners.Quadratic(batch_size=2)
        pl.Trainer(learner, pl.sync(), pl.Simulator(2), callbacks=[view]).fit(steps=steps)
    assert stream.getvalue().count("ended: ") == 2
    view.ended("twice")  # which does nothing
    assert "twice" not in stream.getvalue()


def test_a_resumed_run_is_shown_before_its_clock_goes() -> None:
    books = two()
    live = Live(books.header, {}, Meter(began=7.0), lambda: 1 / 0)
    assert moment(live) == 7.0
    assert moment(books.live()) == 4.0


def test_the_last_picture_is_of_the_end_and_not_of_closing() -> None:
    books = two()
    closed = Live(books.header, {"main": books.meter}, books.meter, lambda: 1e5)
    stream = Terminal()
    view = LiveView(stream)
    view.started(closed)
    view.ended("done")
    shown = stream.getvalue()
    assert "step 1  4.0 s" in shown[shown.rindex("k_sync(2)") :]


def test_the_clock_of_ray_goes_on_when_a_job_is_closed() -> None:
    engine = pl.Ray(workers=1)
    assert 0 <= engine.now() < 5
    engine.close()
    assert 0 <= engine.now() < 5  # and is not that of the machine


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_off_a_terminal_there_are_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    stream = io.StringIO() if term == "xterm" else Terminal()
    engine = pl.Simulator(2)
    watching = [LiveView(stream)]
    pl.Trainer(pl.learners.Quadratic(batch_size=2), pl.sync(), engine, callbacks=watching).fit(
        steps=2
    )
    shown = stream.getvalue()
    assert "step 1  loss 0.5000  waiting " in shown and shown.endswith("ended: 2 steps taken\n")
    assert "worker " not in shown


def test_how_it_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    learner, engine = pl.learners.Quadratic(batch_size=2), pl.Simulator(2)
    pl.Trainer(learner, pl.sync(), engine, progress="live").fit(steps=2)
    assert capsys.readouterr().err.count("ended: ") == 1
    pl.Trainer(learner, pl.sync(), engine, callbacks=[LiveView()]).fit(steps=2)
    assert capsys.readouterr().err.count("ended: ") == 1  # the view is enough
    for wrong in ("line", None, 2):
        with pytest.raises(ValueError, match=rf'progress={wrong!r}: use True .* "live"'):
            pl.Trainer(learner, pl.sync(), engine, progress=wrong)  # type: ignore[arg-type]


def test_without_rich_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "import paceline as pl\n"
        "pl.Trainer(pl.learners.Quadratic(), pl.sync(), pl.Simulator(1)).fit(steps=1)\n"
        "pl.Trainer(pl.learners.Quadratic(), pl.sync(), pl.Simulator(1), progress='live')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ended: 1 steps taken" in found.stderr
    assert "ImportError: the live view needs rich" in found.stderr
    assert "pip install 'paceline[live]'" in found.stderr


SCRIPT = """
import time
import paceline as pl

class Slowly(pl.Callback):
    def stepped(self, progress):
        time.sleep(0.3)
        print("printed at step", progress.step)

trainer = pl.Trainer(
    pl.learners.Quadratic(batch_size=6), pl.k_sync(2), pl.Simulator(3), callbacks=[Slowly()],
    progress=False
)
trainer.fit(steps=4)
"""


def test_the_command_on_a_pseudo_terminal(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    command = [sys.executable, "-m", "paceline", "train", "--live", str(path)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:  # they have ended
            pass
        os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "worker state            speed" in text and "w2     computing" in text
    assert text.count("\033[2mloss") > 4  # also between the steps
    for step in range(1, 5):
        assert f"printed at step {step}\r\n" in text
    assert text.rindex("\033[?25h") > text.rindex("\033[?25l")
    assert "ended: 4 steps taken" in text
    assert "4 steps in " in text[text.rindex("\033[?25h") :]  # the summary, below the table


# --- notebooks ---------------------------------------------------------------------------------


def test_a_run_in_a_notebook() -> None:
    prices = pl.Prices(per_hour=1.0)
    engine = pl.Simulator(20)
    run = pl.Trainer(
        pl.learners.Quadratic(batch_size=40), pl.k_sync(15), engine, progress=False, prices=prices
    ).fit(steps=5)
    html = run._repr_html_()
    assert "<b>k_sync(15)</b> – ended: 5 steps taken" in html
    assert "… 5 more: 5 there" in html
    assert html.count("<tr") == 2 + 1 + 16
    assert "$" in html and "<script" not in html and "computing" not in html


def test_names_in_a_notebook_are_escaped() -> None:
    books = Books(Header("<script>alert(1)</script>", 8))
    books.see(0.0, Joined("<img>"))
    seen = glance(books.meter, books.meter.workers, books.header, 1.0, reason="<b>")
    html = as_html(seen)
    assert "<script" not in html and "<img" not in html and "ended: &lt;b&gt;" in html


CELL = """
import time
import paceline as pl

class Slowly(pl.Callback):
    def stepped(self, progress):
        time.sleep(0.8)

trainer = pl.Trainer(
    pl.learners.Quadratic(batch_size=4), pl.sync(), pl.Simulator(2), callbacks=[Slowly()],
    progress="live"
)
run = trainer.fit(steps=3)
run
"""


def test_a_notebook_keeps_one_display_current() -> None:
    reason = "ipykernel is not installed, which notebooks run on"
    pytest.importorskip("ipykernel", reason=reason)
    code = (
        "import json, sys, warnings\n"
        "from jupyter_client import KernelManager\n"
        "manager = KernelManager(kernel_name='python3')\n"
        "manager.start_kernel()\n"
        "client = manager.client()\n"
        "client.start_channels()\n"
        "client.wait_for_ready(timeout=60)\n"
        "seen = []\n"
        "client.execute_interactive(sys.argv[1], timeout=60,\n"
        "    output_hook=lambda m: seen.append((m['msg_type'], m['content'])))\n"
        "client.stop_channels()\n"
        "manager.shutdown_kernel(now=True)\n"
        "print(json.dumps(seen))\n"
    )
    found = subprocess.run([sys.executable, "-c", code, CELL], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout.splitlines()[-1])
    kinds = [kind for kind, _ in told]
    assert kinds.count("display_data") == 1, told
    updates = [content for kind, content in told if kind == "update_display_data"]
    assert len(updates) >= 2  # while it goes on, and at its end
    assert len({content["transient"]["display_id"] for content in updates}) == 1
    assert "computing" in updates[0]["data"]["text/html"]
    assert "ended: 3 steps taken" in updates[-1]["data"]["text/html"]
    (result,) = (content for kind, content in told if kind == "execute_result")
    assert "ended: 3 steps taken" in result["data"]["text/html"]
