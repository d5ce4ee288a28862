"""The sweep: measures every contender at every size, interleaved, after verifying its result.

    for each size:
        check       whole numbers: every element exact, every rank the same bits;
                    random numbers: within the rounding of a sum
        warm up
        for each iteration, for each contender:   barrier; start the clock; run; stop it
        time of an iteration = the slowest process's

Contenders take turns within an iteration: disturbances of the machine affect them equally.

    world ──► ranks of all processes                  contender ──► one implementation
      barrier()   all have arrived                      prepare(collective, count, dtype)
      gather(x)   every process's x                        │
                                                           ▼
                                                        prepared ──► load, run, run_null, arrays

One process may have all ranks (its devices) or one (a worker of a job): a contender gets the inputs
of its process's ranks, and returns their results.
"""

import itertools
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tfparallel.bench.collectives import (
    SAME_ON_ALL,
    input_count,
    num_different,
    num_wrong,
    random_numbers,
    whole_count,
    whole_numbers,
)
from tfparallel.bench.sizes import ITEM_BYTES, MIN_WARMUP
from tfparallel.bench.table import Row

_NUM_NULL = 5


class World(Protocol):
    """The ranks of a measurement.

    Attributes:
        num_ranks: n, over all processes.
        ranks: The ranks of this process.
        place: A description of the ranks: "4 devices of one process".
        names: A name for each rank, the key of a profile.
    """

    num_ranks: int
    ranks: range
    place: str
    names: list[str]

    def barrier(self) -> None:
        """Returns once every process has called it."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every process's values, in process order."""


class Prepared(Protocol):
    """One collective of one size and type, ready to run repeatedly."""

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Sets the inputs, one vector for each rank of this process."""

    def run(self) -> Any:
        """Runs the collective once; returns its outcome when every rank's result is complete."""

    def run_null(self) -> None:
        """Does the same as `run` without the exchange."""

    def arrays(self, outcome: Any) -> list[np.ndarray]:
        """Returns the outcome of `run` as arrays, one for each rank of this process."""


class Contender(Protocol):
    """One implementation of an algorithm.

    Attributes:
        name: Its name in `--algorithms`.
        implementation: The code that runs, such as "tf.distribute.HierarchicalCopyAllReduce".
        collectives: The supported ones of `sizes.COLLECTIVES`.
    """

    name: str
    implementation: str
    collectives: tuple[str, ...]

    def prepare(self, collective: str, count: int, dtype: str) -> Prepared:
        """Sets up a collective, untimed; `count` is its size in elements of `dtype`."""


class OneProcess:
    """The world of one process, whose devices are all ranks."""

    def __init__(self, num_ranks: int, devices: Sequence[str] = ()):
        self.num_ranks = num_ranks
        self.names = list(devices)
        self.ranks = range(num_ranks)
        self.place = f"{num_ranks} devices of one process"

    def barrier(self) -> None:
        """Does nothing: there is no other process."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns this process's values."""
        return [list(values)]


def measure(
    world: World,
    contenders: Sequence[Contender],
    counts: Sequence[int],
    *,
    collective: str = "all_reduce",
    dtype: str = "float32",
    iters: int = 20,
    warmup_iters: int = MIN_WARMUP,
    unalign: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Measures a collective.

    Args:
        world: The ranks.
        contenders: The contenders, in the same order on all processes.
        counts: The element count of each size, rounded down to what the ranks can divide.
        collective: One of `sizes.COLLECTIVES`.
        dtype: One of `sizes.ITEM_BYTES`.
        iters: Timed calls of each contender.
        warmup_iters: Untimed calls before these, at least `MIN_WARMUP`.
        unalign: If not 0, each size is also measured with so many more elements: see `whole_count`.
        clock: Returns the time in seconds.

    Yields:
        A row for each size and contender, size by size; equal on all processes.
    """
    more = (0, unalign) if unalign else (0,)
    for size, extra in itertools.product(counts, more):
        count = whole_count(collective, size, world.num_ranks, extra)
        prepared = [contender.prepare(collective, count, dtype) for contender in contenders]
        wrong = [_num_wrong(world, one, collective, count, dtype) for one in prepared]
        for _ in range(warmup_iters):
            for one in prepared:
                world.barrier()
                one.run()
                one.run_null()
        seconds: list[list[float]] = [[] for _ in prepared]
        nulls: list[list[float]] = [[] for _ in prepared]
        for iteration in range(iters):
            # Rotate, to let each contender start equally often.
            turn = [(iteration + k) % len(prepared) for k in range(len(prepared))]
            for k in turn:
                seconds[k].append(_timed(world, prepared[k].run, clock))
        for _ in range(_NUM_NULL):
            for k, one in enumerate(prepared):
                nulls[k].append(_timed(world, one.run_null, clock))
        for k, contender in enumerate(contenders):
            slowest = [max(times) for times in zip(*world.gather(seconds[k]), strict=True)]
            slowest_null = [max(times) for times in zip(*world.gather(nulls[k]), strict=True)]
            yield Row(
                algorithm=contender.name,
                implementation=contender.implementation,
                collective=collective,
                num_ranks=world.num_ranks,
                count=count,
                size_bytes=count * ITEM_BYTES[dtype],
                dtype=dtype,
                times_seconds=tuple(slowest),
                null_seconds=statistics.median(slowest_null),
                num_wrong=wrong[k],
            )


def _timed(world, call, clock) -> float:
    world.barrier()
    start = clock()
    outcome = call()
    elapsed = clock() - start
    del outcome  # After the timing: freeing large arrays is not part of the collective.
    return elapsed


def _num_wrong(world: World, one: Prepared, collective: str, count: int, dtype: str) -> int:
    """Runs on whole and random numbers; returns the number of wrong elements on all processes."""
    num_ranks, ranks = world.num_ranks, world.ranks
    num_elements, wrong = input_count(collective, count, num_ranks), 0
    for numbers in (whole_numbers, random_numbers):
        one.load([numbers(num_elements, dtype, rank, num_ranks) for rank in ranks])
        world.barrier()
        outputs = one.arrays(one.run())
        wrong += num_wrong(outputs, ranks, num_ranks, dtype, collective, numbers)
    if collective not in SAME_ON_ALL:
        return int(sum(number for (number,) in world.gather([float(wrong)])))
    # Compare ranks within a process by element, and processes by checksum.
    wrong += num_different(outputs)
    gathered = world.gather([float(wrong), float(zlib.crc32(outputs[0].tobytes()))])
    differing = sum(count for _, bits in gathered if bits != gathered[0][1])
    return int(sum(number for number, _ in gathered)) + differing
