"""Assigns layers to devices."""

import numbers
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.layout.balance import NoPartition
from tfparallel.placement.graph import edges, layers_in_order
from tfparallel.placement.layer_costs import model_costs
from tfparallel.placement.layer_timing import NoCopy
from tfparallel.problems import PlacementError, Problems
from tfparallel.texts import number_of_bytes
from tfparallel.user_log import notice

__all__ = [
    "BALANCES",
    "PlacementError",
    "by_balance",
    "by_device_map",
    "by_layers_per_stage",
    "by_variables",
    "check_balance",
    "check_cut",
]

BALANCES = ("memory", "time", "both")


def by_layers_per_stage(
    layers: Sequence[keras.Layer], devices: Sequence[str], layers_per_stage: Sequence[int]
) -> dict[str, str]:
    """Assigns consecutive layers to each device, in the given numbers.

    Raises:
        ValueError: If the numbers do not fit the layers or the devices.
    """
    counts = list(layers_per_stage)
    if (
        len(counts) != len(devices)
        or sum(counts) != len(layers)
        or any(not isinstance(n, int) or n < 1 for n in counts)
    ):
        raise PlacementError(
            f"`layers_per_stage` must give each of the {len(devices)} devices at least one layer, "
            f"and place all {len(layers)} layers: {_names(layers)}. Received: {counts}, a total "
            f"of {sum(counts)} on {len(counts)} devices."
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
    """Assigns layers by a dictionary.

    Raises:
        ValueError: If it lacks a layer, or names an unknown layer or device.
    """
    names = [layer.name for layer in layers]
    problems = Problems()
    with problems.gathered():
        _check_names(names, device_map)
    if device_map:
        with problems.gathered():
            device_lib.check_devices(list(dict.fromkeys(device_map.values())))
    problems.raise_all()
    return {name: device_lib.resolve(device_map[name]) for name in names}


def by_balance(
    model: keras.Model,
    devices: Sequence[str],
    *,
    batch_size: int,
    balance: str = "memory",
    device_memory: int | None = None,
    all_gradients: bool = False,
) -> dict[str, str]:
    """Cuts the model into stages so that the largest stage is as small as possible.

    Args:
        model: A functional or Sequential model, with or without storage.
        devices: The devices, one per stage.
        batch_size: The examples of a batch.
        balance: "memory", "time", or "both" by their shares of the total.
        device_memory: The bytes that a device may hold; None for no limit.
        all_gradients: Whether all gradients are held at once.

    Raises:
        ValueError: If there are more devices than layers, or no cut fits `device_memory`.
    """
    layers = layers_in_order(model)
    check_cut(layers, devices, balance)
    if len(devices) == 1 and device_memory is None:  # Nothing to cut, so nothing to measure.
        return dict.fromkeys([layer.name for layer in layers], devices[0])
    try:
        try:
            costs = model_costs(model, [batch_size], measures=balance != "memory")
        except NoCopy as error:  # The cut changes no results.
            notice(f"Model '{model.name}' is cut with balance='memory', not {balance!r}. {error}")
            balance = "memory"
            costs = model_costs(model, [batch_size], measures=False)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise PlacementError(
            f"The best cut needs the costs of a batch, on which the model failed: {error}\n"
            "The model must accept the batch. Received: synthetic examples, "
            f"batch_size={batch_size}. Pass the `batch_size` that you train with, or choose the "
            "cut with `layers_per_stage`."
        ) from error
    try:
        counts = costs.cut(
            len(devices), batch_size, balance, device_memory, all_gradients=all_gradients
        )
    except NoPartition as error:
        raise PlacementError(
            f"No cut into {len(devices)} stages keeps each within `device_memory`. Received: "
            f"device_memory={device_memory}; the best cut has a stage of {error.smallest:.0f} "
            f"bytes, {error.smallest - device_memory:.0f} more. Use more devices, a smaller "
            "batch, or an optimizer with less state."
        ) from error
    return by_layers_per_stage(layers, devices, counts)


def read_limits(device_memory: int | str | None, batch_size: int) -> int | None:
    """Parses `device_memory` into bytes, and checks `batch_size`.

    Raises:
        ValueError: If one of them is invalid.
    """
    is_count = isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool)
    if not is_count or batch_size < 1:
        raise PlacementError(
            "`batch_size` must be the number of examples in a batch, at least 1. Received: "
            f"batch_size={batch_size!r}. Pass the one that you train with, such as 32."
        )
    return number_of_bytes("device_memory", device_memory)


def check_cut(layers: Sequence[keras.Layer], devices: Sequence[str], balance: str) -> None:
    """Checks the arguments of the best cut.

    Raises:
        ValueError: If there are more devices than layers, or `balance` is unknown; lists both.
    """
    problems = Problems()
    with problems.gathered():
        _check_number(layers, devices)
    with problems.gathered():
        check_balance(balance)
    problems.raise_all()


def check_balance(balance: str) -> None:
    """Checks `balance`.

    Raises:
        ValueError: If it is not one of `BALANCES`.
    """
    if balance not in BALANCES:
        raise PlacementError(
            f"`balance` must be one of {', '.join(BALANCES)}. Received: balance={balance!r}."
        )


def by_variables(model: keras.Model) -> dict[str, str]:
    """Reads the devices of variables, which the user's `with tf.device(...)` set.

    A layer without variables is placed on the device of its input.

    Raises:
        ValueError: If the variables of one layer are on several devices.
    """
    layers, sent = layers_in_order(model), edges(model)
    placement: dict[str, str] = {}
    for index, layer in enumerate(layers):
        devices = {device_lib.resolve(v.value.device) for v in layer.variables if v.value.device}
        if len(devices) > 1:
            raise PlacementError(
                "A layer's variables must be on one device. Received: layer "
                f"'{layer.name}' with variables on {', '.join(sorted(devices))}. Build the layer "
                "in one `with tf.device(...)` block."
            )
        producers = [p for p, (_, readers) in sent.items() if index in readers]
        before = [placement[layers[p].name] for p in producers if layers[p].name in placement]
        first = device_lib.resolve("CPU:0")
        placement[layer.name] = devices.pop() if devices else before[-1] if before else first
    return placement


def _check_names(names, device_map) -> None:
    missing = [name for name in names if name not in device_map]
    unknown = [name for name in device_map if name not in names]
    if missing or unknown:
        problems = [f"without a device: {', '.join(missing)}"] * bool(missing)
        problems += [f"no such layer: {', '.join(unknown)}"] * bool(unknown)
        raise PlacementError(
            "`device_map` must name a device for each layer of the model, and no other. Received: "
            f"{'; '.join(problems)}. The layers are {', '.join(names)}."
        )


def _check_number(layers, devices) -> None:
    if len(devices) > len(layers):
        raise PlacementError(
            f"Each device needs a layer. Received: {len(devices)} devices for {len(layers)} layers "
            f"({_names(layers)}). Pass fewer devices."
        )


def _names(layers) -> str:
    return ", ".join(layer.name for layer in layers)
