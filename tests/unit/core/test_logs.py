"""What is said again and again is said a few times, and then counted."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import paceline as pl
from paceline.core.logs import MOST, Quota, clear, logger_of, tell_left_out
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import Weather, World


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def say(
    quota: Quota, kept: Kept, text: str, *given: object, at: float, level: int = logging.WARNING
) -> None:
    record = logging.LogRecord("paceline.test", level, "", 0, text, given, None)
    record.created = at
    if quota.filter(record):
        kept.handle(record)


def test_the_first_are_told_and_the_others_counted() -> None:
    quota, kept = Quota(3, 60.0), Kept()
    for i in range(100):
        say(quota, kept, "worker %s is lost: %s", "w1", "100% gone", at=10.0 + i / 10)
    assert kept.told == [
        "worker w1 is lost: 100% gone",
        "worker w1 is lost: 100% gone",
        "worker w1 is lost: 100% gone; more like it are left out for 60 s",
    ]
    say(quota, kept, "worker %s is lost: %s", "w2", "gone", at=70.5)
    assert kept.told[3:] == ["worker w2 is lost: gone; 97 like it were left out before"]
    say(quota, kept, "worker %s is lost: %s", "w2", "gone", at=71.0)
    assert kept.told[4:] == ["worker w2 is lost: gone"] and quota.left_out() == {}


def test_kinds_are_counted_apart() -> None:
    quota, kept = Quota(2, 60.0), Kept()
    for _ in range(5):
        for text in ("server %s is lost", "worker %s is lost"):
            say(quota, kept, text, "x", at=0.0)
            say(quota, kept, text, "x", at=0.0, level=logging.INFO)
    assert len(kept.told) == 8
    assert quota.left_out() == {
        (level, text): 3
        for level in (logging.INFO, logging.WARNING)
        for text in ("server %s is lost", "worker %s is lost")
    }
    assert quota.left_out() == {}


def test_no_error_is_kept_back() -> None:
    quota, kept = Quota(2, 60.0), Kept()
    for level in (logging.ERROR, logging.CRITICAL):
        for i in range(50):
            say(quota, kept, "the end", at=float(i), level=level)
    assert kept.told == ["the end"] * 100


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    quota, kept = Quota(1, 60.0), Kept()
    say(quota, kept, "a", at=1e9)
    say(quota, kept, "a", at=1.0)
    assert len(kept.told) == 2


def test_what_was_left_out_is_told_in_the_end() -> None:
    logger, kept = logger_of("paceline.test_of_logs"), Kept()
    assert logger is logger_of("paceline.test_of_logs") and len(logger.filters) == 1
    assert not logger.handlers
    logger.addHandler(kept)
    try:
        for _ in range(MOST + 7):
            logger.warning("step %d is not saved", 3)
        tell_left_out()
        tell_left_out()
    finally:
        logger.removeHandler(kept)
        clear()
    assert len(kept.told) == MOST + 1
    assert (
        kept.told[-1] == "7 more records like 'step %d is not saved' were left out; see the journal"
    )


def test_thousands_of_losses_are_some_lines() -> None:
    """In virtual time: seconds of ours, in which every second task takes its worker with it."""
    world = World(3, Weather(crash=0.5, wrong=0.1), 8, timeout=4.0)
    engine = SimulatedRay(8, world, start_timeout=5.0, respawns=10**6)
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.1, lr=0.05, batch_size=12)
    kept, log = Kept(), logging.getLogger("paceline")
    log.addHandler(kept)
    try:
        run = pl.Trainer(learner, pl.asynchronous(), engine, progress=False).fit(
            until=lambda progress: sum(world.faults.values()) >= 1000
        )
    finally:
        log.removeHandler(kept)
    assert run.meter.lost >= 900
    assert MOST < len(kept.told) <= 10 * MOST  # a window is a minute, and this takes less than ten
    assert "more records like 'worker %s is lost: %s' were left out" in kept.told[-1]


def test_every_logger_has_a_quota() -> None:
    root = Path(pl.__file__).parent
    made = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    ]
    assert set(made) == {"core/logs.py"}
