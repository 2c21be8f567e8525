"""A check of a cluster before Ray joins it: what answers there, and whether it requires a token.

Ray itself takes 20 seconds to report a wrong token, and waits forever where TLS is. A cluster
without a token runs the code of anyone who reaches one of its ports; see docs/security.md.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.util.client
from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.exceptions import AuthenticationError

from paceline.core.errors import ClusterError, InsecureCluster
from paceline.engines.ray.cluster import token_file

SECONDS = 5.0
"""The timeout for an answer."""
LATE = 3  # exit code of probe.py after its timeout
_GRACE = 10.0  # more seconds, for an interpreter to start on a busy machine
_TLS_FILES = {
    "ca": "RAY_TLS_CA_CERT",
    "certificate": "RAY_TLS_SERVER_CERT",
    "key": "RAY_TLS_SERVER_KEY",
}
_TOKEN = (
    "`ray get-auth-token --generate` makes one; copy it to all machines, and set "
    "RAY_AUTH_MODE=token on each of them"
)


@dataclass(frozen=True)
class Answer:
    """The result of the check of a cluster's address."""

    address: str
    peer: str  # the IP address of the host
    open: bool  # whether a call without a token is answered
    token: bool = False  # whether Ray uses one here


def look(address: str, seconds: float = SECONDS) -> Answer:
    """Make one call to HOST:PORT, ray://HOST:PORT or auto; raise `ClusterError` if that fails.

    The token is sent only to a cluster that requires one.
    """
    where = _resolved(address)
    host, port = _parsed(where)
    given = {
        "host": host,
        "port": port,
        "client": where.startswith("ray://"),
        "tls": _tls_files(),
        "authorization": _authorization(found=address == "auto" and where != _told()),
        "seconds": seconds,
    }
    answer = _asked(given)
    if answer["case"] != "well":
        raise ClusterError(_sentence(where, answer, seconds))
    return Answer(where, answer["peer"], answer["open"], bool(given["authorization"]))


def refuse_open(answer: Answer, nodes: Iterable[str] = ()) -> None:
    """Raise if a cluster requires no token and is not on this machine's loopback alone."""
    far = [node for node in (answer.peer, *nodes) if not is_loopback(node)]
    if answer.open and far:
        raise InsecureCluster(
            f"the cluster at {answer.address} requires no token, and {far[0]} is not loopback: "
            f"any process that reaches a port of it can run code on its machines. {_TOKEN}, "
            "before `ray start`. On a network where you trust all machines, use pl.Ray(..., "
            "allow_insecure=True)"
        )


def refuse_mixed(answer: Answer) -> None:
    """Raise if this process requires a token and the workers have none: all would be lost."""
    if answer.open and answer.token:
        raise ClusterError(
            f"the cluster at {answer.address} requires no token, but this process does, so its "
            "workers could not answer: start the cluster with the same token and "
            "RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here"
        )


def is_loopback(address: str) -> bool:
    """Return whether only its own machine reaches an IP address; a name counts as far away."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def joined_address() -> str:
    """Return the address of the head that this process is connected to."""
    client = ray.util.client.ray
    if client.is_connected():
        return f"ray://{client.get_context().client_worker._conn_str}"
    return str(ray.get_runtime_context().gcs_address)


# --- the question --------------------------------------------------------------------------------


def _told() -> str:
    return os.environ.get("RAY_ADDRESS", "")


def _resolved(address: str) -> str:
    """Return HOST:PORT, with ray:// if it was there."""
    if address != "auto":
        return address
    if _told() and _told() != "auto":
        return _told()
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError) as error:
        raise ClusterError(f"address='auto': {error}") from error
    if found is None or found == "auto":
        raise ClusterError(
            "address='auto': no cluster runs on this machine; `ray start --head --port 6379` "
            "starts one, and address='HOST:6379' names one elsewhere"
        )
    return str(found)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"address={address!r}: use HOST:PORT of the head, as in 'head.example:6379', "
            "ray://HOST:PORT of Ray Client, or 'auto'"
        )
    return host.strip("[]"), int(port)


