"""The drawn pictures: what the scripts draw is what is committed, small and legible on a phone."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures"
SCRIPTS = ("architecture", "choose", "timelines")
PHONE = 360  # pixels that a phone has for a picture
SMALLEST = 9  # pixels of a text there


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script by its path, with its folder to import from."""
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_draw_what_is_committed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(FIGURES / f"{name}.py", monkeypatch).main(tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == [f"{name}-dark.svg", f"{name}-light.svg"]
    for path in drawn:
        told = f"{path.name} is old: run python docs/figures/{name}.py"
        assert path.read_text() == (FIGURES / path.name).read_text(), told


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_is_small_and_legible(name: str, theme: str) -> None:
    content = (FIGURES / f"{name}-{theme}.svg").read_text()
    assert len(content) < 60_000
    root = ElementTree.fromstring(content)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("aria-label")
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert texts
    for text in texts:
        assert float(text.attrib["font-size"]) * PHONE / width >= SMALLEST, text.text
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height


def test_the_timelines_are_those_of_the_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(FIGURES / "timelines.py", monkeypatch)
    for _, _, policy in module.POLICIES:
        journal = module.ran(policy)
        found = module.timeline(journal)
        text = "\n".join(map(str, journal))
        assert len(found.updates) == len(re.findall(r"event=Stepped", text))
        cancelled = sum(bar.fate == "wasted" for bar in found.bars)
        assert cancelled == len(re.findall(r"Cancel\(|Discard\(", text))
        lanes: dict[str, float] = {}
        for bar in found.bars:  # a worker has one task at a time
            assert bar.begin >= lanes.get(bar.task.worker, 0.0)
            lanes[bar.task.worker] = max(bar.begin, bar.end)


def test_the_site_has_both_versions_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    both = load(DOCS / "pictures.py", monkeypatch).both
    assert both("![a](figures/b-light.svg)") == (
        "```{image} figures/b-light.svg\n:alt: a\n:class: only-light\n```\n\n"
        "```{image} figures/b-dark.svg\n:alt: a\n:class: only-dark\n```\n"
    )
    assert both("![a](figures/b.svg)") == "![a](figures/b.svg)"
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"figures/([\w-]+)-light\.svg", page.read_text()):
            assert (FIGURES / f"{name}-dark.svg").exists()
            assert f"{name}-dark.svg" in both(page.read_text()), f"{page.name}: on its own line"
