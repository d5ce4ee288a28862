"""Convolutions and pooling split along the height of the picture.

Weights are whole; the pictures, and with them the activations, are in parts:

                       picture (height, width)
        CPU:0   ┌──────────────────────────────┐
                │  rows 0 … 3                  │
                │- - - - - - - - - - - - - - - │ row 3 ──┐ halo: the row that the first
                ├──────────────────────────────┤         │ window of CPU:1 reaches into
        CPU:1   │- - - - - - - - - - - - - - - │ row 4 <─┘ (and row 4 goes up)
                │  rows 4 … 7                  │
                └──────────────────────────────┘

Output rows [a, b) of a window of extent e and stride s, with p rows of padding above, need the
input rows [a·s − p, (b − 1)·s − p + e). Those that another device holds are sent: the halo. Only
the first and the last part have padding, the rows outside of the picture.

References:
    Dryden, Maruyama, Benson, Moon, Snir, Van Essen. Improving Strong-Scaling of CNN Training by
    Exploiting Finer-Grained Parallelism, arXiv 1903.06681, 2019.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.layers.layer import SplitLayer, sizes_of
from tfparallel.layers.parallel_hints import ParallelHint
from tfparallel.layers.parts import Parts, on_devices, on_each, pieces


class Window(NamedTuple):
    """A layer's window along one axis: its extent, its stride, and the padding at both ends."""

    extent: int
    stride: int
    before: int
    after: int


class SpatialWindow(SplitLayer):
    """Base of layers that slide a window over the picture."""

    _fill_with_least = False

    def split(self, shape: Sequence[int | None], height: int) -> None:
        """Sets the windows.

        Args:
            shape: The input shape, `(batch, height, width, channels)`; height and width are known.
            height: The height of the output.
        """
        windows = [_window(self, axis, shape[1 + axis]) for axis in (0, 1)]
        object.__setattr__(self, "_windows", windows)
        object.__setattr__(self, "_heights", (shape[1], height))

    def call(self, inputs, **kwargs):
        (height, height_out), (rows, columns) = self._heights, self._windows
        ends = [0, *itertools.accumulate(sizes_of(height_out, self._devices))]
        weights = [getattr(self, name, None) for name in ("kernel", "bias")]
        tensors = [keras.ops.convert_to_tensor(v) for v in weights if v is not None]

        def rows_of_device(start, stop, *kernels):
            low = start * rows.stride - rows.before
            high = (stop - 1) * rows.stride - rows.before + rows.extent
            picture = rows_of(inputs, max(low, 0), min(high, height), self._devices)
            above, below = max(-low, 0), max(high - height, 0)
            pad = [[0, 0], [above, below], [columns.before, columns.after], [0, 0]]
            if any(map(any, pad)):
                fill = picture.dtype.min if self._fill_with_least else 0
                picture = tf.pad(picture, pad, constant_values=tf.constant(fill, picture.dtype))
            return self._slide(picture, *kernels, pad=pad)

        copies = [on_each(tensor, self._devices) for tensor in tensors]
        outputs = on_devices(self._devices, rows_of_device, ends[:-1], ends[1:], *copies)
        return Parts(outputs, 1, self._devices)


class SpatialParallelConv2D(ParallelHint, SpatialWindow):
    """A plain or depthwise convolution split by height (see the module docstring).

    y_k = f(x_k * W + b), with x_k the rows of part k and its halo. Each device reads the whole
    kernel; the kernel's gradient is one sum over the devices.

    Input: `(batch, height, width, in)`, in parts along the height, or whole. Output: `(batch,
    height', width', filters)` in parts along the height. Padding "same" or "valid", any strides,
    dilation and groups; `channels_last`.

    Written in a model with the arguments of `keras.layers.Conv2D`, it is that plain layer until
    `tensor_parallel` splits it. Plain layers behind it stay in rows if they can.

    Example:
        >>> pictures = keras.Input((32, 32, 3))
        >>> hidden = tfparallel.layers.SpatialParallelConv2D(16, 3, padding="same")(pictures)
        >>> outputs = keras.layers.MaxPooling2D()(hidden)  # Each device pools its own rows.
        >>> model = keras.Model(pictures, outputs)
        >>> tfparallel.tensor_parallel(model, devices=["GPU:0", "GPU:1"]).split.values()
        dict_values(['height', 'height'])
    """

    plain, kind = keras.layers.Conv2D, "height"

    def _slide(self, picture, kernel, bias=None, *, pad):
        depthwise = isinstance(self, keras.layers.DepthwiseConv2D)
        slide = keras.ops.depthwise_conv if depthwise else keras.ops.conv
        outputs = slide(
            picture,
            kernel,
            strides=self.strides,
            padding="valid",
            dilation_rate=self.dilation_rate,
            data_format="channels_last",
        )
        if bias is not None:
            outputs = outputs + bias
        return outputs if self.activation is None else self.activation(outputs)


