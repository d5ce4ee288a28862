"""Which weights of a model the replicas share out, and models that are built in shares."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.replication.places import ReplicaPlaces
from tfparallel.seams.keras import layers_in, weights_held_by
from tfparallel.update.built import optimizers_of, trained_by
from tfparallel.update.optimizer import UnitOptimizer
from tfparallel.update.shares import shard
from tfparallel.variables.sharded import ShardedVariable
from tfparallel.variables.storageless import NeedsStorage, StoragelessModel

__all__ = ["build_in_shares", "large_weights", "shard_weights"]

# A weight of fewer elements is not worth a collective, as DeepSpeed's
# `stage3_param_persistence_threshold`; what an optimizer holds of it is shared out all the same.
_FEWEST = 2**12


def build_in_shares(function: Callable[[], Any], strategy) -> Any:
    """Calls a function that builds a model; of large weights no device holds two whole ones.

    Args:
        function: Returns a Keras model.
        strategy: Whose replicas share out its weights.

    Returns:
        What the function returned. If it reads values, or compiles, it was built whole at first;
        and so are weights that the first batch makes.
    """
    try:
        built = StoragelessModel(function)
    except NeedsStorage:
        with strategy.scope():
            return function()
    is_model, places = isinstance(built.model, keras.Model), ReplicaPlaces(strategy)
    large = {id(weight) for weight in large_weights(built.model)} if is_model else set()
    for variable in built.waiting():  # In turn: an initializer of the user's may draw.
        if id(variable) in large:
            shard(variable, places, built.value_of(variable))
        else:
            with strategy.scope():
                built.initialize([variable])
    return built.model


def shard_weights(model: keras.Model) -> None:
    """Has each replica keep its share of the large weights of a model, in place of a copy.

    Those stay whole that are made in a step, which has read them by then, and those for which an
    optimizer was built before.

    Args:
        model: One that replicas train.
    """
    if tf.inside_function():
        return
    places = ReplicaPlaces(model.strategy)
    extended = [each for each in optimizers_of(model) if isinstance(each, UnitOptimizer)]
    known = {key for optimizer in extended for key in trained_by(optimizer)}
    for weight in large_weights(model):
        if not isinstance(weight, ShardedVariable) and id(weight) not in known:
            shard(weight, places, tf.convert_to_tensor(weight.value))


def large_weights(model: keras.Model) -> Iterator[keras.Variable]:
    """The weights that are worth it, and which no call writes."""
    layers, writing = layers_in(model), keras.layers.SpectralNormalization
    wrapped = [layer.layer for layer in layers if isinstance(layer, writing)]
    written = {id(weight) for layer in wrapped for weight in weights_held_by(layer)}
    for layer in layers:
        for weight in weights_held_by(layer):
            if math.prod(weight.shape) >= _FEWEST and id(weight) not in written:
                yield weight
