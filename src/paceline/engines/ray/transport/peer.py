"""The end point of a process: it holds objects for others, and gets objects from others.

An object is held under a key, and asked for by the address of its holder and that key, also before
it exists. It is sent as soon as it does. A holder may also push an object to the process that will
ask for it. If the holder is lost, a process that waits for its objects learns it at once, because
the connection ends.

Of what waits to be sent, the objects with the lowest order go first, on all connections: the step
that comes first needs them first. A worker pushes through the server of its own host, if there is
one, so that results and models leave a host in that order. A connection that makes no progress
delays no other, and neither does one that is slow by itself.

Objects that are held together can wait until another process asks for one of them. Then all of
them are pushed: the others will be asked for soon, too.

One thread does all sending and receiving. It shares nothing with other threads but a queue of
actions and the futures that it fills.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.logs import logger_of
from paceline.engines.ray.transport.inbox import Inbox, fail
from paceline.engines.ray.transport.link import Address, Link, Refused
from paceline.engines.ray.transport.messages import Message, Part, Thing, encode, note
from paceline.engines.ray.transport.pushes import Pushes
from paceline.engines.ray.transport.turns import Turns
from paceline.learners.base import Array, Span

logger = logger_of(__name__)

PING = -1
"""The key of an object that every end point has, for others to see whether they reach it."""
_GREETING_SECONDS = 10.0  # for a connection to be made, and for both ends to prove themselves
_PAUSE, _NOTES, _MANY = 0.003, 2**10, 2**16  # seconds, and bytes at a time: see Peer._serve_all
_STRANGERS = 64  # connections at a time that have not proved themselves
_CONNECTING = {0, 115, 36}  # connect() in progress: Linux and macOS


class Peer:
    """An end point that listens on a host.

    secret: what all processes of a run know, and no other process.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._listener = socket.create_server((host, 0), backlog=_STRANGERS)
        self._listener.setblocking(False)
        self.address: Address = host, self._listener.getsockname()[1]
        self._held: dict[int, tuple[Thing, Message]] = {PING: (None, encode(PING, None))}
        self._asked: dict[int, set[Link]] = {}  # for objects that do not exist yet
        self._waiting: dict[int, dict[int, Address]] = {}  # by key, what is pushed when it is asked
        self._inbox = Inbox()
        self._links: dict[Address, Link] = {}
        self._pushes, self._turns = Pushes(), Turns(host)
        self._all: set[Link] = set()  # connections, each once
        self._strangers: set[Link] = set()  # those of unknown processes
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, partial(_drain, self._wake))
        self._closed = False
        threading.Thread(target=self._run, name="paceline transport", daemon=True).start()

    # --- from any thread -------------------------------------------------------------------------

    def push(self, key: int, part: Array, at: Part, order: int, to: Address, via: Address) -> None:
        """Push a part of an array that is not complete yet; `hold` has the rest.

        via: the process that passes it on, or the end itself.
        """
        message = encode(key, part, order, to, at)
        self._do(partial(self._push, key, to, via, [message]))

    def hold(
        self,
        things: Mapping[int, Thing],
        to: dict[int, Address] | None = None,
        orders: Mapping[int, int] | None = None,
        missing: Mapping[int, Sequence[Span]] | None = None,
        waits: bool = False,
    ) -> None:
        """Hold objects by key until they are released; push some of them to addresses.

        orders: in which objects are sent if several wait, from 0 on; 0 for those left out.
        missing: of objects that were pushed in parts, what was not.
        waits: whether to push nothing until one of them is asked for.
        """
        if self._closed:
            raise RuntimeError("the direct transport of this process has ended; see its log")
        order = orders or {}
        held = {
            key: (thing, encode(key, thing, order.get(key, 0))) for key, thing in things.items()
        }
        self._do(partial(self._hold, held, to or {}, missing or {}, waits))

    def relay(self, ends: Iterable[Address]) -> Address | None:
        """Return the process of this host through which objects are pushed to these ends."""
        return next((end for end in ends if end[0] == self.address[0]), None)

    def release(self, keys: Collection[int]) -> None:
        """Drop objects that are held here, or were pushed here."""
        if keys:
            self._do(partial(self._release, keys))

    def fetch(self, address: Address, key: int) -> Future[Thing]:
        """Get an object from its holder; `Lost` if the connection to it ends before."""
        future: Future[Thing] = Future()
        if self._closed:
            fail(future, "the direct transport of this process has ended")
            return future
        self._do(partial(self._fetch, (address[0], address[1]), key, future))
        return future

    def arrived(self, key: int) -> float | None:
        """Return when an object was here that was pushed, by `time.monotonic`."""
        return self._inbox.times.get(key)

    def give_up(self, keys: Collection[int]) -> None:
        """Cancel fetches: their holders need not send the objects any more."""
        self._do(partial(self._give_up, keys))

    def close(self) -> None:
        """End all connections; fetches of this process fail with `Lost`."""
        self._do(partial(setattr, self, "_closed", True))

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        with suppress(BlockingIOError, OSError):  # it is awake already, or has ended
            self._waker.send(b".")

    # --- in the thread of this end point ---------------------------------------------------------

    def _run(self) -> None:
        """Serve until closed. After an error, end all connections, so that nobody waits for this
        process."""
        with suppress(OSError):  # Linux alone: the name that `top -H` shows
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("transport")
        try:
            self._serve_all()
        except Exception:
            logger.exception("the direct transport of this process has failed")
        self._shut_down()

    def _serve_all(self) -> None:
        """Serve all connections in turn.

        Over a slow link an object arrives in hundreds of packets. To wake up for each of them
        costs more CPU than all else here, so the thread pauses until there are more.
        """
        looked = time.monotonic()
        while not self._closed:
            moved = 0
            for key, events in self._selector.select(timeout=self._schedule()):
                if isinstance(key.data, Link):
                    moved += self._serve(key.data, events)
                else:
                    key.data()
            while self._todo:
                self._todo.popleft()()
            if _NOTES < moved < _MANY:
                time.sleep(_PAUSE)
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                for link in [each for each in self._all if not each.opened]:
                    if now - link.since > _GREETING_SECONDS:
                        self._lose(link, "it did not answer")

    def _serve(self, link: Link, events: int) -> int:
        """Receive and send on a connection; return the bytes."""
        moved = 0
        try:
            if events & selectors.EVENT_READ:
                moved += link.read()
            if events & selectors.EVENT_WRITE:
                moved += link.write(self._turns.room(link))
        except (OSError, Refused, ValueError, KeyError, TypeError) as error:
            self._lose(link, str(error))
        else:
            if not link.wants_to_send:
                self._watch(link, False)
        return moved

    def _schedule(self) -> float:
        """Let the connections send that are due; return the seconds until others may be."""
        due, seconds = self._turns.take([link for link in self._all if link.wants_to_send])
        for link, is_due in due.items():
            self._watch(link, is_due)
        return seconds

    def _watch(self, link: Link, write: bool) -> None:
        """Ask the system about room to send only while there is something to send."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        if self._selector.get_key(link.sock).events != wanted:
            self._selector.modify(link.sock, wanted, link)

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            link = Link(sock, self._secret, None, self._received)
            self._register(link)
            self._strangers.add(link)
            self._strangers = {each for each in self._strangers if not each.opened}
            if len(self._strangers) > _STRANGERS:
                self._lose(min(self._strangers, key=lambda each: each.since), "too many others")

    def _link(self, address: Address) -> Link:
        """Return the connection to an address; open one if there is none."""
        if address not in self._links:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            link = self._links[address] = Link(sock, self._secret, address, self._received)
            code = sock.connect_ex(address)
            self._register(link)
            link.send(note(address=self.address))
            if code not in _CONNECTING:
                self._todo.append(partial(self._lose, link, os.strerror(code)))
        return self._links[address]

    def _register(self, link: Link) -> None:
        self._all.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _lose(self, link: Link, why: str) -> None:
        """Forget a connection, and fail the fetches that wait for it."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.close()
        self._all.discard(link)
        self._strangers.discard(link)
        if link.address is not None and self._links.get(link.address) is link:
            del self._links[link.address]
            pushed, relayed = self._pushes.lose(link.address)
            self._not_pushed(pushed)
            for key, origin in relayed.items():
                if origin in self._all:
                    origin.send(note(failed=key))
        for links in self._asked.values():
            links.discard(link)
        self._inbox.lose(link, why)

    def _received(self, link: Link, header: dict[str, Any], thing: Thing) -> None:
        if "to" in header and tuple(header["to"]) != self.address:
            self._pass_on(link, header, thing)
        elif "part" in header:
            self._inbox.take_part(header["key"], thing, header["part"])
        elif "key" in header:
            self._inbox.take(header["key"], thing, pushed="to" in header)
        elif "get" in header:
            self._send(link, header["get"], header["again"])
        elif "not" in header:
            self._asked.get(header["not"], set()).discard(link)
            link.take_back(header["not"])
        elif "failed" in header:
            self._not_pushed({header["failed"]})
        elif "missed" in header:
            if self._inbox.expects(header["missed"]):
                link.send(note(get=header["missed"], again=True))
        elif "address" in header:
            host, port = header["address"]
            self._strangers.discard(link)
            link.address = host, port
            self._links.setdefault((host, port), link)

    def _send(self, link: Link, key: int, again: bool = False) -> None:
        """Send an object that was asked for, now or when it exists.

        again: whether it had arrived there before.
        """
        if (group := self._waiting.get(key)) is not None:
            for each in group:
                del self._waiting[each]
            self._push_held(group, {})
        if key in self._held and (again or not self._pushes.has(key, link.address)):
            link.send(self._held[key][1])
        else:
            self._asked.setdefault(key, set()).add(link)

    def _hold(
        self,
        held: Mapping[int, tuple[Thing, Message]],
        to: dict[int, Address],
        missing: Mapping[int, Sequence[Span]],
        waits: bool,
    ) -> None:
        self._held |= held
        if waits:
            group = {key: address for key, address in to.items() if key in held}
            self._waiting |= dict.fromkeys(group, group)
        else:
            self._push_held(to, missing)
        for key, (thing, _) in held.items():
            for link in self._asked.pop(key, ()):
                self._send(link, key)
            self._inbox.take(key, thing)  # if this very process fetches it

    def _push_held(self, to: Mapping[int, Address], missing: Mapping[int, Sequence[Span]]) -> None:
        for key, address in reversed([*to.items()]):  # as a backward pass makes them
            if key in self._held and address != self.address:
                thing, message = self._held[key]
                order = message.order
                messages = [encode(key, thing, order, address)]
                if key in missing and self._pushes.has(key, address):  # its parts are there
                    assert isinstance(thing, np.ndarray)
                    messages = [
                        encode(key, thing[start:stop], order, address, (start, thing.size))
                        for start, stop in missing[key]
                    ]
                self._push(key, address, self.relay(to.values()) or address, messages)

    def _push(self, key: int, to: Address, via: Address, messages: Iterable[Message]) -> None:
        """Send an object, or a part, to an address, through another process unless that is it."""
        self._pushes.add(key, to, via)
        for message in messages:
            self._link(via).send(message)

    def _pass_on(self, origin: Link, header: dict[str, Any], thing: Thing) -> None:
        """Send an object of another process to its end."""
        host, port = header["to"]
        key = header["key"]
        message = encode(key, thing, header["order"], (host, port), header.get("part"))
        self._link((host, port)).send(message)
        self._pushes.relay(key, (host, port), origin)

    def _not_pushed(self, keys: Collection[int]) -> None:
        """Tell those who asked for objects that these may not arrive otherwise.

        Most of them have arrived. So they are sent only to those who ask once more.
        """
        self._pushes.drop(keys)
        for key in keys:
            for link in self._asked.pop(key, ()) if key in self._held else ():
                link.send(note(missed=key))

    def _release(self, keys: Collection[int]) -> None:
        for key in keys:
            self._held.pop(key, None)
            self._asked.pop(key, None)
            self._waiting.pop(key, {}).pop(key, None)
        self._inbox.release(keys)
        for key in self._pushes.drop(keys):
            for link in self._all:
                link.take_back(key)

    def _fetch(self, address: Address, key: int, future: Future[Thing]) -> None:
        if self._inbox.collect(key, future):
            return
        if address == self.address:
            self._inbox.expect(key, future, None)
            if key in self._held:
                self._inbox.take(key, self._held[key][0])
        else:
            link = self._link(address)
            self._inbox.expect(key, future, link)
            link.send(note(get=key, again=key in self._inbox.used))

    def _give_up(self, keys: Collection[int]) -> None:
        for key in keys:
            if (link := self._inbox.give_up(key)) is not None:
                link.send(note(**{"not": key}))

    def _shut_down(self) -> None:
        self._closed = True
        for action in list(self._todo):  # fetches that came too late, among others
            with suppress(Exception):
                action()
        for link in list(self._all):
            self._lose(link, "this process ends the run")
        self._inbox.end("this process ends the run")
        for each in (self._listener, self._wake, self._waker):
            each.close()
        self._selector.close()


def _drain(wake: socket.socket) -> None:
    with suppress(BlockingIOError):
        while wake.recv(4096):
            pass
