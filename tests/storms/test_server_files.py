"""Checkpoints that servers write beside their steps, while servers and machines are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.training import saving
from paceline.training.checkpoint import read
from paceline.training.checkpoint.background import Background
from tests.storms.processes import Call, ServerProcess, raised
from tests.storms.rolling import Rolling
from tests.storms.serial import serial
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import Weather, World

LEARNER = Rolling((1.0, 0.3, 0.1, 0.5, 0.2), noise=0.1, lr=0.04, batch_size=12)


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LEAST_BYTES", 0)


def calm(servers: int = 3, seed: int = 1) -> SimulatedRay:
    world = World(seed, Weather(), 4, 20.0, nodes=4)
    return SimulatedRay(4, world, servers=servers, start_timeout=5.0)


def train(
    engine: SimulatedRay, folder: Path, steps: int, every: int = 5, timeout: float = 600.0
) -> pl.Run:
    """Train, and check that every checkpoint has the model of its step."""
    engine.world.most = 60_000
    saves = pl.Checkpoints(folder, every=every, keep=99, timeout=timeout)
    run = pl.Trainer(LEARNER, pl.sync(), engine, checkpoints=saves, progress=False).fit(steps=steps)
    done = serial(run.journal.header, list(run.journal), LEARNER, LEARNER.server(), seed=0)
    assert run.steps == steps and np.array_equal(done.models[steps], run.model)
    for step in formats(folder):
        values = read(saves.folder(step)).server.arrays["values"]
        assert np.array_equal(values, done.models[step]), step
    return run


def formats(folder: Path) -> dict[int, int]:
    """Return the format of each checkpoint: 4 is in slices. Nothing else may be there."""
    found = {}
    for path in sorted(folder.iterdir()):
        assert path.name.startswith("step-"), path
        manifest = json.loads((path / "manifest.json").read_text())
        found[manifest["step"]] = manifest["format"]
    return found


def resumed(engine: Any, folder: Path, steps: int) -> pl.Run:
    trainer = pl.Trainer(LEARNER, pl.sync(), engine, progress=False)
    return trainer.resume(folder).fit(steps=steps)


@pytest.mark.parametrize("servers", [1, 2, 5, "driver"])
def test_a_run_goes_on_with_other_servers(servers: Any, tmp_path: Path) -> None:
    whole = train(calm(), tmp_path, 9)
    assert formats(tmp_path) == {5: 4, 9: 3}
    again = resumed(calm(servers), tmp_path / "step-00000005", 9)
    assert np.array_equal(again.model, whole.model)


def test_a_run_goes_on_in_the_simulator(tmp_path: Path) -> None:
    whole = train(calm(), tmp_path, 9)
    again = resumed(pl.Simulator(4), tmp_path / "step-00000005", 9)
    assert np.array_equal(again.model, whole.model)


def test_steps_do_not_wait_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that take an hour: the steps take the time that they take without checkpoints."""
    carry_out = ServerProcess.carry_out

    def slowly(self: ServerProcess, call: Call) -> None:
        if call.name != "write":
            return carry_out(self, call)
        self.world.after(3600.0, lambda: self.finish(call))

    monkeypatch.setattr(ServerProcess, "carry_out", slowly)
    slow = train(calm(), tmp_path / "slow", 12, timeout=7200.0)
    assert formats(tmp_path / "slow") == {5: 4, 12: 3}
    assert slow.metrics["seconds"][-1] < 60.0


# --- faults --------------------------------------------------------------------------------------


def during_write(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[ServerProcess], None], name: str = "s1"
) -> list[str]:
    """Act on a server when it begins to write for the first time; return what was acted on."""
    begin, acted = ServerProcess.begin, list[str]()

    def acting(self: ServerProcess, call: Call) -> None:
        if call.name == "write" and self.name == name and not acted:
            acted.append(self.node)
            act(self)
        begin(self, call)

    monkeypatch.setattr(ServerProcess, "begin", acting)
    return acted


def test_a_server_that_dies_while_it_writes_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    acted = during_write(monkeypatch, ServerProcess.die)
    train(calm(), tmp_path, 14)
    assert acted and "step 5 is not saved: server s1 did not write" in caplog.text
    found = formats(tmp_path)
    late = next(step for step in found if step > 5)
    assert 5 not in found and late < 10 and found[late] == 3  # by the driver, and later than due
    assert found[10] == 4 and found[14] == 3
    again = resumed(calm(2), tmp_path / f"step-{late:08d}", 14)
    assert np.array_equal(again.model, read(tmp_path / "step-00000014").server.arrays["values"])


def test_a_machine_that_is_lost_while_its_server_writes_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted = during_write(monkeypatch, lambda server: server.world.lose_node(server.node))
    engine = calm()
    train(engine, tmp_path, 14)
    assert acted and acted[0] in engine.world.dead and 5 not in formats(tmp_path)


def test_a_full_disk_of_one_server_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServerProcess, "run", _but("write", "s2", ServerProcess.run))
    train(calm(), tmp_path, 9)
    assert "it raised OSError: not on this machine" in caplog.text
    found = formats(tmp_path)
    assert set(found.values()) == {3} and min(found) in range(6, 9)


def test_a_server_that_never_answers_is_given_up_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = ServerProcess.receive

    def deaf(self: ServerProcess, call: Call) -> None:
        if call.name != "write" or self.name != "s0":
            receive(self, call)

    monkeypatch.setattr(ServerProcess, "receive", deaf)
    train(calm(), tmp_path, 12, timeout=2.0)
    assert "did not write state-00000-of-00003.safetensors: it took longer than 2 s" in caplog.text
    assert set(formats(tmp_path).values()) == {3}


def test_a_folder_that_one_machine_does_not_see_is_written_by_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(ServerProcess, "run", _but("show", "s1", ServerProcess.run))
    train(calm(), tmp_path, 9)
    assert formats(tmp_path) == {5: 3, 9: 3}
    told = [r for r in caplog.records if "are gathered and written by the driver" in r.message]
    assert [record.levelname for record in told] == ["INFO"]


def _but(method: str, server: str, run: Any) -> Any:
    def broken(self: ServerProcess, call: Call) -> Any:
        if call.name == method and self.name == server:
            return None, raised("not on this machine")
        return run(self, call)

    return broken


def no_time_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver's own part take no virtual time, so that a seed has one outcome."""
    advance = Background.advance

    def joining(self: Background) -> None:
        advance(self)
        if self._thread is not None:
            self._thread.join(timeout=60.0)

    monkeypatch.setattr(Background, "advance", joining)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_saved_in_bad_weather_is_right(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers crash, hang, raise and lose answers at any moment, also in mid-file."""
    no_time_in_the_driver(monkeypatch)
    bad = Weather(crash=0.02, late=0.1, pause=0.002, lost=0.005, unknown=0.005, server_raises=0.01)
    world = World(seed, bad, 4, 20.0, nodes=4)
    engine = SimulatedRay(4, world, servers=3, start_timeout=5.0, respawns=1000)
    train(engine, tmp_path, 60, every=3, timeout=5.0)
    found = formats(tmp_path)
    assert 60 in found and len(found) > 10 and 4 in found.values()
    assert sum(world.faults.values()) > 20
    assert resumed(calm(2), tmp_path / f"step-{min(found):08d}", 60).steps == 60
