"""Scripts run as Python would run them, and their trainers are trained or measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import paceline as pl

Script = Callable[[str], Path]
Paceline = Callable[..., Result]


def test_a_script_is_run_and_its_run_summed_up(paceline: Paceline, script: Script) -> None:
    then = "print(__name__, sys.argv[1:], sys.path[0])\ntrainer.fit(steps=5)\n"
    path = script(then)
    argv, first = list(sys.argv), sys.path[0]
    found = paceline("train", path, "1", "--json", "-x")
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert lines[0] == f"__main__ ['1', '--json', '-x'] {path.parent}"
    assert lines[1].startswith("5 steps in ")
    assert Path("k1.jsonl").exists()
    assert (sys.argv, sys.path[0]) == (argv, first)


def test_a_script_that_sums_up_itself_is_not_repeated(paceline: Paceline, script: Script) -> None:
    found = paceline("train", script("print(trainer.fit(steps=5).summary())\n"))
    assert found.stdout.count("5 steps in ") == 1


def test_figures_are_alone_on_stdout(paceline: Paceline, script: Script) -> None:
    found = paceline("train", "--json", script("print('hello')\ntrainer.fit(steps=5)\n"))
    assert found.exit_code == 0
    (run,) = json.loads(found.stdout)["runs"]
    assert run["steps"] == 5 and run["policy"] == "k_sync(2)" and run["journal"] == "k2.jsonl"
    assert run["dollars"] is None
    assert "hello" in found.stderr


def test_trainers_are_shown_live_if_asked_for(paceline: Paceline, script: Script) -> None:
    then = "trainer.fit(steps=5)\n"
    assert "ended: " not in paceline("train", script(then)).stderr
    found = paceline("train", "--live", "--json", script(then))
    assert found.exit_code == 0 and json.loads(found.stdout)["runs"][0]["steps"] == 5
    assert "ended: 5 steps taken" in found.stderr  # in lines, as this is no terminal
    assert "ended: " not in paceline("train", script(then)).stderr  # nobody looks on any more


def test_without_rich_the_script_is_not_begun(
    paceline: Paceline, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    found = paceline("train", "--live", script("print('begun')\n"))
    assert found.exit_code == 1 and "begun" not in found.stdout
    assert "pip install 'paceline[live]'" in found.stderr


def test_exit_codes_are_the_scripts(paceline: Paceline, script: Script) -> None:
    found = paceline("train", script("trainer.fit(steps=5)\nsys.exit(7)\n"))
    assert found.exit_code == 7 and "5 steps" in found.stdout
    found = paceline("train", script("pass\n"))
    assert found.exit_code == 0 and "without a call of Trainer.fit()" in found.stderr


def test_an_error_of_the_script_has_its_own_traceback(paceline: Paceline, script: Script) -> None:
    path = script("def broken():\n    raise LookupError('no data')\nbroken()\n")
    found = paceline("train", path)
    assert found.exit_code == 1
    assert found.stderr.startswith("Traceback") and "LookupError: no data" in found.stderr
    assert "runpy" not in found.stderr and "scripts.py" not in found.stderr
    assert "runpy" in paceline("--debug", "train", path).stderr
    found = paceline("train", script("trainer.fit(steps=\n"))
    assert found.exit_code == 1 and "SyntaxError" in found.stderr


def test_a_model_that_is_lost_is_a_failure(paceline: Paceline, script: Script) -> None:
    then = (
        "learner = pl.learners.Quadratic((1.0,), lr=1e200, batch_size=12)\n"
        "pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=9)\n"
    )
    with pytest.warns(RuntimeWarning):
        found = paceline("train", script(then))
    assert found.exit_code == 1
    assert "the loss is" in found.stdout


def test_what_fit_would_train_is_measured(paceline: Paceline, script: Script) -> None:
    path = script(
        "print('hello')\n"
        "try:\n    trainer.fit(steps=5)\n"
        "except Exception:\n    print('swallowed')\n"
        "print('trained')\n"
    )
    args = ("--seconds", "40", "-o", "fleet.json", "--prices-per-hour", "w0=1,w1=1,w2=0.25")
    found = paceline("profile", path, "3", *args)
    assert found.exit_code == 0, found.stderr
    assert found.stdout.splitlines()[0].split() == [
        *("worker", "s/sample", "latency", "ms", "down", "MB/s", "up", "MB/s", "law")
    ]
    assert "hello" in found.stderr
    assert "swallowed" not in found.stderr and "trained" not in found.stderr
    assert not Path("k3.jsonl").exists()
    profile = pl.planner.Profile.load("fleet.json")
    assert [round(w.compute.mean, 3) for w in profile.workers.values()] == [0.1, 0.1, 1.0]
    assert profile.prices.per_hour == {"w0": 1.0, "w1": 1.0, "w2": 0.25}


def test_a_profile_as_json(paceline: Paceline, script: Script) -> None:
    path = script("print('hello')\ntrainer.fit(steps=5)\n")
    found = paceline("profile", "--json", "--seconds", "40", path)
    data = json.loads(found.stdout)
    assert data["file"] == "fleet.json" and Path("fleet.json").exists()
    assert data["workers"]["w2"]["seconds_per_sample"] == pytest.approx(1.0)
    assert data["workers"]["w2"]["bytes_per_second_up"] is None  # no limit


def test_a_trainer_that_plans_is_caught_before_it_does(paceline: Paceline, script: Script) -> None:
    path = script(
        "trainer = pl.Trainer(learner, 'auto', engine, target=0.5, seed=3)\n"
        "print('made')\ntrainer.fit(steps=5)\nprint('planned')\n"
    )
    found = paceline("profile", "--seconds", "40", path)
    assert found.exit_code == 0, found.stderr
    assert "made" in found.stderr and "planned" not in found.stderr


def test_options_after_dashes_are_the_scripts(paceline: Paceline, script: Script) -> None:
    path = script("print(sys.argv[2:])\ntrainer.fit(steps=5)\n")
    found = paceline("profile", "--seconds", "40", path, "--", "2", "-o", "mine", "--seconds", "1")
    assert "['-o', 'mine', '--seconds', '1']" in found.stderr
    assert Path("fleet.json").exists()


def test_what_cannot_be_measured_is_said(paceline: Paceline, script: Script) -> None:
    found = paceline("profile", script("pass\n"))
    assert found.exit_code == 1 and "ended without a call of Trainer.fit()" in found.stderr
    found = paceline("profile", script("1 / 0\n"))
    assert found.exit_code == 1 and "ZeroDivisionError" in found.stderr
    found = paceline("profile", script("trainer.fit(steps=5)\n"), "--seconds", "0.01")
    assert found.exit_code == 1 and "measure for longer" in found.stderr
    found = paceline("profile", script("pass\n"), "-o", "nowhere/fleet.json")
    assert found.exit_code == 1 and "the folder nowhere does not exist" in found.stderr
    found = paceline("profile", script("pass\n"), "--prices-per-hour", "cheap")
    assert found.exit_code == 2 and "is no price" in found.stderr
