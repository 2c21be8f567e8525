"""Figures in the documentation equal those of the benchmark runs in `benchmarks/results`.

A comment before a table names where its numbers stand:

    <!-- figures
    rows: dense; no communication
    columns: messages_star/star/ROW/mixed/accuracy; -; messages_star/star/ROW/saved * 100
    -->

A row of the table begins with any text. The numbers of its other cells follow the columns. `ROW` is
the entry of `rows` for that line, and `-` a number that no run has. A path is a file's name and the
keys of its `figures`. Code spans do not count. A line of prose is checked as a row.

A table with figures has such a comment, or its section names the command that measures it. The
comment `<!-- derived: how -->` before a table exempts numbers that are not measured.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
MARKER = re.compile(r"<!-- figures\nrows: (?P<rows>.*)\ncolumns: (?P<columns>.*)\n-->\n\n?")
NUMBER = re.compile(r"-?\d+(?:\.(?P<decimals>\d+))?(?:e(?P<power>-?\d+))?")
TITLE = re.compile(r"#{1,6} ")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", re.M | re.S)
TABLE = re.compile(r"(?:^[ \t]*\|.*\n?)+", re.M)
SOURCE = re.compile(r"<!-- (?:figures\n|derived: \S)[^>]*-->\s*\Z")  # directly before a table
COMMAND = re.compile(r"`(?:python|make|paceline) [^`]+`")
NAMED = re.compile(r"`[^`]*`|\]\([^)]*\)|arXiv \d+\.\d+|\b\d{4}\.\d{5}\b|<!--.*?-->")
UNIT = "%|times|points|seconds|s|ms|MB|GB|KB|kB|steps|samples|ranks|hours|minutes|cores?"
FIGURE = re.compile(rf"\d\.\d|\d ?(?:{UNIT})(?![\w-])|^\W*\d[\d,]*(?!\w)(?!\W+[a-z])")
Result = dict[str, Any]


@cache
def result(name: str) -> Result:
    found: Result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def value(path: str) -> float:
    """Return the figure at a path, times the factor that may follow it."""
    path, _, factor = path.partition(" * ")
    name, *keys = path.strip().split("/")
    found: Any = result(name)["figures"]
    for key in keys:
        found = found[int(key) if isinstance(found, list) else key]
    return float(found) * float(factor or 1)


def numbers(text: str) -> list[tuple[float, float]]:
    """Return the numbers of a text, each with half a unit of its last digit."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", re.sub(r"`[^`]*`", "", text))
    return [
        (float(each[0]), 0.5 * 10.0 ** (int(each["power"] or 0) - len(each["decimals"] or "")))
        for each in NUMBER.finditer(plain)
    ]


def wrong(page: str) -> list[str]:
    """Return what differs between the marked tables of a page and the results."""
    found = []
    for marker in MARKER.finditer(page):
        rows = marker["rows"].split("; ")
        lines = page[marker.end() :].split("\n\n")[0].splitlines()
        shown = lines[2:] if lines[0].startswith("|") else lines
        if len(shown) != len(rows):
            found.append(f"{len(rows)} rows in the comment, {len(shown)} in the table: {lines[0]}")
            continue
        for row, line in zip(rows, shown, strict=True):
            cells = line.split("|", 2)[2] if line.startswith("|") else line
            paths = [each.replace("ROW", row) for each in marker["columns"].split("; ")]
            printed = numbers(cells)
            if len(printed) != len(paths):
                found.append(f"{len(paths)} columns in the comment, {len(printed)} numbers: {line}")
                continue
            for path, (number, half) in zip(paths, printed, strict=True):
                if path != "-" and abs(value(path) - number) > half * (1 + 1e-9):
                    found.append(f"{number:g} is printed, {path} is {value(path):g}: {line}")
    return found


def measured(table: str) -> bool:
    """Return whether a cell of a table, other than the first of its row, has a figure.

    A figure is a number with decimals or a unit, or a number alone.
    """
    rows = [row.strip().strip("|").split("|")[1:] for row in table.splitlines()[2:]]
    return any(FIGURE.search(NAMED.sub("", cell).strip()) for row in rows for cell in row)


