"""Whom clusters let in, and what a client is told: real ones, with a token and TLS, and open.

Host 0 has a cluster as docs/tls.sh makes it, host 1 one that wants nothing of anybody. Each case
is a process of its own, as Ray reads its settings once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from paceline.testing.hosts import Hosts, missing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
RECIPE = Path(__file__).parents[2] / "docs" / "tls.sh"
RAY = str(Path(sys.executable).parent / "ray")
PORT = 6390
# Trains two steps, if it is let; says how long it took to be refused, and what was said.
CLIENT = """
import json, logging, sys, time
import numpy as np, ray
import paceline as pl

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
given = json.loads(sys.argv[1])
if given["joined"]:
    ray.init(address=given["address"], log_to_driver=False, logging_level="ERROR")
learner = pl.learners.LeastSquares(np.eye(4), np.ones(4), batch_size=4)
engine = pl.Ray(1, cpus=0.1, address=given["address"], allow_insecure=given["allow_insecure"])
trainer = pl.Trainer(learner, pl.sync(), engine, progress=False, journal=given["journal"])
began = time.monotonic()
try:
    told = {"steps": trainer.fit(steps=2).steps}
except Exception as error:
    told = {"error": type(error).__name__, "said": str(error), "left": not ray.is_initialized()}
print(json.dumps({**told, "seconds": time.monotonic() - began}), flush=True)
"""
SETTINGS = ("AUTH_MODE", "AUTH_TOKEN", "AUTH_TOKEN_PATH", "USE_TLS", "ADDRESS")
UNSET = [word for name in SETTINGS for word in ("-u", f"RAY_{name}")]


@dataclass(frozen=True)
class Clusters:
    """Two hosts with a cluster each, and what belongs to whom."""

    hosts: Hosts
    folder: Path
    good: Mapping[str, str]  # the environment of a node
    others: Mapping[str, str]  # that of a node of another cluster

    def start(self, host: int) -> None:
        """Start a host's cluster, in a folder of short name that is removed with the hosts."""
        env = self.good if host == 0 else {"RAY_AUTH_MODE": "disabled"}
        command = [
            *("env", *UNSET, *(f"{name}={value}" for name, value in env.items())),
            *(RAY, "start", "--head", f"--port={PORT}", f"--node-ip-address={self.hosts.ip(host)}"),
            *("--include-dashboard=false", "--num-cpus=1", "--disable-usage-stats"),
            *("--object-store-memory=100000000", f"--temp-dir={self.hosts._folder / f's{host}'}"),
        ]
        with (self.folder / f"ray{host}.log").open("w") as log:  # what it starts keeps a pipe open
            process = self.hosts.popen(host, command, stdout=log, stderr=log)
        assert process.wait(180) == 0, (self.folder / f"ray{host}.log").read_text()

    def revive(self, host: int) -> None:
        """Start a host's cluster anew where a busy machine has ended it."""
        raylet = str(Path(ray.__file__).parent / "core/src/ray/raylet/raylet")
        if not self.hosts.pids(host, raylet):
            self.hosts.kill(host)
            self.start(host)

    def secret(self) -> str:
        return (self.folder / "ours" / "token").read_text()


@dataclass(frozen=True)
class Case:
    """A client, and what it has to be told."""

    error: str = ""
    said: str = ""
    host: int = 0
    port: int = PORT
    ip: str = ""  # that it is given instead of the host's own
    without: tuple[str, ...] = ()  # settings that it lacks
    foreign: tuple[str, ...] = ()  # settings that it has of another cluster
    token: str = ""  # that it has instead
    joined: bool = False
    allow_insecure: bool = False


