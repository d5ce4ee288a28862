"""A Keras variable whose value lies in parts, a part on each device.

The variable stays what the layer, the model, the file and the user know: one `keras.Variable` of
the whole shape. It has no memory of its own. What is read is joined from the parts, what is
assigned is cut into them:

    kernel (4, 6)  =  [ part 0 (4, 3) | part 1 (4, 3) ]      axis 1
                          CPU:0           CPU:1

What computes a step reads and updates the parts, which are plain `keras.Variable`s. In a loop of
the user's own a tape differentiates, and an optimizer that knows of no parts may update: for these
the whole has a handle that stands for those of the parts, and its value can be assigned to.
"""

import itertools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.problems import PlacementError
from tfparallel.seams.keras import set_storage, storage_of
from tfparallel.seams.tensorflow import stand_for

__all__ = ["SplitVariable", "cut", "cut_all", "parts_of", "split_variable", "whole_of"]


class _Handle(tf.__internal__.CompositeTensor):
    """What a tape differentiates with respect to: the handles of the parts.

    TensorFlow asks a composite tensor for what it is composed of, and hands it the gradients.
    """

    def __init__(self, variable: "SplitVariable"):
        self._variable = variable

    @property
    def _type_spec(self):
        return tf.TensorSpec(self._variable.shape, self._variable.dtype)

    @property
    def __composite_gradient__(self):
        return self

    @property
    def dtype(self) -> tf.DType:
        """The type of the variable's elements."""
        return tf.as_dtype(self._variable.dtype)

    def get_gradient_components(self, handle) -> list:
        """Returns the handles of the parts."""
        return [part.value.handle for part in handle._variable.parts]

    def replace_gradient_components(self, handle, gradients):
        """Joins gradients of the parts; None if the target does not depend on them."""
        return joined(gradients, handle._variable.parts, handle._variable.axis)


class SplitVariable:
    """Extends a variable of Keras that lies in parts.

    Attributes:
        parts: The variables that hold the value, in order.
        axis: Along which axis of the whole they follow one another.
    """

    @property
    def value(self):
        """The whole value, joined on the first part's device."""
        with tf.device(self.parts[0].value.device):
            value = tf.concat([part.value for part in self.parts], self.axis)
        stand_for(value, self, f"split_{id(self)}")
        return value

    @property
    def handle(self) -> _Handle:
        """What a tape knows the variable by."""
        return _Handle(self)

    def assign(self, value):
        """Cuts a whole value into the parts.

        Raises:
            ValueError: If its shape is not that of the whole.
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

    @property
    def _shared_name(self) -> str:
        return self.name

    def _serialize_to_tensors(self):
        # `tf.train.Checkpoint` writes a whole variable, and reads one.
        return {"VARIABLE_VALUE": self.value}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *args, **kwargs):
        raise PlacementError(
            "A SavedModel must hold whole weights. Received: an export of the variable "
            f"'{self.path}', which lies in parts. Save the model by `model.save('model.keras')`, "
            "and export what `keras.models.load_model` returns."
        )


def joined(gradients: Sequence, parts: Sequence[keras.Variable], axis: int):
    """Joins gradients of the parts of a variable to that of the whole.

    Returns:
        A tensor; `tf.IndexedSlices` if those of the parts are, and the axis is that of the rows;
        None if there is no gradient.
    """
    if all(gradient is None for gradient in gradients):
        return None
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
    """Cuts the gradient of a whole variable into those of its parts."""
    sizes = [part.shape[variable.axis] for part in variable.parts]
    if gradient is None:
        return [None] * len(sizes)
    if not isinstance(gradient, tf.IndexedSlices) or variable.axis != 0:
        return tf.split(tf.convert_to_tensor(gradient), sizes, variable.axis)
    found = []
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        indices = gradient.indices - tf.cast(start, gradient.indices.dtype)
        own = tf.where((indices >= 0) & (indices < tf.cast(size, indices.dtype)))[:, 0]
        shape = tf.constant([size, *variable.shape[1:]], indices.dtype)
        found.append(
            tf.IndexedSlices(tf.gather(gradient.values, own), tf.gather(indices, own), shape)
        )
    return found


def cut_all(gradients: Sequence, variables: Sequence[keras.Variable]) -> list:
    """Cuts gradients of whole variables into those of the parts, where a variable has some."""
    return [
        part
        for gradient, variable in zip(gradients, variables, strict=True)
        for part in (cut(gradient, variable) if isinstance(variable, SplitVariable) else [gradient])
    ]


def split_variable(
    variable: keras.Variable, parts: Sequence[keras.Variable], axis: int
) -> keras.Variable:
    """Has a variable lie in parts, which take over its value; in place.

    Args:
        variable: The whole; its own memory is given free.
        parts: Variables whose shapes follow one another along the axis.
        axis: The axis.
    """
    if storage_of(variable) is not None:
        sizes = [part.shape[axis] for part in parts]
        for part, share in zip(parts, tf.split(variable.value, sizes, axis), strict=True):
            part.assign(share)
    for part in parts:
        # An optimizer names slots, and finds what it leaves out, by the path.
        part._path = variable.path
        part._whole = variable
    set_storage(variable, None)
    return extend(variable, SplitVariable, parts=tuple(parts), axis=axis)


def parts_of(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables with each split one replaced by its parts."""
    return [
        part
        for variable in variables
        for part in (variable.parts if isinstance(variable, SplitVariable) else [variable])
    ]


def whole_of(variable: keras.Variable) -> keras.Variable:
    """Returns the split variable that a part belongs to; another one itself."""
    return getattr(variable, "_whole", variable)
