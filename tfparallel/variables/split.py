"""A Keras variable that is split into parts, one on each device.

For the layer, the model, files and users it remains one `keras.Variable` of the whole shape. It has
no memory of its own: reading joins the parts, and assigning cuts the value into parts:

    kernel (4, 6)  =  [ part 0 (4, 3) | part 1 (4, 3) ]      axis 1
                          CPU:0           CPU:1

A step reads and updates the parts, which are plain `keras.Variable`s. A user's own loop may read
and differentiate the whole (`composed.py`).
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.seams.keras import set_storage, storage_of
from tfparallel.variables.composed import ComposedVariable


class SplitVariable(ComposedVariable):
    """Extends a Keras variable that is split into parts.

    Attributes:
        parts: The variables that hold the value, in order.
        axis: The axis of the whole along which it is split.
    """

    @property
    def value(self):
        """The whole value, joined on the first part's device."""
        with tf.device(self.parts[0].value.device):
            value = tf.concat([part.value for part in self.parts], self.axis)
        return self._as_variable(value)

    @property
    def pieces(self) -> list[tf.Variable]:
        """The TensorFlow variables of the parts."""
        return [part.value for part in self.parts]

    def gradient_of(self, gradients):
        """Joins gradients of the parts, dense or sparse."""
        return joined(gradients, self.parts, self.axis)

    def assign(self, value):
        """Assigns a whole value to the parts.

        Raises:
            ValueError: If it does not have the shape of the whole.
        """
        value = tf.convert_to_tensor(value)
        if value.shape != self.shape:
            raise ValueError(
                f"The value must have the shape of the variable '{self.path}', "
                f"{tuple(self.shape)}. Received: a value of shape {tuple(value.shape)}."
            )
        sizes = [part.shape[self.axis] for part in self.parts]
        for part, share in zip(self.parts, tf.split(value, sizes, self.axis), strict=True):
            part.assign(share)
        return value


def joined(gradients: Sequence, parts: Sequence[keras.Variable], axis: int):
    """Joins the gradients of a variable's parts to the gradient of the whole.

    Returns:
        A tensor; `tf.IndexedSlices` if all gradients are such and the axis is 0.
    """
    if axis == 0 and all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        starts = itertools.accumulate((part.shape[0] for part in parts), initial=0)
        pairs = list(zip(gradients, starts, strict=False))
        rows = sum(part.shape[0] for part in parts)
        return tf.IndexedSlices(
            tf.concat([gradient.values for gradient, _ in pairs], 0),
            tf.concat([g.indices + tf.cast(start, g.indices.dtype) for g, start in pairs], 0),
            tf.constant([rows, *parts[0].shape[1:]], gradients[0].indices.dtype),
        )
    dense = [
        tf.zeros(part.shape, part.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, part in zip(gradients, parts, strict=True)
    ]
    return tf.concat(dense, axis)


def cut(gradient, variable: "SplitVariable") -> list:
    """Cuts the gradient of a whole variable into the gradients of its parts."""
    sizes = [part.shape[variable.axis] for part in variable.parts]
    if gradient is None:
        return [None] * len(sizes)
    if not isinstance(gradient, tf.IndexedSlices) or variable.axis != 0:
        return tf.split(tf.convert_to_tensor(gradient), sizes, variable.axis)
    slices = []
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        indices = gradient.indices - tf.cast(start, gradient.indices.dtype)
        rows = tf.where((indices >= 0) & (indices < tf.cast(size, indices.dtype)))[:, 0]
        shape = tf.constant([size, *variable.shape[1:]], indices.dtype)
        slices.append(
            tf.IndexedSlices(tf.gather(gradient.values, rows), tf.gather(indices, rows), shape)
        )
    return slices


def cut_all(gradients: Sequence, variables: Sequence[keras.Variable]) -> list:
    """Cuts gradients of split variables into those of their parts."""
    return [
        part
        for gradient, variable in zip(gradients, variables, strict=True)
        for part in (cut(gradient, variable) if isinstance(variable, SplitVariable) else [gradient])
    ]


def split_variable(
    variable: keras.Variable, parts: Sequence[keras.Variable], axis: int
) -> keras.Variable:
    """Splits a variable in place: moves its value into the parts.

    Args:
        variable: The whole variable; its memory is freed.
        parts: Variables whose shapes add up along the axis.
        axis: The axis.
    """
    if storage_of(variable) is not None:
        sizes = [part.shape[axis] for part in parts]
        for part, share in zip(parts, tf.split(variable.value, sizes, axis), strict=True):
            part.assign(share)
    for part in parts:
        # An optimizer names slots, and excludes variables from weight decay, by path.
        part._path = variable.path
        part._whole = variable
    set_storage(variable, None)
    return extend(variable, SplitVariable, parts=tuple(parts), axis=axis)


def share_in_parts(variables: Sequence[keras.Variable]) -> float:
    """The fraction of the variables' elements that are in split variables."""
    in_parts = (variable for variable in variables if isinstance(variable, SplitVariable))
    return _elements(in_parts) / max(_elements(variables), 1)


def _elements(variables) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def parts_of(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables with each split one replaced by its parts."""
    return [
        part
        for variable in variables
        for part in (variable.parts if isinstance(variable, SplitVariable) else [variable])
    ]


def whole_of(variable: keras.Variable) -> keras.Variable:
    """Returns the split variable of a part, or any other variable itself."""
    return getattr(variable, "_whole", variable)
