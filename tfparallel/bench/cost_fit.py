"""References for a sweep: the cost model fitted to it, and the limit of memory bandwidth.

The limit is the bytes that an all-reduce of S bytes among n ranks of one host must read and write:

    in one process, results may share memory      read n·S, write S                    (n+1)·S
    in processes, each needs its own copy          add: read n·S, write S (each rank its part)
                                                   pass on: read and write (n−1)·S     (3n−1)·S

over the bytes per second that all cores together read and write when they add float32 vectors
larger than the caches. Data in the caches can be faster.
"""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Sequence

import numpy as np

from tfparallel.bench.table import Row
from tfparallel.collectives.algorithms import ALGORITHMS
from tfparallel.collectives.cost_model import CostModel, Measurement, fit

_FEWEST = 4  # The number of fitted parameters.
_BETWEEN_WORKERS = {
    "ring": ("gRPC", "ring"),
    "ring_tuned": ("gRPC, tuned", "ring"),
    "mpi_ring": ("MPI", "ring"),
    "mpi_tree": ("MPI", "tree"),
    "mpi_recursive_doubling": ("MPI", "recursive_doubling"),
    "mpi_reduce_scatter_all_gather": ("MPI", "halving_doubling"),
}
_ELEMENTS = 2**23  # 32 MiB each, three per thread.
_ROUNDS = 15  # The best one counts: other programs slow the rest down.


def fitted(rows: Sequence[Row], shared: bool, num_cores: int | None = None) -> dict[str, CostModel]:
    """Returns a model for each transport of a sweep with enough times to fit one.

    Args:
        rows: The sweep.
        shared: Whether the ranks are devices of one process.
        num_cores: The cores of the ranks' host; None if they are on several hosts.
    """
    measured: dict[str, list[Measurement]] = {}
    for row in rows:
        modelled = modelled_as(row.algorithm, shared)
        if modelled is not None and row.collective == "all_reduce":
            transport, algorithm = modelled
            measured.setdefault(transport, []).append(
                Measurement(algorithm, row.num_ranks, row.size_bytes, row.median_seconds)
            )
    kind = "shared" if shared else "wire"
    return {
        transport: fit(times, kind, num_cores)
        for transport, times in measured.items()
        if len(times) >= _FEWEST
    }


def modelled_as(name: str, shared: bool) -> tuple[str, str] | None:
    """Returns a contender's transport and schedule; None for an unknown name.

    A library's name for an algorithm determines the schedule, but not the transport: each transport
    has its own parameters.
    """
    if shared:
        return ("memory", name) if name in ALGORITHMS else None
    return _BETWEEN_WORKERS.get(name)


def describe(model: CostModel) -> str:
    """Returns the model in one line."""
    return (
        f"t0 {model.fixed * 1e6:.3g} us, alpha {model.alpha * 1e6:.3g} us a message, "
        f"beta {model.beta * 1e9:.3g} ns a byte sent, gamma {model.gamma * 1e9:.3g} ns a byte "
        f"added; median error {model.median_error:.0%} of {len(model.residuals)} times"
    )


def as_json(model: CostModel) -> dict:
    """Returns the model, times in seconds."""
    return {**dataclasses.asdict(model), "median_error": model.median_error}


def fastest(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Returns the fastest measured algorithms, each with the size from which on it wins."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.size_bytes not in best or row.median_seconds < best[row.size_bytes].median_seconds:
            best[row.size_bytes] = row
    winners: list[tuple[int, str]] = []
    for size, row in sorted(best.items()):
        if not winners or winners[-1][1] != row.algorithm:
            winners.append((size, row.algorithm))
    return winners


def least_bytes(num_ranks: int, size_bytes: float, shared: bool) -> float:
    """Returns how many bytes an all-reduce must read and write."""
    return ((num_ranks + 1) if shared else (3 * num_ranks - 1)) * size_bytes


def memory_bandwidth() -> float:
    """Measures the memory bandwidth of all cores together, in bytes per second; half a second."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    count = _ELEMENTS // num_threads
    arrays = [np.ones((3, count), np.float32) for _ in range(num_threads)]

    def add(array):
        np.add(array[0], array[1], out=array[2])  # Releases the GIL.

    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(add, arrays))
            best = min(best, time.perf_counter() - start)
    return sum(array.nbytes for array in arrays) / best
