"""The drawn pictures: what the scripts draw is what is committed, small and legible on a phone."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from rich.text import Text

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures"
SCRIPTS = ("architecture", "choose", "peers", "timelines")
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


def seen(svg: str) -> list[tuple[float, list[str]]]:
    """Return the part of the loop at which each frame of a film begins, and its texts."""
    root, space = ElementTree.fromstring(svg), "{http://www.w3.org/2000/svg}"
    texts = {f"#{text.get('id')}": text.text or "" for text in root.iter(f"{space}text")}
    frames = {}
    for group in root.iter(f"{space}g"):
        if group.get("class") == "frame":
            top = re.findall(r"\d+", group.attrib["transform"])[1]
            frames[top] = [texts[use.attrib["href"]] for use in group.iter(f"{space}use")]
    jumps = re.findall(r"([\d.e-]+)%\{transform:translateY\(-?(\d+)px\)\}", svg)
    assert [top for _, top in jumps] == list(frames)
    return [(float(part), frames[top]) for part, top in jumps]


def test_a_film_shows_each_frame_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    film = load(FIGURES / "film.py", monkeypatch)

    def frame(seconds: float, state: str, lost: bool = False) -> object:
        text = Text.assemble(("w0", "bold"), "  ", (state, "red"), "\n", "a < b & c")
        return film.Frame(seconds, "note", film.lines_of(text, 40), lost)

    frames = [frame(2, "idle"), frame(3, "idle"), frame(4, "gone", True), frame(6, "idle")]
    svg = film.film(frames, "a < b", "d", speed=2, hold=2)
    assert seen(svg) == [  # 2 to 6 s, and 2 s of the film at 2 s in a second
        (0, ["note", "w0", "idle", "a < b & c"]),
        (25, ["note", "w0", "gone", "a < b & c"]),
        (50, ["note", "w0", "idle", "a < b & c"]),
    ]
    assert ".strip{animation:strip 4s step-end infinite}" in svg and "2× speed" in svg
    assert svg.count(">w0<") == 1, "a cell of several frames is stored once"
    still = re.search(r'class="strip" transform="translate\(0 (-\d+)\)"', svg)
    assert still and f"25%{{transform:translateY({still[1]}px)}}" in svg, "the lost worker"
    with pytest.raises(ValueError, match="at least one"):
        film.film([], "", "")


def test_the_film_of_a_killed_host_is_small_and_complete() -> None:
    content = (FIGURES / "killed.svg").read_text()
    assert len(content.encode()) < 500_000
    assert not re.search(
        r"<script|\bon\w+=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", content
    )
    assert "@media (prefers-reduced-motion:reduce)" in content
    root = ElementTree.fromstring(content)
    assert all(root.findtext(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc"))
    frames = seen(content)
    assert len(frames) > 20 and [part for part, _ in frames] == sorted(part for part, _ in frames)
    length = re.search(r"animation:strip ([\d.]+)s", content)
    assert length and 15 <= float(length[1]) <= 25
    gone = [any(text.startswith("gone ") for text in texts) for _, texts in frames]
    assert [state for state, _ in groupby(gone)] == [False, True, False]
    steps = [int(text.split()[1]) for _, texts in frames for text in texts if text[:5] == "step "]
    lost = [step for step, away in zip(steps, gone, strict=True) if away]
    assert lost[-1] > lost[0], "the others go on"


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
