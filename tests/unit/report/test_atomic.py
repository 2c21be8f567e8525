"""Files that are written whole, and what is never written over."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import paceline as pl
from paceline.report.atomic import is_journal, whole
from paceline.report.html.page import record_of, write_page
from paceline.report.perfetto import write


def ran(path: Path) -> pl.Run:
    learner = pl.learners.Quadratic(curvature=(1.0, 0.1), batch_size=16)
    return pl.Trainer(learner, pl.sync(), pl.Simulator(2), journal=path, progress=False).fit(
        steps=3
    )


def test_the_folder_is_made_and_nothing_is_left_beside(tmp_path: Path) -> None:
    run = ran(tmp_path / "run.jsonl")
    assert run.report(tmp_path / "a" / "b" / "run.html").is_file()
    assert write(run.journal, tmp_path / "c" / "d" / "trace.json") > 0
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "run.html",
        "run.jsonl",
        "trace.json",
    ]


def test_what_was_there_is_kept_if_something_fails(tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    target.write_text("before")
    with pytest.raises(ZeroDivisionError), whole(target) as partial:
        partial.write_text("half")
        assert target.read_text() == "before"
        raise ZeroDivisionError
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["run.html"]
    with whole(target) as partial:
        partial.write_text("after")
    assert target.read_text() == "after" and os.listdir(tmp_path) == ["run.html"]


@pytest.mark.parametrize("length", [None, 40], ids=["whole", "cut off"])
def test_the_journal_of_another_run_is_not_written_over(tmp_path: Path, length: int | None) -> None:
    run, other = ran(tmp_path / "run.jsonl"), tmp_path / "other.jsonl"
    ran(other)
    other.write_bytes(other.read_bytes()[:length])
    before = other.read_bytes()
    assert is_journal(other)
    for attempt in (
        lambda: run.report(other),
        lambda: write_page(other, record_of(run.journals)),
        lambda: write(run.journal, other),
    ):
        with pytest.raises(
            FileExistsError, match=r"other.jsonl is a journal and would be overwritten"
        ):
            attempt()
    assert other.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["other.jsonl", "run.jsonl"]


def test_what_is_no_journal_may_be_written_over(tmp_path: Path) -> None:
    run, target = ran(tmp_path / "run.jsonl"), tmp_path / "trace.json"
    for _ in range(2):
        assert write(run.journal, target) > 0
        assert not is_journal(target)
    assert not is_journal(tmp_path / "nothing") and not is_journal(tmp_path)


def test_a_link_goes_on_being_one(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("before")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    with whole(tmp_path / "link.html") as partial:
        partial.write_text("after")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "after"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    with whole(tmp_path / "pipe") as partial:
        partial.write_text("page")
    reader.join(10)
    assert got == ["page"]
