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
from collections.abc import Iterable

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator as keras_seeds

from tfparallel.replication import shard as shards
from tfparallel.strategies import variables


class ThreadState:
    """What Keras keeps a thread and a replica, a thread of its own, must share with its caller."""

    _NAMES = (keras_seeds.GLOBAL_SEED_GENERATOR, "dtype_policy")

    def __init__(self):
        if global_state.get_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR) is None:
            python_state = random.getstate()  # Unseeded Keras draws from Python's generator.
            keras_seeds.global_seed_generator()
            random.setstate(python_state)
        self._values = {name: global_state.get_global_attribute(name) for name in self._NAMES}

    def inherit(self) -> None:
        """Takes the caller's state into this thread."""
        for name, value in self._values.items():
            global_state.set_global_attribute(name, value)

    @property
    def seed_generators(self) -> list[keras.random.SeedGenerator]:
        """The generators that belong to no layer."""
        return [self._values[keras_seeds.GLOBAL_SEED_GENERATOR]]


def variables_of(layer: keras.Layer, thread_state: ThreadState) -> list[keras.Variable]:
    """Returns the variables that a call of `layer` may write, each once."""
    found = [variable for variable in layer.variables if not variable.trainable]
    for part in layer._flatten_layers():
        for metric in part.metrics:
            found.extend(metric.variables)
    found.extend(generator.state for generator in thread_state.seed_generators)
    return list({id(variable): variable for variable in found}.values())


def equal_on_replicas(layer: keras.Layer, thread_state: ThreadState) -> set[int]:
    """Returns the ids of the variables whose new values are the same on each replica."""
    equal = {id(generator.state) for generator in thread_state.seed_generators}
    for part in layer._flatten_layers():
        equal.update(id(generator.state) for generator in part._seed_generators)
        if getattr(part, "synchronize", False):
            equal.update(id(variable) for variable in part.non_trainable_variables)
    return equal


def write_own(
    scope: keras.StatelessScope, candidates: Iterable[keras.Variable], equal: set[int], replica: int
) -> dict[int, tf.Tensor]:
    """Writes a replica's own copies of equal state; returns the other new values, by id."""
    rest = {}
    for variable in candidates:
        value = scope.get_current_value(variable)
        if value is None:
            continue
        if id(variable) in equal:
            copies = variables.copies(variable)
            if len(copies) > 1 or replica == 0:
                copies[replica].assign(tf.cast(value, copies[replica].dtype))
        else:
            rest[id(variable)] = value
    return rest


def write_combined(
    candidates: Iterable[keras.Variable],
    values: list[dict[int, tf.Tensor]],
    all_shards: list[shards.Shard],
) -> None:
    """Writes to all copies what the replicas' new values amount to for the global batch."""
    for variable in candidates:
        if id(variable) not in values[0]:
            continue
        parts = [value[id(variable)] for value in values]
        variable.assign(_combine(variable, parts, all_shards))


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
