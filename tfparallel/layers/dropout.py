"""Dropout of a tensor in parts: the mask of the whole, of which each device takes its share."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.extend import extend

__all__ = ["dropped", "share_draws"]


def dropped(layer: keras.layers.Dropout, tensors: Sequence[tf.Tensor], axis: int, devices) -> list:
    """Applies a layer's dropout in training to a tensor in parts.

    The mask is the one that the layer draws for the whole. Each device draws all of it, from the
    same seed, and takes its own share: the same numbers as on one device, and no traffic.
    """
    seed = layer.seed_generator.next()
    sizes = [tf.shape(tensor)[axis] for tensor in tensors]
    found = []
    for k, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        with tf.device(device):
            found.append(_share(layer.rate, tensor, sizes, k, axis, seed))
    return found


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
        """Drops the share that is this one's."""
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
