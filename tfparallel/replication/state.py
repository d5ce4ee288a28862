"""State that a replicated call writes: batch norm's averages, seeds, metrics inside layers.

In a replica a call runs under `keras.StatelessScope`, so that what it writes (and the losses it
adds) stays apart from the other replicas'. Afterwards

* state that is equal on all replicas (seeds, synchronized batch norm's averages) goes into each
  replica's own copy, at no cost;
* a metric's sum grows by what all replicas added to it;
* any other floating-point state (a running mean of the batch, say) becomes the replicas' average,
  weighted with their shares n_k / B of the batch; integers are replica 0's.
"""

import random

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator as keras_seeds

from tfparallel.data import shard as shards
from tfparallel.strategies import variables

# What Keras keeps for each thread, and a replica, a thread of its own, must have as its caller.
_THREAD_STATE = (keras_seeds.GLOBAL_SEED_GENERATOR, "dtype_policy")


class CallState:
    """The variables that a replicated call of a layer may write.

    Args:
        layer: The layer that is called.
    """

    def __init__(self, layer: keras.Layer):
        self._thread_state = _thread_state()
        generators = [self._thread_state[keras_seeds.GLOBAL_SEED_GENERATOR]]
        written = [variable for variable in layer.variables if not variable.trainable]
        equal: list[keras.Variable] = []
        for part in layer._flatten_layers():
            generators.extend(part._seed_generators)
            for metric in part.metrics:
                written.extend(metric.variables)
            if getattr(part, "synchronize", False):
                equal.extend(part.non_trainable_variables)
        equal.extend(generator.state for generator in generators)
        self._written = {id(variable): variable for variable in (*written, *equal)}
        self._equal = {id(variable) for variable in equal}

    def inherit(self) -> None:
        """Takes what Keras keeps for the caller's thread into this one."""
        for name, value in self._thread_state.items():
            global_state.set_global_attribute(name, value)

    def write_own(self, scope: keras.StatelessScope, replica: int) -> dict[int, tf.Tensor]:
        """Writes a replica's own copies of what is equal; returns the other new values, by id."""
        rest = {}
        for key, variable in self._written.items():
            value = scope.get_current_value(variable)
            if value is None:
                continue
            if key not in self._equal:
                rest[key] = value
                continue
            copies = variables.copies(variable)
            if replica < len(copies):
                copies[replica].assign(tf.cast(value, copies[replica].dtype))
        return rest

    def write_combined(
        self, values: list[dict[int, tf.Tensor]], all_shards: list[shards.Shard]
    ) -> None:
        """Writes to all copies what the replicas' other new values amount to for the batch."""
        for key, variable in self._written.items():
            if key in values[0]:
                variable.assign(_combine(variable, [value[key] for value in values], all_shards))


def _thread_state() -> dict:
    if global_state.get_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR) is None:
        python_state = random.getstate()  # An unseeded generator takes its seed from Python's.
        with tf.init_scope():  # Its variable outlives the step that is being traced.
            keras_seeds.global_seed_generator()
        random.setstate(python_state)
    return {name: global_state.get_global_attribute(name) for name in _THREAD_STATE}


def _combine(variable, parts, all_shards):
    copies = variables.copies(variable)
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        old = [copies[k] if len(copies) > 1 else copies[0] for k in range(len(parts))]
        counted = [tf.cast(shard.num_rows > 0, parts[0].dtype) for shard in all_shards]
        return copies[0] + tf.add_n(
            [c * (part - before) for c, part, before in zip(counted, parts, old, strict=True)]
        )
    if not parts[0].dtype.is_floating:
        return parts[0]
    return tf.add_n(
        [shard.weight(part.dtype) * part for shard, part in zip(all_shards, parts, strict=True)]
    )
