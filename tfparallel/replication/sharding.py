"""Shards the large weights of a model over the replicas, or builds the model in shares."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cloning.storageless import NeedsStorage, StoragelessModel
from tfparallel.judge.check_rows import forget_steps
from tfparallel.replication.places import ReplicaPlaces
from tfparallel.seams.keras import layers_in, weights_held_by
from tfparallel.update.built_optimizers import optimizers_of, trained_by
from tfparallel.update.optimizer import UnitOptimizer
from tfparallel.update.places import Places
from tfparallel.update.shares import shard
from tfparallel.variables.sharded import ShardedVariable

# A weight of fewer elements is not worth a collective, like DeepSpeed's
# `stage3_param_persistence_threshold`; its optimizer state is sharded anyway.
_FEWEST = 2**12


def build_in_shares(function: Callable[[], Any], strategy) -> Any:
    """Builds a model in shares; no device ever holds two whole large weights.

    Args:
        function: Returns a Keras model.
        strategy: The strategy whose replicas keep the shares.

    Returns:
        The result of the function. If the function reads values or compiles, the model is built
        whole at first; so are weights that the first batch creates.
    """
    try:
        built = StoragelessModel(function)
    except NeedsStorage:
        with strategy.scope():
            return function()
    is_model, places = isinstance(built.model, keras.Model), ReplicaPlaces(strategy)
    large = {id(weight) for weight in large_weights(built.model)} if is_model else set()
    for variable in built.waiting():  # In order: a user's initializer may draw random numbers.
        if id(variable) in large:
            shard(variable, places, built.value_of(variable))
        else:
            with strategy.scope():
                built.initialize([variable])
    return built.model


def shard_weights(model: keras.Model) -> None:
    """Shards the large weights of a model: each replica keeps a share instead of a copy.

    Weights that are created in a step, which has already read them, stay whole, and so do weights
    for which an optimizer was built before.

    Args:
        model: A model that replicas train.
    """
    if tf.inside_function():
        return
    places = ReplicaPlaces(model.strategy)
    extended = [each for each in optimizers_of(model) if isinstance(each, UnitOptimizer)]
    in_optimizers = {key for optimizer in extended for key in trained_by(optimizer)}
    weights = [weight for weight in large_weights(model) if id(weight) not in in_optimizers]
    if not all(isinstance(weight, ShardedVariable) for weight in weights):
        # They may have read whole copies. The training step may be running, eagerly.
        forget_steps(model, kinds=("test", "predict"))
    shard_all(weights, places)


def shard_all(weights: Iterable[keras.Variable], places: Places) -> None:
    """Shards weights over places, except those that are sharded already."""
    for weight in weights:
        if not isinstance(weight, ShardedVariable):
            shard(weight, places, tf.convert_to_tensor(weight.value))


def large_weights(model: keras.Layer) -> Iterator[keras.Variable]:
    """The weights of a model or layer that are worth sharding, and that no call writes."""
    layers, writing = layers_in(model), keras.layers.SpectralNormalization
    wrapped = [layer.layer for layer in layers if isinstance(layer, writing)]
    written = {id(weight) for layer in wrapped for weight in weights_held_by(layer)}
    for layer in layers:
        for weight in weights_held_by(layer):
            if math.prod(weight.shape) >= _FEWEST and id(weight) not in written:
                yield weight
