"""Lets glibc reuse the memory of freed buffers.

By default glibc returns a large buffer to the kernel when it is freed, and faults in the next one
page by page: at every step, for every collective. `tfparallel launch` changes that through the
environment of its workers; this module does it for workers started by other launchers.
"""

import ctypes
import os
import sys

# From <malloc.h>: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX.
_SETTINGS = ((-1, 2**31 - 1), (-2, 2**28), (-4, 0))


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory, unless the environment configures malloc.

    Returns:
        Whether the settings were applied.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # Another C library.
        return False
    return all([mallopt(name, value) for name, value in _SETTINGS])
