"""The look at a cluster, with real sockets that are not one, and real files."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import paceline as pl
from paceline.engines.ray.cluster import preflight, token_file
from paceline.engines.ray.cluster.preflight import Answer, look, refuse_mixed, refuse_open

VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be somebody who has no token, and did not choose anything."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(token_file, "_warned", set())
    return tmp_path


@pytest.fixture
def server() -> Iterator[Callable[[bytes | None], str]]:
    """Listen on loopback; say something to whoever comes and hang up, or say nothing for ever."""
    peers: list[socket.socket] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def start(words: bytes | None) -> str:
            def serve() -> None:
                with suppress(OSError):
                    while True:
                        peers.append(listening.accept()[0])
                        if words is not None:
                            peers[-1].sendall(words)
                            peers[-1].close()

            threading.Thread(target=serve, daemon=True).start()
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield start
        listening.shutdown(socket.SHUT_RDWR)  # ends the thread, too
        for peer in peers:
            peer.close()


@pytest.mark.parametrize(
    "address", ["", "head", "head:", ":6379", "head:port", "head:0", "head:65536", "http://head:1"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"use HOST:PORT of the head.*or 'auto'"):
        look(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_nobody_is_there(address: str) -> None:
    with pytest.raises(pl.errors.ClusterError, match="no cluster answers at") as caught:
        look(address)
    assert address in str(caught.value) and "ray start --head" in str(caught.value)


def test_somebody_else_is_there(server: Callable[[bytes | None], str]) -> None:
    with pytest.raises(pl.errors.ClusterError, match=r"not a Ray head .neither gRPC nor TLS"):
        look(server(b"SSH-2.0-OpenSSH_9.9\r\n"))


@pytest.mark.parametrize("tls", [False, True])
def test_whoever_says_nothing_is_not_waited_for(
    tls: bool,
    server: Callable[[bytes | None], str],
    monkeypatch: pytest.MonkeyPatch,
    certificate: dict[str, str],
) -> None:
    for name, path in certificate.items() if tls else ():
        monkeypatch.setenv(name, path)
    began = time.monotonic()
    with pytest.raises(pl.errors.ClusterError, match=r"within 1 s|not a Ray head|does not use TLS"):
        look(server(None), seconds=1.0)
    assert time.monotonic() - began < 8  # and not the minutes of Ray


def probed(look: str) -> subprocess.CompletedProcess[str]:
    """Have the process look that looks, in another way."""
    given = {"host": "", "port": 0, "client": False, "tls": None, "authorization": "Bearer secret"}
    code = (
        "import time; from paceline.engines.ray.cluster import probe;"
        f"probe.Probe.look = lambda self: {look}; probe.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps({**given, "seconds": 0.2}),
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_what_has_no_end_is_ended() -> None:
    """The process ends itself, whatever it hangs in."""
    done = probed("time.sleep(60)")
    assert done.returncode == preflight.LATE and not done.stdout


def test_what_fails_does_not_tell_the_secret() -> None:
    done = probed("{}[self._authorization]")
    assert json.loads(done.stdout) == {"case": "failed", "detail": "KeyError"}
    assert "secret" not in done.stdout + done.stderr


def test_auto_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(pl.errors.ClusterError, match=r"no cluster answers at 127\.0\.0\.1:1"):
        look("auto")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make a certificate by the recipe; return the environment that names it."""
    folder = tmp_path_factory.mktemp("tls")
    recipe = Path(__file__).parents[5] / "docs" / "tls.sh"
    subprocess.run(["bash", str(recipe), str(folder), "127.0.0.1"], check=True, timeout=60)
    node = folder / "127.0.0.1"
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(node / "ca.crt"),
        "RAY_TLS_SERVER_CERT": str(node / "node.crt"),
        "RAY_TLS_SERVER_KEY": str(node / "node.key"),
    }


def test_tls_wants_all_of_its_files(
    certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.delenv("RAY_TLS_CA_CERT", raising=False)
    with pytest.raises(pl.errors.ClusterError, match=r"RAY_TLS_CA_CERT .*docs/tls.sh"):
        look("127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name, path in certificate.items():
            monkeypatch.setenv(name, path)
        monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "absent"))
        with pytest.raises(
            pl.errors.ClusterError, match=r"files for TLS cannot be used .No such file"
        ):
            look(f"127.0.0.1:{listening.getsockname()[1]}")


def test_who_is_let_in_where_it_matters() -> None:
    shut, opened = (Answer("head:1", "10.0.0.1", open) for open in (False, True))
    near = Answer("here:1", "127.0.0.2", True)
    refuse_open(shut)
    refuse_open(near, ["127.0.0.2", "::1"])
    with pytest.raises(
        pl.errors.InsecureCluster, match=r"get-auth-token --generate.*AUTH_MODE=token"
    ):
        refuse_open(opened)
    with pytest.raises(
        pl.errors.InsecureCluster, match=r"10.0.0.7 is not loopback.*allow_insecure=True"
    ):
        refuse_open(near, ["127.0.0.2", "10.0.0.7"])


def test_a_token_on_one_side_alone() -> None:
    for open, token in ((False, True), (False, False), (True, False)):
        refuse_mixed(Answer("head:1", "10.0.0.1", open, token))
    with pytest.raises(pl.errors.ClusterError, match=r"RAY_AUTH_MODE=disabled here"):
        refuse_mixed(Answer("head:1", "10.0.0.1", True, True))


@pytest.mark.parametrize("name", ["head.example", "0.0.0.0", "10.88.0.1", "::", "192.168.1.1", ""])
def test_what_is_not_loopback(name: str) -> None:
    assert not preflight.is_loopback(name)


# --- the file of the token -----------------------------------------------------------------------


def test_a_token_of_our_own_is_for_nobody_else(home: Path) -> None:
    before = os.umask(0)
    try:
        token_file.make_if_missing()
    finally:
        os.umask(before)
    path = home / ".ray" / "auth_token"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    text = path.read_text()
    assert len(bytes.fromhex(text)) == 32 and list(path.parent.iterdir()) == [path]
    token_file.make_if_missing()
    assert path.read_text() == text


def test_no_token_is_made_where_another_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "named"))
    token_file.make_if_missing()
    assert token_file.source() == str(home / "named")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    token_file.make_if_missing()
    assert token_file.source() == "RAY_AUTH_TOKEN"
    assert list(home.iterdir()) == []


def test_a_token_that_others_read_is_told_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = home / "token"
    path.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with caplog.at_level(logging.WARNING):
        path.chmod(0o600)
        token_file.warn_if_readable()
        assert caplog.text == ""
        path.chmod(0o640)
        token_file.warn_if_readable()
        token_file.warn_if_readable()
    assert len(caplog.records) == 1 and f"chmod 600 {path}" in caplog.text
    assert "secret" not in caplog.text