def _tls_files() -> dict[str, str] | None:
    """Return the paths of our certificate, its key and the CA, or None without TLS."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    if absent := [name for name in _TLS_FILES.values() if not os.environ.get(name)]:
        raise ClusterError(
            f"RAY_USE_TLS is set without {' and '.join(absent)}: set all of "
            f"{', '.join(_TLS_FILES.values())} to files; docs/tls.sh makes them"
        )
    return {what: os.environ[name] for what, name in _TLS_FILES.items()}


def _authorization(found: bool) -> str:
    """Return the header that Ray will send; empty unless Ray is set to use a token."""
    # Without a setting, Ray uses a token only for a cluster that it finds by itself.
    always = found and "RAY_AUTH_MODE" not in os.environ
    try:
        header = AuthenticationTokenLoader.instance().get_token_for_http_header(always)
    except AuthenticationError as error:
        why = str(error).partition(". ")[0]
        raise ClusterError(f"RAY_AUTH_MODE=token, but there is no token: {why}. {_TOKEN}") from None
    return str(header.get("authorization", ""))


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """Run the probe in another process, with a timeout; its answer is one line."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=given["seconds"] + _GRACE,
        )
    except subprocess.TimeoutExpired:
        return {"case": "late"}
    if not done.stdout:
        late = done.returncode == LATE
        return {"case": "late"} if late else {"case": "failed", "detail": done.stderr[-500:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# --- the answer ----------------------------------------------------------------------------------


def _sentence(address: str, answer: dict[str, Any], seconds: float) -> str:
    detail = answer.get("detail", "")
    match answer["case"]:
        case "nobody":
            return (
                f"no cluster answers at {address} ({detail}): run `ray start --head --port 6379` "
                "on the head, and use its address here, with a port that no firewall blocks"
            )
        case "late":
            return (
                f"no cluster answers at {address} within {seconds:g} s: check the name, and "
                "whether a firewall drops the packets"
            )
        case "no token" if _authorization_unused():
            return (
                f"the cluster at {address} requires a token, and this process does not use its "
                "own: set RAY_AUTH_MODE=token before Python starts"
            )
        case "no token":
            return (
                f"the cluster at {address} requires a token, and this machine has none: copy the "
                "head's (`ray get-auth-token` prints it) to ~/.ray/auth_token, or to a file that "
                "RAY_AUTH_TOKEN_PATH names, and set RAY_AUTH_MODE=token"
            )
        case "wrong token":
            return (
                f"the cluster at {address} rejects the token of this machine, from "
                f"{token_file.source()}: copy the head's (`ray get-auth-token` prints it there)"
            )
        case "tls wanted":
            return (
                f"the cluster at {address} uses TLS, and this process does not: set "
                f"RAY_USE_TLS=1, and {', '.join(_TLS_FILES.values())} to files; docs/tls.sh makes "
                "them"
            )
        case "no tls":
            return (
                f"RAY_USE_TLS is set here, but the server at {address} does not use TLS "
                f"({detail}): start the cluster with the same RAY_USE_TLS and the files that "
                "docs/tls.sh makes, or unset it here, and check that the port is that of the head"
            )
        case "files":
            names = ", ".join(f"{n}={os.environ.get(n)}" for n in _TLS_FILES.values())
            return f"the files for TLS cannot be used ({detail}): {names}"
        case "their certificate":
            return (
                f"the certificate of the cluster at {address} cannot be verified ({detail}): use "
                "the CA that signed it (here "
                f"RAY_TLS_CA_CERT={os.environ.get('RAY_TLS_CA_CERT')}), and an address that the "
                "certificate names"
            )
        case "our certificate":
            return (
                f"the cluster at {address} rejects the certificate of this process ({detail}): "
                f"have RAY_TLS_SERVER_CERT={os.environ.get('RAY_TLS_SERVER_CERT')} signed by its "
                "CA"
            )
        case "stranger":
            return (
                f"the server at {address} is not a Ray head ({detail}): use the port of the head, "
                "by default HOST:6379, or ray://HOST:10001 for Ray Client"
            )
    return f"the check of {address} failed: {detail}"


def _authorization_unused() -> bool:
    """Return whether there is a token that Ray is not set to use."""
    try:
        there = AuthenticationTokenLoader.instance().has_token(True)
        return bool(there and not is_token_auth_enabled())
    except AuthenticationError:
        return False
