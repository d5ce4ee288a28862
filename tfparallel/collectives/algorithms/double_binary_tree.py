"""Double binary tree: each half of the vector moves up its own tree, packet by packet.

A rank that is a leaf of one tree is an inner node of the other, so all links are busy both ways:

    first tree, n = 8           second: the same, mirrored (n even) or shifted by one (n odd)

        0 ◄─ 4                        7 ◄─ 3
           ↗   ↖                         ↗   ↖
          2     6                       5     1
         ↗ ↖   ↗ ↖                     ↗ ↖   ↗ ↖
        1   3 5   7                   6   4 2   0

Each half is split into k packets. A rank sends to at most two parents and receives from at most two
children, one message per step in each direction. The messages of both trees form a graph in which
every sender and every receiver has at most two edges, so two colours suffice, and each colour can
be used in every other step. A packet moves up a level in at most two steps, and the next packet
follows two steps later, so a phase takes at most

    2⌈log₂ n⌉ + 2k steps,    T ≤ 2·(2⌈log₂ n⌉ + 2k)·(α + S/2k·β) + (2⌈log₂ n⌉ + 2k)·S/2k·γ

With k = √(⌈log₂ n⌉·Sβ/2α) that is 2Sβ + O(α log n) + O(√(αβS log n)): the ring's bytes at the
tree's latency.

References:
    Peter Sanders, Jochen Speck, Jesper Larsson Träff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", Parallel Computing 35(12), 2009.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

from tfparallel.collectives.algorithms.schedule import MessageSchedule, Step, Terms, log2_ceiling

NUM_PACKETS = 2
_MAX_COUNTED = 64  # Ranks; counting the steps means generating the schedule.


def schedule(num_ranks: int, num_packets: int = NUM_PACKETS) -> MessageSchedule:
    """Returns the schedule of n ranks, in 2k blocks: k packets for each tree."""

    def steps():
        rising = list(_rising(num_ranks, num_packets))
        yield from rising
        for step in reversed(rising):
            yield step.backwards()

    return MessageSchedule(num_ranks, 2 * num_packets, steps)


def terms(num_ranks: int, num_packets: int = NUM_PACKETS) -> Terms:
    """Returns the cost, from the number of steps, or their upper bound for many ranks."""
    if num_ranks <= _MAX_COUNTED:
        steps = _num_rising(num_ranks, num_packets)
    else:
        steps = max_rising(num_ranks, num_packets)
    packet = 1 / (2 * num_packets)
    return Terms(latencies=2 * steps, sent=2 * steps * packet, added=steps * packet)


def max_rising(num_ranks: int, num_packets: int) -> int:
    """Returns 2⌈log₂ n⌉ + 2k, the most steps of a phase."""
    return 2 * log2_ceiling(num_ranks) + 2 * num_packets


@functools.lru_cache(maxsize=1024)
def _num_rising(num_ranks, num_packets):
    return sum(1 for _ in _rising(num_ranks, num_packets))


def best_num_packets(num_ranks: int, size_bytes: float, alpha: float, beta: float) -> int:
    """Returns k = √(⌈log₂ n⌉·Sβ/2α), at least 1."""
    return max(1, round(math.sqrt(log2_ceiling(num_ranks) * size_bytes * beta / (2 * alpha))))


def parents(num_ranks: int) -> tuple[list[int], list[int]]:
    """Returns each rank's parent in the first and in the second tree; −1 for the roots."""
    first = [_parent(rank, num_ranks) for rank in range(num_ranks)]
    second = [-1] * num_ranks
    for rank, parent in enumerate(first):
        if parent >= 0:
            second[_twin(rank, num_ranks)] = _twin(parent, num_ranks)
    return first, second


def _parent(rank, num_ranks):
    """Parent in the in-order tree: even ranks are inner nodes; the lowest set bit is the level."""
    if rank == 0:
        return -1
    low = rank & -rank
    above = (rank ^ low) | low << 1
    return above if above < num_ranks else rank ^ low


def _twin(rank, num_ranks):
    return num_ranks - 1 - rank if num_ranks % 2 == 0 else (rank + 1) % num_ranks


def _rising(num_ranks, num_packets) -> Iterator[Step]:
    """The reduction: steps alternate between two colours, but ready packets may go early."""
    trees = parents(num_ranks)
    edges = [
        (rank, parent, tree)
        for tree in (0, 1)
        for rank, parent in enumerate(trees[tree])
        if parent >= 0
    ]
    colours = _two_colours(edges)
    children: dict[tuple[int, int], list[int]] = {}
    for index, (_, parent, tree) in enumerate(edges):
        children.setdefault((parent, tree), []).append(index)
    sent = [0] * len(edges)
    number = 0
    while min(sent, default=num_packets) < num_packets:
        ready = [
            index
            for index, (rank, _, tree) in enumerate(edges)
            if sent[index]
            < min([num_packets, *(sent[child] for child in children.get((rank, tree), []))])
        ]
        ready.sort(key=lambda index: colours[index] != number % 2)
        sending, receiving, messages = set(), set(), []
        for index in ready:
            rank, parent, tree = edges[index]
            if rank not in sending and parent not in receiving:
                sending.add(rank)
                receiving.add(parent)
                messages.append((rank, parent, tree * num_packets + sent[index], index))
        for *_, index in messages:
            sent[index] += 1
        sources, targets, blocks, _ = np.array(messages).T
        yield Step(sources, targets, blocks, blocks + 1)
        number += 1


def _two_colours(edges) -> list[int]:
    """Colours edges so that edges of the same sender, or of the same receiver, differ.

    Each end has at most two edges, so the graph consists of paths and even cycles, along which the
    colours alternate.
    """
    at_end: dict[tuple[str, int], list[int]] = {}
    for index, (source, target, _) in enumerate(edges):
        at_end.setdefault(("sends", source), []).append(index)
        at_end.setdefault(("receives", target), []).append(index)
    colours = [-1] * len(edges)
    for first in range(len(edges)):
        if colours[first] >= 0:
            continue
        colours[first] = 0
        waiting = [first]
        while waiting:
            index = waiting.pop()
            source, target, _ = edges[index]
            for neighbour in at_end["sends", source] + at_end["receives", target]:
                if colours[neighbour] < 0:
                    colours[neighbour] = 1 - colours[index]
                    waiting.append(neighbour)
    return colours
