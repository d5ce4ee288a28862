"""Ring: n blocks travel around, and each rank adds its term; then the sums travel around.

    step s = 0 … n−2:   rank r ──block (r−s) mod n──► rank (r+1) mod n, which adds it

    After n−1 steps rank r holds the sum of block (r+1) mod n. The rest is the same in reverse.

              blocks 0    1    2                 block 0 of n = 3
    rank 0   ──►  x₀   ·    ·             0 ──x₀──► 1 ──x₀+x₁──► 2   (the sum is at 2)
    rank 1        ·   x₁    ·  ──►
    rank 2        ·    ·   x₂  ──► 0

    T = 2(n−1)·α + 2(n−1)/n·Sβ + (n−1)/n·Sγ

No rank sends more than 2S bytes for any n, which is optimal, but 2(n−1) messages follow one
another. For large vectors and few ranks.

References:
    Pitch Patarasuk, Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", Journal of Parallel and Distributed Computing 69(2), 2009.
"""

import numpy as np

from tfparallel.collectives.algorithms.schedule import MessageSchedule, Step, Terms, there_and_back


def schedule(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in n blocks."""
    ranks = np.arange(num_ranks)

    def step(s):
        blocks = (ranks - s) % num_ranks
        return Step(ranks, (ranks + 1) % num_ranks, blocks, blocks + 1)

    return there_and_back(num_ranks, num_ranks, num_ranks - 1, step)


def terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    share = (num_ranks - 1) / num_ranks
    return Terms(latencies=2 * (num_ranks - 1), sent=2 * share, added=share)
