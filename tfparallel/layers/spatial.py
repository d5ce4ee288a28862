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
input rows [a·s − p, (b − 1)·s − p + e). Those of them that another device holds are sent: the halo.
Rows outside of the picture are padding, which only the first and the last part have.

References:
    Dryden, Maruyama, Benson, Moon, Snir, Van Essen. Improving Strong-Scaling of CNN Training by
    Exploiting Finer-Grained Parallelism, arXiv 1903.06681, 2019.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.layers.dropout import dropped
from tfparallel.layers.layer import SplitLayer, sizes_of
from tfparallel.layers.parallel_hints import ParallelHint
from tfparallel.layers.parts import Parts, on_each, pieces

__all__ = [
    "SpatialBatchNormalization",
    "SpatialDropout",
    "SpatialGlobalPooling2D",
    "SpatialMerge",
    "SpatialParallelConv2D",
    "SpatialParallelPooling2D",
    "SpatialPixelwise",
    "SpatialZeroPadding2D",
    "rows_of",
]


class Window(NamedTuple):
    """How a layer slides over one axis: extent and stride, and the padding at both ends."""

    extent: int
    stride: int
    before: int
    after: int


class SpatialWindow(SplitLayer):
    """What layers share that slide a window over the picture."""

    _fill_with_least = False

    def split(self, shape: Sequence[int | None], height: int) -> None:
        """Notes the windows.

        Args:
            shape: Of the input, `(batch, height, width, channels)`, with height and width known.
            height: Of the output.
        """
        windows = [_window(self, axis, shape[1 + axis]) for axis in (0, 1)]
        object.__setattr__(self, "_windows", windows)
        object.__setattr__(self, "_heights", (shape[1], height))

    def call(self, inputs, **kwargs):
        """Computes each device's rows."""
        (height, height_out), (rows, columns) = self._heights, self._windows
        ends = [0, *itertools.accumulate(sizes_of(height_out, self._devices))]
        weights = self._weights_on_devices()
        outputs = []
        for device, start, stop, own in zip(
            self._devices, ends, ends[1:], weights, strict=False
        ):
            low = start * rows.stride - rows.before
            high = (stop - 1) * rows.stride - rows.before + rows.extent
            with tf.device(device):
                picture = rows_of(inputs, max(low, 0), min(high, height), self._devices)
                above, below = max(-low, 0), max(high - height, 0)
                pad = [[0, 0], [above, below], [columns.before, columns.after], [0, 0]]
                if any(map(any, pad)):
                    fill = picture.dtype.min if self._fill_with_least else 0
                    picture = tf.pad(picture, pad, constant_values=tf.constant(fill, picture.dtype))
                outputs.append(self._slide(picture, *own, pad=pad))
        return Parts(outputs, 1, self._devices)

    def _weights_on_devices(self):
        variables = [getattr(self, name, None) for name in ("kernel", "bias")]
        tensors = [keras.ops.convert_to_tensor(v) for v in variables if v is not None]
        copies = [on_each(tensor, self._devices) for tensor in tensors]
        return zip(*copies, strict=True) if copies else [()] * len(self._devices)


class SpatialParallelConv2D(ParallelHint, SpatialWindow):
    """A convolution, or a depthwise one, of which each device computes some rows (see the module).

    y_k = f(x_k * W + b), with x_k the rows of part k and its halo. Each device reads the whole
    kernel; its gradient is one sum over the devices.

    Input: `(batch, height, width, in)`, in parts along the height, or whole. Output: `(batch,
    height', width', filters)` in parts along the height. Padding "same" or "valid", any strides,
    dilation and groups; `channels_last`.

    Written by hand, with the arguments of `keras.layers.Conv2D`, it is that plain layer until
    `tensor_parallel` splits it. The plain layers behind it that can stay in rows do.

    Example:
        >>> pictures = keras.Input((32, 32, 3))
        >>> hidden = tfparallel.layers.SpatialParallelConv2D(16, 3, padding="same")(pictures)
        >>> outputs = keras.layers.MaxPooling2D()(hidden)  # Of its own rows on each device.
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
    """Pooling, of which each device computes some rows (see the module).

    Of a mean at the border only the pixels inside of the picture are counted, as in Keras. It
    stands for two classes of Keras, so write one of those: behind a `SpatialParallelConv2D` it
    stays in rows, elsewhere `split={name: "height"}` asks for it.

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


class SpatialPixelwise(SplitLayer):
    """Extends a layer without weights that treats each pixel by itself."""

    def split(self, shape, height) -> None:
        """Has nothing to do."""

    def call(self, inputs, *args, **kwargs):
        """Computes each part on its device."""
        if not isinstance(inputs, Parts):
            return super().call(inputs, *args, **kwargs)
        outputs = []
        for tensor, device in zip(inputs.tensors, self._devices, strict=True):
            with tf.device(device):
                outputs.append(super().call(tensor, *args, **kwargs))
        return Parts(outputs, 1, self._devices)


class SpatialDropout(SpatialPixelwise):
    """Extends dropout: the mask is the whole picture's, in parts."""

    def call(self, inputs, training=False):
        """Drops from each part what the whole mask drops there."""
        if not training or self.rate == 0 or not isinstance(inputs, Parts):
            return super().call(inputs, training=training)
        return Parts(dropped(self, inputs.tensors, 1, self._devices), 1, self._devices)


