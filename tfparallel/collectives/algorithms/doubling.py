"""Doublings: p = 2^⌊log₂ n⌋ ranks exchange with ever more distant, or ever nearer partners.

Each of the other n−p ranks first adds its vector to a neighbour's, and receives the sum at the end.

Recursive doubling exchanges the whole vector with ever more distant partners.

    step s = 0 … log₂p − 1:   rank r ◄──whole vector──► rank r xor 2ˢ,   both add

    T = log₂p·(α + Sβ + Sγ)      and, if n > p,   2α + 2Sβ + Sγ

Half the messages of halving-doubling, but more bytes: for small vectors. Partners compute a + b and
b + a, which are equal, so the results are bitwise equal on all ranks.

Halving-doubling exchanges half of the remaining data with ever nearer partners; then back.

    step s = 0 … log₂p − 1:   rank r ◄──► rank r xor (p/2ˢ⁺¹)
                              each sends the half of its part that belongs to the partner's side

    p = 4           blocks  0 1 2 3
    rank 0, s = 0          [0 1|2 3]──► 2,    s = 1: [0|1]──► 1        ends with the sum of 0
    rank 1                 [0 1|2 3]──► 3,           [0|1]──► 0 (0)                      of 1

    T = 2·log₂p·α + 2(p−1)/p·Sβ + (p−1)/p·Sγ      and, if n > p,   2α + 2Sβ + Sγ

As many bytes as the ring in far fewer messages, if n is a power of two.

References:
    Rajeev Thakur, Rolf Rabenseifner, William Gropp, "Optimization of Collective Communication
    Operations in MPICH", International Journal of High Performance Computing Applications 19(1),
    2005.
"""

import numpy as np

from tfparallel.collectives.algorithms.schedule import (
    MessageSchedule,
    Step,
    Terms,
    check_num_ranks,
    there_and_back,
)


def recursive_doubling(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in one block."""
    members, others = _fold(num_ranks)
    p = len(members)
    index = np.arange(p)

    def steps():
        into = _whole(others, members[: len(others)], 1)
        if len(others):
            yield into
        for s in range(p.bit_length() - 1):
            yield _whole(members, members[index ^ 1 << s], 1)
        if len(others):
            yield into.backwards()

    return MessageSchedule(num_ranks, 1, steps)


def recursive_doubling_terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    exchanges = num_ranks.bit_length() - 1
    folds = int(num_ranks > 1 << exchanges)
    return Terms(exchanges + 2 * folds, exchanges + 2 * folds, exchanges + folds)


def halving_doubling(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in p blocks."""
    members, others = _fold(num_ranks)
    p = len(members)
    index = np.arange(p)  # Index of each member, and of the block that it ends up with.
    num_folds = int(num_ranks > p)

    def step(s):
        if s < num_folds:
            return _whole(others, members[: len(others)], p)
        half = p >> (s - num_folds + 1)
        partner = index ^ half
        # The partner's side of the 2·half blocks that the two still share.
        starts = partner // half * half
        return Step(members, members[partner], starts, starts + half)

    return there_and_back(num_ranks, p, num_folds + p.bit_length() - 1, step)


def halving_doubling_terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    exchanges = num_ranks.bit_length() - 1
    p = 1 << exchanges
    folds, share = int(num_ranks > p), (p - 1) / p
    return Terms(2 * exchanges + 2 * folds, 2 * share + 2 * folds, share + folds)


def _fold(num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the p participating ranks and the n−p others, which fold into the first members."""
    check_num_ranks(num_ranks)
    p = 1 << (num_ranks.bit_length() - 1)
    num_others = num_ranks - p
    pairs = np.arange(2 * num_others)
    return np.concatenate([pairs[::2], np.arange(2 * num_others, num_ranks)]), pairs[1::2]


def _whole(sources: np.ndarray, targets: np.ndarray, num_blocks: int) -> Step:
    """Returns a step that sends all blocks."""
    return Step(sources, targets, np.zeros_like(sources), np.full_like(sources, num_blocks))
