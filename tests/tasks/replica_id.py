"""A task that no form can keep: a layer reads which replica it runs on."""

import keras
import tensorflow as tf
from blobs import compile_model, load_data

__all__ = ["build_model", "compile_model", "load_data"]


class ReplicaScale(keras.layers.Layer):
    """Scales its input by the number of the replica."""

    def call(self, x):
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group
        return x * (1.0 + tf.cast(replica, x.dtype))


def build_model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            ReplicaScale(name="replica_scale"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
