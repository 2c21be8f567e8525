"""The journal: in memory and in files, whole and torn."""

from __future__ import annotations

import json
import random
from math import inf, nan
from pathlib import Path

import pytest

from paceline.core.coordinator import Coordinator
from paceline.core.journal import (
    Entry,
    Header,
    Journal,
    dump_entry,
    parse_entry,
    read_entries,
    same,
)
from paceline.core.protocol import (
    Evaluated,
    Finished,
    Interrupted,
    Joined,
    Prices,
    SetTimer,
    Start,
    Step,
    Stop,
    Task,
    Work,
)
from paceline.policies.named import k_sync

TASK = Task(0, "w0", Work(samples=4), 0, 0.0, 4, 0)
ENTRIES = [
    Entry(0.0, Joined("w0"), (Start(TASK), SetTimer("t", 1.5))),
    Entry(1.25, Finished(0, 4, 1.25, {"loss": inf}), (Step({0: 1.0}),)),
    Entry(2.0, Joined("w1"), ()),
    Entry(2.0, Interrupted("é"), (Stop("é"),)),
]


def fill(journal: Journal) -> Journal:
    for entry in ENTRIES:
        journal.append(entry)
    return journal


def test_in_memory() -> None:
    journal = fill(Journal())
    assert len(journal) == 4
    assert list(journal) == ENTRIES
    assert list(journal) == ENTRIES  # more than once


def test_an_entry_is_a_line() -> None:
    line = dump_entry(ENTRIES[2])
    assert line == '{"now":2.0,"event":{"type":"Joined","worker":"w1"}}'
    for entry in ENTRIES:
        assert "\n" not in dump_entry(entry)
        assert parse_entry(dump_entry(entry)) == entry


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    path, told = tmp_path / "long.jsonl", list[float]()
    journal = Journal(Header("é"), path)
    for _ in range(200):
        fill(journal)
    journal.close()
    assert len(Journal.load(path, told.append)) == 800
    assert len(told) == 13 and told == sorted(told)  # 64 entries at a time
    assert told[-1] == path.stat().st_size


def test_saved_and_loaded(tmp_path: Path) -> None:
    header = Header("Gather(k=2)", 16, {"seed": 3}, {"policy": {}, "ledger": {"a": [1, None]}})
    journal = fill(Journal(header))
    journal.save(tmp_path / "deep" / "run.jsonl")
    back = Journal.load(tmp_path / "deep" / "run.jsonl")
    assert back == journal
    assert list(back) == ENTRIES
    assert back.header == header


def test_sizes_and_prices_are_in_the_header(tmp_path: Path) -> None:
    prices = Prices({"w0": 1.5, "w1": 0.1 + 0.2}, 0.09, idle=True)
    header = Header("sync", 8, message_bytes=4096, prices=prices)
    Journal(header, tmp_path / "run.jsonl").close()
    assert Journal.load(tmp_path / "run.jsonl").header == header
    assert Journal.load(tmp_path / "run.jsonl").header != Header("sync", 8, message_bytes=4096)


def test_a_journal_from_before_there_were_prices_is_read(tmp_path: Path) -> None:
    head = {"format": 2, "policy": "sync", "batch": 8, "about": None, "state": None}
    (tmp_path / "old.jsonl").write_text(f"{json.dumps(head)}\n{dump_entry(ENTRIES[2])}\n")
    loaded = Journal.load(tmp_path / "old.jsonl")
    assert loaded.header == Header("sync", 8, message_bytes=0, prices=Prices())
    assert list(loaded) == [ENTRIES[2]]


def test_the_header_is_the_first_line(tmp_path: Path) -> None:
    fill(Journal(Header("sync", 8), tmp_path / "run.jsonl")).close()
    first, *rest = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == {
        "format": 2,
        "policy": "sync",
        "batch": 8,
        "about": None,
        "state": None,
        "message_bytes": 0,
        "prices": {"per_hour": 0.0, "per_gigabyte": 0.0, "idle": False},
        "tiles": [],
    }
    assert rest == [dump_entry(entry) for entry in ENTRIES]


def test_in_a_file_it_lives_on_disk_alone(tmp_path: Path) -> None:
    journal = fill(Journal(path=tmp_path / "run.jsonl"))
    assert len(journal) == 4
    assert list(journal) == ENTRIES  # while it is still being written
    assert not journal._entries
    (tmp_path / "run.jsonl").write_text('{"format": 2}\n' + dump_entry(ENTRIES[2]) + "\n")
    assert list(journal) == [ENTRIES[2]]
    journal.close()


