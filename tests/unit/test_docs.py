"""Every snippet of the README and the documentation runs, in the order of its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


PAGES = [
    "README.md",
    *(
        f"docs/{page}.md"
        for page in (
            "guide",
            "planning",
            "selection",
            "placement",
            "messages",
            "gossip",
            "ddp",
            "coding",
            "report",
        )
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert snippets
    names: dict[str, Any] = {"__name__": "snippet"}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
