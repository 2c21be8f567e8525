"""Keeps memory that a process frees, for its next step."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

# The settings of glibc's mallopt(3), and their values in bytes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**26}


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory; return whether it does.

    A step frees the activations of its model. Outside the main thread, glibc returns most of that
    memory to the system. The next step then gets each page anew, filled with zeros. Arrays above
    32 MiB, the largest value of the setting, are returned as before.
    """
    if sys.platform != "linux":
        return False
    with suppress(OSError, AttributeError):  # other C libraries have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return all([mallopt(setting, value) for setting, value in _SETTINGS.items()])
    return False
