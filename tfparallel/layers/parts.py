"""A tensor in parts, one on each device, between two split layers."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.seams.keras import mask_of, set_mask


class Parts:
    """A tensor whose parts are joined only on request.

    Keras's graph of layers passes it from layer to layer as it is.

    Attributes:
        tensors: The parts, each on its device, in order.
        axis: The axis of the whole along which they follow one another; -1 for the last.
        devices: The devices.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], axis: int, devices: Sequence[str], mask=None):
        self.tensors = list(tensors)
        self.axis = axis
        self.devices = list(devices)
        self._mask = mask
        self._whole: tf.Tensor | None = None

    @property
    def _keras_mask(self):
        """The mask, under the name by which Keras passes it on and removes it.

        It is shared with the whole: removing it there removes it here.
        """
        return self._mask if self._whole is None else mask_of(self._whole)

    @_keras_mask.setter
    def _keras_mask(self, mask):
        self._mask = mask
        if self._whole is not None:
            set_mask(self._whole, mask)

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole."""
        shape = self.tensors[0].shape.as_list()
        shape[self.axis] = None if None in self.sizes else sum(self.sizes)
        return tf.TensorShape(shape)

    @property
    def ndim(self) -> int:
        return len(self.tensors[0].shape)

    @property
    def dtype(self) -> tf.DType:
        return self.tensors[0].dtype

    @property
    def sizes(self) -> list[int | None]:
        """The length of each part along the axis."""
        return [tensor.shape[self.axis] for tensor in self.tensors]

    def cast(self, dtype: str) -> "Parts":
        """Returns the tensor cast to another dtype, each part on its device."""
        if self.dtype == tf.as_dtype(dtype):
            return self
        tensors = on_devices(self.devices, lambda tensor: tf.cast(tensor, dtype), self.tensors)
        return Parts(tensors, self.axis, self.devices, self._keras_mask)

    def whole(self) -> tf.Tensor:
        """Joins the parts on the first device; later calls return the same tensor."""
        if self._whole is None:
            with tf.device(self.devices[0]):
                self._whole = tf.concat(self.tensors, self.axis)
            if self._mask is not None:
                set_mask(self._whole, self._mask)
        return self._whole


def whole(value):
    """Returns the whole of a tensor in parts; anything else unchanged."""
    return value.whole() if isinstance(value, Parts) else value


def with_parts(value):
    """Returns the whole of a tensor in parts, with the parts attached; anything else unchanged.

    For the `call` of a composite layer, which may do anything with it. If nothing reads the
    whole, TensorFlow prunes the operation that joins the parts.
    """
    if not isinstance(value, Parts):
        return value
    tensor = value.whole()
    if value.axis in (-1, value.ndim - 1):  # Rows of pictures are joined between these layers.
        tensor._tfparallel_parts = value
    return tensor


def parts_of_tensor(value):
    """Returns the parts, by features, attached to a tensor; anything else unchanged."""
    return getattr(value, "_tfparallel_parts", value)


def as_it_is(value):
    """Returns a tensor in parts, or anything else, unchanged."""
    return value


def handing_on(how: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Sets how layers return tensors in parts: by `whole`, `with_parts` or `as_it_is`.

    `as_it_is` only between the layers of a model in parts, where Keras passes it to the next one.
    """
    return within(hand_on_parts=how)


def handed_on() -> Callable[[Any], Any]:
    """Returns how a layer called now returns tensors in parts."""
    return context().hand_on_parts or whole


def on_devices(
    devices: Sequence[str], function: Callable[..., Any], *inputs: Iterable[Any]
) -> list[Any]:
    """Calls a function on each device with that device's element of each input, in order."""
    outputs = []
    for device, *arguments in zip(devices, *inputs, strict=True):
        with tf.device(device):
            outputs.append(function(*arguments))
    return outputs


def on_each(tensor, devices: Sequence[str]) -> list:
    """Copies a tensor, and its mask, to each device.

    All readers on a device share one copy: their gradients are summed there first, and one sum per
    device is sent back.
    """

    def copy():
        copied, mask = tf.identity(tensor), mask_of(tensor)
        if mask is not None:
            set_mask(copied, tf.identity(mask))
        return copied

    return on_devices(devices, copy)


def pieces(tensor, sizes: Sequence[int], axis: int, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns each device's part of a tensor, which may already be in such parts."""
    if isinstance(tensor, Parts):
        same = tensor.sizes == list(sizes) and axis in (tensor.axis, tensor.axis - tensor.ndim)
        if same:
            return tensor.tensors
        tensor = tensor.whole()
    return on_devices(devices, tf.identity, tf.split(tensor, sizes, axis))
