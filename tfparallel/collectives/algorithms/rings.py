"""Rings: one over all ranks, and one inside each group of ranks (the devices of a host).

Ring: n blocks travel around, and each rank adds its term; then the sums travel around.

    step s = 0 … n−2:   rank r ──block (r−s) mod n──► rank (r+1) mod n, which adds it

    After n−1 steps rank r holds the sum of block (r+1) mod n. The rest is the same in reverse.

              blocks 0    1    2                 block 0 of n = 3
    rank 0   ──►  x₀   ·    ·             0 ──x₀──► 1 ──x₀+x₁──► 2   (the sum is at 2)
    rank 1        ·   x₁    ·  ──►
    rank 2        ·    ·   x₂  ──► 0

    T = 2(n−1)·α + 2(n−1)/n·Sβ + (n−1)/n·Sγ

No rank sends more than 2S bytes for any n, which is optimal, but 2(n−1) messages follow one
another. For large vectors and few ranks.

Hierarchical: n = g·k ranks, k groups of g neighbours each, rank r = j·g + i.

    reduce-scatter   in each group j   ring over g blocks       rank (j, i) has block (i+1) mod g
    reduce           for each i        tree over the k groups   group 0 has the sum of its block
    and the same in reverse

            group 0        group 1
          ┌─0 ─► 1─┐     ┌─4 ─► 5─┐        inside: (g−1) steps of S/g on fast links
          └─3 ◄─ 2─┘     └─7 ◄─ 6─┘
            0 ◄──────────── 4              across: ⌈log₂ k⌉ steps of S/g on slow links,
            1 ◄──────────── 5, …           g messages in parallel

    T = 2(g−1)·α + 2(g−1)/g·Sβ  +  ⌈log₂ k⌉·(2α' + 2S/g·β')  +  ((g−1) + ⌈log₂ k⌉)/g·Sγ

Hierarchical ring: like it, but after the inner ring, the S/g bytes of a rank travel around the k
groups in k parts. Fewer bytes between groups than a tree, in more messages:

    T = 2(g−1)·α + 2(g−1)/g·Sβ  +  2(k−1)·α' + 2(k−1)/k·S/g·β'  +  (n−1)/n·Sγ

References:
    Pitch Patarasuk, Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", Journal of Parallel and Distributed Computing 69(2), 2009.
"""

import math

import numpy as np

from tfparallel.collectives.algorithms.schedule import (
    MessageSchedule,
    Step,
    Terms,
    check_num_ranks,
    log2_ceiling,
    there_and_back,
)


def ring(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in n blocks."""
    return there_and_back(
        num_ranks, num_ranks, num_ranks - 1, lambda s: _step(num_ranks, 1, s, num_parts=1)
    )


def ring_terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    share = (num_ranks - 1) / num_ranks
    return Terms(latencies=2 * (num_ranks - 1), sent=2 * share, added=share)


def hierarchical(num_ranks: int, local_ranks: int | None = None) -> MessageSchedule:
    """Returns the schedule of n ranks, in g blocks.

    Args:
        num_ranks: n.
        local_ranks: g, a divisor of n; by default the smallest that is at least √n.
    """
    g, k = groups(num_ranks, local_ranks)

    def step(s):
        if s < g - 1:
            return _step(g, k, s, num_parts=1)
        level = s - (g - 1)
        group = np.arange(2**level, k, 2 ** (level + 1))
        sources = (group[:, None] * g + np.arange(g)).ravel()
        blocks = (sources + 1) % g
        return Step(sources, sources - 2**level * g, blocks, blocks + 1)

    return there_and_back(num_ranks, g, g - 1 + log2_ceiling(k), step)


def hierarchical_terms(num_ranks: int, local_ranks: int | None = None) -> Terms:
    """Returns the cost."""
    g, k = groups(num_ranks, local_ranks)
    levels = log2_ceiling(k)
    return Terms(
        latencies=2 * (g - 1),
        sent=2 * (g - 1) / g,
        added=(g - 1 + levels) / g,
        latencies_across=2 * levels,
        sent_across=2 * levels / g,
    )


def hierarchical_ring(num_ranks: int, local_ranks: int | None = None) -> MessageSchedule:
    """Returns the schedule of n = g·k ranks, in g·k blocks; arguments as for `hierarchical`."""
    g, k = groups(num_ranks, local_ranks)
    ranks = np.arange(num_ranks)
    group, local = ranks // g, ranks % g

    def step(s):
        if s < g - 1:
            return _step(g, k, s, num_parts=k)
        parts = (local + 1) % g * k + (group - (s - (g - 1))) % k
        return Step(ranks, (ranks + g) % num_ranks, parts, parts + 1)

    return there_and_back(num_ranks, num_ranks, g - 1 + k - 1, step)


def hierarchical_ring_terms(num_ranks: int, local_ranks: int | None = None) -> Terms:
    """Returns the cost."""
    g, k = groups(num_ranks, local_ranks)
    return Terms(
        latencies=2 * (g - 1),
        sent=2 * (g - 1) / g,
        added=(num_ranks - 1) / num_ranks,
        latencies_across=2 * (k - 1),
        sent_across=2 * (k - 1) / k / g,
    )


def groups(num_ranks: int, local_ranks: int | None = None) -> tuple[int, int]:
    """Returns g and k.

    Raises:
        ValueError: If `local_ranks` does not divide `num_ranks`.
    """
    check_num_ranks(num_ranks)
    if local_ranks is None:
        least = math.isqrt(num_ranks - 1) + 1
        local_ranks = next(g for g in range(least, num_ranks + 1) if num_ranks % g == 0)
    if local_ranks < 1 or num_ranks % local_ranks:
        raise ValueError(
            "All groups have the same size, so the number of ranks must be a multiple of it. "
            f"Received: local_ranks={local_ranks}, num_ranks={num_ranks}."
        )
    return local_ranks, num_ranks // local_ranks


def _step(g: int, k: int, s: int, num_parts: int) -> Step:
    """Returns step s of a ring in each of k groups, over g blocks of `num_parts` blocks each."""
    ranks = np.arange(g * k)
    first, local = ranks - ranks % g, ranks % g
    starts = (local - s) % g * num_parts
    return Step(ranks, first + (local + 1) % g, starts, starts + num_parts)
