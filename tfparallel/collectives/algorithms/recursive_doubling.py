"""Recursive doubling: exchange the whole vector with ever more distant partners.

    p = 2^⌊log₂ n⌋ ranks participate; each of the other n−p first adds its vector to a neighbour's,
    and receives the sum at the end.

    step s = 0 … log₂p − 1:   rank r ◄──whole vector──► rank r xor 2ˢ,   both add

    T = log₂p·(α + Sβ + Sγ)      and, if n > p,   2α + 2Sβ + Sγ

Half the messages of halving-doubling, but more bytes: for small vectors. Partners compute a + b and
b + a, which are equal, so the results are bitwise equal on all ranks.

References:
    Rajeev Thakur, Rolf Rabenseifner, William Gropp, "Optimization of Collective Communication
    Operations in MPICH", International Journal of High Performance Computing Applications 19(1),
    2005.
"""

import numpy as np

from tfparallel.collectives.algorithms.halving_doubling import fold, whole
from tfparallel.collectives.algorithms.schedule import MessageSchedule, Terms


def schedule(num_ranks: int) -> MessageSchedule:
    """Returns the schedule of n ranks, in one block."""
    members, others = fold(num_ranks)
    p = len(members)
    index = np.arange(p)

    def steps():
        into = whole(others, members[: len(others)], 1)
        if len(others):
            yield into
        for s in range(p.bit_length() - 1):
            yield whole(members, members[index ^ 1 << s], 1)
        if len(others):
            yield into.backwards()

    return MessageSchedule(num_ranks, 1, steps)


def terms(num_ranks: int) -> Terms:
    """Returns the cost."""
    p = 1 << (num_ranks.bit_length() - 1)
    folds = int(num_ranks > p)
    exchanges = p.bit_length() - 1
    return Terms(exchanges + 2 * folds, exchanges + 2 * folds, exchanges + folds)