class SpatialParallelPooling2D(ParallelHint, SpatialWindow):
    """Pooling split by height (see the module docstring).

    A mean at the border counts only pixels inside of the picture, as in Keras. This class stands
    for two Keras classes, so write one of those: behind a `SpatialParallelConv2D` it stays in rows;
    elsewhere, request it with `split={name: "height"}`.

    Input: `(batch, height, width, channels)`, in parts along the height, or whole. Output: `(batch,
    height', width', channels)` in parts along the height.

    Example:
        >>> pictures = keras.Input((32, 32, 3))
        >>> model = keras.Model(pictures, keras.layers.MaxPooling2D(name="pool")(pictures))
        >>> split = {"pool": "height"}
        >>> tfparallel.tensor_parallel(model, devices=["GPU:0", "GPU:1"], split=split).split
        {'pool': 'height'}
    """

    @property
    def _fill_with_least(self) -> bool:
        return isinstance(self, keras.layers.MaxPooling2D)

    def _slide(self, picture, *, pad):
        size, strides = self.pool_size, self.strides
        if self._fill_with_least:
            return keras.ops.max_pool(picture, size, strides, "valid", "channels_last")
        outputs = keras.ops.average_pool(picture, size, strides, "valid", "channels_last")
        if not any(map(any, pad)):
            return outputs
        height, width = picture.shape[1] - sum(pad[1]), picture.shape[2] - sum(pad[2])
        inside = tf.pad(tf.ones((1, height, width, 1), picture.dtype), pad)
        return outputs / keras.ops.average_pool(inside, size, strides, "valid", "channels_last")


class SpatialZeroPadding2D(SpatialWindow):
    """Extends padding with zeros: a window of one pixel."""

    def _slide(self, picture, *, pad):
        return picture


class SpatialMerge(SplitLayer):
    """Extends a sum, product or channel concatenation of pictures in the same parts."""

    def call(self, inputs):
        call, parts = super().call, [rows_by_device(picture, self._devices) for picture in inputs]
        outputs = on_devices(self._devices, lambda *pictures: call(list(pictures)), *parts)
        return Parts(outputs, 1, self._devices)


class SpatialGlobalPooling2D(SplitLayer):
    """Extends the mean or maximum of all pixels: one reduction of one number per channel."""

    def split(self, shape, height) -> None:
        object.__setattr__(self, "_num_pixels", shape[1] * shape[2])

    def call(self, inputs):
        """Reduces each part, then the results."""
        parts = rows_by_device(inputs, self._devices)
        if isinstance(self, keras.layers.GlobalAveragePooling2D):
            # As Keras: in 16 bits, the sum would overflow.
            dtype = keras.backend.result_type(inputs.dtype, "float32")
            parts = on_devices(self._devices, lambda x: tf.cast(x, dtype), parts)
            sums = self._reduced(tf.reduce_sum, parts)
            mean = tf.add_n(sums, name="sum_of_parts") / self._num_pixels
            pooled = tf.cast(mean, inputs.dtype)
        else:
            pooled = self._largest(parts)
        return pooled if self.keepdims else tf.squeeze(pooled, [1, 2])

    def _largest(self, tensors):
        """Returns the maximum of all pixels. Equal maxima share its gradient across devices."""
        largest = tf.reduce_max(tf.stack(self._reduced(tf.reduce_max, tensors)), 0)
        largest = tf.stop_gradient(largest)

        def ties(tensor):
            return tf.reduce_sum(tf.cast(tensor == largest, tensor.dtype), [1, 2], keepdims=True)

        def steps(tensor):  # Zeros that carry the gradient to the largest pixels.
            step = tensor - tf.stop_gradient(tensor)
            is_one = (tensor == largest) & tf.math.is_finite(tensor)  # ∞ − ∞ is NaN.
            step = tf.where(is_one, step, tf.zeros_like(step))
            return tf.reduce_sum(step, [1, 2], keepdims=True)

        number = tf.add_n(on_devices(self._devices, ties, tensors))
        return largest + tf.add_n(on_devices(self._devices, steps, tensors)) / number

    def _reduced(self, reduce, tensors):
        return on_devices(self._devices, lambda each: reduce(each, [1, 2], keepdims=True), tensors)


