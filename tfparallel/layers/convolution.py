"""Convolutions in parts, by channels."""

import keras

from tfparallel.layers.dense import ColumnParallel, RowParallel
from tfparallel.layers.parallel_hints import ParallelHint

__all__ = ["ChannelParallelConv2D", "ChannelReducingConv2D"]


class ChannelParallelConv2D(ParallelHint, ColumnParallel):
    """A convolution whose filters are split: each device computes a part of the channels.

        kernel (h, w, in, filters)            output (batch, height, width, filters)
             ┌───────┬───────┐                      ┌───────┬───────┐
          in │  W_0  │  W_1  │                      │  y_0  │  y_1  │  filters
             └───────┴───────┘                      └───────┴───────┘
               CPU:0   CPU:1                          CPU:0   CPU:1

    y_k = f(x * W_k + b_k). What works channel by channel behind it (normalization, activation,
    pooling, a depthwise convolution) stays in parts. A convolution that reads channels in parts,
    `ChannelReducingConv2D`, has its kernel split along `in`, and sums, as `RowParallelDense` does:

        ┌─────┐
        │ V_0 │ CPU:0
        ├─────┤           z = y_0 * V_0 + y_1 * V_1 + c
        │ V_1 │ CPU:1
        └─────┘

    Input: `(batch, height, width, in)`, whole. Output: `(batch, height', width', filters)` in parts
    along the last axis. `channels_last` and `groups=1` alone.

    Written by hand, with the arguments of `keras.layers.Conv2D`, it is that plain layer until
    `tensor_parallel` splits it.

    Example:
        >>> pictures = keras.Input((32, 32, 3))
        >>> hidden = tfparallel.layers.ChannelParallelConv2D(64, 3, activation="relu")(pictures)
        >>> outputs = tfparallel.layers.ChannelReducingConv2D(32, 1)(hidden)
        >>> model = keras.Model(pictures, outputs)
        >>> tfparallel.tensor_parallel(model, devices=["GPU:0", "GPU:1"]).split.values()
        dict_values(['column', 'row'])

    References:
        Jia, Lin, Qi, Aiken. Exploring Hidden Dimensions in Parallelizing Convolutional Neural
        Networks. ICML, 2018.
    """

    plain, kind = keras.layers.Conv2D, "column"
    _count, _axes = "filters", {"kernel": 3, "bias": 0}


class ChannelReducingConv2D(ParallelHint, RowParallel):
    """The second convolution of a pair, which reads parts (see `ChannelParallelConv2D`).

    Input: `(batch, height, width, in)`, in parts along the last axis, or whole. Output: `(batch,
    height', width', filters)`, whole, on the first device, where the bias is.

    Written by hand, with the arguments of `keras.layers.Conv2D`, it is that plain layer until
    `tensor_parallel` splits it.

    Example:
        >>> pictures = keras.Input((32, 32, 3))
        >>> hidden = tfparallel.layers.ChannelParallelConv2D(64, 3, activation="relu")(pictures)
        >>> outputs = tfparallel.layers.ChannelReducingConv2D(32, 1)(hidden)
    """

    plain, kind = keras.layers.Conv2D, "row"
    _axis = 2
