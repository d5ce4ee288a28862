"""Which layer goes to which device."""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tfparallel import devices as device_lib
from tfparallel.placement.balance import partition
from tfparallel.placement.graph import edges, layers_in_order

__all__ = ["by_device_map", "by_layers_per_stage", "by_memory", "by_variables", "bytes_of"]

_COPIES = 4  # Of each weight while it trains: itself, its gradient, and two slots, as Adam's.


def by_layers_per_stage(
    layers: Sequence[keras.Layer], devices: Sequence[str], layers_per_stage: Sequence[int]
) -> dict[str, str]:
    """Gives each device as many consecutive layers as the list says.

    Raises:
        ValueError: If the numbers do not fit the layers or the devices.
    """
    counts = list(layers_per_stage)
    if (
        len(counts) != len(devices)
        or sum(counts) != len(layers)
        or any(not isinstance(n, int) or n < 1 for n in counts)
    ):
        raise ValueError(
            f"`layers_per_stage` must give each of the {len(devices)} devices one layer or more, "
            f"and all {len(layers)} layers together: {_names(layers)}. Received: {counts}, which "
            f"are {sum(counts)} on {len(counts)} devices."
        )
    placed = iter(layers)
    return {
        next(placed).name: device
        for device, count in zip(devices, counts, strict=True)
        for _ in range(count)
    }


def by_device_map(
    layers: Sequence[keras.Layer], device_map: Mapping[str, str]
) -> dict[str, str]:
    """Takes the device of each layer from a dictionary.

    Raises:
        ValueError: If a layer is missing in it or unknown, or a device does not exist.
    """
    names = [layer.name for layer in layers]
    missing = [name for name in names if name not in device_map]
    unknown = [name for name in device_map if name not in names]
    if missing or unknown:
        problems = [f"without a device: {', '.join(missing)}"] * bool(missing)
        problems += [f"no such layer: {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(
            "`device_map` must name a device for each layer of the model, and no other. Received: "
            f"{'; '.join(problems)}. The layers are {', '.join(names)}."
        )
    device_lib.check_devices(list(dict.fromkeys(device_map.values())))
    return {name: device_lib.resolve(device_map[name]) for name in names}


def by_memory(model: keras.Model, devices: Sequence[str], batch_size: int) -> dict[str, str]:
    """Cuts the model where the largest device holds least.

    A layer holds its weights four times (the weight, its gradient, two slots), and its outputs for
    the batch, which wait for the backward pass; so do the tensors that a device is sent.
    """
    layers, found = layers_in_order(model), edges(model)
    _check_number(layers, devices)
    outputs = {index: size * batch_size for index, (size, _) in found.items()}
    costs = [
        _COPIES * sum(bytes_of(weight) for weight in layer.weights) + outputs.get(index, 0)
        for index, layer in enumerate(layers)
    ]
    sent = {index: (outputs[index], readers) for index, (_, readers) in found.items()}
    return by_layers_per_stage(layers, devices, partition(costs, len(devices), sent))


def by_variables(model: keras.Model) -> dict[str, str]:
    """Honours the user's own `with tf.device(...)`, which the variables remember.

    A layer without variables goes where its input comes from.

    Raises:
        ValueError: If the variables of one layer are on several devices.
    """
    layers, found = layers_in_order(model), edges(model)
    placement: dict[str, str] = {}
    for index, layer in enumerate(layers):
        own = {device_lib.resolve(v.value.device) for v in layer.variables if v.value.device}
        if len(own) > 1:
            raise ValueError(
                "A layer's variables must be on one device. Received: layer "
                f"'{layer.name}' with variables on {', '.join(sorted(own))}. Build the layer in "
                "one `with tf.device(...)` block."
            )
        producers = [p for p, (_, readers) in found.items() if index in readers]
        before = [placement[layers[p].name] for p in producers if layers[p].name in placement]
        first = device_lib.resolve("CPU:0")
        placement[layer.name] = own.pop() if own else before[-1] if before else first
    return placement


def _check_number(layers, devices) -> None:
    if len(devices) > len(layers):
        raise ValueError(
            f"Each device needs a layer. Received: {len(devices)} devices for {len(layers)} layers "
            f"({_names(layers)}). Name fewer devices."
        )


def bytes_of(weight: keras.Variable) -> int:
    """Returns how many bytes a variable holds."""
    itemsize = 2 if weight.dtype == "bfloat16" else np.dtype(weight.dtype).itemsize
    return int(np.prod(weight.shape, dtype=np.int64)) * itemsize


def _names(layers) -> str:
    return ", ".join(layer.name for layer in layers)
