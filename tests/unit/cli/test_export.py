"""`paceline export`: the trace it writes, and how it refuses."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Paceline = Callable[..., Result]


def test_a_trace_is_written(paceline: Paceline, journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    done = paceline("export", journal, "-o", target)
    assert done.exit_code == 0, done.stderr
    found = json.loads(target.read_text())["traceEvents"]
    assert (
        done.stdout == f"wrote {target}: {len(found)} events; open it at https://ui.perfetto.dev\n"
    )
    assert sum(event["name"].startswith("step ") for event in found) == 20


def test_several_journals_and_compression(
    paceline: Paceline, journal: Path, tmp_path: Path
) -> None:
    target = tmp_path / "trace.json.gz"
    done = paceline("export", "--json", "--format", "perfetto", journal, journal, "-o", target)
    data = json.loads(done.stdout)
    found = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert data == {"journals": [str(journal)] * 2, "output": str(target), "events": len(found)}
    assert {event["pid"] for event in found} == {1, 2}


def test_what_cannot_be_exported(paceline: Paceline, journal: Path, tmp_path: Path) -> None:
    text = journal.read_text()
    done = paceline("export", journal, "-o", journal)
    assert done.exit_code == 1
    assert "is a journal and would be overwritten" in done.stderr
    assert journal.read_text() == text
    other = tmp_path / "other.txt"
    other.write_text("[]\n")
    done = paceline("export", other, "-o", tmp_path / "trace.json")
    assert done.exit_code == 1
    assert f"not a journal: {other} (" in done.stderr
    assert not (tmp_path / "trace.json").exists()
    assert paceline("export", journal).exit_code == 2
