"""Extends the parts of a model that behave differently in a replica: layers, seeds, optimizers."""

import functools
import weakref

import keras

from tfparallel.draws import replica_seeds
from tfparallel.extend import extend, original_class
from tfparallel.judge.check_rows import exchange_moments
from tfparallel.replication import batch_norm
from tfparallel.replication.places import ReplicaPlaces
from tfparallel.replication.replicated_layer import ReplicatedLayer
from tfparallel.replication.sharding import shard_weights
from tfparallel.seams.keras import layers_in, seed_generators_of
from tfparallel.update.built_optimizers import optimizers_of
from tfparallel.update.place_optimizer import prepare

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss")


def extend_parts(model: keras.Model) -> None:
    """Extends the layers, seeds and optimizers of a model that behave differently in a replica.

    Repeated before each trace, for parts that were created since.
    """
    strategy = model.strategy
    if strategy is None:
        return
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            extend(
                layer,
                batch_norm.SynchronizedBatchNormalization,
                synchronize=model._synchronize_batch_norm,
            )
        for generator in seed_generators_of(layer):
            replica_seeds.hold_state(generator, strategy)
            replica_seeds.by_replica(generator)
    exchange_moments(model)
    cls = original_class(model)
    if any(getattr(cls, step) is not getattr(keras.Model, step) for step in _STEPS):
        # A user's own step calls the model's layers, so each layer is replicated instead.
        for layer in model.layers:
            extend(
                layer,
                ReplicatedLayer,
                _strategy=strategy,
                _synchronize_batch_norm=model._synchronize_batch_norm,
                _check_rows=model._check_rows,
                _model_of_step=weakref.ref(model),
            )
    share_out = functools.partial(shard_weights, model) if model._shards_parameters else None
    if share_out is not None:
        share_out()
    for optimizer in optimizers_of(model):
        prepare(optimizer, ReplicaPlaces(strategy, share_out), shares=model._shards_optimizer)
