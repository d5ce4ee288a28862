"""Convolutions in parts, by channels."""

from tfparallel.layers.dense import ColumnParallel, RowParallel

__all__ = ["ChannelParallelConv2D", "ChannelReducingConv2D"]


class ChannelParallelConv2D(ColumnParallel):
    """A convolution whose filters are split: each device computes a part of the channels.

        kernel (h, w, in, filters)            output (batch, height, width, filters)
             ┌───────┬───────┐                      ┌───────┬───────┐
          in │  W_0  │  W_1  │                      │  y_0  │  y_1  │  filters
             └───────┴───────┘                      └───────┴───────┘
               CPU:0   CPU:1                          CPU:0   CPU:1

    y_k = f(x * W_k + b_k). What works channel by channel behind it (normalization, activation,
    pooling, a depthwise convolution) stays in parts. A convolution that reads channels in parts has
    its kernel split along `in`, and sums, as `RowParallelDense` does:

        ┌─────┐
        │ V_0 │ CPU:0
        ├─────┤           z = y_0 * V_0 + y_1 * V_1 + c
        │ V_1 │ CPU:1
        └─────┘

    Input: `(batch, height, width, in)`, whole. Output: `(batch, height', width', filters)` in parts
    along the last axis. `channels_last` and `groups=1` alone.

    References:
        Jia, Lin, Qi, Aiken. Exploring Hidden Dimensions in Parallelizing Convolutional Neural
        Networks. ICML, 2018.
    """

    _count, _axes = "filters", {"kernel": 3, "bias": 0}


class ChannelReducingConv2D(RowParallel):
    """The second convolution of a pair, which reads parts (see `ChannelParallelConv2D`)."""

    _axis = 2
