"""Whether a process sees a folder of another one: both are on one host, or share a file system.

A path may exist on two hosts and name two folders. So the driver writes a random token into the
folder, and a server reads it there.
"""

from __future__ import annotations

import secrets
from pathlib import Path

TOKEN = "token"
"""The name of the file with the token."""


def offer(folder: Path) -> str:
    """Write a token into a folder; return it."""
    token = secrets.token_hex(16)
    (folder / TOKEN).write_text(token)
    return token


def check_seen(folder: Path, token: str) -> None:
    """Raise OSError if a folder of this name has another token here, or none."""
    file = folder / TOKEN
    if file.stat().st_size != len(token) or file.read_text() != token:
        raise FileNotFoundError(f"{folder} is another folder here than it is for the driver")


def answer(folder: Path, token: str, name: str) -> None:
    """Write the token beside the driver's, under a name."""
    check_seen(folder, token)
    (folder / f"{TOKEN}-{name}").write_text(token)


def is_answered(folder: Path, token: str, name: str) -> bool:
    """Return whether an answer has arrived in the driver's folder."""
    file = folder / f"{TOKEN}-{name}"
    return file.is_file() and file.read_text() == token
