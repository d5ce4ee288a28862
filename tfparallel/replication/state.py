"""State that a replicated call writes: batch norm's averages, seeds, metrics inside layers.

A replica writes variables to its own copies (`ReplicaScope`). Afterwards

* state that is equal on all replicas (seeds, averages of synchronized batch norm) stays as it is,
  at no cost;
* the sum of a metric grows by the increments of all replicas;
* any other floating-point state (such as a running mean of the batch) becomes the average over the
  replicas, weighted by their shares n_k / B of the batch; integers are those of replica 0.
"""

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.data import rows_of_replica as shards
from tfparallel.problems import PlacementError
from tfparallel.replication.random import ReplicaSeedGenerator, global_seed_generator, in_pieces
from tfparallel.seams.keras import (
    DTYPE_POLICY,
    GLOBAL_SEED_GENERATOR,
    get_global,
    layers_in,
    seed_generators_of,
    set_global,
)
from tfparallel.strategies import variables
from tfparallel.variables.sharded import ShardedVariable

# State that Keras keeps per thread; each replica of an eager step is a thread and needs it, too.
_THREAD_STATE = (GLOBAL_SEED_GENERATOR, DTYPE_POLICY)


class ReplicaScope(keras.StatelessScope):
    """Separates the losses of a replica's call, and writes to the replica's own copies.

    Args:
        replica: Index of the replica.
    """

    def __init__(self, replica: int):
        super().__init__(collect_losses=True)
        self.replica = replica
        self.written: dict[int, keras.Variable] = {}

    def add_update(self, update) -> None:
        """Writes at once, while Keras would store the value for later."""
        variable, value = update
        if isinstance(variable, ShardedVariable):
            raise PlacementError(
                "Under shard='parameters', a layer's call can assign only to weights that are not "
                f"sharded, such as small ones. Received: an assignment to '{variable.path}'. Use "
                "shard='optimizer'."
            )
        copies = variables.copies(variable)
        self.written[id(variable)] = variable
        if self.replica < len(copies):
            copies[self.replica].assign(tf.cast(value, copies[self.replica].dtype))


class CallState:
    """The thread state that a replicated call of a layer reads, and the variables that it writes.

    Create it before the call: it records the sums of the layer's metrics.

    Args:
        layer: The layer that is called.
    """

    def __init__(self, layer: keras.Layer):
        self._thread_state = _thread_state()
        generators = [self._thread_state[GLOBAL_SEED_GENERATOR]]
        equal: list[keras.Variable] = []
        self._sums: dict[int, list[tf.Tensor]] = {}
        for part in layers_in(layer):
            generators.extend(seed_generators_of(part))
            if getattr(part, "synchronize", False):
                equal.extend(part.non_trainable_variables)
            for metric in part.metrics:
                for variable in metric.variables:
                    copies = variables.copies(variable)
                    self._sums[id(variable)] = [tf.identity(copy) for copy in copies]
        equal.extend(generator.state for generator in generators)
        self._equal = {id(variable) for variable in equal}

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Gives a replica's thread the Keras state of the caller's thread, within the block.

        With Keras's global seed, a replica draws for its rows, as with a layer's seed.
        """
        before = {name: get_global(name) for name in self._thread_state}
        seed = in_pieces(self._thread_state[GLOBAL_SEED_GENERATOR], ReplicaSeedGenerator)
        for name, value in (self._thread_state | {GLOBAL_SEED_GENERATOR: seed}).items():
            set_global(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                set_global(name, value)

    def written(
        self, scopes: list[ReplicaScope], *, with_sums: bool = True
    ) -> list[tuple[int, keras.Variable]]:
        """The variables, with their ids, that the replicas wrote and that may differ between them.

        Args:
            scopes: The scope of each replica.
            with_sums: Whether to include the variables of metrics, which sum over all rows.
        """
        return [
            (key, variable)
            for key, variable in scopes[0].written.items()
            if key not in self._equal and variables.is_distributed(variable)
            if with_sums or key not in self._sums
        ]

    def combine(
        self,
        scopes: list[ReplicaScope],
        own_shards: list[shards.Shard],
        sum_over_workers: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        """Combines what the replicas wrote into the state for the batch, in all copies.

        Args:
            scopes: The scopes of this worker's replicas, in order.
            own_shards: Their shards.
            sum_over_workers: Sums tensors over the workers.
        """
        written = self.written(scopes)
        own_terms = []
        for key, variable in written:
            before = self._sums.get(key)
            new = [tf.identity(copy) for copy in variables.copies(variable)]
            own_terms.append(
                _share_of_average(new, own_shards)
                if before is None
                else _added(before, new, own_shards)
            )
        totals = sum_over_workers(own_terms)
        for (key, variable), total in zip(written, totals, strict=True):
            if (before := self._sums.get(key)) is None:
                variable.assign(tf.cast(total, variable.dtype))
                continue
            variable.assign(before[0] + total)
            # In a program the first copy holds the total; the others would count it again.
            for other, previous in zip(variables.copies(variable)[1:], before[1:], strict=True):
                other.assign(previous)


def _added(old, new, own_shards):
    """The increments of a metric's sum by the replicas with examples."""
    return tf.add_n(
        [
            shard.if_it_has_rows(after - before)
            for shard, before, after in zip(own_shards, old, new, strict=True)
        ]
    )


def _share_of_average(new, own_shards):
    """This worker's terms of Σ_k n_k/B x_k; for integers, only the value of replica 0."""
    if not new[0].dtype.is_floating:
        value = tf.cast(new[0], tf.uint8) if new[0].dtype.is_bool else new[0]
        return value if own_shards[0].replica == 0 else tf.zeros_like(value)
    return tf.add_n(
        [
            shard.if_it_has_rows(shard.weight(part.dtype) * part)
            for shard, part in zip(own_shards, new, strict=True)
        ]
    )


def _thread_state() -> dict:
    global_seed_generator()
    return {name: get_global(name) for name in _THREAD_STATE}