def unsourced(page: str) -> list[str]:
    """Return the first lines of tables that have figures, and neither a comment nor a command.

    A command counts from the last title before the table up to the paragraph after it.
    """
    page = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page)
    found = []
    for table in TABLE.finditer(page):
        if not measured(table[0]):
            continue
        before, after = page[: table.start()], page[table.end() :].lstrip("\n").split("\n\n")[0]
        titles = [each.start() for each in re.finditer(rf"^{TITLE.pattern}", before, re.M)]
        section = before[titles[-1] if titles else 0 :]
        near = "" if TITLE.match(after) else after
        if not (SOURCE.search(section) or COMMAND.search(section + table[0] + near)):
            found.append(table[0].splitlines()[0].strip())
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_table_of_figures_names_its_source(page: Path) -> None:
    assert not unsourced(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_figures_equal_those_of_the_runs(page: Path) -> None:
    assert not wrong(page.read_text())


def test_every_result_is_used_and_none_is_of_a_quick_run() -> None:
    marked = " ".join(
        marker["columns"].replace("ROW", row)
        for page in PAGES
        for marker in MARKER.finditer(page.read_text())
        for row in marker["rows"].split("; ")
    )
    for path in sorted(ROOT.glob("benchmarks/results/*.json")):
        assert f"{path.stem}/" in marked, f"no table of the documentation has {path.name}"
        assert not result(path.stem)["quick"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    figures = {"star": {"dense": {"accuracy": 82.14, "saved": 0.9874, "loss": 2.3e-5}}}
    monkeypatch.setattr(f"{__name__}.result", lambda name: {"figures": figures})
    columns = "run/star/ROW/accuracy; -; run/star/ROW/saved * 100; run/star/ROW/loss"
    table = "| method | accuracy | kept | bytes | loss |\n|---|---|---|---|---|\n"
    row = "| dense `TopK(0.5)` 7 | **82.1** | 1,000 MB, `k=3` | 98.7 % | 2.3e-5 |"
    return f"<!-- figures\nrows: dense\ncolumns: {columns}\n-->\n\n{table}{row}\n\nText 5.\n"


def test_a_changed_figure_is_found(example: str) -> None:
    assert wrong(example) == []
    assert "82.3 is printed" in wrong(example.replace("82.1", "82.3"))[0]
    assert "98.8 is printed" in wrong(example.replace("98.7", "98.8"))[0]
    assert wrong(example.replace("2.3e-5", "2.4e-5"))
    assert "4 columns" in wrong(example.replace("98.7 %", "a lot"))[0]
    assert "1 rows" in wrong(example.replace("\n\nText", "\n| int8 | 1 | 2 | 3 | 4 |\n\nText"))[0]


def test_a_missing_key_is_found(example: str) -> None:
    with pytest.raises(KeyError, match="int8"):
        wrong(example.replace("rows: dense", "rows: int8"))


TIMES = "| policy | seconds |\n|---|---|\n| `sync()` | 12.5 |\n"
SHAPES = "| policy | waits for |\n|---|---|\n| `k_sync(3)` | k results (arXiv 1803.01113) |\n"


def test_a_table_without_a_source_is_found() -> None:
    assert unsourced(f"# Title\n\n{TIMES}") == ["| policy | seconds |"]
    assert unsourced(f"# By `python run.py`\n\n# Title\n\n{TIMES}\n# By `make bench`\n")
    assert unsourced(f"# Title\n\n```console\n`python run.py`\n```\n\n{TIMES}")
    assert unsourced(f"# Title\n\n<!-- derived: how -->\n\n{SHAPES}\n{TIMES}")
    assert unsourced(f"# Title\n\n<!-- derived: -->\n\n{TIMES}")
    for cell in ("12", "**1.2** times", "3 %", "about 12 ms", "4 to 7 points", "1,000 ± 20"):
        assert unsourced(TIMES.replace("12.5", cell)), cell


def test_a_command_or_a_comment_is_a_source() -> None:
    assert not unsourced(f"# By `python run.py --quick`\n\n{TIMES}")
    assert not unsourced(f"# Title\n\nSeconds (`make bench`):\n\n{TIMES}\n{TIMES}")
    assert not unsourced(f"# Title\n\n{TIMES}\n`paceline plan` measures it.\n")
    assert not unsourced(f"# Title\n\n<!-- derived: bytes over bandwidth -->\n\n{TIMES}")
    assert not unsourced(TIMES.replace("12.5", "`python run.py`: 12.5"))


def test_a_table_of_words_needs_no_source(example: str) -> None:
    assert not unsourced(f"# Title\n\n{SHAPES}")
    assert not unsourced(f"# Title\n\n```text\n{TIMES}```\n")
    assert not unsourced(example)
    assert unsourced(example.replace("<!-- figures", "<!-- other"))
