"""Hierarchical ring: a ring inside each group, and rings across the groups.

Like `hierarchical`, but after the inner ring, the S/g bytes of a rank travel around the k groups in
k parts. Fewer bytes between groups than a tree, in more messages:

    T = 2(g−1)·α + 2(g−1)/g·Sβ  +  2(k−1)·α' + 2(k−1)/k·S/g·β'  +  (n−1)/n·Sγ
"""

import numpy as np

from tfparallel.collectives.algorithms.hierarchical import groups, ring_inside
from tfparallel.collectives.algorithms.schedule import MessageSchedule, Step, Terms, there_and_back


def schedule(num_ranks: int, local_ranks: int | None = None) -> MessageSchedule:
    """Returns the schedule of n = g·k ranks, in g·k blocks; arguments as for `hierarchical`."""
    g, k = groups(num_ranks, local_ranks)
    ranks = np.arange(num_ranks)
    group, local = ranks // g, ranks % g

    def step(s):
        if s < g - 1:
            return ring_inside(g, k, s, num_parts=k)
        parts = (local + 1) % g * k + (group - (s - (g - 1))) % k
        return Step(ranks, (ranks + g) % num_ranks, parts, parts + 1)

    return there_and_back(num_ranks, num_ranks, g - 1 + k - 1, step)


def terms(num_ranks: int, local_ranks: int | None = None) -> Terms:
    """Returns the cost."""
    g, k = groups(num_ranks, local_ranks)
    return Terms(
        latencies=2 * (g - 1),
        sent=2 * (g - 1) / g,
        added=(num_ranks - 1) / num_ranks,
        latencies_across=2 * (k - 1),
        sent_across=2 * (k - 1) / k / g,
    )
