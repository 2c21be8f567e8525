"""Pictures with a light and a dark version: a page names the light one, and the site has both.

So a page is plain Markdown, with a picture, wherever else it is read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_PICTURE = re.compile(r"^!\[([^\]]*)\]\((figures/[\w-]+)-light\.svg\)$", re.M)


def both(text: str) -> str:
    """Return a page with the dark version after each light one; the theme shows one of the two."""

    def images(found: re.Match[str]) -> str:
        words, name = found.groups()
        return "\n".join(
            f"```{{image}} {name}-{version}.svg\n:alt: {words}\n:class: only-{version}\n```\n"
            for version in ("light", "dark")
        )

    return _PICTURE.sub(images, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = both(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
