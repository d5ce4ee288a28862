"""What several replicas do, traced once: for the first, and made again for the others.

    replica 0   x₀ ─ conv ─ moments ─┐ meet ┌─ scale ─ …     traced: Python, Keras, tapes
    replica 1   x₁ ─ conv ─ moments ─┘      └─ scale ─ …     the same operations, of x₁ and of the
                                                             second copies, on the second device

An operation that takes something of the first replica's takes at another what stands for it: other
rows, the copy of a variable there, what was made of them before. Gradients are traced likewise,
from the tape of the first.

So Python runs once for a step of N replicas, and to make the rest takes a fraction of that for each
of the others; all replicas run the same operations; and what layers keep in attributes meanwhile is
never that of another replica.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.tracing.graphs import operations_here
from tfparallel.tracing.replay import Again, DrawnApart

__all__ = ["OneTrace"]


class OneTrace:
    """Runs functions for each replica, in a graph; one may read what another has left.

    Args:
        others: The replicas behind the first.
        index: Of the first, among those of all processes.
    """

    def __init__(self, others: Sequence[Again], index: int = 0):
        self._others = others
        self._first = DrawnApart(index)
        self._num_seen = 0  # How many operations there were when the others were last made.

    def run(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> list[Any]:
        """Runs a function for each replica; it is called once.

        Args:
            function: Returns a nested structure.
            *by_replica: Each argument on every replica: nested structures that are alike, of
                tensors where they differ. Of what is no tensor the first is taken.

        Returns:
            What it returns, on every replica. What is no tensor is the first's.
        """
        first, *others = zip(*by_replica, strict=True)
        first = _of_components(first)
        for other, given in zip(self._others, others, strict=True):
            other.take(first, given)
        self.pass_over()
        found = function(*first)
        self.make_others()
        return [found, *(other.of(found) for other in self._others)]

    def make_others(self) -> None:
        """Makes for the other replicas what was traced since the last time."""
        operations = operations_here()[self._num_seen :]
        self._first.change(operations)
        for other in self._others:
            other.make(operations)
        self.pass_over()

    def pass_over(self) -> None:
        """Leaves what was traced since the last time as it is: it belongs to no replica."""
        self._num_seen = len(operations_here())


def _of_components(structure):
    """The same, of ragged tensors that keep nothing beside their components."""
    return tf.nest.map_structure(lambda leaf: leaf, structure, expand_composites=True)
