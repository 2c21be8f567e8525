"""One exchange of direct transport: every host sends its slice of a model to all others at once.

Four hosts on this machine (network namespaces), links of 100 Mbit/s, 20 ms round trips. A step of
`sync` has two such exchanges. The time of the bytes alone is 3/4 of the model over the rate of a
link. Arms:

- built: `engines/ray/transport` as it is. Linux paces the connections, at no particular rate;
- unbounded: without the bound of what is on its way;
- unpaced: without pacing;
- in turn: to one host after the other, and each host begins with the next one after itself. So a
  link has one sender and one receiver at a time, if all hosts keep pace;
- known rate: each connection is limited to a third of the rate of the link, which the others do not
  know;
- measured rate: to its share of the rate at which bytes were acknowledged lately.

The arms take turns. Needs root, `ip`, and a C compiler.

    python benchmarks/exchange.py [--quick] [--megabytes 20]
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from _driver import Driver, say
from _report import OtherLoad, finish, machine, parser, quantile, table
from paceline.engines.ray.transport import link as links
from paceline.engines.ray.transport.link import Address, Link
from paceline.engines.ray.transport.peer import Peer
from paceline.engines.ray.transport.window import Connection, Window
from paceline.testing.hosts import Hosts, missing

HOSTS, RATE, DELAY, QUEUE = 4, 100e6, 0.005, 1 << 20
ARMS = ["built", "unbounded", "unpaced", "in turn", "known rate", "measured rate"]
BOUND = 1.6  # of the time of the bytes alone, as built
PATIENCE = 0.05  # seconds without progress after which a connection does not hold up others
WINDOW, KEPT, GAIN = 0.1, 50, 1.05  # of measured rates: seconds, samples, room to grow
ACKNOWLEDGED = slice(120, 128)  # of Linux's tcp_info
PACING_RATE = 47  # SO_MAX_PACING_RATE


class NoBound(Window):
    def room(self, connection: Connection, active: int) -> float:
        return inf


class Unbounded(Peer):
    """Sends what TCP takes, without a bound of what is on its way."""

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, secret)
        self._turns._window = NoBound()


class InTurn(Peer):
    """Sends to one host after the other."""

    def _schedule(self) -> float:
        now = time.monotonic()
        waiting = [link for link in self._all if link.wants_to_send]
        large = sorted(
            (link for link in waiting if not self._turns.is_near(link)), key=self._rotated
        )
        quick = [link for link in large if now - link.moved < PATIENCE]
        for link in waiting:
            due = link not in quick or link is quick[0]
            if not due:
                link.moved = now
            self._watch(link, due)
        return PATIENCE / 3 if waiting else 1.0

    def _rotated(self, link: Link) -> tuple[bool, str]:
        host = "" if link.address is None else link.address[0]
        return host <= self.address[0], host


class KnownRate(Peer):
    """Limits each connection to its share of a known rate."""

    def _register(self, link: Link) -> None:
        super()._register(link)
        share = RATE / 8 / (HOSTS - 1)
        link.sock.setsockopt(socket.SOL_SOCKET, PACING_RATE, int(1.02 * share))


class MeasuredRate(Peer):
    """Limits each connection to its share of the largest rate that was measured lately."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._before: tuple[float, dict[Link, int]] = 0.0, {}
        super().__init__(host, secret)

    def _schedule(self) -> float:
        pause = super()._schedule()
        sending = [x for x in self._all if x.opened and not self._turns.is_near(x)]
        sending = [link for link in sending if link.wants_to_send]
        now, (at, acknowledged) = time.monotonic(), self._before
        if sending and now - at >= WINDOW:
            self._before = now, {link: _acknowledged(link) for link in sending}
            moved = [self._before[1][link] - acknowledged.get(link, 0) for link in sending]
            if now - at < 5 * WINDOW and all(link in acknowledged for link in sending):
                self._rates.append(sum(moved) / (now - at))
            if self._rates:
                share = GAIN * max(self._rates) / len(sending)
                for link in sending:
                    link.sock.setsockopt(socket.SOL_SOCKET, PACING_RATE, max(int(share), 10_000))
        return min(pause, WINDOW) if sending else pause


def _acknowledged(link: Link) -> int:
    about = link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return int.from_bytes(about[ACKNOWLEDGED], "little")


