"""Layers that treat each feature, or channel, by itself: they leave a tensor in its parts."""

import keras
import tensorflow as tf

from tfparallel.layers.dropout import dropped
from tfparallel.layers.layer import SplitLayer, local_layer
from tfparallel.layers.parts import Parts
from tfparallel.seams.keras import mask_of

__all__ = ["FeaturewiseDropout", "FeaturewiseJoin", "FeaturewiseLayer", "FeaturewiseWeights"]


class FeaturewiseLayer(SplitLayer):
    """Extends a layer without weights: it is called with each part, where the part is."""

    def split(self, sizes) -> None:
        """Has nothing to do."""

    def call(self, inputs, *args, **kwargs):
        """Computes each part on its device."""
        if not isinstance(inputs, Parts):
            return super().call(inputs, *args, **kwargs)
        outputs = []
        for tensor, device in zip(inputs.tensors, self._devices, strict=True):
            with tf.device(device):
                outputs.append(super().call(tensor, *args, **kwargs))
        return Parts(outputs, -1, self._devices)


class FeaturewiseDropout(FeaturewiseLayer):
    """Extends dropout: the mask is the whole tensor's, in parts."""

    def call(self, inputs, training=False):
        """Drops from each part what the whole mask drops there."""
        if not training or self.rate == 0 or not isinstance(inputs, Parts):
            return super().call(inputs, training=training)
        return Parts(dropped(self, inputs.tensors, -1, self._devices), -1, self._devices)


class FeaturewiseJoin(SplitLayer):
    """Extends the concatenation of an example's features, one input for each device.

    Nothing is joined: input k goes to device k, and a row-parallel layer reads it there.
    """

    def split(self, sizes) -> None:
        """Has nothing to do."""

    def call(self, xs):
        """Sends each input to its device."""
        tensors = []
        for tensor, device in zip(xs, self._devices, strict=True):
            with tf.device(device):
                tensors.append(tf.identity(tensor))
        return Parts(tensors, -1, self._devices)


class FeaturewiseWeights(SplitLayer):
    """Extends a layer with weights for each feature, which are split as its input is.

                 gamma, beta, moving mean and variance (channels)
                           ┌─────────┬─────────┐
                           │    0    │    1    │
                           └─────────┴─────────┘
                              CPU:0     CPU:1

    Batch normalization, a depthwise convolution, PReLU.
    """

    def split(self, sizes) -> None:
        """Makes the parts.

        Args:
            sizes: How many features of the input each device gets.
        """
        shape = _shape(self)
        axes = {v.name: _feature_axis(self, v) for v in self.variables}
        self._take(
            [
                local_layer(self, device, (*shape[:-1], size))
                for device, size in zip(self._devices, sizes, strict=True)
            ],
            axes,
        )

    def call(self, inputs, **kwargs):
        """Computes each part on its device."""
        mask = mask_of(inputs)
        if mask is not None and isinstance(self, keras.layers.BatchNormalization):
            # Keras itself hands a mask on with tensors alone.
            kwargs["mask"] = mask
        for local in self._small.layers:
            if local.trainable != self.trainable:  # Frozen batch normalization is another.
                local.trainable = self.trainable
        if not isinstance(inputs, Parts):
            shape = _shape(self)
            sizes = [local.get_build_config()["input_shape"][-1] for local in self._small.layers]
            inputs = Parts(tf.split(inputs, sizes, len(shape) - 1), -1, self._devices)
        return Parts(self._on_devices(inputs.tensors, **kwargs), -1, self._devices)


def _shape(layer):
    return layer.get_build_config()["input_shape"]


def _feature_axis(layer, variable) -> int:
    # A depthwise kernel is (height, width, channels, multiplier); all others end in the features.
    is_depthwise = isinstance(layer, keras.layers.DepthwiseConv2D) and variable.ndim == 4
    return 2 if is_depthwise else variable.ndim - 1
