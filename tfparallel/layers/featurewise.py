"""Layers that keep features in parts: they join inputs, or have weights for each feature."""

import keras
import tensorflow as tf

from tfparallel.layers.layer import SplitLayer, local_layer
from tfparallel.layers.parts import Parts, on_devices, pieces
from tfparallel.seams.keras import mask_of


class FeaturewiseJoin(SplitLayer):
    """Extends the concatenation of an example's features, one input per device.

    Nothing is joined: input k is copied to device k, where a row-parallel layer reads it.
    """

    def call(self, xs):
        return Parts(on_devices(self._devices, tf.identity, xs), -1, self._devices)


class FeaturewiseWeights(SplitLayer):
    """Extends a layer with weights for each feature; they are split as its input is.

                 gamma, beta, moving mean and variance (channels)
                           ┌─────────┬─────────┐
                           │    0    │    1    │
                           └─────────┴─────────┘
                              CPU:0     CPU:1

    Batch normalization, a depthwise convolution, PReLU.
    """

    _reads_features = True

    def split(self, sizes) -> None:
        """Makes the parts; `sizes` are the features of the input that each has."""
        shape = _shape(self)
        axes = {v.name: _feature_axis(self, v) for v in self.variables}

        def smaller(device, size):
            return local_layer(self, device, (*shape[:-1], size))

        self._split(sizes, smaller, axes)

    def call(self, inputs, **kwargs):
        mask = mask_of(inputs)
        if mask is not None and isinstance(self, keras.layers.BatchNormalization):
            # Keras passes a mask on with tensors only.
            kwargs["mask"] = mask
        for local in self._small.layers:
            if local.trainable != self.trainable:  # Frozen batch normalization computes otherwise.
                local.trainable = self.trainable
        sizes = [local.get_build_config()["input_shape"][-1] for local in self._small.layers]
        parts = pieces(inputs, sizes, -1, self._devices)
        return Parts(self._on_devices(parts, **kwargs), -1, self._devices)


def _shape(layer):
    return layer.get_build_config()["input_shape"]


def _feature_axis(layer, variable) -> int:
    # A depthwise kernel is (height, width, channels, multiplier); all others end in the features.
    is_depthwise = isinstance(layer, keras.layers.DepthwiseConv2D) and variable.ndim == 4
    return 2 if is_depthwise else variable.ndim - 1
