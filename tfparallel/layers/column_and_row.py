"""Dense layers and convolutions split by columns or by rows of the kernel."""

import keras
import tensorflow as tf

from tfparallel.layers.layer import SplitLayer, local_layer, sizes_of
from tfparallel.layers.parallel_hints import ParallelHint
from tfparallel.layers.parts import Parts, on_each, pieces, whole


class ColumnParallel(SplitLayer):
    """Base of dense layers and convolutions whose outputs are split."""

    _count, _axes = "units", {"kernel": 1, "bias": 0}

    def split(self, *, gather: bool = False) -> None:
        """Makes the parts.

        Args:
            gather: Whether to join the output. The activation is then applied to the whole, since
                it may mix features, as softmax does.
        """
        changes = {"activation": None} if gather else {}

        def smaller(device, size):
            return local_layer(self, device, **{self._count: size}, **changes)

        self._split(sizes_of(getattr(self, self._count), self._devices), smaller, self._axes)
        object.__setattr__(self, "_gather", gather)

    def call(self, inputs, **kwargs):
        copies = on_each(whole(inputs), self._devices)
        parts = Parts(self._on_devices(copies), -1, self._devices)
        if not self._gather:
            return parts
        outputs = parts.whole()
        if self.activation is not None:
            outputs = self.activation(outputs)
        if self.activation in (None, keras.activations.linear, keras.activations.softmax):
            # A softmax loss finds the logits here, and need not join the outputs.
            outputs._tfparallel_logits = parts
        return outputs


class ColumnParallelDense(ParallelHint, ColumnParallel):
    """A dense layer whose columns are split: each device computes a part of the units.

                 kernel (in, units)              bias (units)
               ┌────────┬────────┐             ┌────┬────┐
        y = x ·│  W_0   │  W_1   │  +          │ b_0│ b_1│      y = [ y_0 | y_1 ]
               └────────┴────────┘             └────┴────┘
                 CPU:0    CPU:1

    y_k = f(x·W_k + b_k). Nothing is exchanged forward; backward, ∂L/∂x = Σ_k ∂L/∂y_k·W_kᵀ is one
    reduction.

    Input: `(batch, …, in)`, whole. Output: `(batch, …, units)` in parts along the last axis.

    Written in a model with the arguments of `keras.layers.Dense`, it is that plain layer until
    `tensor_parallel` splits it.

    Example:
        >>> def build():
        ...     return keras.Sequential([
        ...         keras.Input((64,)),
        ...         tfparallel.layers.ColumnParallelDense(128, activation="gelu"),
        ...         tfparallel.layers.RowParallelDense(64),
        ...     ])
        >>> model = tfparallel.tensor_parallel(build, devices=["CPU:0", "CPU:1"])
        >>> model.split
        {'dense': 'column', 'dense_1': 'row'}

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, arXiv 1909.08053, 2019.
    """

    plain, kind = keras.layers.Dense, "column"


class RowParallel(SplitLayer):
    """Base of dense layers and convolutions whose inputs are split."""

    _axis, _reads_features = 0, True

    def split(self, sizes=None) -> None:
        """Makes the parts. `sizes` are the features that each reads; default: even shares."""
        shape = _input_shape(self)
        sizes = sizes or sizes_of(shape[-1], self._devices)
        object.__setattr__(self, "_sizes", sizes)

        def smaller(device, size):
            input_shape = (*shape[:-1], size)
            return local_layer(self, device, input_shape, use_bias=False, activation=None)

        self._split(sizes, smaller, {"kernel": self._axis})

    def call(self, inputs, **kwargs):
        partial = self._on_devices(pieces(inputs, self._sizes, -1, self._devices))
        outputs = tf.add_n(partial, name="sum_of_parts")
        if self.bias is not None:
            # The last axis holds the units or the channels.
            outputs = outputs + keras.ops.cast(self.bias, outputs.dtype)
        return outputs if self.activation is None else self.activation(outputs)


class RowParallelDense(ParallelHint, RowParallel):
    """A dense layer whose rows are split: each device reads a part of the features.

                              kernel (in, units)
                                ┌───────────┐
                                │    W_0    │ CPU:0
        y = [ x_0 | x_1 ]   ·   ├───────────┤          y = x_0·W_0 + x_1·W_1 + b
                                │    W_1    │ CPU:1
                                └───────────┘

    The sum is one reduction forward. There is none backward: each x_k has its gradient on its own
    device. So a column-parallel layer, layers that work feature by feature, and a row-parallel
    layer need one reduction forward and one backward. An input that is whole, or split by
    `tfparallel.data.by_feature`, gives the feature partition.

    Input: `(batch, …, in)`, in parts along the last axis, or whole. Output: `(batch, …, units)`,
    whole, on the first device, where the bias is.

    Written in a model with the arguments of `keras.layers.Dense`, it is that plain layer until
    `tensor_parallel` splits it.

    Example:
        >>> inputs = keras.Input((64,))
        >>> hidden = tfparallel.layers.ColumnParallelDense(128, activation="gelu")(inputs)
        >>> outputs = tfparallel.layers.RowParallelDense(64)(hidden)

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, arXiv 1909.08053, 2019.
    """

    plain, kind = keras.layers.Dense, "row"


class ChannelParallelConv2D(ParallelHint, ColumnParallel):
    """A convolution whose filters are split: each device computes a part of the channels.

        kernel (h, w, in, filters)            output (batch, height, width, filters)
             ┌───────┬───────┐                      ┌───────┬───────┐
          in │  W_0  │  W_1  │                      │  y_0  │  y_1  │  filters
             └───────┴───────┘                      └───────┴───────┘
               CPU:0   CPU:1                          CPU:0   CPU:1

    y_k = f(x * W_k + b_k). Layers behind it that work channel by channel (normalization,
    activation, pooling, depthwise convolution) stay in parts. A convolution that reads channels in
    parts, `ChannelReducingConv2D`, splits its kernel along `in` and sums, as `RowParallelDense`:

        ┌─────┐
        │ V_0 │ CPU:0
        ├─────┤           z = y_0 * V_0 + y_1 * V_1 + c
        │ V_1 │ CPU:1
        └─────┘

    Input: `(batch, height, width, in)`, whole. Output: `(batch, height', width', filters)` in parts
    along the last axis. Only `channels_last` and `groups=1`.

    Written in a model with the arguments of `keras.layers.Conv2D`, it is that plain layer until
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

    Written in a model with the arguments of `keras.layers.Conv2D`, it is that plain layer until
    `tensor_parallel` splits it.

    Example:
        >>> pictures = keras.Input((32, 32, 3))
        >>> hidden = tfparallel.layers.ChannelParallelConv2D(64, 3, activation="relu")(pictures)
        >>> outputs = tfparallel.layers.ChannelReducingConv2D(32, 1)(hidden)
    """

    plain, kind = keras.layers.Conv2D, "row"
    _axis = 2


def _input_shape(layer) -> tuple[int | None, ...]:
    kernel = layer.kernel.shape
    # The kernel of a convolution is (height, width, in, out).
    return (*(None,) * (len(kernel) - 1), kernel[-2])
