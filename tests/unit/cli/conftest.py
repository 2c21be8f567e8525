"""A script, a journal and a profile to try commands on, all on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import paceline as pl
from paceline.cli.app import app

SCRIPT = """
import sys
import paceline as pl

learner = pl.learners.Quadratic((1.0, 0.3) * 4, noise=0.3, lr=0.2, batch_size=12)
engine = pl.Simulator(3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), pl.delays.Fixed(1.0)], unit=1)
k = int(sys.argv[1]) if len(sys.argv) > 1 else 2
trainer = pl.Trainer(learner, pl.k_sync(k), engine, progress=False, journal=f"k{k}.jsonl")
"""

Paceline = Callable[..., Result]


@pytest.fixture
def paceline() -> Paceline:
    """Call the command."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a script that has made a trainer, in the folder that is then the current one."""
    monkeypatch.chdir(tmp_path)

    def write(then: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(SCRIPT + then)
        return path

    return write


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Write the journal of a short run."""
    path = tmp_path / "run.jsonl"
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=12)
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    prices = pl.Prices(per_hour=36.0)
    pl.Trainer(learner, pl.k_sync(2), engine, journal=path, prices=prices, progress=False).fit(
        steps=20
    )
    return path


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the profile of three workers, one of them slow."""
    learner = pl.learners.Quadratic((1.0, 0.3) * 4, noise=0.3, lr=0.2, batch_size=12)
    engine = pl.Simulator(
        3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), pl.delays.Fixed(1.0)], unit=1
    )
    path = tmp_path_factory.mktemp("fleet") / "fleet.json"
    pl.profile(learner, engine, seconds=60, prices=pl.Prices(per_hour=1.0)).save(path)
    return path
