"""Public fakes and real faults: for testing policies, and what is built on Paceline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.testing.scripted import Done, ScriptedEngine, transcript
from paceline.testing.slow import SlowWorkers, Throttle

if TYPE_CHECKING:
    from paceline.testing.histories import History, check_books, legal_histories
    from paceline.testing.storms.cases import Case
    from paceline.testing.storms.storm import Violation, play

__all__ = [
    "Case",
    "Done",
    "History",
    "ScriptedEngine",
    "SlowWorkers",
    "Throttle",
    "Violation",
    "check_books",
    "legal_histories",
    "play",
    "transcript",
]


def __getattr__(name: str) -> Any:
    if name == "Case":  # which needs PyTorch, as the next ones do Ray
        return getattr(importlib.import_module("paceline.testing.storms.cases"), name)
    if name in ("Violation", "play"):
        return getattr(importlib.import_module("paceline.testing.storms.storm"), name)
    if name in ("History", "check_books", "legal_histories"):
        try:
            return getattr(importlib.import_module("paceline.testing.histories"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"paceline.testing.{name} needs hypothesis: pip install 'paceline[testing]'"
            ) from error
    raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
