"""Traces the first of several replicas, and replays its operations for the others.

    replica 0   x₀ ─ conv ─ moments ─┐ sum  ┌─ scale ─ …     traced: Python, Keras, tapes
    replica 1   x₁ ─ conv ─ moments ─┘      └─ scale ─ …     the same operations, of x₁ and of the
                                                             second copies, on the second device

In the replay, the inputs of an operation are replaced by those of the other replica: its rows, its
copies of variables, and the results of earlier operations. Gradients are traced and replayed in the
same way, from the tape of the first replica.

So Python runs once for a step of N replicas, and replaying takes a fraction of that for each of the
others; all replicas run the same operations; and values that layers store in attributes meanwhile
never come from another replica.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.tracing.graphs import operations_here
from tfparallel.tracing.replay import Again, DrawnApart


class OneTrace:
    """Runs functions for each replica in a graph; a function may use results of an earlier one.

    Args:
        others: The replicas after the first.
        index: The index of the first replica among those of all processes.
    """

    def __init__(self, others: Sequence[Again], index: int = 0):
        self._others = others
        self._first = DrawnApart(index)
        self._num_seen = 0  # The number of operations at the last replay.

    def run(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> list[Any]:
        """Calls a function once, and replays it for the other replicas.

        Args:
            function: Returns a nested structure.
            *by_replica: Each argument on every replica: nested structures of the same form, with
                tensors where they differ. Other values are those of the first replica.

        Returns:
            The result on every replica; values other than tensors are those of the first replica.
        """
        first, *others = zip(*by_replica, strict=True)
        first = _of_components(first)
        for other, arguments in zip(self._others, others, strict=True):
            other.take(first, arguments)
        self.pass_over()
        result = function(*first)
        self.make_others()
        return [result, *(other.of(result) for other in self._others)]

    def make_others(self) -> None:
        """Replays the operations since the last time for the other replicas."""
        operations = operations_here()[self._num_seen :]
        self._first.change(operations)
        for other in self._others:
            other.make(operations)
        self.pass_over()

    def exchange(self, function: Callable[[list[Any]], Sequence[Any]], argument: Any) -> Any:
        """Exchanges tensors between the replicas, while the first is traced.

        Args:
            function: Takes the argument of every replica, and returns the result of every replica:
                nested structures of the same form.
            argument: The argument of the first replica.

        Returns:
            The result of the first replica.
        """
        self.make_others()
        results = function([argument, *(other.of(argument) for other in self._others)])
        first = tf.nest.map_structure(_apart, results[0], expand_composites=True)
        for other, result in zip(self._others, results[1:], strict=True):
            other.take(first, result)
        self.pass_over()
        return first

    def pass_over(self) -> None:
        """Skips the operations since the last time, which belong to no replica."""
        self._num_seen = len(operations_here())


def _apart(leaf):
    """Copies a tensor, so that other replicas can replace it even if all received the same."""
    return tf.identity(leaf) if tf.is_symbolic_tensor(leaf) else leaf


def _of_components(structure):
    """Rebuilds ragged tensors without values cached beside their components."""
    return tf.nest.map_structure(lambda leaf: leaf, structure, expand_composites=True)
