"""Files that are written whole or not at all, and never over a journal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HEADER = re.compile(rb'\s*\{\s*"format"\s*:\s*\d')  # also of one that is cut off
_LOOKED_AT = 64  # bytes; a header of a resumed run has megabytes


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """Give the name of a file to be written, which takes the place of `path` if all went well.

    Its folder is made. What was there before is kept if something fails. A pipe or a device is
    written to as it is.
    """
    target = Path(path).resolve()  # a link goes on being one
    if target.exists() and not target.is_file():
        yield target
        return
    if is_journal(target):
        raise FileExistsError(
            f"{path} is a journal, and would be lost; give another name, or remove it first"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")  # nobody opens half a file
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def is_journal(path: Path) -> bool:
    """Tell whether a file begins as journals do."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return _HEADER.match(file.read(_LOOKED_AT)) is not None
