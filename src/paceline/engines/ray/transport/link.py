"""One TCP connection between two processes that know the same secret."""

from __future__ import annotations

import heapq
import hmac
import itertools
import json
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from math import inf
from typing import Any, TypeAlias

import numpy as np

from paceline.engines.ray.transport.messages import (
    LONGEST_HEADER,
    PREFIX,
    Message,
    Thing,
    decode,
    room,
)

if sys.platform == "linux":
    import fcntl
    import termios

Address: TypeAlias = tuple[str, int]
"""The host and the port on which a process listens."""

_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE of Linux, which Python does not name
_GREETING = b"paceline transport 1"
_NONCE = 16
_MIN_RTT = slice(148, 152)  # of Linux's tcp_info, in microseconds
_ASK_AGAIN = 1.0  # seconds
_AT_ONCE = 2**20  # bytes sent or received before the next connection has its turn


class Refused(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


class Link:
    """A connection; only the thread of its `Peer` uses it.

    secret: both ends prove that they know it before anything else is read.
    address: of the other end, if this end opens the connection; otherwise the other end tells it.
    received: called with each header, and with the object that came with it.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        address: Address | None,
        received: Callable[[Link, dict[str, Any], Thing], None],
    ) -> None:
        sock.setblocking(False)
        _set_options(sock)
        self.sock, self.address, self.opened = sock, address, False
        self.since = time.monotonic()
        self._began, self._secret, self._received = address is not None, secret, received
        self._out: list[tuple[int, int, Message]] = []  # a heap: their order, and when they came
        self._count = itertools.count()
        self._begun: deque[memoryview] = deque()  # the rest of the message that is being sent
        self._order = -1  # of that message
        self.moved = self.since  # when bytes were sent last, or there were none
        self._held_back: list[Message] = []  # until both ends are known
        self._nonce = secrets.token_bytes(_NONCE)
        self._begun.append(memoryview(_GREETING + self._nonce))
        self._sent = 0
        self._round_trip = 0.0, -inf  # the shortest one, and when the system was asked
        self._parser = self._parse()
        self._room = next(self._parser)

    @property
    def wants_to_send(self) -> bool:
        return bool(self._begun or self._out)

    @property
    def order(self) -> int:
        """The lowest order of what waits. A message that has begun may hold up an earlier one."""
        waiting = [self._order] if self._begun or not self._out else []
        return min([*waiting, *(order for order, _, _ in self._out[:1])])

    @property
    def on_its_way(self) -> int:
        """The bytes that the system has taken, and the other end has not acknowledged."""
        if sys.platform == "linux":
            with suppress(OSError):
                waiting = fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4))
                return int.from_bytes(waiting, sys.byteorder)
        return 0

    @property
    def acknowledged(self) -> int:
        """The bytes that have arrived at the other end."""
        return self._sent - self.on_its_way

    @property
    def round_trip(self) -> float:
        """The seconds of the shortest round trip, 0 where the system does not tell."""
        seconds, asked = self._round_trip
        if sys.platform == "linux" and time.monotonic() - asked > _ASK_AGAIN:
            with suppress(OSError):
                about = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.stop)
                seconds = int.from_bytes(about[_MIN_RTT], sys.byteorder) / 1e6
            self._round_trip = seconds, time.monotonic()
        return seconds

    def send(self, message: Message) -> None:
        """Queue a message; its buffers must not change until it is sent."""
        if self.opened:
            if not self.wants_to_send:
                self.moved = time.monotonic()
            heapq.heappush(self._out, (message.order, next(self._count), message))
        else:
            self._held_back.append(message)

    def take_back(self, key: int) -> None:
        """Drop an object from the queue, unless it is being sent."""
        self._held_back = [each for each in self._held_back if each.key != key]
        self._out = [each for each in self._out if each[2].key != key]
        heapq.heapify(self._out)

    def write(self, room: float = inf) -> int:
        """Send what the system takes, and return its bytes; raise OSError if the connection is
        lost.

        room: bytes that may be sent now.
        """
        left = most = int(min(room, _AT_ONCE))
        with suppress(BlockingIOError):
            while self.wants_to_send and left > 0:
                if not self._begun:
                    self._order, _, message = heapq.heappop(self._out)
                    self._begun.extend(message.pieces())
                sent = self.sock.send(self._begun[0][:left])
                left -= sent
                self._sent += sent
                self.moved = time.monotonic()
                if sent == len(self._begun[0]):
                    self._begun.popleft()
                else:
                    self._begun[0] = self._begun[0][sent:]
        return most - left

    def read(self) -> int:
        """Receive what has arrived, and return its bytes; raise OSError if the connection is lost,
        `Refused` for a stranger."""
        left = _AT_ONCE
        with suppress(BlockingIOError):
            while left > 0:
                count = self.sock.recv_into(self._room)
                if not count:
                    raise ConnectionResetError("the other end has closed the connection")
                left -= count
                self._room = self._room[count:]
                while not self._room:
                    self._room = self._parser.send(None)
        return _AT_ONCE - left

    def _parse(self) -> Generator[memoryview, None, None]:
        """Yield the room for the bytes to come, and handle them when it is filled."""
        greeting = bytearray(len(_GREETING) + _NONCE)
        yield memoryview(greeting)
        if greeting[: len(_GREETING)] != _GREETING:
            raise Refused("it does not speak this protocol")
        theirs = bytes(greeting[len(_GREETING) :])
        self._begun.append(memoryview(self._proof(self._began, theirs, self._nonce)))
        proof = bytearray(32)
        yield memoryview(proof)
        if not hmac.compare_digest(proof, self._proof(not self._began, self._nonce, theirs)):
            raise Refused("it does not know the secret of this run")
        self.opened = True
        for message in self._held_back:
            self.send(message)
        self._held_back.clear()
        while True:
            yield from self._parse_message()

    def _parse_message(self) -> Generator[memoryview, None, None]:
        prefix = bytearray(PREFIX.size)
        yield memoryview(prefix)
        length, size = PREFIX.unpack(prefix)
        if length > LONGEST_HEADER:
            raise Refused(f"it announces a header of {length} bytes")
        content = bytearray(length)
        yield memoryview(content)
        header = json.loads(content)
        arrays = room(header)
        if sum(array.nbytes for array in arrays.values()) != size:
            raise Refused("its header and its bytes disagree")
        for array in arrays.values():
            if array.nbytes:
                yield array.reshape(-1).view(np.uint8).data
        self._received(self, header, decode(header, arrays) if "key" in header else None)

    def _proof(self, began: bool, theirs: bytes, ours: bytes) -> bytes:
        """Return the proof of one end, which differs from the other end's."""
        return hmac.digest(self._secret, bytes([began]) + theirs + ours, "sha256")

    def close(self) -> None:
        self.sock.close()


def _set_options(sock: socket.socket) -> None:
    """Have the system notice within seconds that the other host is gone, and send evenly.

    A limit to the rate, however high, makes Linux pace what it sends. Unpaced bursts on several
    connections overflow the queue of a slow link: an exchange among 4 hosts took 0.48 s instead of
    0.36 s (docs/scale.md).
    """
    wanted = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": 15_000,
        "TCP_NOTSENT_LOWAT": 2**17,  # the rest stays here, where it can be taken back
    }
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, 2**31 - 1)
        for name, value in wanted.items():
            if hasattr(socket, name):  # some are of Linux alone
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
