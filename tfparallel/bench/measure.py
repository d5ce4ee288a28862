"""The sweep: measures every contender at every size, interleaved, after verifying its result.

    for each size:
        check       whole numbers: every element exact, every rank the same bits;
                    random numbers: within the rounding of a sum
        warm up
        for each iteration, for each contender:   barrier; start the clock; run; stop it
        time of an iteration = the slowest process's

Contenders take turns within an iteration: disturbances of the machine affect them equally.
"""

import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from tfparallel.bench.collectives import (
    SAME_ON_ALL,
    input_count,
    num_different,
    num_wrong,
    random_numbers,
    whole_count,
    whole_numbers,
)
from tfparallel.bench.contender import Contender, Prepared, World
from tfparallel.bench.sizes import ITEM_BYTES, MIN_WARMUP
from tfparallel.bench.table import Row

_NUM_NULL = 5


def measure(
    world: World,
    contenders: Sequence[Contender],
    counts: Sequence[int],
    *,
    collective: str = "all_reduce",
    dtype: str = "float32",
    iters: int = 20,
    warmup_iters: int = MIN_WARMUP,
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
        clock: Returns the time in seconds.

    Yields:
        A row for each size and contender, size by size; equal on all processes.
    """
    for size in counts:
        count = whole_count(collective, size, world.num_ranks)
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
