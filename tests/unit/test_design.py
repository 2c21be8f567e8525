"""docs/design.md tells one step as a list of functions: runs must call them in that order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import paceline as pl
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import Weather, World

TEXT = (Path(__file__).parents[2] / "docs" / "design.md").read_text()


def told(beginning: str) -> list[str]:
    """Return the functions of a list in the page, as `module.py function`."""
    _, _, rest = TEXT.partition(beginning)
    lines = rest.strip().splitlines()
    listed = [re.match(r"\d+\. `([\w/.]+)` `([\w.]+)` ", line) for line in lines]
    found = []
    for match in listed:
        if match is None:
            break
        found.append(f"{match[1]} {match[2]}")
    return found


def called(engine: Any) -> list[str]:
    """Return the functions of the package that two steps on an engine call."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event == "call" and module.startswith("paceline."):
            path = module.removeprefix("paceline.").replace(".", "/")
            seen.append(f"{path}.py {frame.f_code.co_qualname}")

    learner = pl.learners.Quadratic(batch_size=6)
    trainer = pl.Trainer(learner, pl.sync(), engine, progress=False)
    sys.setprofile(note)
    try:
        trainer.fit(steps=2)
    finally:
        sys.setprofile(None)
    return seen


def ray() -> SimulatedRay:
    world = World(3, Weather(), 3, 20.0)
    world.most = 20_000
    return SimulatedRay(3, world, "driver", start_timeout=5.0)


@pytest.mark.parametrize(
    ("beginning", "engine"),
    [("In the simulator:", lambda: pl.Simulator(3)), ("with the model in the driver:", ray)],
    ids=["simulator", "ray"],
)
def test_a_step_calls_what_the_page_says(beginning: str, engine: Any) -> None:
    listed = told(beginning)
    assert len(listed) > 10
    calls = iter(called(engine()))
    for name in listed:
        assert name in calls, f"{name} is not called, or not after those before it"
