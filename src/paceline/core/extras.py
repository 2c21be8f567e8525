"""The check for Ray, which `pip install paceline` leaves out and `paceline[ray]` brings.

The folders that import Ray call it in their `__init__.py`, so no import of Ray comes before it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NoReturn

INSTALL_RAY = "pip install 'paceline[ray]'"
_MODULES = {"ray": "Ray is not installed", "grpc": "Ray is installed without its extra `default`"}


class MissingRay(ImportError):
    """Ray, or the part of it that Paceline needs, is not installed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}: {INSTALL_RAY}, or train on pl.Simulator(…), which does not need it"
        )
        self.reason = reason


def require_ray() -> None:
    """Raise `MissingRay` unless Ray is installed. It is not imported, which takes a second."""
    for module, reason in _MODULES.items():
        if not _is_installed(module):
            raise MissingRay(reason)


def stand_in(name: str, error: MissingRay) -> type:
    """Return a class that raises the error when it is called.

    Listing the names of the package (`help`, `from paceline import *`) then works without Ray.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise MissingRay(error.reason)

    contents = {"__doc__": f"Unavailable: {error}.", "__module__": "paceline", "__new__": refuse}
    return type(name, (), contents)


def _is_installed(module: str) -> bool:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        return False
    return found is not None and found.origin is not None  # None: only a folder of that name
