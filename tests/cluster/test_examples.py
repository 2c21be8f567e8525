"""The examples run as a user runs them, and Ctrl-C ends a run with what was learned."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from fashion_mnist import FASHION_MNIST

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
needs_data = pytest.mark.skipif(
    not Path(FASHION_MNIST).exists() and not os.environ.get("CI"),  # in CI it must be there
    reason="Debian's package dataset-fashion-mnist is absent",
)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where an optional package is absent; in CI it must be there."""
    absent = find_spec(package) is None and not os.environ.get("CI")
    return pytest.mark.skipif(absent, reason=f"the package {package} is not installed")


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_data
def test_quickstart_learns_in_spite_of_a_slow_worker() -> None:
    output = run("examples/quickstart.py")
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) > 75
    assert "0 lost" in output


@needs_data
def test_simulate_ranks_the_policies() -> None:
    rows = [line.split() for line in run("examples/simulate.py").splitlines()[1:]]
    loss = {row[0]: float(row[3]) for row in rows}
    assert loss["k_sync(7)"] < loss["sync()"] and loss["rennala(8)"] < loss["sync()"]


@needs("lightning")
@pytest.mark.long
def test_a_lightning_module_learns_in_spite_of_a_slow_worker() -> None:
    output = run("examples/lightning_digits.py")
    losses = re.search(r"loss before ([\d.]+), after ([\d.]+)", output)
    assert losses and float(losses[2]) < 0.3 * float(losses[1])
    accuracy = re.search(r"Reader: test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) > 75


@needs("transformers")
@pytest.mark.long
def test_a_model_of_transformers_learns_and_stays_tied() -> None:
    output = run("examples/transformers_tiny.py")
    losses = re.search(r"test loss before ([\d.]+), after ([\d.]+)", output)
    assert losses and float(losses[2]) < 0.3 * float(losses[1])
    assert "share their weights: True" in output


@needs("peft")
@pytest.mark.long
@pytest.mark.parametrize("engine", [[], ["--ray"]])
def test_an_adapter_learns_and_plain_peft_loads_it(engine: list[str]) -> None:
    output = run("examples/lora.py", *engine)
    assert re.search(r"accuracy of the base \d%, with the adapter (100|9\d)%", output)
    assert re.search(r"accuracy of the last checkpoint (100|9\d)%", output)
    size = re.search(r"^(\d+) bytes are sent each way in a step; the base has (\d+)$", output, re.M)
    assert size and int(size[1]) < int(size[2]) / 4


@pytest.mark.long
def test_a_gpt_learns_on_ray() -> None:
    output = run("examples/gpt.py", "--ray", "--steps", "40")
    losses = re.search(r"test loss before ([\d.]+), after ([\d.]+)", output)
    assert losses and float(losses[2]) < 0.8 * float(losses[1])


def test_a_plain_loop_learns() -> None:
    assert final_losses(run("examples/plain_loop.py"))[0] < 0.3


def test_the_same_loop_learns_in_two_processes() -> None:
    command = [sys.executable, "-m", "paceline", "launch", "--workers", "2", "session_loop.py"]
    done = subprocess.run(
        command, cwd=ROOT / "examples", capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = final_losses(done.stdout)
    assert one == other < 0.3
    assert "started again" not in done.stderr


def final_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"final loss ([\d.]+)", output)]


INTERRUPTED = """
import paceline as pl
from tests.conftest import make_learner
saves = pl.Checkpoints({path!r}, every=1000)
trainer = pl.Trainer(make_learner(), pl.k_sync(1), pl.Ray(workers=2), checkpoints=saves)
run = trainer.fit(seconds=100)
print("reason:", run.reason, "steps:", run.steps)
"""


def test_ctrl_c_ends_cleanly_with_what_was_learned(tmp_path: Path) -> None:
    script = INTERRUPTED.format(path=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,  # a group of its own, as a terminal gives it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:  # training has begun
            if line.startswith("step "):
                break
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode == 0, errors
    found = re.search(r"reason: interrupted by the user steps: (\d+)", output)
    assert found and int(found[1]) >= 1
    assert (tmp_path / f"step-{int(found[1]):08d}" / "manifest.json").exists()
