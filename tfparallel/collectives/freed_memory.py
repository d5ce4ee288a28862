"""Keeps what large buffers leave behind, for the next ones.

glibc gives a large buffer back to the kernel when it is freed, and faults the next one in page by
page: at every step, for every collective. `tfparallel launch` says otherwise in the environment of
its workers; a worker that something else has started says it here.
"""

import ctypes
import os
import sys

# From <malloc.h>: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX.
_SETTINGS = ((-1, 2**31 - 1), (-2, 2**28), (-4, 0))


def keep_freed_memory() -> bool:
    """Has glibc keep freed memory, unless the environment says what to do.

    Returns:
        Whether it was told.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        tell = ctypes.CDLL(None).mallopt
    except AttributeError:  # Another C library.
        return False
    return all([tell(name, value) for name, value in _SETTINGS])
