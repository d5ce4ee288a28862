"""Dense layers in Einstein notation (`EinsumDense`), in parts."""

import keras

from tfparallel.layers.layer import SplitLayer, local_layer, sizes_of
from tfparallel.layers.parts import Parts, on_each, whole


class ColumnParallelEinsum(SplitLayer):
    """An `EinsumDense` split along its longest output axis that the input does not have.

        abc,cde -> abde      kernel (c, d, e), split along d or e; outputs joined along the same

    Input and output are whole. The bias and the activation are applied to the whole output.
    """

    def split(self) -> None:
        """Makes the parts."""
        letter = _letter_of(self)
        _, kernel, output = _letters(self)
        axis = output.index(letter) - len(output)
        shape = list(self.partial_output_shape)

        def smaller(device, size):
            shape[axis] = size
            changes = {"output_shape": shape, "bias_axes": None, "activation": None}
            return local_layer(self, device, **changes)

        sizes = sizes_of(shape[axis], self._devices)
        self._split(sizes, smaller, {"kernel": kernel.index(letter)})
        object.__setattr__(self, "_axis", axis)

    def call(self, inputs, training=None):
        copies = on_each(whole(inputs), self._devices)
        outputs = Parts(self._on_devices(copies), self._axis, self._devices).whole()
        if self.bias is not None:
            outputs = keras.ops.add(outputs, self.bias)
        return outputs if self.activation is None else self.activation(outputs)


def units_of(layer: keras.layers.EinsumDense) -> int:
    """Returns the length of the axis along which a layer is split; 0 if there is none."""
    letter = _letter_of(layer)
    return 0 if letter is None else layer.kernel.shape[_letters(layer)[1].index(letter)]


def _letter_of(layer) -> str | None:
    """Returns the longest axis of the kernel that is in the output and not in the input."""
    inputs, kernel, output = _letters(layer)
    # After an ellipsis, axes are counted from the end.
    behind = output.rpartition(".")[2]
    letters = [letter for letter in kernel if letter in behind and letter not in inputs]
    return max(letters, key=lambda letter: layer.kernel.shape[kernel.index(letter)], default=None)


def _letters(layer) -> tuple[str, str, str]:
    sources, output = layer.equation.replace(" ", "").split("->")
    inputs, kernel = sources.split(",")
    return inputs, kernel, output.replace("...", ".")
