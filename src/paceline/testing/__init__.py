"""Public fakes and real faults, to test policies and software that is built on Paceline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.testing.scripted import Done, ScriptedEngine, transcript
from paceline.testing.slow import SlowWorkers, Throttle

if TYPE_CHECKING:
    from paceline.testing.histories import History, check_books, legal_histories

__all__ = [
    "Done",
    "History",
    "ScriptedEngine",
    "SlowWorkers",
    "Throttle",
    "check_books",
    "legal_histories",
    "transcript",
]


def __getattr__(name: str) -> Any:
    if name in ("History", "check_books", "legal_histories"):
        try:
            return getattr(importlib.import_module("paceline.testing.histories"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"paceline.testing.{name} needs hypothesis: pip install 'paceline[testing]'"
            ) from error
    raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
