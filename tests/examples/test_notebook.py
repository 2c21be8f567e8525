"""The notebook runs from top to bottom, and prints what is saved in it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.console import check

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"
absent = not all(map(find_spec, ("ipykernel", "nbclient", "nbformat")))
pytestmark = [
    pytest.mark.skipif(absent and not os.environ.get("CI"), reason="nbclient is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of Jupyter's own packages
]


def test_the_notebook_prints_what_is_saved_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # nothing into the tester's home
        monkeypatch.setenv(name, str(tmp_path / name))
    saved = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(saved)
    fresh = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(fresh, timeout=120, kernel_name="python3", resources=place).execute()
    printed = 0
    for before, now in zip(saved.cells, fresh.cells, strict=True):
        shown, found = (
            "".join(each.text for each in cell.get("outputs", ())).splitlines()
            for cell in (before, now)
        )
        assert len(shown) == len(found)
        check(shown, found, tolerance=0.05)  # torch's arithmetic differs between machines
        printed += len(found)
    assert printed > 20
    assert (tmp_path / "sync.html").stat().st_size > 10_000
