"""Dropout of a tensor in parts: each device takes its share of the whole tensor's mask.

Each device draws the whole mask from the same seed: the same numbers as on one device, without
communication.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.draws.row_draws import for_both_passes, narrowed
from tfparallel.extend import extend
from tfparallel.layers.layer import PartwiseLayer
from tfparallel.layers.parts import Parts, on_devices
from tfparallel.piece import current, working_on


class PartwiseDropout(PartwiseLayer):
    """Extends dropout: each part takes its share of the whole tensor's mask."""

    def call(self, inputs, training=False):
        if not training or self.rate == 0 or not isinstance(inputs, Parts):
            return super().call(inputs, training=training)
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
        self._seed = for_both_passes(narrowed(layer.seed_generator.next()))
        self._piece = current()  # Attention draws a block again in the backward pass.

    def dropped(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        """Returns part k of the tensor with its share of the mask applied."""
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
        ones = tf.ones(tf.stack(shape), tensor.dtype)
        with working_on(self._piece):
            return tf.nn.experimental.stateless_dropout(
                ones, rate=self._layer.rate, seed=self._seed, noise_shape=shape
            )
