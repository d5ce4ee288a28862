"""Dense layers in parts: by columns of the kernel, or by rows."""

import keras
import tensorflow as tf

from tfparallel.layers.layer import SplitLayer, local_layer, sizes_of
from tfparallel.layers.parallel_hints import ParallelHint
from tfparallel.layers.parts import Parts, on_each, pieces, whole

__all__ = ["ColumnParallel", "ColumnParallelDense", "RowParallel", "RowParallelDense"]


class ColumnParallel(SplitLayer):
    """What dense layers and convolutions share whose outputs are split."""

    _count, _axes = "units", {"kernel": 1, "bias": 0}

    def split(self, *, gather: bool = False) -> None:
        """Makes the parts.

        Args:
            gather: Whether the output is handed on whole. Then the activation is applied to the
                whole, which may mix the features, as softmax does.
        """
        changes = {"activation": None} if gather else {}
        self._take(
            [
                local_layer(self, device, **{self._count: size}, **changes)
                for device, size in zip(
                    self._devices, sizes_of(getattr(self, self._count), self._devices), strict=True
                )
            ],
            self._axes,
        )
        object.__setattr__(self, "_gather", gather)

    def call(self, inputs, **kwargs):
        """Computes the columns, each on its device."""
        copies = on_each(whole(inputs), self._devices)
        parts = Parts(self._on_devices(copies), -1, self._devices)
        if not self._gather:
            return parts
        outputs = parts.whole()
        if self.activation is not None:
            outputs = self.activation(outputs)
        if self.activation in (None, keras.activations.linear, keras.activations.softmax):
            # A softmax loss finds the logits here, and need not wait for the whole.
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

    Written by hand, with the arguments of `keras.layers.Dense`, it is that plain layer until
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
    """What dense layers and convolutions share whose inputs are split."""

    _axis = 0

    def split(self, sizes=None) -> None:
        """Makes the parts.

        Args:
            sizes: How many features each device reads; even shares if None.
        """
        shape = _input_shape(self)
        sizes = sizes or sizes_of(shape[-1], self._devices)
        object.__setattr__(self, "_sizes", sizes)
        self._take(
            [
                local_layer(
                    self, device, (*shape[:-1], size), use_bias=False, activation=None
                )
                for device, size in zip(self._devices, sizes, strict=True)
            ],
            {"kernel": self._axis},
        )

    def call(self, inputs, **kwargs):
        """Sums what the parts compute."""
        partial = self._on_devices(pieces(inputs, self._sizes, -1, self._devices))
        outputs = tf.add_n(partial, name="sum_of_parts")
        if self.bias is not None:
            # The last axis is that of units and of channels.
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

    The sum is one reduction forward. Backward nothing is: each x_k has its gradient where it is.
    So a column-parallel layer, anything that works feature by feature, and a row-parallel layer
    have one reduction forward and one backward. An input that is whole, or split by
    `tfparallel.data.by_feature`, is the feature partition.

    Input: `(batch, …, in)`, in parts along the last axis, or whole. Output: `(batch, …, units)`,
    whole, on the first device, where the bias is.

    Written by hand, with the arguments of `keras.layers.Dense`, it is that plain layer until
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


def _input_shape(layer) -> tuple[int | None, ...]:
    kernel = layer.kernel.shape
    # The kernel of a convolution is (height, width, in, out).
    return (*(None,) * (len(kernel) - 1), kernel[-2])
