"""A Keras variable whose value lies in parts, a part on each device.

The variable stays what the layer, the model, the file and the user know: one `keras.Variable` of
the whole shape. It has no memory of its own. What is read is joined from the parts, what is
assigned is cut into them:

    kernel (4, 6)  =  [ part 0 (4, 3) | part 1 (4, 3) ]      axis 1
                          CPU:0           CPU:1

What computes a step reads and updates the parts, which are plain `keras.Variable`s.
"""

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfparallel.extend import extend

__all__ = ["SplitVariable", "parts_of", "split_variable", "whole_of"]


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
        if tf.executing_eagerly():
            # By which an optimizer knows a variable that it is told to leave out.
            value._unique_id = f"split_{id(self)}"
        return value

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


def split_variable(
    variable: keras.Variable, parts: Sequence[keras.Variable], axis: int
) -> keras.Variable:
    """Has a variable lie in parts, which take over its value; in place.

    Args:
        variable: The whole; its own memory is given free.
        parts: Variables whose shapes follow one another along the axis.
        axis: The axis.
    """
    if variable._value is not None:
        sizes = [part.shape[axis] for part in parts]
        for part, share in zip(parts, tf.split(variable.value, sizes, axis), strict=True):
            part.assign(share)
    for part in parts:
        # An optimizer names slots, and finds what it leaves out, by the path.
        part._path = variable.path
        part._whole = variable
    variable._value = None
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
