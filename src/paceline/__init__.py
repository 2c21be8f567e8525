"""Trains one PyTorch model on machines that are unequal, unreliable and far apart."""

from typing import Any

import lazy_loader

from paceline.core.extras import MissingRay, stand_in

# __init__.pyi lists the names. Each is imported at first use, so the command starts quickly.
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    try:
        return _import(name)
    except MissingRay as error:
        return stand_in(name, error)


def _version() -> str:
    """Return the version that was installed; pyproject.toml takes it from the git tag."""
    from importlib import metadata  # which takes a while

    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a source tree on the path
