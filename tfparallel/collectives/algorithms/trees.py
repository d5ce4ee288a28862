"""Trees: the whole vector moves up to rank 0, and its sum down again.

Reduce to one: rank 0 receives from all other ranks, sums, and sends the sum to each.

    step s = 0 … n−2:   rank s+1 ──x_{s+1}──► rank 0          then the same in reverse

    T = 2(n−1)·(α + Sβ) + (n−1)·Sγ

Rank 0 handles one message at a time. Within one process nothing is sent: it is a single sum of n
vectors, and hard to beat.

Tree: sum pairs, then pairs of sums; then the same in reverse.

    step s = 0 … ⌈log₂ n⌉ − 1:   rank r ──its sum──► rank r − 2ˢ,   for r mod 2ˢ⁺¹ = 2ˢ

    0 ◄── 1     2 ◄── 3     4 ◄── 5     6 ◄── 7        s = 0
    0 ◄──────── 2           4 ◄──────── 6              s = 1
    0 ◄──────────────────── 4                          s = 2

    T = ⌈log₂ n⌉·(2α + 2Sβ + Sγ)

For small vectors on many ranks. Half of the ranks are done after the first step, so large vectors
leave most links idle.
"""

import numpy as np

from tfparallel.collectives.algorithms.schedule import (
    MessageSchedule,
    Step,
    Terms,
    log2_ceiling,
    there_and_back,
)


def reduce_to_one(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in one block."""
    return there_and_back(num_ranks, 1, num_ranks - 1, lambda s: _whole(np.array([s + 1]), s + 1))


def reduce_to_one_terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    others = num_ranks - 1
    return Terms(latencies=2 * others, sent=2 * others, added=others)


def tree(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in one block."""
    return there_and_back(
        num_ranks,
        1,
        log2_ceiling(num_ranks),
        lambda s: _whole(np.arange(2**s, num_ranks, 2 ** (s + 1)), 2**s),
    )


def tree_terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    levels = log2_ceiling(num_ranks)
    return Terms(latencies=2 * levels, sent=2 * levels, added=levels)


def _whole(sources: np.ndarray, distance: int) -> Step:
    """Returns a step in which ranks send the whole vector to those at a distance below them."""
    return Step(sources, sources - distance, np.zeros_like(sources), np.ones_like(sources))
