"""Tree: sum pairs, then pairs of sums; then the same in reverse.

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


def schedule(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in one block."""

    def step(s):
        sources = np.arange(2**s, num_ranks, 2 ** (s + 1))
        zeros = np.zeros_like(sources)
        return Step(sources, sources - 2**s, zeros, zeros + 1)

    return there_and_back(num_ranks, 1, log2_ceiling(num_ranks), step)


def terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    levels = log2_ceiling(num_ranks)
    return Terms(latencies=2 * levels, sent=2 * levels, added=levels)
