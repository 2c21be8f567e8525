"""Real namespaces and links: what they delay, carry, lose and leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.testing import groups
from paceline.testing.hosts import Hosts, missing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

MBIT = 1e6
# Answers each byte; says so when it is ready.
ECHO = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        peer = server.accept()[0]
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while byte := peer.recv(1):
            peer.sendall(byte)
"""
# Prints the best of some round trips, which no busy machine makes shorter than they are.
ROUND_TRIP = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
best = 1e9
for _ in range(8):
    start = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    best = min(best, time.monotonic() - start)
print(best)
"""
# Takes all that comes, then answers one byte.
SINK = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        peer = server.accept()[0]
        while peer.recv(1 << 18):
            pass
        peer.sendall(b"x")
        peer.close()
"""
# Prints the seconds until all bytes have arrived.
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=10)
start = time.monotonic()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.monotonic() - start)
"""
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3, delay=0.005, rate=50 * MBIT) as hosts:
        yield hosts


def serve(hosts: Hosts, host: int, script: str) -> None:
    """Start a server on a host, and wait until it listens."""
    command = [sys.executable, "-S", "-c", script]
    process = hosts.popen(host, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == "ready\n"


def printed(hosts: Hosts, host: int, script: str, *arguments: object) -> float:
    """Return the number that a script prints on a host."""
    command = [sys.executable, "-S", "-c", script, *map(str, arguments)]
    done = hosts.run(host, command, timeout=20)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]


def mine() -> list[str]:
    return [name for name in namespaces() if name.startswith(f"pl{os.getpid()}n")]


@pytest.mark.timing
def test_a_round_trip_crosses_four_links(hosts: Hosts) -> None:
    serve(hosts, 1, ECHO)
    assert 0.0195 < printed(hosts, 0, ROUND_TRIP, hosts.ip(1), 5) < 0.024
    hosts.link(1, delay=0.020)
    assert 0.0495 < printed(hosts, 0, ROUND_TRIP, hosts.ip(1), 5) < 0.054
    assert printed(hosts, 1, ROUND_TRIP, "127.0.0.1", 5) < 0.005


@pytest.mark.timing
def test_the_rate_is_reached_and_kept_and_can_be_changed(hosts: Hosts) -> None:
    serve(hosts, 1, SINK)
    size = 5_000_000
    assert 35 * MBIT < 8 * size / printed(hosts, 0, SEND, hosts.ip(1), size) < 50 * MBIT
    hosts.link(1, rate=5 * MBIT)
    size = 600_000
    assert 3.5 * MBIT < 8 * size / printed(hosts, 0, SEND, hosts.ip(1), size) < 5 * MBIT


@pytest.mark.timing
def test_what_waits_leaves_at_the_new_rate() -> None:
    with Hosts(2, rate=20_000) as hosts:
        serve(hosts, 1, SINK)
        command = [sys.executable, "-S", "-c", SEND, hosts.ip(1), "100000"]
        sender = hosts.popen(0, command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while hosts.carried()[0][0] < 1000:  # the first frame of ten that go at once: 6 seconds
            assert time.monotonic() < until
            time.sleep(0.01)
        for host in range(2):
            hosts.link(host, rate=100 * MBIT)
        assert sender.wait(timeout=3) == 0


def test_a_cut_link_carries_nothing_until_it_is_mended(hosts: Hosts) -> None:
    serve(hosts, 1, ECHO)
    serve(hosts, 2, ECHO)
    hosts.link(1, up=False)
    before = hosts.carried()[1]
    command = [sys.executable, "-S", "-c", ROUND_TRIP, hosts.ip(1), "0.5"]
    done = hosts.run(0, command, timeout=20)
    assert done.returncode != 0 and "timed out" in done.stderr
    assert hosts.carried()[1] == before
    assert printed(hosts, 0, ROUND_TRIP, hosts.ip(2), 5) < 0.03
    hosts.link(1, up=True)
    assert printed(hosts, 0, ROUND_TRIP, hosts.ip(1), 5) < 0.03


def test_bytes_are_counted_on_the_links_that_carry_them(hosts: Hosts) -> None:
    serve(hosts, 1, SINK)
    printed(hosts, 0, SEND, hosts.ip(1), 1_000_000)
    carried = hosts.carried()
    assert 1_000_000 < carried[0][0] < 1_100_000
    assert 1_000_000 < carried[1][1] < 1_100_000
    assert carried[0][1] < 100_000 and carried[1][0] < 100_000  # the acknowledgements
    assert sum(carried[2]) < 10_000  # not the million: the kernels greet their neighbors


def test_loss_and_a_short_queue_drop_frames() -> None:
    with Hosts(3, rate=50 * MBIT, queue=20_000) as hosts:
        serve(hosts, 1, SINK)
        printed(hosts, 0, SEND, hosts.ip(1), 1_000_000)
        assert hosts.dropped()[0][0] > 0 and hosts.dropped()[2] == (0, 0)
        hosts.link(1, loss=1.0)
        command = [sys.executable, "-S", "-c", ROUND_TRIP, hosts.ip(1), "0.5"]
        assert hosts.run(2, command, timeout=20).returncode != 0
        assert hosts.dropped()[1][1] > 0


def test_kill_ends_the_processes_of_one_host(hosts: Hosts) -> None:
    nested = f"import subprocess; subprocess.run({SLEEP!r}, start_new_session=True)"
    killed = hosts.popen(2, [sys.executable, "-S", "-c", nested])
    spared = hosts.popen(1, SLEEP)
    hosts.kill(2)
    assert killed.wait(5) == -signal.SIGKILL
    assert spared.poll() is None
    hosts.link(2, rate=10 * MBIT)  # the wire, which made a device on every host, is on none


def test_a_frozen_host_answers_when_it_is_thawed(hosts: Hosts) -> None:
    if reason := groups.missing():
        pytest.skip(reason)
    serve(hosts, 1, ECHO)
    hosts.freeze(1)
    command = [sys.executable, "-S", "-c", ROUND_TRIP, hosts.ip(1), "0.5"]
    assert hosts.run(0, command, timeout=20).returncode != 0
    assert hosts.pids(1, sys.executable) == hosts.pids(1) and not hosts.pids(1, "other")
    hosts.thaw(1)
    assert printed(hosts, 0, ROUND_TRIP, hosts.ip(1), 5) < 0.03
    hosts.freeze(1)
    hosts.kill(1)
    assert not hosts.pids(1)


def test_run_gives_the_code_and_the_output_and_ends_in_time(hosts: Hosts) -> None:
    code = "import os, sys; print(os.environ['A']); sys.exit(os.environ['GLOO_SOCKET_IFNAME'])"
    done = hosts.run(0, [sys.executable, "-S", "-c", code], timeout=10, env={"A": "B"})
    assert (done.returncode, done.stdout, done.stderr) == (1, "B\n", "eth0\n")
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run(0, SLEEP, timeout=0.2)


def test_settings_of_the_devices() -> None:
    with Hosts(1, mtu=9000, slow_start_after_idle=False) as hosts:
        files = ["/sys/class/net/eth0/mtu", "/proc/sys/net/ipv4/tcp_slow_start_after_idle"]
        assert hosts.run(0, ["cat", *files], timeout=10).stdout == "9000\n0\n"


def test_nothing_is_left_even_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts, Hosts(1) as others:
        process, other = hosts.popen(1, SLEEP), others.popen(0, SLEEP)
        assert len(mine()) == 3
        raise ZeroDivisionError
    assert process.returncode == other.returncode == -signal.SIGKILL
    assert not mine()
    with pytest.raises(RuntimeError, match="not up"):
        hosts.run(0, ["true"], timeout=10)
    with hosts:
        assert hosts.run(1, ["true"], timeout=10).returncode == 0


def test_a_killed_process_leaves_no_wire_and_its_hosts_are_removed_by_the_next() -> None:
    script = (
        "import sys, time; from paceline.testing.hosts import Hosts\n"
        "with Hosts(2) as hosts:\n"
        f"    print(hosts.popen(1, {SLEEP!r}).pid, hosts._wire.pid, flush=True)\n"
        "    time.sleep(60)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as crashed:
        assert crashed.stdout is not None
        sleeper, wire = map(int, crashed.stdout.readline().split())
        crashed.kill()
    left = [name for name in namespaces() if name.startswith(f"pl{crashed.pid}n")]
    folders = list(Path("/tmp").glob(f"paceline{crashed.pid}-*"))
    assert len(left) == len(folders) == 2 and Path(f"/proc/{sleeper}").exists()
    with Hosts(1):
        assert not any(folder.exists() for folder in folders)
        assert not set(left) & set(namespaces())
        for pid in (sleeper, wire):
            assert not Path(f"/proc/{pid}/exe").exists()  # gone, or waiting to be reaped


def test_ray_sees_a_node_on_each_host() -> None:
    script = (
        "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)\n"
        "print(*sorted(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']))"
    )
    with Hosts(2, delay=0.001, rate=100 * MBIT) as hosts:
        address = hosts.start_ray(cpus=2, object_store=100_000_000)
        assert address == "10.88.0.1:6388"
        done = hosts.run(0, [sys.executable, "-c", script, address], timeout=60)
        assert done.stdout == "10.88.0.1 10.88.0.2\n", done.stderr
    assert not mine()


def test_a_ray_that_does_not_start_shows_its_log() -> None:
    with Hosts(1) as hosts:
        with pytest.raises(RuntimeError, match=r"on host 0 has failed(.|\n)*encodings"):
            hosts.start_ray(env={"PYTHONHOME": "nowhere"})
        with pytest.raises(RuntimeError, match=r"on host 0 took over 0.1 s; the end of its log"):
            hosts.start_ray(timeout=0.1)
