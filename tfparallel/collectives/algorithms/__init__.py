"""All-reduce algorithms, one per module: message schedules and costs, in plain Python.

`tfparallel.collectives.cross_device` executes a schedule in TensorFlow; `cost_model` times it.
"""

from tfparallel.collectives.algorithms import (
    double_binary_tree,
    halving_doubling,
    hierarchical,
    hierarchical_ring,
    recursive_doubling,
    reduce_to_one,
    ring,
    tree,
)

# Modules with `schedule(num_ranks, …)` and `terms(num_ranks, …)`.
ALGORITHMS = {
    "reduce_to_one": reduce_to_one,
    "tree": tree,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "ring": ring,
    "double_binary_tree": double_binary_tree,
    "hierarchical": hierarchical,
    "hierarchical_ring": hierarchical_ring,
}
# Algorithms that depend on the number of ranks per host.
GROUPED = ("hierarchical", "hierarchical_ring")
