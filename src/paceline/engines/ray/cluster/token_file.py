"""The token file of a cluster: where Ray looks for it, and whether other users may read it.

Ray writes the file with default permissions, so that on most machines every user can read it.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.core.logs import logger_of

logger = logger_of(__name__)

_warned: set[Path] = set()


def source() -> str:
    """Return the variable or file from which Ray reads the token, without the token itself."""
    path = file()
    return "RAY_AUTH_TOKEN" if path is None else str(path)


def file() -> Path | None:
    """Return the file of the token, whether it exists or not; None if a variable holds it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else _default()


def warn_if_readable() -> None:
    """Warn, once for each file, if others on this machine may read the token."""
    path = file()
    if path is None or path in _warned:
        return
    with suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            _warned.add(path)
            logger.warning(
                "other users of this machine can read the cluster's token, and run code with it: "
                "mode %03o of %s; run chmod 600 %s",
                *(mode, path, path),
            )


def make_if_missing() -> None:
    """Write a token to Ray's default file, if there is none, readable for this user alone."""
    path = file()
    if path != _default() or path.exists():
        return
    with suppress(OSError):  # Ray reports it better
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent)  # of mode 600
        try:
            with os.fdopen(number, "w") as new:
                new.write(secrets.token_hex(32))  # as long as Ray's own
            os.link(name, path)  # atomic, and never over an existing file
        finally:
            os.unlink(name)


def _default() -> Path:
    return Path.home() / ".ray" / "auth_token"
