"""Base classes of all layers in a model with split layers: how they read tensors in parts."""

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
from tfparallel.problems import PlacementError
from tfparallel.variables.mesh_replica import device_at_work
from tfparallel.variables.split import split_variable


class _HiddenLayers:
    """Hides the smaller layers from Keras, which then saves only the whole layer's weights.

    Keras looks for layers in all attributes, and in lists and dictionaries there.
    """

    def __init__(self, layers: list[keras.Layer]):
        self.layers = layers


class OnDevices:
    """Extends a layer that is on several devices: those of the replica at work."""

    @property
    def _devices(self) -> list[str]:
        return [device_at_work(device) for device in self._first_devices]


class WholeLayer(OnDevices):
    """Extends a layer that is left in place: it reads whole tensors, on the first device."""

    def __call__(self, *args, **kwargs):
        args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        with tf.device(self._devices[0]), handing_on(whole):
            return super().__call__(*args, **kwargs)


class FixedLayer:
    """Extends a layer whose weights are in parts: no weights can be added or replaced.

    The smaller layers would not see LoRA's factors nor quantized weights.
    """

    def enable_lora(self, *args, **kwargs):
        """Raises a `PlacementError`."""
        raise PlacementError(_fixed(self, "enable_lora"))

    def _quantize(self, *args, **kwargs):
        raise PlacementError(_fixed(self, "quantize"))

    def fix(self) -> None:
        """Makes the layer refuse to be quantized."""
        # Before Keras 3.16, Keras sets `quantize` on each layer, which hides the class's method.
        attach(self, quantize=self._quantize)


class SplitLayer(OnDevices, FixedLayer):
    """Extends a built Keras layer that smaller layers compute, one on each device.

    The smaller layers are plain layers of the same class. Their variables are the parts of this
    layer's, which keep their place, names and shapes in the model. Each class has a method `split`
    that makes the smaller layers, and a `call` that combines their outputs.
    """

    _reads_features = False  # Whether its input may be in parts along the last axis.

    def split(self, **_) -> None:
        """Makes no smaller layers: the layer itself is called with each part."""

    def __call__(self, *args, **kwargs):
        """Calls the layer; tensors may be in parts.

        Only the next layer of a model in parts can read such a tensor: any other caller, a submodel
        or a user's own layer, gets the whole.
        """
        if self._reads_features:
            args = keras.tree.map_structure(parts_of_tensor, args)
        args, kwargs = keras.tree.map_structure(self._autocast, (args, kwargs))
        hand_on = handed_on()
        with tf.device(self._devices[0]), handing_on(whole):
            outputs = super().__call__(*args, **kwargs)
        return keras.tree.map_structure(hand_on, outputs)

    def __setattr__(self, name, value):
        """Sets an attribute, unless the smaller layers hold a copy of it."""
        if name in getattr(self, "_settings", ()):
            raise PlacementError(
                "A layer's settings must be changed before it is split. Received: "
                f"{name}={value!r} of layer '{self.name}'. Set it in the plain model, and pass "
                "that to `tensor_parallel`."
            )
        super().__setattr__(name, value)

    def _autocast(self, value):
        # As Keras casts a tensor.
        if not isinstance(value, Parts) or not self.autocast or not value.dtype.is_floating:
            return value
        return value.cast(self.compute_dtype)

    def _hold(self, locals_: Sequence[keras.Layer]) -> None:
        object.__setattr__(self, "_small", _HiddenLayers(list(locals_)))
        settings = {*_config_of(self), "dtype_policy"} - {"name", "trainable"}
        for name, value in vars(self).items():
            if isinstance(value, keras.Variable):
                settings |= {name, name.removeprefix("_")}  # `kernel` is a property of `_kernel`.
        object.__setattr__(self, "_settings", settings)
        self.fix()

    def _split(
        self, sizes: Sequence[int], smaller: Callable[[str, int], keras.Layer], axes: dict[str, int]
    ) -> None:
        """Makes one smaller layer per device, which holds the parts of the variables.

        Args:
            sizes: The size of each smaller layer.
            smaller: Returns the layer for a device and its size.
            axes: The axis along which each variable is split, by its name.
        """
        locals_ = list(map(smaller, self._devices, sizes))
        self._hold(locals_)
        split_variables(self, locals_, axes)

    def _on_devices(self, inputs: Sequence[Any], **kwargs) -> list:
        """Calls each smaller layer on its device with its part of the input."""
        return on_devices(
            self._devices, lambda local, part: local(part, **kwargs), self._small.layers, inputs
        )


class PartwiseLayer(SplitLayer):
    """Extends a layer without weights that treats each feature or each pixel independently.

    A tensor stays in parts: the layer is called with each part, on its device.
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
        "A split layer must keep the weights that it was split with. Received: "
        f"{method}() of layer '{layer.name}'. Call {method}() on the plain model, and pass that "
        "to `tensor_parallel`, which leaves such a layer whole on the first device."
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
    """Divides a number of units, heads, channels or rows evenly over the devices."""
    return [part.size for part in row_ranges(number, len(devices))]


def local_layer(
    layer: keras.Layer, device: str, shape: Sequence[int | None] | None = None, **changes: Any
) -> keras.Layer:
    """Makes a plain but smaller copy of a layer, on a device.

    The input shape defaults to the whole layer's; `changes` override entries of its config.
    """
    config = {**_config_of(layer), **changes}
    for key in config:
        if key.endswith("_initializer"):
            config[key] = "zeros"
    with without_draws(), tf.device(device):
        local = original_class(layer).from_config(config)
        if shape is not None:
            local.build(shape)
        else:
            local.build_from_config(layer.get_build_config())
    return local


def has_activation_of_keras(layer: keras.Layer) -> bool:
    """Returns whether the activation, if any, is Keras's own, which mixes at most the last axis.

    A user's own function may do anything.
    """
    activation = getattr(layer, "activation", None)
    module = getattr(activation, "__module__", "") or ""
    return activation is None or module.startswith("keras.src.activations")


def _config_of(layer: keras.Layer) -> dict[str, Any]:
    """The config, without functions and objects of the user's, which Keras may not serialize.

    The whole layer initializes the values, applies penalties and constraints, and calls activations
    that are not Keras's.
    """
    of_whole = ("_initializer", "_regularizer", "_constraint")
    without: dict[str, Any] = {name: None for name in vars(layer) if name.endswith(of_whole)}
    if not has_activation_of_keras(layer):
        without["activation"] = keras.activations.linear
    before = {name: getattr(layer, name) for name in without}
    vars(layer).update(without)  # Not by `setattr`: a split layer refuses other settings.
    try:
        return layer.get_config()
    finally:
        vars(layer).update(before)
