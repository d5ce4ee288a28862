"""What MPI's library costs a process that has started it. No TensorFlow, and one process."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import mmap
from tfparallel.collectives.mpi import library

def map_memory(times):
    for _ in range(times):
        mmap.mmap(-1, 16384).close()

def anonymous_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))

library.load()
map_memory(2000)
before = anonymous_kib()
map_memory(20000)
print((anonymous_kib() - before) / 20)
"""


def growth(**environment):
    """KiB that 1,000 mappings leave behind; Python makes one for each call from TensorFlow."""
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, **environment}
    return float(subprocess.check_output(command, env=environment, text=True, timeout=120))


@pytest.mark.skipif(
    os.path.isdir("/sys/class/infiniband"), reason="RDMA needs what UCX keeps of each mapping"
)
def test_nothing_is_kept_of_memory_that_was_given_back():
    pytest.importorskip("mpi4py")
    assert growth() < 10
    assert growth(UCX_MEM_EVENTS="y") > 100  # Fails once UCX keeps nothing.
