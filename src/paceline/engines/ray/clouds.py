"""Notices of clouds that take a machine back, as its metadata service gives them.

| cloud | path | notice |
|---|---|---|
| AWS | `/latest/meta-data/spot/instance-action`, with a session token | 200, and 404 before |
| Google Cloud | `/computeMetadata/v1/instance/preempted` | `TRUE` |
| Azure | `/metadata/scheduledevents` | an event of this machine: Preempt, Terminate, Redeploy |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Final, Protocol
from urllib.parse import urlsplit

ADDRESS: Final = "http://169.254.169.254"
"""Of the metadata service, the same in all three clouds. PACELINE_METADATA_URL replaces it."""
_SECONDS, _BYTES = 2.0, 2**16  # that an answer may take, and have
_LEAVING = {"Preempt", "Terminate", "Redeploy"}


class Ask(Protocol):
    """Asks the metadata service for a path; returns the status and the text of the answer."""

    def __call__(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> tuple[int, str]: ...


def aws(ask: Ask) -> str | None:
    """Return what AWS will do with this machine, or None."""
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    status, token = ask("/latest/api/token", seconds, "PUT")
    if status != 200:
        return None
    header = {"X-aws-ec2-metadata-token": token}
    status, text = ask("/latest/meta-data/spot/instance-action", header)
    if status != 200:
        return None
    told = json.loads(text)
    return f"AWS will {told['action']} this machine at {told['time']}"


def gcp(ask: Ask) -> str | None:
    """Return that Google Cloud preempts this machine, or None."""
    header = {"Metadata-Flavor": "Google"}
    status, text = ask("/computeMetadata/v1/instance/preempted", header)
    if status == 200 and text.strip() == "TRUE":
        return "Google Cloud preempts this machine"
    return None


def azure(ask: Ask) -> str | None:
    """Return the event that Azure has scheduled for this machine, or None."""
    header = {"Metadata": "true"}
    status, text = ask("/metadata/scheduledevents?api-version=2020-07-01", header)
    if status != 200:
        return None
    events = [each for each in json.loads(text)["Events"] if each["EventType"] in _LEAVING]
    if not events:
        return None
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    status, name = ask(path, header)
    for event in events:
        if status == 200 and name.strip() in event["Resources"]:
            return f"Azure announces {event['EventType']} at {event['NotBefore'] or 'any moment'}"
    return None


CLOUDS: Mapping[str, Callable[[Ask], str | None]] = {"aws": aws, "gcp": gcp, "azure": azure}


def notice(cloud: str) -> str | None:
    """Ask the metadata service of this machine; return why it will be taken away, or None."""
    try:
        return CLOUDS[cloud](_ask)
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None  # it does not answer, or not in its usual form


def _ask(path: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, str]:
    """Ask once, without a proxy and without following to another address."""
    address = urlsplit(os.environ.get("PACELINE_METADATA_URL", ADDRESS))
    connection = HTTPConnection(address.hostname or "", address.port, timeout=_SECONDS)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(_BYTES).decode("utf-8", "replace")
    finally:
        connection.close()
