"""Traces the replicas of a strategy or of a mesh once, up to each exchange between them.

At each exchange (`merge_call`), and at the end of the function, the operations that were traced for
the first replica are replayed for each of the others (`tracing/one_trace.py`).

An eager step has no operations to replay. There, each replica of a strategy runs the function in
its own thread, one at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.collectives import ops
from tfparallel.compute_context import context, within
from tfparallel.device_names import to_tensorflow_name
from tfparallel.devices import resolve
from tfparallel.seams.distribute import distribute, of_replica, replica_index
from tfparallel.seams.tensorflow import not_recording, recording
from tfparallel.strategies import variables
from tfparallel.tracing.one_trace import OneTrace
from tfparallel.tracing.replay import Again, DrawnApart
from tfparallel.variables.mesh_replica import Replica, at_work


class ReplicaTrace(OneTrace):
    """Runs functions on each replica of a `ProgramStrategy` in this process."""

    def __init__(self, strategy):
        others = [_other(strategy, k) for k in range(1, len(strategy.devices))]
        super().__init__(others, strategy.first_in_job)
        self._strategy = strategy
        # Kept, since gradients use it again.
        self._at_first: _FirstReplica | None = None

    def run(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> list[Any]:
        """Runs a function on each replica, as `OneTrace` does; eagerly, calls it on each."""
        if tf.executing_eagerly():
            return self._run_each(function, by_replica)
        with tf.device(self._strategy.devices[0]), recording():
            if self._at_first is None:
                self._at_first = _FirstReplica(self._strategy, self, self._others)
            self._at_first.graph = tf.compat.v1.get_default_graph()
            with self._at_first:
                return super().run(function, *by_replica)

    def update(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> None:
        """Runs a function that updates variables on each replica, while a graph is traced.

        Call it in a program, where variables are those of the first replica.
        """
        self._first = DrawnApart(0)  # An update draws the same random numbers on all workers.
        super().run(function, *by_replica)

    def _run_each(self, function, by_replica):
        results = {}

        def on_replica():
            k = replica_index()
            with _EagerReplica(self._strategy):
                results[k] = function(*(each[k] for each in by_replica))

        self._strategy.run(on_replica)
        return [results[k] for k in range(len(results))]


class MeshTrace(OneTrace):
    """Runs functions for each replica of a mesh in this process.

    A replica has several devices, and a copy of each variable on one of them. In an eager step, the
    replicas run in turn. `index` is that of the first replica, among those of all processes.
    """

    def __init__(self, replicas: Sequence[Replica], index: int = 0):
        super().__init__(list(map(_other_of_mesh, replicas[1:])), index)
        self._replicas = replicas

    def run(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> list[Any]:
        """Runs a function for each replica, as `OneTrace` does; eagerly, calls it for each."""
        if not tf.executing_eagerly():
            with at_work(self._replicas[0]):
                return super().run(function, *by_replica)
        results = []
        for replica, *arguments in zip(self._replicas, *by_replica, strict=True):
            with at_work(replica):
                results.append(function(*arguments))
        return results


class _CountsRows(tf.distribute.ReplicaContext):
    """The context of a replica whose exchanges do not count its dummy row, unlike TensorFlow's."""

    def all_reduce(self, reduce_op, value, options=None):
        reduce_op = tf.distribute.ReduceOp(getattr(reduce_op, "value", reduce_op).upper())
        is_sum = reduce_op is tf.distribute.ReduceOp.SUM
        return ops.all_reduce(value, "sum" if is_sum else "mean")

    def all_gather(self, value, axis, options=None):
        if axis != 0:
            return super().all_gather(value, axis, options)
        return ops.all_gather(value)


class _EagerReplica(_CountsRows):
    """The context of a replica that runs eagerly in a thread of TensorFlow's."""

    def __init__(self, strategy):
        self._in_thread = tf.distribute.get_replica_context()
        super().__init__(strategy, self._in_thread.replica_id_in_sync_group)

    def _merge_call(self, fn, args, kwargs):
        return self._in_thread._merge_call(fn, args, kwargs)


class _FirstReplica(_CountsRows):
    """The context of the first replica; at an exchange, the others are replayed up to that point.

    Attributes:
        graph: The graph of the replica; a gradient may be computed in a branch.
    """

    graph: tf.Graph

    def __init__(self, strategy, trace, others):
        super().__init__(strategy, strategy.first_in_job)  # TensorFlow finds its copies by it.
        self._trace = trace
        self._outside = context()
        with tf.device(None):
            first, *rest = [
                tf.constant(strategy.first_replica + k) for k in range(len(strategy.devices))
            ]
            # A constant would be folded into dependent operations, and be the same on all replicas.
            self._index = tf.compat.v1.placeholder_with_default(first, [])
        for other, index in zip(others, rest, strict=True):
            other.take(self._index, index)

    @property
    def replica_id_in_sync_group(self):
        return self._index

    def _merge_call(self, fn, args, kwargs):
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise RuntimeError(
                "Replicas cannot synchronize inside a nested function, a loop or a branch. A "
                "collective outside of it is required. Received: `merge_call`, of "
                f"{getattr(fn, '__qualname__', fn)}."
            )
        merge_call = super()._merge_call

        def merged(arguments):
            with not_recording(), within(**vars(self._outside)):
                result = merge_call(fn, *distribute(arguments))
            return [of_replica(k, result) for k in range(len(arguments))]

        return self._trace.exchange(merged, (args, kwargs))


def _other(strategy, index: int) -> Again:
    """The replay for another replica of a strategy."""
    devices = strategy.devices
    first, device_of_other = resolve(devices[0]), devices[index]
    return Again(
        index,
        lambda device: device_of_other if resolve(device) == first else device,
        lambda handle: variables.copy_of(handle, index, len(devices), strategy),
    )


def _other_of_mesh(replica: Replica) -> Again:
    def device_of(device):
        other = replica.in_place_of(device)
        return device if other is None else to_tensorflow_name(other)

    return Again(
        replica.index,
        device_of,
        lambda handle: variables.copy_of(handle, replica.index, replica.number),
    )
