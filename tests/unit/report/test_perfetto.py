"""Traces of journals: whether the format is kept, and whether they tell what happened."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.core.journal import Entry, Header, Journal
from paceline.core.protocol import Cancel, Finished, Joined, Left, Start, Step, Stop, Task, Work
from paceline.gossip.metrics import meter_of
from paceline.report.metrics import Meter
from paceline.report.perfetto import events, write

GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("*.jsonl"))
KEYS = {  # that each kind of event has beside ph, name, pid, tid and ts
    "X": {"dur", "cat", "args"},
    "i": {"s"},
    "C": {"args"},
    "M": {"args"},
}


def load(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert trace["displayTimeUnit"] == "ms"
    found: list[dict[str, Any]] = trace["traceEvents"]
    check(found)
    return found


def check(found: list[dict[str, Any]]) -> None:
    """Check what the Trace Event Format asks for."""
    slices = defaultdict(list)
    for event in found:
        assert {"ph", "name", "pid", "tid", "ts"} | KEYS[event["ph"]] <= set(event)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            end = round(event["ts"] + event["dur"], 3)
            slices[event["pid"], event["tid"]].append((event["ts"], end))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    for spans in slices.values():  # slices of a thread nest or follow each other; these follow
        spans.sort()
        for (_, end), (begin, _) in pairwise(spans):
            assert begin >= end
    threads = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in found if e["ph"] != "M"} <= threads


def threads(found: list[dict[str, Any]]) -> dict[str, int]:
    """Return the thread of each name, in the order in which they are shown."""
    order = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    names = {e["args"]["name"]: e["tid"] for e in found if e["name"] == "thread_name"}
    return dict(sorted(names.items(), key=lambda item: order[item[1]]))


@pytest.mark.parametrize("journal", GOLDEN, ids=lambda path: path.stem)
def test_every_task_of_a_journal_is_in_its_trace_once(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    count = write(journal, target)
    found = load(target)
    assert len(found) == count
    loaded = Journal.load(journal)
    meter = Meter.begin(loaded.header)
    tasks = len(meter.unsettled())
    for entry in loaded:
        meter.observe(entry)
    drawn = [e for e in found if e["ph"] == "X" and e["cat"] == "task"]
    assert len({e["args"]["task"] for e in drawn}) == len(drawn) == meter.started + tasks
    fates = Counter(e["name"] for e in drawn)
    assert (fates["cancelled"], fates["lost"]) == (meter.cancelled, meter.lost)
    assert fates["used"] <= meter.used  # some results are kept, and used more than once
    steps = [e for e in found if e["ph"] == "X" and e["cat"] == "step"]
    assert [e["name"] for e in steps] == [f"step {n:.0f}" for n in meter.columns["step"]]
    assert sum(e["dur"] for e in drawn if e["name"] != "unfinished") > 0


def test_a_run_by_hand() -> None:
    def task(id: int, worker: str, since: float) -> Task:
        return Task(id, worker, Work(), 0, since, 4, 4 * id)

    first, second, third = task(0, "w10", 0.0), task(1, "w2", 0.5), task(2, "w10", 1.0)
    entries = [
        Entry(0.0, Joined("w10"), (Start(first),)),
        Entry(0.5, Joined("w2"), (Start(second),)),
        Entry(1.0, Finished(0, 4, 0.9, {"loss": 0.25}), (Start(third),)),
        Entry(2.0, Finished(1, 4, 1.5, {"loss": 0.75}), (Step({0: 0.5, 1: 0.5}), Cancel(2))),
        Entry(3.0, Left("w2"), (Stop("enough"),)),
    ]
    found = list(events(Header("Gather()", 8, {"policy": "k_sync(2)"}), entries))
    check(found)
    place = threads(found)
    assert list(place) == ["steps", "w2", "w10"]
    name = next(e["args"]["name"] for e in found if e["name"] == "process_name")
    assert name == "k_sync(2)"
    drawn = {e["args"]["task"]: e for e in found if e["ph"] == "X" and e["cat"] == "task"}
    told = {id: (e["name"], e["tid"], e["ts"], e["dur"]) for id, e in drawn.items()}
    assert told == {
        0: ("used", place["w10"], 0.0, 1e6),
        1: ("used", place["w2"], 5e5, 1.5e6),
        2: ("cancelled", place["w10"], 1e6, 1e6),
    }
    assert drawn[0]["args"] == {"task": 0, "version": 0, "samples": 4, "step": 1, "staleness": 0}
    assert drawn[2]["args"] == {"task": 2, "version": 0, "samples": 4}
    (step,) = (e for e in found if e["ph"] == "X" and e["cat"] == "step")
    assert (step["ts"], step["dur"]) == (0.0, 2e6)
    assert step["args"] == {"results": 2, "staleness": 0.0, "samples": 8, "loss": 0.5}
    counters = {e["name"]: e["args"][e["name"]] for e in found if e["ph"] == "C"}
    busy, there = 2.0 + 1.5, 2.0 + 1.5
    assert counters == {
        **{"results": 2, "staleness": 0.0, "workers": 2, "loss": 0.5},
        "waiting": 1 - busy / there,
    }
    instants = [(e["name"], e["tid"], e["ts"]) for e in found if e["ph"] == "i"]
    assert instants == [
        ("joined", place["w10"], 0.0),
        ("joined", place["w2"], 5e5),
        ("lost", place["w2"], 3e6),
        ("ended: enough", place["steps"], 3e6),
    ]


def test_tasks_at_a_time_are_side_by_side() -> None:
    several = [Task(id, "w0", Work(), 0, 0.0, 4, 4 * id) for id in range(2)]
    later = Task(2, "w0", Work(), 0, 1.0, 4, 8)
    entries = [
        Entry(0.0, Joined("w0"), tuple(map(Start, several))),
        Entry(1.0, Finished(0, 4), (Start(later),)),  # takes the lane that is free
    ]
    found = list(events(Header("", 8), entries))
    check(found)
    place = threads(found)
    assert list(place) == ["steps", "w0", "w0 (2)"]
    drawn = {e["args"]["task"]: (e["name"], e["tid"]) for e in found if e["ph"] == "X"}
    assert drawn == {
        0: ("unfinished", place["w0"]),
        1: ("unfinished", place["w0 (2)"]),
        2: ("unfinished", place["w0"]),
    }


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    trainer = pl.Trainer(pl.learners.TimingOnly(4), pl.sync(), pl.Simulator(2), progress=False)
    run = trainer.fit(steps=3)
    write(run.journal, tmp_path / "trace.json")
    found = load(tmp_path / "trace.json")
    assert {e["name"] for e in found if e["ph"] == "C"} == {
        *("results", "waiting", "staleness", "workers")
    }


def test_nodes_of_a_decentralized_run_are_processes(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        pl.learners.Quadratic((1.0, 0.3), batch_size=6),
        pl.gossip.Gossip(pl.gossip.ring(3)),
        pl.Simulator(3),
        progress=False,
        journal=tmp_path / "run.jsonl",
    )
    run = trainer.fit(steps=4)
    write(list(run.journals.values()), tmp_path / "memory.json", meter_of)
    write(sorted(tmp_path.glob("run-w*.jsonl")), tmp_path / "files.json.gz", meter_of)
    found = load(tmp_path / "memory.json")
    assert found == load(tmp_path / "files.json.gz")
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert [name.partition(":")[0] for name in names] == ["w0", "w1", "w2"]
    assert {e["pid"] for e in found} == {1, 2, 3}


def test_a_resumed_run_begins_where_it_was(tmp_path: Path) -> None:
    def trainer() -> pl.Trainer:
        return pl.Trainer(
            pl.learners.Quadratic((1.0, 0.3), batch_size=6),
            pl.k_async(2),
            pl.Simulator(3, pl.delays.Exponential(0.1), unit=1),
            progress=False,
            checkpoints=pl.Checkpoints(tmp_path / "saved", every=5),
        )

    trainer().fit(steps=5)
    resumed = trainer().resume(tmp_path / "saved").fit(steps=9)
    write(resumed.journal, tmp_path / "trace.json")
    steps = [e for e in load(tmp_path / "trace.json") if e.get("cat") == "step"]
    assert [e["name"] for e in steps] == ["step 6", "step 7", "step 8", "step 9"]
    assert steps[0]["ts"] == pytest.approx(resumed.meter.began * 1e6, abs=1e-3)


def test_half_a_trace_is_never_left(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(GOLDEN[0].read_text().splitlines()[0] + "\nnot json\n")
    target = tmp_path / "trace.json"
    target.write_text("of before")
    with pytest.raises(ValueError, match="Expecting value"):
        write(bad, target)
    assert target.read_text() == "of before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "trace.json"]
