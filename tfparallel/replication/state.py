"""State that a replicated call writes: batch norm's averages, seeds, metrics inside layers.

In a replica a variable is written to the replica's own copy (`ReplicaScope`). Afterwards

* state that is equal on all replicas (seeds, synchronized batch norm's averages) is left as it is,
  at no cost;
* a metric's sum grows by what all replicas added to it;
* any other floating-point state (a running mean of the batch, say) becomes the replicas' average,
  weighted with their shares n_k / B of the batch; integers are replica 0's.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.data import rows_of_replica as shards
from tfparallel.problems import PlacementError
from tfparallel.replication.random import by_replica
from tfparallel.seams.keras import (
    DTYPE_POLICY,
    GLOBAL_SEED_GENERATOR,
    get_global,
    layers_in,
    make_global_seed_generator,
    seed_generators_of,
    set_global,
)
from tfparallel.strategies import variables
from tfparallel.variables.sharded import ShardedVariable

# What Keras keeps for each thread; a replica of an eager step is one, and must have it, too.
_THREAD_STATE = (GLOBAL_SEED_GENERATOR, DTYPE_POLICY)


class ReplicaScope(keras.StatelessScope):
    """Keeps the losses that a replica's call adds apart, and writes the replica's own copies.

    Args:
        replica: Index of the replica.
    """

    def __init__(self, replica: int):
        super().__init__(collect_losses=True)
        self.replica = replica
        self.written: dict[int, keras.Variable] = {}

    def add_update(self, update) -> None:
        """Writes at once, where Keras would keep the value for later."""
        variable, value = update
        if isinstance(variable, ShardedVariable):
            raise PlacementError(
                "Under shard='parameters' a layer's call reads its weights, and a small weight is "
                "required where it writes one: that is no share. Received: an assignment to "
                f"'{variable.path}'. Take shard='optimizer'."
            )
        copies = variables.copies(variable)
        self.written[id(variable)] = variable
        if self.replica < len(copies):
            copies[self.replica].assign(tf.cast(value, copies[self.replica].dtype))


class CallState:
    """What a replicated call of a layer reads from its thread, and writes.

    Made before the call: it notes the sums of the layer's metrics.

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
        """Gives a replica's thread what Keras keeps for the caller's, within the block.

        By Keras's global seed the replica draws its own numbers, as it does by a layer's seed.
        """
        before = {name: get_global(name) for name in self._thread_state}
        seed = by_replica(copy.copy(self._thread_state[GLOBAL_SEED_GENERATOR]))
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
        """The variables, by their id, that the replicas wrote and that may differ between them.

        Args:
            scopes: What each replica wrote.
            with_sums: Whether those of metrics are among them, to which all rows are added.
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
        """Writes to all copies what the replicas' own copies amount to for the batch.

        Args:
            scopes: What this worker's replicas wrote, in order.
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
            # In a program the first copy holds the whole; of the others each would count again.
            for held, own in zip(variables.copies(variable)[1:], before[1:], strict=True):
                held.assign(own)


def _added(old, new, own_shards):
    """What the replicas with examples added to a metric's sum."""
    return tf.add_n(
        [
            shard.if_it_has_rows(after - before)
            for shard, before, after in zip(own_shards, old, new, strict=True)
        ]
    )


def _share_of_average(new, own_shards):
    """This worker's terms of Σ_k n_k/B x_k; of integers, replica 0's value and nothing else."""
    if not new[0].dtype.is_floating:
        own = tf.cast(new[0], tf.uint8) if new[0].dtype.is_bool else new[0]
        return own if own_shards[0].replica == 0 else tf.zeros_like(own)
    return tf.add_n(
        [
            shard.if_it_has_rows(shard.weight(part.dtype) * part)
            for shard, part in zip(own_shards, new, strict=True)
        ]
    )


def global_seed_generator() -> keras.random.SeedGenerator:
    """Keras's seed generator for layers and functions without one; made where there is none yet."""
    if get_global(GLOBAL_SEED_GENERATOR) is None:
        python_state = random.getstate()  # An unseeded generator takes its seed from Python's.
        with tf.init_scope():  # Its variable outlives the step that is being traced.
            make_global_seed_generator()
        random.setstate(python_state)
    return get_global(GLOBAL_SEED_GENERATOR)


def _thread_state() -> dict:
    global_seed_generator()
    return {name: get_global(name) for name in _THREAD_STATE}