class SpatialBatchNormalization(SplitLayer):
    """Extends batch normalization: mean and variance are computed over all rows.

        μ = Σ_k Σ x_k / n        σ² = Σ_k Σ (x_k − μ)² / n

    One reduction for each, of one number per channel.
    """

    def split(self, shape, height) -> None:
        object.__setattr__(self, "_num_pixels", shape[1] * shape[2])

    def call(self, inputs, training=None, mask=None):
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        parts = rows_by_device(inputs, self._devices)
        parts = on_devices(self._devices, lambda x: tf.cast(x, dtype), parts)
        if training and self.trainable:
            mean, variance = self._moments_of_parts(parts)
            for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
                before = keras.ops.cast(moving, dtype)
                moving.assign(before * self.momentum + value * (1.0 - self.momentum))
        else:
            mean = keras.ops.cast(self.moving_mean, dtype)
            variance = keras.ops.cast(self.moving_variance, dtype)
        parameters = [mean, variance]
        parameters += [keras.ops.cast(v, dtype) for v in (self.beta, self.gamma) if v is not None]

        def normalized(x, mean, variance, *affine):
            beta = affine[0] if self.center else None
            gamma = affine[-1] if self.scale else None
            outputs = keras.ops.batch_normalization(
                x, mean, variance, -1, beta, gamma, self.epsilon
            )
            return tf.cast(outputs, self.compute_dtype)

        copies = [on_each(tensor, self._devices) for tensor in parameters]
        outputs = on_devices(self._devices, normalized, parts, *copies)
        return Parts(outputs, 1, self._devices)

    def _moments_of_parts(self, parts):
        def mean_of(pictures):
            sums = on_devices(self._devices, lambda x: tf.reduce_sum(x, [0, 1, 2]), pictures)
            return tf.add_n(sums, name="sum_of_parts") / number

        number = tf.cast(tf.shape(parts[0])[0] * self._num_pixels, parts[0].dtype)
        mean = mean_of(parts)
        means = on_each(mean, self._devices)
        squares = on_devices(self._devices, lambda x, m: tf.square(x - m), parts, means)
        return mean, mean_of(squares)


def rows_by_device(picture, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns each device's rows of a picture of known height, in parts or whole."""
    return pieces(picture, sizes_of(picture.shape[1], devices), 1, devices)


def rows_of(picture, low: int, high: int, devices: Sequence[str]) -> tf.Tensor:
    """Returns the rows [low, high) of a picture, in parts or whole, on the current device.

    Each device cuts out its own rows, so only these are sent.
    """
    if not isinstance(picture, Parts):
        with tf.device(devices[0]):
            rows = picture[:, low:high]
        return tf.identity(rows)
    slices, start = [], 0
    tensors = pieces(picture, picture.sizes, 1, devices)
    for tensor, device, size in zip(tensors, devices, picture.sizes, strict=True):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            with tf.device(device):
                slices.append(tensor[:, first:last] if last - first < size else tensor)
        start += size
    return tf.concat(slices, 1) if len(slices) > 1 else tf.identity(slices[0])


def _window(layer, axis, length) -> Window:
    if isinstance(layer, keras.layers.ZeroPadding2D):
        return Window(1, 1, *layer.padding[axis])
    size = getattr(layer, "kernel_size", None) or layer.pool_size
    dilation = getattr(layer, "dilation_rate", (1, 1))
    extent = (size[axis] - 1) * dilation[axis] + 1
    stride = layer.strides[axis]
    if layer.padding == "valid":
        return Window(extent, stride, 0, 0)
    missing = max((-(-length // stride) - 1) * stride + extent - length, 0)
    return Window(extent, stride, missing // 2, missing - missing // 2)
