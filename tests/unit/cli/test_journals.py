"""Journals are reported, compared and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import paceline as pl

Paceline = Callable[..., Result]


def train(path: Path, policy: pl.policies.Gather) -> pl.Run:
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=12)
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    trainer = pl.Trainer(learner, policy, engine, journal=path, progress=False)
    return trainer.fit(steps=20)


def test_a_report_is_the_summary_of_the_run(paceline: Paceline, tmp_path: Path) -> None:
    run = train(tmp_path / "a.jsonl", pl.k_sync(2))
    found = paceline("report", tmp_path / "a.jsonl")
    first, *rest, instead = found.stdout.splitlines()
    assert first.startswith("k_sync(2) on Simulator(workers=3")
    assert run.summary().splitlines() == [*rest, f"  journal   {tmp_path / 'a.jsonl'}"]
    assert instead.startswith("  instead   ")


def test_a_report_says_what_would_have_been_faster(paceline: Paceline, tmp_path: Path) -> None:
    slow = pl.Simulator(3, [pl.delays.Fixed(seconds) for seconds in (0.1, 0.1, 0.2)], unit=1)
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=24)
    trainer = pl.Trainer(learner, pl.sync(), slow, journal=tmp_path / "a.jsonl", progress=False)
    trainer.fit(steps=20)
    told = paceline("report", tmp_path / "a.jsonl", "-o", tmp_path / "a.html").stdout
    shares = "“sync(), placement=BySpeed()” would have taken about "
    assert f"  instead   {shares}" in told
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert f"<strong>What to change.</strong> {shares}" in page


def test_a_report_as_json(paceline: Paceline, journal: Path) -> None:
    data = json.loads(paceline("report", journal, "--json").stdout)
    assert data["steps"] == 20 and data["ended"] == "20 steps taken"
    assert data["dollars"] == pytest.approx(data["busy_seconds"] / 100)
    assert data["samples"] == 240


def test_a_journal_that_is_cut_off_is_reported_as_far_as_it_goes(
    paceline: Paceline, journal: Path
) -> None:
    text = journal.read_text()
    journal.write_text(text[: 2 * len(text) // 3])
    found = paceline("report", journal)
    assert "(ended: not yet, or the journal is cut off)" in found.stdout


def test_a_report_of_a_run_without_a_main_node(paceline: Paceline, tmp_path: Path) -> None:
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=12)
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    policy = pl.gossip.Gossip(pl.gossip.ring(3))
    path = tmp_path / "g.jsonl"
    pl.Trainer(learner, policy, engine, journal=path, progress=False).fit(steps=5)
    found = paceline("report", tmp_path / "g-w0.jsonl")
    assert found.exit_code == 0, found.stderr
    assert " steps of 1 node in " in found.stdout


def test_runs_side_by_side(paceline: Paceline, tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    train(paths[0], pl.k_sync(2))
    train(paths[1], pl.sync())
    head, *rows = paceline("compare", *paths).stdout.splitlines()
    names = ["journal", "policy", "steps", "seconds", "loss", "samples/s", "waiting", "bytes"]
    assert head.split() == [*names, "dollars"]
    assert [row.split()[1] for row in rows] == ["k_sync(2)", "sync()"]
    assert [row.split()[-1] for row in rows] == ["–", "–"]
    data = json.loads(paceline("compare", "--json", *paths).stdout)
    assert [run["journal"] for run in data["runs"]] == [str(path) for path in paths]


@pytest.mark.parametrize(
    "policy",
    ["k_sync(2)", "bandit(2)", "asynchronous()", "ringmaster(4)", "sync(), placement=BySpeed()"],
)
def test_a_replay_is_the_same(paceline: Paceline, tmp_path: Path, policy: str) -> None:
    from paceline.cli.expressions import parse

    path = tmp_path / "a.jsonl"
    train(path, parse(policy))
    for args in ([], ["--policy", policy]):
        found = paceline("replay", path, *args)
        assert found.exit_code == 0, found.output
        assert found.stdout.startswith("the same: all ")


def test_where_a_replay_differs(paceline: Paceline, journal: Path) -> None:
    found = paceline("replay", journal, "--policy", "rennala(2)")
    assert found.exit_code == 3
    first, recorded, replayed = found.stdout.splitlines()
    assert first.startswith("not the same: at entry 4 of ")
    assert recorded == "  journal  no command"
    assert replayed.startswith("  replay   Start(task=Task(id=3, ")
    found = paceline("replay", journal, "--policy", "rennala(2)", "--json")
    assert found.exit_code == 3
    data = json.loads(found.stdout)
    assert (data["same"], data["entry"], data["recorded"]) == (False, 4, "no command")


def test_a_resumed_run_is_replayed(paceline: Paceline, tmp_path: Path) -> None:
    def trainer() -> pl.Trainer:
        learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=12)
        engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
        saves = pl.Checkpoints(tmp_path / "saved", every=5)
        path = tmp_path / "a.jsonl"
        return pl.Trainer(
            learner, pl.k_sync(2), engine, journal=path, progress=False, checkpoints=saves
        )

    trainer().fit(steps=10)
    trainer().resume(tmp_path / "saved").fit(steps=20)
    path = tmp_path / "a-10.jsonl"
    assert paceline("replay", path).exit_code == 0
    assert paceline("replay", path, "--policy", "k_sync(2)").exit_code == 0
    found = paceline("replay", path, "--policy", "k_sync(3)")
    assert found.exit_code == 1 and "continues a run of" in found.stderr


def test_a_journal_that_no_trainer_wrote(paceline: Paceline, tmp_path: Path) -> None:
    coordinator = pl.protocol.Coordinator(pl.sync(), journal=pl.Journal(path=tmp_path / "a.jsonl"))
    coordinator.handle(0.0, pl.protocol.Joined("w0"))
    coordinator.journal.close()
    found = paceline("replay", tmp_path / "a.jsonl", "--policy", "sync()")
    assert found.exit_code == 0, found.stderr


def test_policies_that_have_no_text_must_be_given(paceline: Paceline, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=12)
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    pl.Trainer(learner, pl.coded(1), engine, journal=path, progress=False).fit(steps=5)
    found = paceline("replay", path)
    assert found.exit_code == 1 and "give it as --policy" in found.stderr
    assert paceline("replay", path, "--policy", "coded(1)").exit_code == 0


def test_a_file_that_is_no_journal_is_named(paceline: Paceline, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for text in (
        "",
        "[1]\n",
        '{"format": 9}\n',
        '{"format": 2, "wings": 2}\n',
        '{"format": 2}\n{}\n',
    ):
        path.write_text(text)
        for command in ("report", "compare", "replay"):
            found = paceline(command, path)
            assert found.exit_code == 1
            assert "a.jsonl is not a journal" in found.stderr


def test_no_command_overwrites_a_journal(
    paceline: Callable[..., Result], journal: Path, script: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(text := journal.read_text())
    for command in (
        ("report", journal, "-o", other),
        ("report", journal, "-o", journal),
        ("export", journal, "-o", other),
        ("profile", script("trainer.fit(steps=5)"), "-o", other),
    ):
        done = paceline(*command)
        assert done.exit_code == 1
        assert "is a journal and would be overwritten; give -o another name" in done.stderr
        assert other.read_text() == journal.read_text() == text
    done = paceline("plan", journal, "--target", "0.5")
    assert done.exit_code == 1
    assert "`paceline profile SCRIPT -o fleet.json`" in done.stderr
