"""The end point of this process, of which there is one at a time."""

from __future__ import annotations

from paceline.engines.ray.transport.inbox import Lost
from paceline.engines.ray.transport.peer import Peer

_current: Peer | None = None


def open_peer(host: str, secret: bytes) -> Peer:
    """Open the end point of this process, in the place of an earlier one."""
    global _current
    close_peer()
    _current = Peer(host, secret)
    return _current


def close_peer() -> None:
    """Close the end point of this process, if there is one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def current() -> Peer:
    """Return the end point of this process."""
    if _current is None:
        raise Lost("this process has no direct transport")
    return _current
