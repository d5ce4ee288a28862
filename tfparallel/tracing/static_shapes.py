"""Shape operations that add nothing to a graph if the static shape says they change nothing.

A graph of N layers has N times the operations of one layer, and TensorFlow spends time and memory
on each while it prepares a step: tens of kilobytes per operation.
"""

from collections.abc import Sequence

import tensorflow as tf


def size_along(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
    """Returns the size of an axis: an integer if it is static, else a scalar tensor."""
    size = tensor.shape[axis] if tensor.shape.rank is not None else None
    return tf.shape(tensor)[axis] if size is None else size


def shape_of(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """Returns the size of each axis: an integer where it is static, else a scalar tensor."""
    return [size_along(tensor, axis) for axis in range(tensor.shape.rank)]


def reshaped(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Reshapes a tensor; returns it unchanged if it has that shape."""
    known = tensor.shape.as_list() if tensor.shape.rank is not None else None
    return tensor if known == list(shape) else tf.reshape(tensor, shape)


def as_matrix(tensor: tf.Tensor) -> tf.Tensor:
    """Flattens all axes behind the first. The width is static if these are, for zero rows too."""
    width = tensor.shape[1:].num_elements()
    return tf.reshape(tensor, [size_along(tensor, 0), -1 if width is None else width])


def concatenated(tensors: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    """Concatenates tensors along an axis; returns a single tensor unchanged."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)


def in_parts(tensor: tf.Tensor, num_parts: int) -> tf.Tensor:
    """Divides axis 0 into equal parts: shape `(num_parts, rows / num_parts, …)`."""
    num_rows, *rest = shape_of(tensor)
    return tf.reshape(tensor, [num_parts, num_rows // num_parts, *rest])


def split(
    tensor: tf.Tensor, sizes: int | Sequence[int | tf.Tensor], axis: int = 0
) -> list[tf.Tensor]:
    """Splits a tensor along an axis; a single part is the tensor itself.

    Args:
        tensor: The tensor.
        sizes: The number of equal parts, or the size of each part.
        axis: The axis.
    """
    number = sizes if isinstance(sizes, int) else len(sizes)
    return [tensor] if number == 1 else tf.split(tensor, sizes, axis, num=number)
