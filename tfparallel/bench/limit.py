"""The least time that the memory of a machine allows, whatever the algorithm.

Bytes that must be read and written for an all-reduce of S bytes among n ranks of one host:

    in one process, results may share memory      read n·S, write S                    (n+1)·S
    in processes, each must hold its own           add: read n·S, write S (each rank its part)
                                                   pass on: read and write (n−1)·S     (3n−1)·S

over the bytes a second that all cores together read and write, adding float32 vectors larger than
the caches. What stays in the caches can be faster.
"""

import concurrent.futures
import os
import time

import numpy as np

_ELEMENTS = 2**23  # 32 MiB each, three of them a thread.
_ROUNDS = 15  # The best counts: what else runs takes its share of the others.


def least_bytes(num_ranks: int, size_bytes: float, shared: bool) -> float:
    """Returns how many bytes an all-reduce must read and write."""
    return ((num_ranks + 1) if shared else (3 * num_ranks - 1)) * size_bytes


def memory_bandwidth() -> float:
    """Measures the bytes a second that all cores together read and write, in half a second."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    count = _ELEMENTS // num_threads
    arrays = [np.ones((3, count), np.float32) for _ in range(num_threads)]

    def add(array):
        np.add(array[0], array[1], out=array[2])  # Without Python's lock.

    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(add, arrays))
            best = min(best, time.perf_counter() - start)
    return sum(array.nbytes for array in arrays) / best
