"""Plans and forecasts are those of the library, printed or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import paceline as pl

Paceline = Callable[..., Result]


def test_a_plan_is_printed(paceline: Paceline, fleet: Path) -> None:
    found = paceline("plan", fleet, "--target", "0.5", "--learning-rate", "0.2")
    assert found.exit_code == 0, found.stderr
    plan = pl.plan(pl.planner.Profile.load(fleet), target=0.5, learning_rate=0.2)
    assert found.stdout == f"{plan}\n"


def test_a_plan_as_json(paceline: Paceline, fleet: Path) -> None:
    args = ("--target", "0.5", "--minimize", "dollars", "--workers", "2", "--json")
    data = json.loads(paceline("plan", fleet, *args).stdout)
    assert data["minimize"] == "dollars"
    dollars = [entry["dollars"] for entry in data["entries"]]
    assert dollars[0] <= 1.03 * min(dollars)
    assert {"policy", "learning_rate", "seconds", "risk"} <= set(data["entries"][0])


def test_rows_of_a_plan_can_be_simulated(paceline: Paceline, fleet: Path) -> None:
    data = json.loads(paceline("plan", fleet, "--target", "0.5", "--json").stdout)
    for entry in data["entries"]:
        args = ("--target", "0.5", "--learning-rate", entry["learning_rate"], "--seeds", "1")
        found = paceline("simulate", fleet, "--policy", entry["policy"], *args)
        assert found.exit_code == 0, found.stderr


def test_a_forecast(paceline: Paceline, fleet: Path) -> None:
    args = ("--target", "0.5", "--learning-rate", "0.2", "--json")
    quick, slow = (
        json.loads(paceline("simulate", fleet, "--policy", policy, *args).stdout)
        for policy in ("k_sync(2)", "sync()")
    )
    expected = pl.forecast(
        pl.k_sync(2), pl.planner.Profile.load(fleet), learning_rate=0.2, target=0.5
    )
    assert quick["seconds"] == expected.seconds
    assert slow["seconds"] > 2 * quick["seconds"]
    found = paceline("simulate", fleet, "--policy", "k_sync(2)", *args[:-1], "--codec", "Half()")
    assert found.stdout.startswith("k_sync(2) to a loss of 0.5: ")


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["--policy", "exit()"], 2, "'exit' is unknown"),
        (["--policy", "k_sync(9)"], 1, "k=9"),
        (["--policy", "k_sync(2)", "--codec", "k_sync(2)"], 2, "'k_sync' is unknown"),
    ],
)
def test_what_cannot_be_simulated(
    paceline: Paceline, fleet: Path, args: list[str], code: int, told: str
) -> None:
    found = paceline("simulate", fleet, *args, "--target", "0.5", "--learning-rate", "0.2")
    assert found.exit_code == code
    assert told in found.stderr and not found.stdout


@pytest.fixture
def adamw(tmp_path: Path) -> Path:
    """Write the profile of a script that trains with AdamW."""
    workers = {
        f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(each))
        for i, each in enumerate((0.1, 1.0))
    }
    path = tmp_path / "adamw.json"
    pl.planner.Profile(workers, 12, 400, optimizer={"name": "AdamW", "lr": 0.01}).save(path)
    return path


def test_other_optimizers_than_sgd_are_not_forecast_as_sgd(paceline: Paceline, adamw: Path) -> None:
    args = ("--target", "0.5", "--learning-rate", "0.01")
    found = paceline("plan", adamw, *args)
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("with the least time per step; the steps to a loss of 0.5 are")
    data = json.loads(paceline("plan", adamw, *args, "--json").stdout)
    assert "optimizer is AdamW" in data["unknown"]
    assert {entry["seconds"] for entry in data["entries"]} == {None}
    assert data["entries"][0]["per_step"]["seconds"] > 0
    told = paceline("simulate", adamw, "--policy", "sync()", *args).stdout
    assert told.startswith("sync(): 6 s a step [6-6], ")
    assert "steps to a loss are unknown" in told and "theory" not in told


def test_an_older_profile_is_read_with_a_note(
    paceline: Paceline, fleet: Path, tmp_path: Path
) -> None:
    data = json.loads(fleet.read_text())
    del data["optimizer"]
    path = tmp_path / "older.json"
    path.write_text(json.dumps({**data, "format": 1}))
    args = ("--policy", "sync()", "--target", "0.5", "--learning-rate", "0.2", "--seeds", "1")
    told = paceline("simulate", path, *args).stdout
    assert "note: this profile is of an older version and does not name its optimizer" in told


def test_a_file_that_is_no_profile_is_named(paceline: Paceline, tmp_path: Path) -> None:
    for text in ("", "[]", '{"format": 1}', "\x00"):
        path = tmp_path / "fleet.json"
        path.write_text(text)
        found = paceline("plan", path, "--target", "0.5")
        assert found.exit_code == 1
        assert "fleet.json is not a profile" in found.stderr
    assert "paceline profile" in found.stderr


def test_both_tell_how_far_they_are(fleet: Path) -> None:
    profile, told = pl.planner.Profile.load(fleet), list[float]()
    pl.forecast(pl.sync(), profile, learning_rate=0.2, target=0.5, seeds=4, on_progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]
    told.clear()
    pl.plan(profile, target=0.5, learning_rate=0.2, on_progress=told.append)
    assert told[0] == 0.0 and told == sorted(told) and 0.6 < told[-1] < 1.0
