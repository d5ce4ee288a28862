"""What all replicas of a process do, traced once: for the first, and made again for the others.

    replica 0   x₀ ─ conv ─ moments ─┐ merge ┌─ scale ─ …    traced: Python, Keras, tapes
    replica 1   x₁ ─ conv ─ moments ─┘       └─ scale ─ …    the same operations, of x₁ and of the
                                                             second copies, on the second device

Whenever the replicas meet (`merge_call`), and when the function ends, what was traced for the first
replica is made again for each of the others. An operation that takes something of the first
replica's takes there what stands for it: other rows, the copy of a variable on another device, what
was made of them before. Gradients are traced likewise, from the tape of the first.

So Python runs once for a step of N replicas, and to make the rest takes a fraction of that for each
of the others; all replicas run the same operations; and what layers keep in attributes meanwhile is
never that of another replica.

An eager step leaves no operations that could be made again. There each replica runs the function in
a thread of its own, and they take turns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.devices import resolve
from tfparallel.engine.again import Again
from tfparallel.seams.tensorflow import (
    distribute,
    not_recording,
    of_replica,
    recording,
    replica_index,
)

__all__ = ["OneTrace"]


class OneTrace:
    """Runs functions on each replica of this process; one may read what another has left.

    Args:
        strategy: A `ProgramStrategy`.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self._others = [_other(strategy, index) for index in range(1, len(strategy.devices))]
        self._num_seen = 0  # How many operations there were when the replicas last met.

    def run(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> list[Any]:
        """Runs a function on each replica.

        Args:
            function: Returns a nested structure. While a graph is traced it is called once.
            *by_replica: Each argument on every replica: nested structures that are alike, of
                tensors where they differ. Of what is no tensor the first is taken.

        Returns:
            What it returns, on every replica. What is no tensor is the first's.
        """
        if tf.executing_eagerly():
            return self._run_each(function, by_replica)
        with tf.device(self._strategy.devices[0]), recording():
            with _FirstReplica(self._strategy, self, self._others):
                return self._traced(function, by_replica)

    def update(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> None:
        """Runs a function that updates variables, on each replica; while a graph is traced.

        Args:
            function: Called in a program, where variables are those of the first replica.
            *by_replica: As of `run`.
        """
        self._traced(function, by_replica)

    def operations(self) -> list[tf.Operation]:
        """What has been traced so far; nothing of an eager step."""
        if tf.executing_eagerly():
            return []
        return tf.compat.v1.get_default_graph().get_operations()

    def make_others(self) -> None:
        """Makes for the other replicas what was traced since the last time."""
        operations = self.operations()[self._num_seen :]
        for other in self._others:
            other.make(operations)
        self.pass_over()

    def pass_over(self) -> None:
        """Leaves what was traced since the last time as it is: it belongs to no replica."""
        self._num_seen = len(self.operations())

    def _traced(self, function, by_replica):
        first, *others = zip(*by_replica, strict=True)
        first = _of_components(first)
        for other, given in zip(self._others, others, strict=True):
            other.take(first, given)
        self.pass_over()
        found = function(*first)
        self.make_others()
        return [found, *(other.of(found) for other in self._others)]

    def _run_each(self, function, by_replica):
        found = {}

        def on_replica():
            k = replica_index()
            found[k] = function(*(each[k] for each in by_replica))

        self._strategy.run(on_replica)
        return [found[k] for k in range(len(found))]


class _FirstReplica(tf.distribute.ReplicaContext):
    """Where the first replica runs; those who meet it here are made up to that point."""

    def __init__(self, strategy, trace, others):
        super().__init__(strategy, strategy.first_replica)
        self._trace, self._others = trace, others
        self._outside = context()
        self._graph = tf.compat.v1.get_default_graph()
        with tf.device(None):
            first, *rest = [
                tf.constant(strategy.first_replica + k) for k in range(len(strategy.devices))
            ]
            # A constant would be folded into what is made of it, and so be every replica's.
            self._index = tf.compat.v1.placeholder_with_default(first, [])
        for other, index in zip(others, rest, strict=True):
            other.take(self._index, index)

    @property
    def replica_id_in_sync_group(self):
        return self._index

    def _merge_call(self, fn, args, kwargs):
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise RuntimeError(
                "Replicas meet in a function, a loop or a branch within what each of them does. "
                "A collective outside of it is required. Received: `merge_call`, of "
                f"{getattr(fn, '__qualname__', fn)}."
            )
        self._trace.make_others()
        given = [(args, kwargs), *(other.of((args, kwargs)) for other in self._others)]
        args, kwargs = distribute(given)
        with not_recording(), within(**vars(self._outside)):
            found = super()._merge_call(fn, args, kwargs)
        results = [of_replica(k, found) for k in range(1 + len(self._others))]
        first = tf.nest.map_structure(_apart, results[0], expand_composites=True)
        for other, result in zip(self._others, results[1:], strict=True):
            other.take(first, result)
        self._trace.pass_over()
        return first


def _other(strategy, index: int) -> Again:
    """Another replica of a strategy."""
    first, own = resolve(strategy.devices[0]), strategy.devices[index]
    return Again(
        index,
        lambda device: own if device and resolve(device) == first else device,
        lambda handle: strategy.copy_of(handle, index),
    )


def _of_components(structure):
    """The same, of ragged tensors that keep nothing beside their components."""
    return tf.nest.map_structure(lambda leaf: leaf, structure, expand_composites=True)


def _apart(leaf):
    """A tensor for which others may stand, though all replicas were given it."""
    return tf.identity(leaf) if tf.is_symbolic_tensor(leaf) else leaf
