"""What a page shows is read as a reader would, and told apart from what was printed."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tests.console import Command, Edit, File, check, loose, read, snippets

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
        (["157 … 161.4 s"], 0.0),
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
        (["157 steps in w161.4 s"], inf),
        (["  waiting    75% of it"], inf),  # is not the first line
        (["…", "  cost      10000 s", "more"], inf),
        (["157 … 161.4"], inf),  # says where it ends
    ],
)
def test_not_alike(shown: list[str], tolerance: float) -> None:
    printed = ["157 steps in 161.4 s", "  waiting    75% of it", "  cost      10000 s"]
    with pytest.raises(AssertionError, match="the page shows"):
        check(shown, printed, tolerance)


MEASURED = """ok    python 3.11
ok    2 cores

worker  s/sample  law
w0         0.003  Pareto
…
w7         0.030  Pareto
saved fleet.json""".splitlines()
RANKED = """to a loss of 1:
   policy          seconds
 1 ringmaster(32)     10.1
 2 k_async(2)        10.63
…
10 OnlyWorkers(['w0'])     14.09
ringmaster(32) takes 10.1 s""".splitlines()


@pytest.mark.parametrize(
    ("shown", "old", "new"),
    [
        (MEASURED, "…", "w3 0.004 Pareto"),
        (MEASURED, "0.003  Pareto", "0.0042  ShiftedExponential"),
        (MEASURED, "ok    2 cores", "warning  8 cores\n  use fewer"),
        (RANKED, "k_async(2) ", "rennala(16)"),
        (RANKED, "OnlyWorkers(['w0'])", "k_async(4)"),
        (RANKED, "ringmaster(32)", "ringmaster(16)"),
    ],
)
def test_what_differs_by_machine_is_left_open(shown: list[str], old: str, new: str) -> None:
    real = "\n".join(shown)
    assert old in real
    check(loose(shown), real.replace(old, new).splitlines(), inf)


@pytest.mark.parametrize(
    ("shown", "old", "new"),
    [
        (MEASURED, "python", "snake"),
        (MEASURED, "law", "model"),
        (MEASURED, "\nw7", "\nv7"),
        (MEASURED, "saved", "wrote"),
        (MEASURED, "fleet.json", "fleet.json; next: plan"),
        (RANKED, "ringmaster(32)", "k_async(3)"),
        (RANKED, "\n 1", "\n"),
        (RANKED, "takes", "needs"),
    ],
)
def test_what_does_not_is_compared(shown: list[str], old: str, new: str) -> None:
    real = "\n".join(shown)
    assert old in real
    with pytest.raises(AssertionError, match="the page shows"):
        check(loose(shown), real.replace(old, new).splitlines(), inf)
