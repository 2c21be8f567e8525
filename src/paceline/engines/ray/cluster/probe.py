"""Finds out what answers at an address: `python probe.py`, with the question as JSON on its input.

It is a process of its own, since names may take long to resolve, and gRPC does not go together with
a process that forks. It imports neither Ray nor Paceline, to start quickly. The token comes through
the pipe, which no other process can read. The answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import threading
import time
from typing import Any

import grpc  # type: ignore[import-untyped]

# Calls for which Ray first checks the token. The second one, of Ray Client, answers that no client
# of that name is connected.
_HEAD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_CLIENT = "/ray.rpc.RayletDriver/KVExists"
_ANSWERED = {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
_SILENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113, 3.4
_LATE = 3  # exit code after the timeout


class Probe:
    """One check of HOST:PORT, which ends within the given seconds."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._host, self._port = given["host"], given["port"]
        self._method = _CLIENT if given["client"] else _HEAD
        self._files: dict[str, str] | None = given["tls"]
        self._authorization: str = given["authorization"]
        self._until: float = time.monotonic() + given["seconds"]

    def look(self) -> dict[str, Any]:
        """Return the case, a detail, the address reached, and whether no token is required."""
        try:
            with self._connected() as plain:
                self._peer = plain.getpeername()[0]
        except (OSError, OverflowError) as error:
            return {"case": "nobody", "detail": _said(error)}
        if self._files is None:
            return self._ask(grpc.insecure_channel(self._target())) or self._plain()
        try:
            own = ssl.create_default_context(cafile=self._files["ca"])
            own.load_cert_chain(self._files["certificate"], self._files["key"])
            own.set_alpn_protocols(["h2"])
        except (OSError, ssl.SSLError) as error:
            return {"case": "files", "detail": _said(error)}
        if (refused := self._shake(own)) is not None:
            return refused
        read = {name: _bytes(path) for name, path in self._files.items()}
        credentials = grpc.ssl_channel_credentials(read["ca"], read["key"], read["certificate"])
        found = self._ask(grpc.secure_channel(self._target(), credentials))
        return found or {"case": "stranger", "detail": "TLS, but no gRPC"}

    def _ask(self, channel: grpc.Channel) -> dict[str, Any] | None:
        """Call without the token, and then with it; return None if this is not gRPC at all."""
        with channel:
            code = self._call(channel, "")
            if code in _SILENT:
                return None
            if code in _ANSWERED:
                return {"case": "well", "peer": self._peer, "open": True}
            if code != grpc.StatusCode.UNAUTHENTICATED:
                return {"case": "stranger", "detail": f"gRPC, but {code.name}"}
            if not self._authorization:
                return {"case": "no token"}
            code = self._call(channel, self._authorization)
        if code in _ANSWERED:
            return {"case": "well", "peer": self._peer, "open": False}
        if code in _SILENT:
            return {"case": "late"}
        return {"case": "wrong token"}  # or one that cannot even be sent

    def _call(self, channel: grpc.Channel, authorization: str) -> grpc.StatusCode:
        metadata = [("authorization", authorization)] if authorization else []
        try:
            channel.unary_unary(self._method)(b"", timeout=self._left() / 2, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def _plain(self) -> dict[str, Any]:
        """Return why a call without TLS failed: the other side requires TLS, or is not Ray."""
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # nothing is sent there
        anyone.set_alpn_protocols(["h2"])
        try:
            with self._connected() as plain, anyone.wrap_socket(plain):
                return {"case": "tls wanted"}
        except (OSError, ssl.SSLError) as error:
            return {"case": "stranger", "detail": f"neither gRPC nor TLS, {_said(error)}"}

    def _shake(self, own: ssl.SSLContext) -> dict[str, Any] | None:
        """Do a TLS handshake with our certificate; return the fault, None if there is none."""
        try:
            with (
                self._connected() as plain,
                own.wrap_socket(plain, server_hostname=self._host) as secure,
            ):
                secure.sendall(_PREFACE)
                # In TLS 1.3 a server refuses our certificate after the handshake, maybe silently.
                if not secure.recv(1):
                    return {"case": "our certificate", "detail": "the server closed the connection"}
        except ssl.SSLCertVerificationError as error:
            return {"case": "their certificate", "detail": error.verify_message}
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or _said(error)
            if "ALERT" in reason or isinstance(error, ConnectionError):
                return {"case": "our certificate", "detail": reason}
            return {"case": "no tls", "detail": reason}
        return None

    def _connected(self) -> socket.socket:
        return socket.create_connection((self._host, self._port), self._left() / 2)

    def _target(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.01)


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main() -> None:
    given = json.loads(sys.stdin.read())
    late = threading.Timer(given["seconds"], os._exit, [_LATE])  # even if a name hangs
    late.daemon = True
    late.start()
    try:
        answer = Probe(given).look()
    except Exception as error:  # its text may contain the token
        answer = {"case": "failed", "detail": type(error).__name__}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
