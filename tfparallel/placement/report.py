"""A table of a model's placement, and an audit of the step's graph, operation by operation."""

import collections
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfparallel.device_memory import peak_bytes_of_gpus
from tfparallel.placement.graph import edges, layers_in_order
from tfparallel.placement.layer_costs import bytes_of
from tfparallel.placement.processes import peak_memory_bytes
from tfparallel.seams.optimizers import weights_of
from tfparallel.texts import aligned, size_text
from tfparallel.tracing.audit import Noted, recording, short


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """A layer's row.

    Attributes:
        layer: Its name.
        device: Its device.
        parameter_bytes: The size of its variables.
        slot_bytes: The size of the optimizer's slots for them.
        activation_bytes: The size of its outputs that other layers read, for one example.
    """

    layer: str
    device: str
    parameter_bytes: int
    slot_bytes: int
    activation_bytes: int


@dataclasses.dataclass(frozen=True)
class PlacementReport:
    """The placement of a model.

    Attributes:
        layers: One row per layer, producers before consumers.
        num_audited: The number of operations checked, by kind; empty without `data`.
        elsewhere: Variables, slots and operations that are not on their layer's device.
    """

    layers: list[LayerPlacement]
    num_audited: dict[str, int]
    elsewhere: list[Noted]

    def __str__(self):
        rows = [("layer", "device", "parameters", "slots", "outputs per example"), *(
            (r.layer, r.device, size_text(r.parameter_bytes), size_text(r.slot_bytes),
             size_text(r.activation_bytes))
            for r in self.layers
        )]  # fmt: skip
        totals: dict[str, list[int]] = {}
        for r in self.layers:
            total = totals.setdefault(r.device, [0, 0, 0])
            for i, n in enumerate((r.parameter_bytes, r.slot_bytes, r.activation_bytes)):
                total[i] += n
        rows += [("all", device, *map(size_text, total)) for device, total in totals.items()]
        lines = aligned(rows)
        wrong = collections.Counter(noted.kind for noted in self.elsewhere)
        lines += [
            f"{kind}: {number - wrong[kind]} of {number} on their device"
            for kind, number in self.num_audited.items()
        ]
        lines += [
            f"  {n.owner}: {n.operation} is on {n.actual or 'the default device'}, not {n.expected}"
            for n in self.elsewhere
        ]
        return "\n".join(lines)


def placement_report(
    model: keras.Model, data: Any = None, *, strict: bool = False
) -> PlacementReport:
    """Reports where a placed model's layers are, and audits whether all of each layer is there.

    Args:
        model: A model from `model_parallel`.
        data: A batch `(x, y[, sample_weight])`, which is not trained on. With it, and a compiled
            model, the step is traced, and each operation that belongs to a layer is checked.
            Operations inside a branch or a loop are placed with it.
        strict: Whether to raise an error if anything is elsewhere.

    Returns:
        The report: `layers` with one row each, `elsewhere` with everything that is not on its
        layer's device. `print` shows both.

    Raises:
        ValueError: If the model has no placement, or, with `strict`, if something is elsewhere.

    Example:
        >>> model = tfparallel.model_parallel(build_model, devices=["GPU:0", "GPU:1"])
        >>> model.compile("adam", "mse")
        >>> report = tfparallel.placement_report(model, (x[:8], y[:8]))
        >>> report.elsewhere
        []
    """
    placement = getattr(model, "placement", None)
    if not placement:
        raise ValueError(
            "A model that `tfparallel.model_parallel` returned is required. Received: "
            f"{type(model).__name__} '{model.name}', whose layers have no devices."
        )
    slots, elsewhere, num_audited = {}, [], {"variables": 0, "slots": 0}
    owners = {id(v): layer.name for layer in layers_in_order(model) for v in layer.variables}
    for layer in layers_in_order(model):
        for variable in layer.variables:
            num_audited["variables"] += 1
            _check_device(elsewhere, "variables", layer.name, variable, placement[layer.name])
    for variable, slot in _slots(model):
        name = owners[id(variable)]
        slots[name] = slots.get(name, 0) + bytes_of(slot)
        num_audited["slots"] += 1
        _check_device(elsewhere, "slots", name, slot, placement[name])
    if data is not None:
        for noted in _trace(model, data):
            num_audited[noted.kind] = num_audited.get(noted.kind, 0) + 1
            if noted.actual != noted.expected:
                elsewhere.append(noted)
    sent = edges(model)
    rows = [
        LayerPlacement(
            layer.name,
            placement[layer.name],
            sum(map(bytes_of, layer.variables)),
            slots.get(layer.name, 0),
            sent.get(index, (0, []))[0],
        )
        for index, layer in enumerate(layers_in_order(model))
    ]
    report = PlacementReport(rows, num_audited, elsewhere)
    if strict and elsewhere:
        raise ValueError(f"A layer must be entirely on its device. Received:\n{report}")
    return report


def held_by_device(model: keras.Model) -> list[dict[str, Any]]:
    """Returns what each device of a placed model holds, as JSON.

    Returns:
        By device: its `device`, the `layers`, their `parameter_bytes` and `slot_bytes`;
        `peak_memory_bytes`, the peak host memory of its process so far (absent if the system does
        not provide it); and, for a GPU of this process, `peak_tensor_bytes`, the peak memory of
        tensors on it.
    """
    devices = {
        device: {"device": device, "layers": [], "parameter_bytes": 0, "slot_bytes": 0}
        for device in model.devices
    }
    for row in placement_report(model).layers:
        content = devices[row.device]
        content["layers"].append(row.layer)
        content["parameter_bytes"] += row.parameter_bytes
        content["slot_bytes"] += row.slot_bytes
    for device, content in devices.items():
        if (peak := peak_memory_bytes(device)) is not None:
            content["peak_memory_bytes"] = peak
    for device, peak in peak_bytes_of_gpus(list(devices)).items():
        devices[device]["peak_tensor_bytes"] = peak
    return list(devices.values())


def _check_device(elsewhere, kind, owner, variable, expected):
    device = short(variable.value.device)
    if device != expected:
        elsewhere.append(Noted(kind, owner, variable.path, expected, device))


def _slots(model: keras.Model):
    """Yields pairs of a trainable variable and its slot, which has the same shape."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for part in getattr(optimizer, "optimizers", [optimizer] if optimizer is not None else []):
        trainable = weights_of(part)
        for slot in part.variables:
            for variable in trainable:
                # Keras names a slot after its variable: "adam/dense_kernel_momentum".
                if variable.path.replace("/", "_") in slot.path and slot.shape == variable.shape:
                    yield variable, slot
                    break


def _trace(model, data) -> list[Noted]:
    if not model.compiled:
        raise ValueError(
            "The step of a model that is not compiled cannot be traced. Call `compile` before "
            "`placement_report(model, data)`. Received: a model without optimizer and loss."
        )
    spec = tf.nest.map_structure(
        lambda array: tf.TensorSpec([None, *tf.convert_to_tensor(array).shape[1:]],
                                    tf.convert_to_tensor(array).dtype),
        tuple(data),
    )  # fmt: skip
    # The first trace creates the metrics' variables; Keras also does this before its first step.
    model._symbolic_build(data_batch=tuple(data))
    model._build_optimizer()
    with recording() as trace:
        tf.function(model.train_step).get_concrete_function(spec)
        return trace.operations()