# --- on each host --------------------------------------------------------------------------------


def serve(ip: str, rank: int, arm: str, megabytes: float) -> None:
    """Take part in an exchange whenever it is asked to."""
    if arm == "unpaced":
        links._MAX_PACING_RATE = -1  # the system refuses it
    kinds = {"in turn": InTurn, "known rate": KnownRate, "measured rate": MeasuredRate}
    kinds["unbounded"] = Unbounded
    peer = kinds.get(arm, Peer)(ip, b"of this benchmark alone, 32 byte")
    say(address=peer.address)
    everyone: list[Address] = [(host, port) for host, port in json.loads(sys.stdin.readline())]
    mine = np.ones(int(megabytes * 1e6 / 4 / HOSTS), np.float32)
    for line in sys.stdin:
        number = json.loads(line)["round"]
        begin = time.monotonic()
        ends = [end for end in enumerate(everyone) if end[0] != rank]
        fetched = [peer.fetch(address, number * HOSTS + other) for other, address in ends]
        key = number * HOSTS + rank
        peer.hold({key: mine}, orders={key: number})
        for future in fetched:
            future.result(timeout=120)
        say(seconds=time.monotonic() - begin)
        peer.release([key - HOSTS])


# --- outside -------------------------------------------------------------------------------------


def measure(megabytes: float, rounds: int, blocks: int) -> dict[str, list[float]]:
    """Return the seconds until all hosts have all slices, for each arm."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with (
        Hosts(HOSTS, delay=DELAY, rate=RATE, queue=QUEUE) as hosts,
        tempfile.TemporaryDirectory() as folder,
    ):
        groups: dict[str, list[Driver]] = {}
        for arm in ARMS:
            group = groups[arm] = []
            for rank in range(HOSTS):
                own = Path(folder) / arm / str(rank)
                own.mkdir(parents=True)
                plan = json.dumps([hosts.ip(rank), rank, arm, megabytes])
                group.append(Driver(hosts, __file__, ["--serve", plan], own, host=rank))
            addresses = [each.heard(120)["address"] for each in group]
            for each in group:
                assert each.process.stdin is not None
                each.process.stdin.write(json.dumps(addresses) + "\n")
                each.process.stdin.flush()
        for block in range(blocks):
            for arm, group in groups.items():
                for number in range(rounds + 1):
                    for each in group:
                        each.order(round=block * (rounds + 1) + number)
                    seconds = max(each.heard(150)["seconds"] for each in group)
                    if number:  # the first one opens connections, or finds them idle
                        found[arm].append(seconds)
                print(f"{arm}: {[round(each, 2) for each in found[arm][-rounds:]]}", flush=True)
        for group in groups.values():
            for each in group:
                with suppress(OSError):
                    each.process.kill()
    return found


def main() -> None:
    arguments = parser(__doc__, seconds=90)
    arguments.add_argument("--megabytes", type=float, default=20.0, help="of the whole model")
    arguments.add_argument("--serve", help="for the benchmark itself, on a host")
    given = arguments.parse_args()
    if given.serve:
        serve(*json.loads(given.serve))
        return
    about = machine("numpy")
    if reason := missing():
        finish("exchange", {"not_run": reason}, {"built": BOUND}, False, about, given)
    load = OtherLoad()
    found = measure(given.megabytes, 2 if given.quick else 5, 1 if given.quick else 3)
    alone = given.megabytes * 1e6 * (HOSTS - 1) / HOSTS / (RATE / 8)
    figures: dict[str, Any] = {"bytes_alone": round(alone, 2)}
    rows = []
    for arm, seconds in found.items():
        middle = quantile(seconds, 0.5)
        figures[arm] = {
            "seconds": round(middle, 2),
            "least": round(min(seconds), 2),
            "most": round(max(seconds), 2),
            "to_bytes_alone": round(middle / alone, 2),
        }
        spread = f"{middle:.2f} [{min(seconds):.2f}–{max(seconds):.2f}]"
        rows.append([arm, spread, f"{middle / alone:.2f}"])
    table(["", "seconds, median [range]", "to the bytes alone"], rows)
    about["others"] = load.cores()
    ok = figures["built"]["to_bytes_alone"] <= BOUND
    finish("exchange", figures, {"built": BOUND}, ok, about, given)


if __name__ == "__main__":
    main()
