"""Without Ray: all else works, and each use of Ray says in one sentence how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.extras import INSTALL_RAY, MissingRay, require_ray, stand_in

SENTENCE = f"{INSTALL_RAY}, or train on pl.Simulator(…), which does not need it"
HIDE = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuses())
"""
TRAIN = "pl.Trainer(pl.learners.Quadratic(), {policy}, {engine}, progress=False).fit(steps=2)\n"


def python(folder: Path, *arguments: str, hidden: tuple[str, ...] = ("ray", "grpc")) -> str:
    """Return what a Python without these modules prints; its child processes lack them too."""
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


def test_every_module_works_or_says_the_sentence(tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, paceline\n"
        "from paceline.core.extras import MissingRay\n"
        "told = []\n"
        "for found in pkgutil.walk_packages(paceline.__path__, 'paceline.', onerror=lambda _: 0):\n"
        "    if found.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(found.name)\n"
        "    except MissingRay: told.append(found.name)\n"
        "print(*told, 'ray' in sys.modules)"
    )
    *needy, imported = python(tmp_path, "-c", f"import sys\n{code}").split()
    assert imported == "False"
    folders = {"paceline.engines.ray", "paceline.gossip.ray", "paceline.sessions"}
    assert set(needy) == {*folders, "paceline.testing.hosts"}


@pytest.mark.parametrize(
    "use",
    [
        "pl.Ray(workers=2)",
        "pl.session(None, None)",
        "pl.local_steps(None, None)",
        "pl.trackers.Prometheus()",
        "from paceline.engines.ray.pool import Pool",
        "from paceline.gossip.ray.driver import RayGossip",
        TRAIN.format(policy="pl.gossip.Gossip(pl.gossip.ring(3))", engine="pl.Ray(3)"),
    ],
)
def test_a_use_of_ray_names_the_command(use: str, tmp_path: Path) -> None:
    printed = python(tmp_path, "-c", f"import paceline as pl\n{use}")
    last = "paceline.core.extras.MissingRay: Ray is not installed: " + SENTENCE
    assert printed.splitlines()[-1] == last
    assert "ModuleNotFoundError" not in printed


def test_ray_without_its_extra_is_told_apart(tmp_path: Path) -> None:
    printed = python(tmp_path, "-c", "import paceline as pl\npl.Ray(2)", hidden=("grpc",))
    assert f"Ray is installed without its extra `default`: {SENTENCE}" in printed


def test_the_names_of_the_package_can_be_listed(tmp_path: Path) -> None:
    code = (
        "from paceline import *\nimport inspect, paceline\n"
        "print(sum(1 for name, _ in inspect.getmembers(paceline) if name in paceline.__all__))\n"
        "print(len(paceline.__all__), isinstance(Simulator(2), Ray), Ray.__doc__)"
    )
    found, listed, instance, *about = python(tmp_path, "-c", code).split()
    assert found == listed and int(found) > 30
    assert instance == "False"
    assert " ".join(about) == f"Unavailable: Ray is not installed: {SENTENCE}."


def test_the_simulator_trains(tmp_path: Path) -> None:
    code = "import paceline as pl, paceline.ddp\nprint({run}.steps)"
    run = TRAIN.strip().format(policy="pl.sync()", engine="pl.Simulator(2)")
    assert python(tmp_path, "-c", code.format(run=run)) == "2\n"


def test_a_command_prints_one_sentence(tmp_path: Path) -> None:
    run = TRAIN.format(policy="pl.sync()", engine="pl.Ray(2)")
    (tmp_path / "train.py").write_text(f"import paceline as pl\n{run}")
    printed = python(tmp_path, "-m", "paceline", "train", "train.py")
    assert printed == f"Error: Ray is not installed: {SENTENCE}\n"
    assert SENTENCE in python(tmp_path, "-m", "paceline", "env")


def test_the_doctor_names_the_command(tmp_path: Path) -> None:
    printed = python(tmp_path, "-m", "paceline", "doctor")
    assert printed.splitlines() == ["error    Ray is not installed", f"{'':8} -> {INSTALL_RAY}"]


def test_a_folder_called_ray_is_not_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(MissingRay, match="Ray is not installed"):
        require_ray()


def test_a_stand_in_raises_with_any_arguments() -> None:
    found = stand_in("Ray", MissingRay("Ray is not installed"))
    assert found.__name__ == "Ray" and found.__module__ == "paceline"
    with pytest.raises(MissingRay, match="pip install"):
        found(workers=4, address="auto")
