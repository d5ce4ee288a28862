"""Reduce to one: rank 0 receives from all other ranks, sums, and sends the sum to each.

    step s = 0 … n−2:   rank s+1 ──x_{s+1}──► rank 0          then the same in reverse

    T = 2(n−1)·(α + Sβ) + (n−1)·Sγ

Rank 0 handles one message at a time. Within one process nothing is sent: it is a single sum of n
vectors, and hard to beat.
"""

import numpy as np

from tfparallel.collectives.algorithms.schedule import MessageSchedule, Step, Terms, there_and_back


def schedule(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in one block."""

    def step(s):
        one = np.array([s + 1])
        return Step(one, np.zeros_like(one), np.zeros_like(one), np.ones_like(one))

    return there_and_back(num_ranks, 1, num_ranks - 1, step)


def terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    others = num_ranks - 1
    return Terms(latencies=2 * others, sent=2 * others, added=others)
