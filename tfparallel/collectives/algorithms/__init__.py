"""All-reduce algorithms: message schedules and costs, in plain Python.

`tfparallel.collectives.cross_device` executes a schedule in TensorFlow; `cost_model` times it.
"""

from collections.abc import Callable
from typing import NamedTuple

from tfparallel.collectives.algorithms import double_binary_tree, doubling, rings, trees
from tfparallel.collectives.algorithms.schedule import MessageSchedule, Terms


class Algorithm(NamedTuple):
    """An algorithm: functions of the number of ranks, and of more where it depends on more."""

    schedule: Callable[..., MessageSchedule]
    terms: Callable[..., Terms]


ALGORITHMS = {
    "reduce_to_one": Algorithm(trees.reduce_to_one, trees.reduce_to_one_terms),
    "tree": Algorithm(trees.tree, trees.tree_terms),
    "recursive_doubling": Algorithm(doubling.recursive_doubling, doubling.recursive_doubling_terms),
    "halving_doubling": Algorithm(doubling.halving_doubling, doubling.halving_doubling_terms),
    "ring": Algorithm(rings.ring, rings.ring_terms),
    "double_binary_tree": Algorithm(double_binary_tree.schedule, double_binary_tree.terms),
    "hierarchical": Algorithm(rings.hierarchical, rings.hierarchical_terms),
    "hierarchical_ring": Algorithm(rings.hierarchical_ring, rings.hierarchical_ring_terms),
}
# Algorithms that depend on the number of ranks per host.
GROUPED = ("hierarchical", "hierarchical_ring")
