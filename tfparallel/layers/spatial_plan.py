"""Decides which layers of a model are split along the height of the picture.

These are convolutions and pooling with at least one row of output per device, and, behind them,
layers that treat each pixel independently or merge pictures. A layer that computes the model's
output is left in place if it ends in an activation, where Keras looks for the logits of a loss.
"""

import keras

from tfparallel.extend import original_class
from tfparallel.keras_compat import renormalizes
from tfparallel.layers import spatial
from tfparallel.layers.dropout import PartwiseDropout
from tfparallel.layers.layer import PartwiseLayer, has_activation_of_keras

HEIGHT = "height"
CALLER = "the model's caller"

_layers = keras.layers
_WINDOWS = {
    _layers.Conv2D: spatial.SpatialParallelConv2D,
    _layers.DepthwiseConv2D: spatial.SpatialParallelConv2D,
    _layers.MaxPooling2D: spatial.SpatialParallelPooling2D,
    _layers.AveragePooling2D: spatial.SpatialParallelPooling2D,
}
_BEHIND = {
    _layers.ZeroPadding2D: spatial.SpatialZeroPadding2D,
    _layers.ReLU: PartwiseLayer,
    _layers.LeakyReLU: PartwiseLayer,
    _layers.ELU: PartwiseLayer,
    _layers.Activation: PartwiseLayer,
    _layers.Dropout: PartwiseDropout,
    _layers.BatchNormalization: spatial.SpatialBatchNormalization,
    _layers.Add: spatial.SpatialMerge,
    _layers.Multiply: spatial.SpatialMerge,
    _layers.Concatenate: spatial.SpatialMerge,
    _layers.GlobalAveragePooling2D: spatial.SpatialGlobalPooling2D,
    _layers.GlobalMaxPooling2D: spatial.SpatialGlobalPooling2D,
}


def class_of(layer: keras.Layer) -> type:
    """Returns the class that extends a layer split by height."""
    return (_WINDOWS | _BEHIND)[original_class(layer)]


def is_split_by_height(layer: keras.Layer, graph, num_devices: int, in_rows: set[str]) -> bool:
    """Returns whether a layer that is called once is split by height over `num_devices` devices.

    `in_rows` are the preceding layers whose outputs are split by height.
    """
    cls, node = original_class(layer), graph.nodes[layer.name][0]
    shape, outputs = node.input_tensors[0].shape, node.outputs[0].shape
    if cls not in _WINDOWS | _BEHIND or len(shape) != 4 or None in shape[1:]:
        return False
    if getattr(layer, "data_format", None) == "channels_first":
        return False
    if not has_activation_of_keras(layer):
        return False
    others = [name for name in graph.readers[layer.name] if name not in graph.layers]
    if others and others != [CALLER]:
        return False  # An operation that is not a layer cannot join parts.
    if others and getattr(layer, "activation", keras.activations.linear) not in (
        None,
        keras.activations.linear,
    ):
        return False
    if cls in _WINDOWS:
        return outputs[1] >= num_devices
    if not all(source in in_rows for source in graph.sources[layer.name]):
        return False
    if cls in (_layers.GlobalAveragePooling2D, _layers.GlobalMaxPooling2D):
        return True
    if cls is _layers.BatchNormalization:
        return layer.axis in (-1, 3) and not renormalizes(layer) and not layer.synchronized
    if cls is _layers.Dropout:
        return layer.noise_shape is None
    if cls is _layers.Concatenate and layer.axis not in (-1, 3):
        return False
    if cls is _layers.ZeroPadding2D and max(layer.padding[0]) >= outputs[1] // num_devices:
        return False  # A device would hold nothing but padding.
    heights = {tensor.shape[1:3] for tensor in node.input_tensors}
    return len(heights) == 1 and outputs[1] >= num_devices


def is_in_rows(layer: keras.Layer) -> bool:
    """Returns whether the output of a layer split by height is also in rows."""
    return class_of(layer) is not spatial.SpatialGlobalPooling2D
