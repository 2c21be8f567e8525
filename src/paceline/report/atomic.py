"""Files that are written completely or not at all, and never over a journal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HEADER = re.compile(rb'\s*\{\s*"format"\s*:\s*\d')  # also matches a header that is cut off
_LOOKED_AT = 64  # bytes; the header of a resumed run may have megabytes


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """Provide the path of a file to write; it replaces `path` when the block succeeds.

    The folder is created. If the block fails, an existing file stays as it is. For a pipe or a
    device, the path is the target itself.
    """
    target = Path(path).resolve()  # a link stays a link
    if target.exists() and not target.is_file():
        yield target
        return
    if is_journal(target):
        raise FileExistsError(
            f"{path} is a journal and would be overwritten; give another name, or remove it first"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")  # so that no reader opens half a file
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def is_journal(path: Path) -> bool:
    """Return whether a file begins like a journal."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return _HEADER.match(file.read(_LOOKED_AT)) is not None
