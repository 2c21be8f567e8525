"""Arguments of the wrong kind are refused with the argument's name, its value, and what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paceline as pl

WRONG: dict[str, Callable[[], Any]] = {
    "workers='4': use a whole number from 1 on": lambda: pl.Ray("4"),  # type: ignore[arg-type]
    "workers=4.5: use a whole number from 1 on": lambda: pl.Ray(4.5),  # type: ignore[arg-type]
    "workers=True: use a whole number from 1 on": lambda: pl.Simulator(True),
    "workers=0: use at least 1": lambda: pl.Simulator(0),
    "respawns=-1: use at least 0": lambda: pl.Ray(4, respawns=-1),
    "timeout='x': use a number of seconds above 0": lambda: pl.Ray(4, timeout="x"),  # type: ignore[arg-type]
    "start_timeout=0: use a number of seconds above 0": lambda: pl.Ray(4, start_timeout=0),
    "period='1': use a number of seconds above 0": lambda: pl.deadline("1"),  # type: ignore[arg-type]
    "stragglers='1': use a whole number from 0 on": lambda: pl.coded("1"),  # type: ignore[arg-type]
    "steps='4': use a whole number from 1 on": lambda: pl.local_sgd("4"),  # type: ignore[arg-type]
    "Exponential got mean='1', which is not a number": lambda: pl.delays.Exponential("1"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("told", WRONG)
def test_the_refusal_says_what_was_given_and_what_to_use(told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        WRONG[told]()
    assert str(refusal.value) == told


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    assert pl.Simulator(np.int64(3)).size == 3  # type: ignore[arg-type]
