"""Dense layers in Einstein notation (`EinsumDense`), in parts."""

import keras
import tensorflow as tf

from tfparallel.layers.layer import SplitLayer, local_layer, sizes_of
from tfparallel.layers.parts import Parts, on_each, pieces, whole


class ParallelEinsum(SplitLayer):
    """An `EinsumDense` split along one axis of its kernel.

        kernel's axis is in    example: abc,cde -> abde, split along
        the output             d or e: every device reads the input; outputs are joined along d or e
        the input              c: every device reads its slice of the input; the outputs are summed
        both                   each device reads a slice, and outputs are joined

    By default, it is the longest axis that the input does not have. Input and output are whole. The
    bias and the activation are applied to the whole output.
    """

    def split(self, axis: int | None = None) -> None:
        """Makes the parts. `axis` is the kernel's; default: the longest that the input lacks."""
        axis = _longest(self) if axis is None else axis
        read, written = axes_of(self)[axis]
        sizes = sizes_of(self.kernel.shape[axis], self._devices)
        shape = list(self.partial_output_shape)
        input_shape = list(self.get_build_config()["input_shape"])

        def smaller(device, size):
            if written is not None:
                shape[written] = size
            if read is not None:
                input_shape[read] = size
            changes = {"output_shape": shape, "bias_axes": None, "activation": None}
            return local_layer(self, device, input_shape, **changes)

        # Keras would track the attributes.
        object.__setattr__(self, "_plan", (sizes, read, written))
        self._split(sizes, smaller, {"kernel": axis})

    def call(self, inputs, training=None):
        sizes, read, written = self._plan
        if read is None:
            slices = on_each(whole(inputs), self._devices)
        else:
            slices = pieces(whole(inputs), sizes, read, self._devices)
        outputs = self._on_devices(slices)
        if written is None:
            outputs = tf.add_n(outputs, name="sum_of_parts")
        else:
            outputs = Parts(outputs, written, self._devices).whole()
        if self.bias is not None:
            outputs = keras.ops.add(outputs, self.bias)
        return outputs if self.activation is None else self.activation(outputs)


def axes_of(layer: keras.layers.EinsumDense) -> dict[int, tuple[int | None, int | None]]:
    """Returns the axes of a kernel along which a layer can be split.

    Returns:
        The axis of the input and that of the output, counted from the end, by the kernel's; None
        where the tensor has no such axis.
    """
    sources, output = layer.equation.replace(" ", "").replace("...", ".").split("->")
    inputs, kernel = sources.split(",")
    axes = {axis: (_axis(inputs, k), _axis(output, k)) for axis, k in enumerate(kernel)}
    # Axes before an ellipsis have no number, and the layer's `output_shape` has no batch.
    most = len(layer.partial_output_shape)
    return {
        axis: (read, written)
        for axis, (read, written) in axes.items()
        if 0 not in (read, written) and (written is None or -written <= most)
    }


def units_of(layer: keras.layers.EinsumDense) -> int:
    """Returns the length of the axis along which a layer is split; 0 if there is none."""
    axis = _longest(layer)
    return 0 if axis is None else layer.kernel.shape[axis]


def _longest(layer) -> int | None:
    """Returns the longest axis of the kernel that is in the output and not in the input."""
    units = [axis for axis, (read, written) in axes_of(layer).items() if read is None]
    return max(units, key=lambda axis: layer.kernel.shape[axis], default=None)


def _axis(letters, letter) -> int | None:
    """Returns the axis of a letter, counted from the end; 0 if an ellipsis follows it."""
    if letter not in letters:
        return None
    index = letters.index(letter)
    return 0 if "." in letters[index:] else index - len(letters)
