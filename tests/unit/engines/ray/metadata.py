"""A metadata service on this machine, which answers as those of three clouds do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token"
NAME = "worker-7"


class Service:
    """What the clouds say of this machine.

    action: of AWS, in place of none.
    preempted: by Google Cloud.
    events: of Azure, each a type and the machines that it is for.
    """

    def __init__(self) -> None:
        self.action: str | None = None
        self.preempted = False
        self.events: list[tuple[str, list[str]]] = []
        self.url = ""
        self.asked: list[str] = []

    def answer(self, method: str, address: str, headers: dict[str, str]) -> tuple[int, str]:
        """Return status and text, as strictly as the real services ask for their headers."""
        self.asked.append(address)
        url = urlsplit(address)
        versions = parse_qs(url.query).get("api-version", [""])
        match method, url.path:
            case "PUT", "/latest/api/token":
                return (
                    (200, TOKEN) if "x-aws-ec2-metadata-token-ttl-seconds" in headers else (400, "")
                )
            case "GET", "/latest/meta-data/spot/instance-action":
                if headers.get("x-aws-ec2-metadata-token") != TOKEN:
                    return 401, ""
                if self.action is None:
                    return 404, "Not Found"
                return 200, json.dumps({"action": self.action, "time": "2026-11-18T08:22:00Z"})
            case "GET", "/computeMetadata/v1/instance/preempted":
                if headers.get("metadata-flavor") != "Google":
                    return 403, ""
                return 200, "TRUE" if self.preempted else "FALSE"
            case "GET", "/metadata/scheduledevents":
                if headers.get("metadata") != "true" or versions != ["2020-07-01"]:
                    return 400, ""
                events = [
                    {"EventId": str(i), "EventType": kind, "ResourceType": "VirtualMachine",
                     "Resources": names, "EventStatus": "Scheduled", "NotBefore": ""}
                    for i, (kind, names) in enumerate(self.events)
                ]  # fmt: skip
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})
            case "GET", "/metadata/instance/compute/name":
                return (200, NAME) if headers.get("metadata") == "true" else (400, "")
        return 404, ""


@contextmanager
def serving() -> Iterator[Service]:
    """Serve on loopback until the end of the block."""
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text = service.answer(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
