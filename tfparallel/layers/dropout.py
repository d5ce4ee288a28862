"""Dropout of a tensor in parts: each device takes its share of the whole tensor's mask.

Each device draws the whole mask from the same seed: the same numbers as on one device, without
communication.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.data import rows_of_replica as shards
from tfparallel.extend import extend
from tfparallel.judge.propagation import note
from tfparallel.layers.layer import PartwiseLayer
from tfparallel.layers.parts import Parts, on_devices, whole

__all__ = ["Draw", "PartwiseDropout", "dropped_in_parts", "share_draws"]


class PartwiseDropout(PartwiseLayer):
    """Extends dropout: each part takes its share of the whole tensor's mask."""

    def call(self, inputs, training=False):
        if not training or self.rate == 0 or not isinstance(inputs, Parts):
            return super().call(whole(inputs), training=training)
        return dropped_in_parts(self, inputs)


def dropped_in_parts(layer: keras.layers.Dropout, inputs: Parts) -> Parts:
    """Applies a dropout layer, in training, as to the whole tensor."""
    sizes = [tf.shape(tensor)[inputs.axis] for tensor in inputs.tensors]
    draw = Draw(layer, sizes, inputs.axis)
    parts = on_devices(inputs.devices, draw.dropped, range(len(sizes)), inputs.tensors)
    return Parts(parts, inputs.axis, inputs.devices)


def share_draws(
    layer: keras.layers.Dropout, locals_: Sequence[keras.layers.Dropout], sizes, axis: int
) -> None:
    """Makes the dropout inside smaller layers draw the mask of the whole layer.

    Args:
        layer: The dropout of the whole layer; its seed advances.
        locals_: The dropouts of the smaller layers, called in this order, once each per step.
        sizes: The length of each part along the axis.
        axis: The axis.
    """
    drawn: list = []
    for k, local in enumerate(locals_):
        extend(local, SharedDraws, _share_of=(layer, drawn, list(sizes), k, axis))


class SharedDraws:
    """Extends a dropout layer: it takes a share of another layer's mask."""

    def call(self, inputs, training=False):
        layer, drawn, sizes, k, axis = self._share_of
        if not training or layer.rate == 0:
            return inputs
        if k == 0:
            drawn[:] = [Draw(layer, sizes, axis)]
        return drawn[0].dropped(k, inputs)


class Draw:
    """One mask of a dropout layer, for a tensor with parts of these sizes along an axis."""

    def __init__(self, layer: keras.layers.Dropout, sizes: Sequence, axis: int):
        self._layer, self._sizes, self._axis = layer, sizes, axis
        self._shard = shards.current()
        seeds = layer.seed_generator
        self._seed = seeds.next() if self._shard is None else seeds.next_global()

    def dropped(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        """Returns part k of the tensor with its share of the mask applied."""
        note(self._layer, tensor)
        if self._layer.rate >= 1:
            return tf.zeros_like(tensor)
        axis = self._axis % len(tensor.shape)
        shape = [tf.shape(tensor)[place] for place in range(len(tensor.shape))]
        shape[axis] = tf.add_n([tf.convert_to_tensor(size) for size in self._sizes])
        factors = tf.split(self.factors(tensor, shape), self._sizes, axis, num=len(self._sizes))[k]
        # A product alone would turn dropped infinite values into NaN.
        return tf.where(factors != 0, tensor * factors, tf.zeros_like(tensor))

    def factors(self, tensor: tf.Tensor, shape) -> tf.Tensor:
        """Returns the factor of each element of the whole tensor.

        Args:
            tensor: A part of it.
            shape: The shape of the whole.
        """
        rate = self._layer.rate
        if self._shard is not None:  # Some of the rows for which one device draws.
            uniform = self._layer.uniform(tensor, shape, self._seed, self._shard)
            return tf.where(uniform >= rate, tf.constant(1 / (1 - rate), tensor.dtype), 0)
        # As `keras.random` narrows a seed.
        seed = tf.cast(tf.math.floormod(self._seed, tf.int32.max - 1), tf.int32)
        ones = tf.ones(tf.stack(shape), tensor.dtype)
        return tf.nn.experimental.stateless_dropout(ones, rate=rate, seed=seed)
