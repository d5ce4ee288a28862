"""Dropout of a tensor in parts: the mask of the whole, of which each device takes its share.

Each device draws all of the mask, from the same seed: the same numbers as on one device, and no
traffic.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.layers.layer import PartwiseLayer
from tfparallel.layers.parts import Parts, on_devices

__all__ = ["PartwiseDropout", "share_draws"]


class PartwiseDropout(PartwiseLayer):
    """Extends dropout: the mask is the whole tensor's, in parts."""

    def call(self, inputs, training=False):
        if not training or self.rate == 0 or not isinstance(inputs, Parts):
            return super().call(inputs, training=training)
        axis, seed = inputs.axis, self.seed_generator.next()
        sizes = [tf.shape(tensor)[axis] for tensor in inputs.tensors]

        def share(k, tensor):
            return _share(self.rate, tensor, sizes, k, axis, seed)

        parts = on_devices(self._devices, share, range(len(sizes)), inputs.tensors)
        return Parts(parts, axis, self._devices)


def share_draws(
    layer: keras.layers.Dropout, locals_: Sequence[keras.layers.Dropout], sizes, axis: int
) -> None:
    """Has the dropout inside of smaller layers draw what the whole one would.

    Args:
        layer: The whole layer's; its seed counts on.
        locals_: Those of the smaller layers, which are called in this order, once each a step.
        sizes: How long each one's part is along the axis.
        axis: The axis.
    """
    drawn: list = []
    for k, local in enumerate(locals_):
        extend(local, SharedDraws, _share_of=(layer, drawn, list(sizes), k, axis))


class SharedDraws:
    """Extends a dropout layer that draws a share of what another would."""

    def call(self, inputs, training=False):
        layer, drawn, sizes, k, axis = self._share_of
        if not training or layer.rate == 0:
            return inputs
        if k == 0:
            drawn[:] = [layer.seed_generator.next()]
        return _share(layer.rate, inputs, sizes, k, axis, drawn[0])


def _share(rate, tensor, sizes, k, axis, seed):
    if rate >= 1:
        return tf.zeros_like(tensor)
    axis %= len(tensor.shape)
    shape = [tf.shape(tensor)[place] for place in range(len(tensor.shape))]
    shape[axis] = tf.add_n([tf.convert_to_tensor(size) for size in sizes])
    # As `keras.random` narrows a seed.
    seed = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
    kept = tf.nn.experimental.stateless_dropout(
        tf.ones(tf.stack(shape), tensor.dtype), rate=rate, seed=seed
    )
    own = tf.split(kept, sizes, axis, num=len(sizes))[k]
    # Not a product alone: what is dropped is zero, even where it was infinite.
    return tf.where(own != 0, tensor * own, tf.zeros_like(tensor))
