"""What all layers of a model with split layers share: how they meet a tensor in parts."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cloning.copy_state import without_draws
from tfparallel.data.partition import row_ranges
from tfparallel.extend import attach, original_class
from tfparallel.layers.parts import (
    Parts,
    handed_on,
    handing_on,
    on_devices,
    parts_of_tensor,
    whole,
)
from tfparallel.placement.layer_devices import PlacementError
from tfparallel.variables.replica import device_at_work
from tfparallel.variables.split import split_variable

__all__ = [
    "FixedLayer",
    "PartwiseLayer",
    "SplitLayer",
    "WholeLayer",
    "local_layer",
    "sizes_of",
    "split_variables",
]


class _Held:
    """What holds the smaller layers, so that Keras writes and reads the whole one's weights alone.

    It looks for layers in all attributes, and in lists and dictionaries there.
    """

    def __init__(self, layers: list[keras.Layer]):
        self.layers = layers


class OnDevices:
    """Extends a layer that has a place on several devices: those of the replica at work."""

    @property
    def _devices(self) -> list[str]:
        return [device_at_work(device) for device in self._first_devices]


class WholeLayer(OnDevices):
    """Extends a layer that is left in place: on the first device, it reads whole tensors."""

    def __call__(self, *args, **kwargs):
        args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        with tf.device(self._devices[0]), handing_on(whole):
            return super().__call__(*args, **kwargs)


class FixedLayer:
    """Extends a layer whose weights are in parts: they are all that it has, and stay what they are.

    The smaller layers would not know of factors that are added, nor of other numbers.
    """

    def enable_lora(self, *args, **kwargs):
        """Raises a `PlacementError`."""
        raise PlacementError(_fixed(self, "enable_lora"))

    def _quantize(self, *args, **kwargs):
        raise PlacementError(_fixed(self, "quantize"))

    def fix(self) -> None:
        """Has the layer refuse to be quantized."""
        # Before Keras 3.16 each layer has a method of its own, which hides that of a class.
        attach(self, quantize=self._quantize)


class SplitLayer(OnDevices, FixedLayer):
    """Extends a built layer of Keras that is computed by smaller ones, one on each device.

    The smaller ones are plain layers of the same class. Their variables are the parts of this
    one's, which keep their place, names and shapes in the model. Each class has a method `split`
    that makes the smaller layers, and a `call` that puts together what they compute.
    """

    _reads_features = False  # Whether its input may lie in parts along the last axis.

    def split(self, **_) -> None:
        """Makes no parts: the layer itself is called with each part."""

    def __call__(self, *args, **kwargs):
        """Calls the layer; a tensor in parts may stand where a tensor does.

        Only the next layer of a model in parts can read such a tensor: whoever else calls this
        one, a submodel or a layer of the user's own, gets the whole.
        """
        if self._reads_features:
            args = keras.tree.map_structure(parts_of_tensor, args)
        args, kwargs = keras.tree.map_structure(self._autocast, (args, kwargs))
        hand_on = handed_on()
        with tf.device(self._devices[0]), handing_on(whole):
            outputs = super().__call__(*args, **kwargs)
        return keras.tree.map_structure(hand_on, outputs)

    def __setattr__(self, name, value):
        """Sets an attribute, if it is none that the smaller layers have a copy of."""
        if name in getattr(self, "_settings", ()):
            raise PlacementError(
                "What a layer computes must be set before it is split. Received: "
                f"{name}={value!r} of layer '{self.name}'. Set it in the plain model, and call "
                "`tensor_parallel` with that."
            )
        super().__setattr__(name, value)

    def _autocast(self, value):
        # As Keras does to a tensor.
        if not isinstance(value, Parts) or not self.autocast or not value.dtype.is_floating:
            return value
        return value.cast(self.compute_dtype)

    def _hold(self, locals_: Sequence[keras.Layer]) -> None:
        object.__setattr__(self, "_small", _Held(list(locals_)))
        settings = {*self.get_config(), "dtype_policy"} - {"name", "trainable"}
        for name, value in vars(self).items():
            if isinstance(value, keras.Variable):
                settings |= {name, name.removeprefix("_")}  # Of `kernel` there is a property.
        object.__setattr__(self, "_settings", settings)
        self.fix()

    def _split(
        self, sizes: Sequence[int], smaller: Callable[[str, int], keras.Layer], axes: dict[str, int]
    ) -> None:
        """Makes a smaller layer of a size on each device, which has the parts of the variables.

        Args:
            sizes: One a device.
            smaller: Returns the layer for a device and its size.
            axes: Along which axis each variable is split, by its name.
        """
        locals_ = list(map(smaller, self._devices, sizes))
        self._hold(locals_)
        split_variables(self, locals_, axes)

    def _on_devices(self, inputs: Sequence[Any], **kwargs) -> list:
        """Calls each smaller layer on its device with its part of the input."""
        return on_devices(
            self._devices, lambda local, own: local(own, **kwargs), self._small.layers, inputs
        )


class PartwiseLayer(SplitLayer):
    """Extends a layer without weights that treats each feature, or each pixel, by itself.

    It leaves a tensor in its parts: it is called with each of them, where that is.
    """

    _reads_features = True

    def call(self, inputs, *args, **kwargs):
        call = super().call
        if not isinstance(inputs, Parts):
            return call(inputs, *args, **kwargs)
        outputs = on_devices(
            self._devices, lambda tensor: call(tensor, *args, **kwargs), inputs.tensors
        )
        return Parts(outputs, inputs.axis, self._devices)


def _fixed(layer, method) -> str:
    return (
        "The weights of a split layer must stay those that it was split with. Received: "
        f"{method}() of layer '{layer.name}'. Call {method}() on the plain model, and "
        "`tensor_parallel` with that: it leaves such a layer in place, on the first device."
    )


def split_variables(
    layer: keras.Layer, locals_: Sequence[keras.Layer], axes: dict[str, int]
) -> None:
    """Makes the smaller layers' variables the parts of a layer's, by name, along the axes."""
    for variable in layer.variables:
        if variable.name in axes:
            parts = [
                next(v for v in local.variables if v.name == variable.name) for local in locals_
            ]
            split_variable(variable, parts, axes[variable.name])


def sizes_of(number: int, devices: Sequence[str]) -> list[int]:
    """How many of that many units, heads, channels or rows each device gets."""
    return [part.size for part in row_ranges(number, len(devices))]


def local_layer(
    layer: keras.Layer, device: str, shape: Sequence[int | None] | None = None, **changes: Any
) -> keras.Layer:
    """Makes a plain layer like this one, but smaller, on a device.

    Its input has the shape of the whole layer's by default; `changes` are those of its config.
    """
    config = {**layer.get_config(), **changes}
    for key in config:
        # The values come from the whole; so do penalties, and constraints.
        if key.endswith("_initializer"):
            config[key] = "zeros"
        elif key.endswith(("_regularizer", "_constraint")):
            config[key] = None
    with without_draws(), tf.device(device):
        local = original_class(layer).from_config(config)
        if shape is not None:
            local.build(shape)
        else:
            local.build_from_config(layer.get_build_config())
    return local
