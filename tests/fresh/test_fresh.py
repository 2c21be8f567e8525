"""Installs into new environments: README and the ten minutes, literally; and without Ray.

Each test has a virtual environment with PyTorch of its own: minutes, and gigabytes of disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

import pytest

from tests.console import Command, Edit, File, check, loose, read, snippets

ROOT = Path(__file__).parents[2]
MEASURED = ("paceline doctor", "paceline profile", "paceline plan")  # differ by machine and scipy
REAL = {"Install", "Check the machine", "Run it on real processes"}  # as this machine is
PACKAGES = 15  # that `pip install paceline` may bring beside PyTorch's own
SCRIPT = """
from functools import partial
import torch, paceline as pl
from torch.utils.data import TensorDataset

x = torch.randn(512, 20)
learner = pl.TorchLearner(
    torch.nn.Linear(20, 1),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    partial(torch.optim.SGD, lr=0.1),
    TensorDataset(x, x.sum(dim=1, keepdim=True)),
    batch_size=64,
)
engine = pl.Simulator(workers=4, delays=pl.delays.Pareto(0.1, 3.0))
pl.Trainer(learner, pl.k_sync(3), engine, journal="run.jsonl", progress=False).fit(steps=40)
"""

pytestmark = [pytest.mark.fresh, pytest.mark.timeout(900)]


class Bash:
    """One session, to which commands are typed."""

    def __init__(self, folder: Path, errors: Path) -> None:
        kept = ("HOME", "PATH", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        environment = {key: value for key, value in os.environ.items() if key in kept}
        environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        environment |= {
            "PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt"),
            "PIP_COMPILE": "0",  # a minute for modules of which most are never imported
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # no token file in the tester's home
        }
        self.folder, self._errors = folder, errors
        reading, writing = os.pipe()
        with errors.open("wb") as told:
            self._process = subprocess.Popen(
                ["bash", f"/dev/fd/{reading}"],  # so that no command can read the ones after it
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=told,
                pass_fds=[reading],
                text=True,
                start_new_session=True,
            )
        os.close(reading)
        self._typed = os.fdopen(writing, "w")

    def type(self, line: str) -> list[str]:
        """Run a line as it is; return what it printed. Raises if it failed."""
        mark = secrets.token_hex(8)
        self._typed.write(f"{line}\necho; echo {mark} $? $PWD\n")
        self._typed.flush()
        printed: list[str] = []
        assert self._process.stdout is not None
        for got in self._process.stdout:
            if got.startswith(mark):
                _, code, folder = got.split(maxsplit=2)
                self.folder = Path(folder.strip())
                told = "\n".join(printed) + self._errors.read_text()[-4000:]
                assert code == "0", f"{line} ended with {code}:\n{told}"
                return printed[:-1] if printed[-1:] == [""] else printed
            printed.append(got.rstrip("\n"))
        raise AssertionError(f"bash ended at {line}:\n{self._errors.read_text()[-4000:]}")

    def close(self) -> None:
        """End the session, and whatever was started in it and is still there."""
        self._typed.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def bash(folder: Path, errors: Path) -> Iterator[Bash]:
    session = Bash(folder, errors)
    try:
        yield session
    finally:
        session.close()


def copy_checkout(to: Path) -> Path:
    """Copy what git knows, or would add: what a clone of this tree has."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """Copy the checkout, and leave no gigabytes behind: pytest keeps the folders of three runs."""
    yield copy_checkout(tmp_path / "paceline")
    shutil.rmtree(tmp_path / "paceline" / ".venv", ignore_errors=True)


def test_the_readme_and_the_ten_minutes(checkout: Path, tmp_path: Path) -> None:
    steps = read(checkout / "docs" / "start.md")
    install = [step.line for step in read(checkout / "README.md") if isinstance(step, Command)]
    typed = [step.line for step in steps if isinstance(step, Command)]
    assert install and install == typed[: len(install)], "README and start.md install differently"

    with bash(checkout, tmp_path / "errors.txt") as session:
        for step in steps:
            match step:
                case File(name, text):
                    (session.folder / name).write_text(text)
                case Edit():
                    step.apply(session.folder)
                case Command(line, shown, section):
                    printed = session.type(line)
                    lines = loose(shown) if line.startswith(MEASURED) else shown
                    # What is planned follows from what was measured.
                    varies = section in REAL or line.startswith(MEASURED) or "planned" in line
                    check(lines, printed, tolerance=inf if varies else 0.02)
        assert "w7 was the slowest" in (session.folder / "sync.html").read_text()  # as it says
        (example,) = snippets(checkout / "README.md")
        (tmp_path / "readme.py").write_text(example)
        printed = session.type(f"python {tmp_path / 'readme.py'}")
        assert " steps in " in printed[0]
        imported = session.type("python -c 'import paceline; print(paceline.__file__)'")
        assert str(checkout / ".venv") in imported[0]


def test_without_ray(checkout: Path, tmp_path: Path) -> None:
    """The light install trains on the simulator, plans, reports, and names the command for Ray."""
    with bash(checkout, tmp_path / "errors.txt") as session:
        session.type("python3 -m venv .venv && . .venv/bin/activate && pip install torch")
        of_torch = set(session.type("pip list --format=freeze"))
        session.type("pip install .")
        added = set(session.type("pip list --format=freeze")) - of_torch
        names = {line.partition("==")[0] for line in added}
        assert "paceline" in names and len(names) <= PACKAGES, names
        assert not names & {"ray", "grpcio"}

        session.type("mkdir ../light && cd ../light")
        (session.folder / "train.py").write_text(SCRIPT)
        assert "train" in "\n".join(session.type("paceline --help"))
        assert session.type("paceline train train.py")[0].startswith("40 steps in ")
        session.type("paceline report run.jsonl -o run.html")
        assert "<html" in (session.folder / "run.html").read_text()
        session.type("paceline profile train.py -o fleet.json")
        planned = session.type("paceline plan fleet.json --target 0.5 --learning-rate 0.1")
        assert planned[0] == "to a loss of 0.5, with the least time:"
        session.type("python -c 'import paceline.ddp; paceline.ddp.ProportionalSampler'")
        for use in ("paceline doctor", "python -c 'import paceline as pl; pl.Ray(workers=2)'"):
            told = "\n".join(session.type(f"({use}; echo ended with $?) 2>&1"))
            assert told.endswith("ended with 1")
            assert "Ray is not installed" in told and "pip install 'paceline[ray]'" in told
            assert "ModuleNotFoundError" not in told
