"""Freed memory stays with a process, so that the next step does not ask for it page by page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it")

# Twelve arrays of 10 MB, as activations of a step, allocated and freed in a thread.
STEPS = """
import resource, sys, threading
import numpy as np
from paceline.engines.allocator import keep_freed_memory

def work():
    if sys.argv[1] == "keep":
        assert keep_freed_memory()
    for step in range(6):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        arrays = [np.ones(1_250_000) for _ in range(12)]
        del arrays
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    print(faults)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def faults(how: str) -> int:
    """Return the page faults of the last of six steps, in a process of its own."""
    command = [sys.executable, "-c", STEPS, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_a_step_uses_the_memory_of_the_last_one() -> None:
    assert faults("keep") < 0.1 * faults("usual")
