"""Tables, JSON, and a word while one waits."""

from __future__ import annotations

import io
import threading
from math import inf, nan

import pytest

from paceline.cli.show import patience, plain, table


class Stream(io.StringIO):
    """Keeps what is written, and tells when something is."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self.live, self.written = live, threading.Event()

    def isatty(self) -> bool:
        return self.live

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.mark.parametrize(
    ("live", "told"), [(False, "planning: 0 s\n"), (True, "\r\033[Kplanning: 0 s\r\033[K")]
)
def test_who_waits_is_told(live: bool, told: str) -> None:
    stream = Stream(live)
    with patience("planning", after=0.0, stream=stream):
        assert stream.written.wait(30)
    assert stream.getvalue() == told


@pytest.mark.parametrize(
    ("live", "told"),
    [
        (False, "reading: 0 s, 25%\n"),
        (True, f"\r\033[Kreading: 0 s  [{'#' * 6}{'-' * 18}] 25%\r\033[K"),
    ],
)
def test_where_the_total_is_known_there_is_a_bar(live: bool, told: str) -> None:
    stream = Stream(live)
    with patience("reading", 200.0, after=0.2, stream=stream) as part:
        part.to(50.0)
        part.to(10.0)  # it does not go back
        assert stream.written.wait(30)
    assert stream.getvalue() == told


def test_what_is_being_done_is_named() -> None:
    stream = Stream(live=False)
    with patience("measuring", after=0.2, stream=stream) as part:
        part.at("workers", 1.0)
        part.at("curvature", 0.25)  # each begins anew
        assert stream.written.wait(30)
    assert stream.getvalue() == "measuring curvature: 0 s, 25%\n"


def test_what_is_quick_says_nothing() -> None:
    stream = Stream(live=True)
    with patience("planning", stream=stream):
        pass
    assert stream.getvalue() == ""


def test_words_go_left_and_numbers_right() -> None:
    text = table(["a", "law", "seconds"], [["w0", "Fixed", "1.5"], ["w10", "Pareto", "–"]])
    assert text == "a    law     seconds\nw0   Fixed       1.5\nw10  Pareto        –"


def test_json_has_no_infinity() -> None:
    assert plain({1: [nan, inf, 2.5, "x", None]}) == {"1": [None, None, 2.5, "x", None]}
