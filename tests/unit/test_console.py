"""What a page shows is read as a reader would, and told apart from what was printed."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tests.console import Command, Edit, File, check, read, snippets

PAGE = """# Page

```python
shown = 1
```

## First

Save this as `a.py`, and
see what it does:

```python
x = 1
y = 2
```

```diff
-y = 2
+y = 3
```

```console
$ python a.py
3 lines
…
$ echo done
```
"""


def test_a_page_is_files_edits_and_commands(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    file, edit, *commands = read(page)
    assert file == File("a.py", "x = 1\ny = 2\n")
    assert isinstance(edit, Edit)
    assert commands == [
        Command("python a.py", ("3 lines", "…"), "First"),
        Command("echo done", (), "First"),
    ]
    assert snippets(page) == ["shown = 1\n"]
    (tmp_path / "a.py").write_text(file.text)
    edit.apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 3\n"
    with pytest.raises(AssertionError, match="has no such lines"):
        edit.apply(tmp_path)


@pytest.mark.parametrize(
    ("shown", "tolerance"),
    [
        (["157 steps in 161.4 s", "  waiting   75% of it"], 0.0),
        (["157 steps in 160 s"], 0.02),
        (["1 steps in 2 s"], inf),
        (["157 steps…"], 0.0),
        (["…", "  cost      1e+04 s"], 0.0),
        (["157 steps in 161.4 s", "…", "  cost …"], 0.0),
    ],
)
def test_alike(shown: list[str], tolerance: float) -> None:
    printed = ["157 steps in 161.4 s", "  waiting    75% of it", "  cost      10000 s"]
    check(shown, printed, tolerance)


@pytest.mark.parametrize(
    ("shown", "tolerance"),
    [
        (["157 steps in 161.5 s"], 0.0),
        (["157 steps in 150 s"], 0.02),
        (["157 steps in 161.4"], inf),
        (["157 turns in 161.4 s"], inf),
        (["  waiting    75% of it"], inf),  # is not the first line
        (["…", "  cost      10000 s", "more"], inf),
    ],
)
def test_not_alike(shown: list[str], tolerance: float) -> None:
    printed = ["157 steps in 161.4 s", "  waiting    75% of it", "  cost      10000 s"]
    with pytest.raises(AssertionError, match="the page shows"):
        check(shown, printed, tolerance)