def test_it_can_be_read_after_closing(tmp_path: Path) -> None:
    journal = fill(Journal(path=tmp_path / "run.jsonl"))
    journal.close()
    journal.close()
    assert list(journal) == ENTRIES
    assert journal == fill(Journal())


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    fill(Journal(path=path)).close()
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (ends[-1], ends[-2] + 1, ends[-2] + 5):  # in and before the last line
        path.write_bytes(whole[:cut])
        assert list(Journal.load(path)) == ENTRIES[:3]
    path.write_bytes(whole[: ends[0] + 1])
    assert len(Journal.load(path)) == 0


def test_it_may_forget(tmp_path: Path) -> None:
    journal = fill(Journal(keep=False))
    assert len(journal) == 4
    assert list(journal) == []
    written = fill(Journal(path=tmp_path / "run.jsonl", keep=False))
    assert list(written) == ENTRIES  # what is in a file is not in memory anyway
    written.close()


@pytest.mark.parametrize(
    "first", ['{"format": 1, "policy": ""}', '{"policy": "sync"}', "[]", '"format"', "1"]
)
def test_another_format_is_refused(tmp_path: Path, first: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(first + "\n")
    with pytest.raises(ValueError, match=r"other.jsonl is not a journal of format 2"):
        Journal.load(path)


def test_a_forged_entry_builds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"format": 2}\n{"now":0.0,"event":{"type":"os.system","command":"true"}}\n')
    with pytest.raises(ValueError, match=r"unknown type 'os.system'"):
        Journal.load(path)


def test_equality() -> None:
    journal = fill(Journal(Header("one")))
    assert journal == fill(Journal(Header("another")))  # entries count, not where they come from
    shorter = Journal()
    for entry in ENTRIES[:3]:
        shorter.append(entry)
    assert journal != shorter
    shorter.append(Entry(2.0, Interrupted("é"), ()))
    assert journal != shorter
    assert journal != ENTRIES


def test_saving_onto_itself_loses_nothing(tmp_path: Path) -> None:
    journal = fill(Journal(path=tmp_path / "run.jsonl"))
    journal.save(tmp_path / "." / "run.jsonl")
    assert list(journal) == ENTRIES
    journal.close()
    journal.save(tmp_path / "run.jsonl")
    assert list(journal) == ENTRIES
    assert Journal.load(tmp_path / "run.jsonl") == journal


def test_a_journal_with_a_nan_equals_what_was_saved_of_it(tmp_path: Path) -> None:
    journal = Journal()
    journal.append(Entry(1.0, Finished(0, 4, 1.0, {"loss": float("nan")}), ()))
    journal.save(tmp_path / "run.jsonl")
    assert Journal.load(tmp_path / "run.jsonl") == journal


def test_the_state_of_a_coordinator_goes_into_the_header(tmp_path: Path) -> None:
    first = Coordinator(k_sync(1), 8)
    first.handle(0.0, Joined("w0"))
    first.handle(1.0, Joined("w1"))
    header = Header("Gather(k=1)", 8, None, first.state())
    Journal(header, tmp_path / "run.jsonl").close()
    second = Coordinator(k_sync(1), 8)
    state = Journal.load(tmp_path / "run.jsonl").header.state
    assert state is not None
    second.load(state)
    finished = Finished(1, 8)
    assert second.handle(2.0, finished) == first.handle(2.0, finished)
    assert second.state() == first.state()


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(Header(), path)
    for at in range(600):
        journal.append(Entry(float(at), Joined(f"w{at}"), ()))
    journal.close()
    lines = path.read_text().splitlines(keepends=True)
    lines[399] = lines[399][:20] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"run.jsonl, line 400: "):
        Journal.load(path)


def test_a_line_that_is_no_entry_is_named_and_those_before_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    fill(Journal(Header(), path)).close()
    for wrong in ('{"now":1.0}', "7", '{"now":1.0,"event":{"type":"Finished"}}'):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:3], wrong, *lines[4:]]) + "\n")
        found = []
        with pytest.raises(ValueError, match=r"run.jsonl, line 4: damaged"):
            for entry in read_entries(path):
                found.append(entry)
        assert found == ENTRIES[:2]


def test_whatever_is_damaged_a_journal_is_read_or_refused_by_name(tmp_path: Path) -> None:
    path, rng = tmp_path / "run.jsonl", random.Random(1)
    fill(Journal(Header("é", tiles=(3, 4)), path)).close()
    whole = path.read_bytes()
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        at = rng.randrange(len(damaged))
        match rng.randrange(3):
            case 0:
                damaged[at] = rng.randrange(256)
            case 1:
                del damaged[at : at + rng.randint(1, 40)]
            case 2:
                damaged[at:at] = damaged[: rng.randint(1, 40)]
        path.write_bytes(damaged)
        try:
            Journal.load(path)
        except ValueError:
            refused += 1
    assert refused > 1000


def test_metrics_of_any_name_and_value() -> None:
    entry = Entry(2.0, Evaluated(1, {"accuracy": nan, "type": 1.0}, "max"), ())
    assert same(parse_entry(dump_entry(entry)), entry)
