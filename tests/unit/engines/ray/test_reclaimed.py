"""SIGTERM to a real process: a notice at first, its end the second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.unit.engines.ray.metadata import serving

WAITS = """
import sys, threading
from paceline.engines.ray.reclaimed import Reclaimed
found = Reclaimed(*sys.argv[1:])
def tell():
    print(tuple(found.wait(30)), flush=True)
thread = threading.Thread(target=tell)
thread.start()
print("ready", flush=True)
thread.join(30)
threading.Event().wait(60)
"""


def start(*given: str, url: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITS, *given]
    env = {**os.environ, "PACELINE_METADATA_URL": url}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_the_first_sigterm_is_a_notice_and_the_second_ends_the_process() -> None:
    with start() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "('its process got SIGTERM', False)\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143


def test_a_cloud_gives_notice_of_the_whole_machine() -> None:
    with serving() as service, start("gcp", url=service.url) as process:
        assert process.stdout is not None
        service.preempted = True
        assert process.stdout.readline() == "('Google Cloud preempts this machine', True)\n"
        process.kill()


def test_a_forked_process_ends_at_sigterm_and_its_parent_hears_nothing() -> None:
    code = """
import os, signal, time
from paceline.engines.ray.reclaimed import Reclaimed
found = Reclaimed()
child = os.fork()
if not child:
    time.sleep(30)
    os._exit(0)
time.sleep(0.5)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), found.wait(0.5))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "-15 None\n"