class SpatialMerge(SpatialPixelwise):
    """Extends a sum, product or concatenation of channels of pictures in the same parts."""

    def call(self, inputs):
        """Merges the parts of each device."""
        outputs = []
        own = [tensor.tensors for tensor in inputs]
        for tensors, device in zip(zip(*own, strict=True), self._devices, strict=True):
            with tf.device(device):
                outputs.append(super(SpatialPixelwise, self).call(list(tensors)))
        return Parts(outputs, 1, self._devices)


class SpatialGlobalPooling2D(SpatialPixelwise):
    """Extends the mean, or the largest, of all pixels: one reduction of one number a channel."""

    def split(self, shape, height) -> None:
        """Notes how many pixels there are."""
        object.__setattr__(self, "_num_pixels", shape[1] * shape[2])

    def call(self, inputs):
        """Reduces each part, then what is left."""
        is_mean = isinstance(self, keras.layers.GlobalAveragePooling2D)
        pooled = self._mean(inputs) if is_mean else self._largest(inputs)
        return pooled if self.keepdims else tf.squeeze(pooled, [1, 2])

    def _mean(self, inputs):
        sums = self._reduced(tf.reduce_sum, inputs.tensors)
        return tf.add_n(sums, name="sum_of_parts") / self._num_pixels

    def _largest(self, inputs):
        """The largest of all pixels. Those that are equal share its gradient, wherever they are."""
        tensors = inputs.tensors
        found = tf.reduce_max(tf.stack(self._reduced(tf.reduce_max, tensors)), 0)
        found = tf.stop_gradient(found)

        def ties(tensor):
            return tf.reduce_sum(tf.cast(tensor == found, tensor.dtype), [1, 2], keepdims=True)

        def steps(tensor):  # Zeros, with the gradient of the pixels that are the largest.
            step = tensor - tf.stop_gradient(tensor)
            is_one = (tensor == found) & tf.math.is_finite(tensor)  # ∞ − ∞ is NaN.
            step = tf.where(is_one, step, tf.zeros_like(step))
            return tf.reduce_sum(step, [1, 2], keepdims=True)

        number = tf.add_n(self._of_parts(ties, tensors))
        return found + tf.add_n(self._of_parts(steps, tensors)) / number

    def _reduced(self, reduce, tensors):
        return self._of_parts(lambda each: reduce(each, [1, 2], keepdims=True), tensors)

    def _of_parts(self, function, tensors):
        """What a function makes of each part, where it is."""
        made = []
        for tensor, device in zip(tensors, self._devices, strict=True):
            with tf.device(device):
                made.append(function(tensor))
        return made


class SpatialBatchNormalization(SplitLayer):
    """Extends batch normalization: mean and variance are those of all rows.

        μ = Σ_k Σ x_k / n        σ² = Σ_k Σ (x_k − μ)² / n

    One reduction each, of one number a channel.
    """

    def split(self, shape, height) -> None:
        """Notes how many pixels there are."""
        object.__setattr__(self, "_num_pixels", shape[1] * shape[2])

    def call(self, inputs, training=None, mask=None):
        """Normalizes each part on its device."""
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        parts = []
        for tensor, device in zip(inputs.tensors, self._devices, strict=True):
            with tf.device(device):
                parts.append(tf.cast(tensor, dtype))
        if training and self.trainable:
            mean, variance = self._moments_of_parts(parts)
            for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
                before = keras.ops.cast(moving, dtype)
                moving.assign(before * self.momentum + value * (1.0 - self.momentum))
        else:
            mean = keras.ops.cast(self.moving_mean, dtype)
            variance = keras.ops.cast(self.moving_variance, dtype)
        own = [mean, variance]
        own += [keras.ops.cast(v, dtype) for v in (self.beta, self.gamma) if v is not None]
        copies = [on_each(tensor, self._devices) for tensor in own]
        outputs = []
        for tensor, device, values in zip(
            parts, self._devices, zip(*copies, strict=True), strict=True
        ):
            center = values[2] if self.center else None
            scale = values[-1] if self.scale else None
            with tf.device(device):
                outputs.append(
                    tf.cast(
                        keras.ops.batch_normalization(
                            tensor, values[0], values[1], -1, center, scale, self.epsilon
                        ),
                        self.compute_dtype,
                    )
                )
        return Parts(outputs, 1, self._devices)

    def _moments_of_parts(self, parts):
        def total(terms):
            found = []
            for term, device in zip(terms, self._devices, strict=True):
                with tf.device(device):
                    found.append(tf.reduce_sum(term(), [0, 1, 2]))
            return tf.add_n(found, name="sum_of_parts") / number

        number = tf.cast(tf.shape(parts[0])[0] * self._num_pixels, parts[0].dtype)
        mean = total([lambda x=x: x for x in parts])
        means = on_each(mean, self._devices)
        variance = total(
            [lambda x=x, m=m: tf.square(x - m) for x, m in zip(parts, means, strict=True)]
        )
        return mean, variance


def rows_of(picture, low: int, high: int, devices: Sequence[str]) -> tf.Tensor:
    """Returns the rows [low, high) of a picture in parts, or whole, where it is asked for.

    What other devices hold of them is cut out there, so that only these rows are sent.
    """
    if not isinstance(picture, Parts):
        with tf.device(devices[0]):
            own = picture[:, low:high]
        return tf.identity(own)
    found, start = [], 0
    tensors = pieces(picture, picture.sizes, 1, devices)
    for tensor, device, size in zip(tensors, devices, picture.sizes, strict=True):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            with tf.device(device):
                found.append(tensor[:, first:last] if last - first < size else tensor)
        start += size
    return tf.concat(found, 1) if len(found) > 1 else tf.identity(found[0])


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