def environment(node: Path) -> dict[str, str]:
    """Return what the file that the recipe wrote sets, as a shell reads it."""
    script = 'source "$1/env"; for name in ${!RAY_*}; do printf "%s=%s\\n" "$name" "${!name}"; done'
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        ["bash", "-euc", script, "bash", str(node)],
        env=clean,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    folder = tmp_path_factory.mktemp("security")
    with Hosts(2) as hosts:
        for name in ("ours", "theirs"):
            done = subprocess.run(
                ["bash", str(RECIPE), str(folder / name), hosts.ip(0)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            assert f"--node-ip-address={hosts.ip(0)}" in done.stdout
        ours, theirs = (folder / name / hosts.ip(0) for name in ("ours", "theirs"))
        good, others = environment(ours), environment(theirs)
        both = Clusters(hosts, folder, good, others)
        both.start(0)
        both.start(1)
        yield both


def run(
    clusters: Clusters, case: Case, journal: Path | None = None
) -> tuple[dict[str, object], str]:
    """Be a client; return what it found, and all that it wrote."""
    hosts = clusters.hosts
    clusters.revive(case.host)
    settings = dict(clusters.good if case.host == 0 else {"RAY_AUTH_MODE": "disabled"})
    settings = {name: value for name, value in settings.items() if name not in case.without}
    settings |= {name: clusters.others[name] for name in case.foreign}
    settings |= {"RAY_AUTH_TOKEN": case.token} if case.token else {}
    given = {
        "address": f"{case.ip or hosts.ip(case.host)}:{case.port}",
        "joined": case.joined,
        "allow_insecure": case.allow_insecure,
        "journal": None if journal is None else str(journal),
    }
    home = clusters.folder / "home"  # with no token in it
    home.mkdir(exist_ok=True)
    command = ["env", *UNSET, f"HOME={home}", *(f"{n}={v}" for n, v in settings.items())]
    done = hosts.run(
        case.host, [*command, sys.executable, "-c", CLIENT, json.dumps(given)], timeout=180
    )
    told = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines, told
    return json.loads(lines[-1]), told


TLS = ("RAY_USE_TLS", "RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
CASES = {
    "no token": Case("ClusterError", "requires a token, and this machine has none", without=TOKEN),
    "a token that is not used": Case(
        "ClusterError", "set RAY_AUTH_MODE=token", without=("RAY_AUTH_MODE",)
    ),
    "a token that is promised": Case(
        "ClusterError", "there is no token", without=("RAY_AUTH_TOKEN_PATH",)
    ),
    "another's token": Case(
        "ClusterError", "rejects the token of this machine", foreign=("RAY_AUTH_TOKEN_PATH",)
    ),
    "a token that cannot be sent": Case(
        "ClusterError", "rejects the token of this machine", token="not\x01ours"
    ),
    "no TLS": Case("ClusterError", "uses TLS, and this process does not", without=TLS),
    "another's CA": Case("ClusterError", "cannot be verified", foreign=TLS),
    "another's certificate": Case(
        "ClusterError",
        "rejects the certificate of this process",
        foreign=("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"),
    ),
    "an address that the certificate lacks": Case(
        "ClusterError", "an address that the certificate names", ip="127.0.0.3"
    ),
    "a host that is not there": Case("ClusterError", "no cluster answers at", ip="10.88.0.9"),
    "another port": Case("ClusterError", "no cluster answers at", port=1),
    "TLS to a cluster without": Case("ClusterError", "does not use TLS", host=1, foreign=TLS),
    "a token to a cluster without": Case(
        "ClusterError",
        "requires no token, but this process does",
        host=1,
        foreign=("RAY_AUTH_MODE",),
        token="unused",
        allow_insecure=True,
    ),
    "an open cluster": Case("InsecureCluster", "ray get-auth-token --generate", host=1),
    "an open cluster, by way of loopback": Case(
        "InsecureCluster", "is not loopback", host=1, ip="127.0.0.1"
    ),
    "an open cluster that was joined before": Case(
        "InsecureCluster", "allow_insecure=True", host=1, joined=True
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_who_is_refused(case: Case, clusters: Clusters) -> None:
    found, told = run(clusters, case)
    assert found.get("error") == case.error and case.said in str(found["said"]), told
    assert float(str(found["seconds"])) < 30, told  # Ray itself tries for a minute
    assert found["left"] or case.joined, told  # Ray is not left running here
    theirs = (clusters.folder / "theirs" / "token").read_text()
    for secret in (clusters.secret(), theirs, case.token or theirs):
        assert secret not in told


def test_whoever_has_token_and_certificate_trains(clusters: Clusters) -> None:
    journal = clusters.folder / "good.jsonl"
    found, told = run(clusters, Case(joined=True), journal)
    assert found.get("steps") == 2, told
    assert clusters.secret() not in told + journal.read_text()
    listed = [clusters.folder / "ours", *(clusters.folder / "ours").rglob("*")]
    assert len(listed) > 8  # the recipe's files are for one user alone
    assert all(path.stat().st_mode & 0o077 == 0 for path in listed), listed


def test_a_token_that_others_can_read_is_told(clusters: Clusters) -> None:
    token = Path(clusters.good["RAY_AUTH_TOKEN_PATH"])
    token.chmod(0o644)
    try:
        found, told = run(clusters, Case())
    finally:
        token.chmod(0o600)
    assert found.get("steps") == 2, told
    assert told.count(f"chmod 600 {token}") == 1 and clusters.secret() not in told


def test_an_open_cluster_is_joined_by_whoever_says_so(clusters: Clusters) -> None:
    found, told = run(clusters, Case(host=1, allow_insecure=True))
    assert found.get("steps") == 2, told


def test_the_doctor_asks_without_a_token(clusters: Clusters) -> None:
    command = ["env", *UNSET, "RAY_AUTH_MODE=disabled", sys.executable]
    command += ["-m", "paceline", "doctor", "--json", "--workers=1"]
    address = f"--address={clusters.hosts.ip(1)}:{PORT}"
    done = clusters.hosts.run(1, [*command, address], timeout=180)
    findings = json.loads(done.stdout)["findings"]
    assert any(
        "not authenticated: any process that reaches" in each["text"] for each in findings
    ), findings


def test_a_cluster_of_our_own_has_a_token_for_one_user_alone(clusters: Clusters) -> None:
    home = clusters.folder / "fresh"
    home.mkdir()
    given = {"address": None, "joined": False, "allow_insecure": False, "journal": None}
    command = ["env", *UNSET, f"HOME={home}", sys.executable, "-c", CLIENT, json.dumps(given)]
    done = clusters.hosts.run(1, ["sh", "-c", 'umask 000; exec "$@"', "sh", *command], timeout=180)
    assert json.loads(done.stdout.splitlines()[-1]).get("steps") == 2, done.stdout + done.stderr
    token = home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() not in done.stdout + done.stderr
