"""The builder `model_parallel`: the layers of a plain Keras model on several devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cloning.attributes import CannotCarry
from tfparallel.cloning.compiled import compile_alike
from tfparallel.cloning.copy_state import copy_state
from tfparallel.cloning.layers import copy_layers, is_its_graph, like, rebuilt
from tfparallel.cloning.storageless import NeedsStorage, StoragelessModel, move_variables
from tfparallel.cloning.verify_clone import NotAlike
from tfparallel.extend import extend, is_own
from tfparallel.layout.layout import Layout
from tfparallel.layout.mesh import Mesh
from tfparallel.placement import layer_devices
from tfparallel.placement.graph import layers_in_order
from tfparallel.placement.placed_model import PlacedLayer, PlacedModel
from tfparallel.problems import PlacementError, Problems, usable_devices

_INSTEAD = " Pass the function that builds the model instead."  # Here, it was passed already.


def model_parallel(
    model_or_function: keras.Model | Callable[[], keras.Model] | Sequence[keras.Layer],
    devices: Sequence[str] | int | None = None,
    *,
    layers_per_stage: Sequence[int] | None = None,
    device_map: Mapping[str, str] | None = None,
    balance: str = "memory",
    device_memory: int | str | None = None,
    batch_size: int = 32,
) -> keras.Model:
    """Places the layers of a functional or Sequential model on several devices.

    Use it when the model does not fit on one device. Each layer's weights, gradients and optimizer
    state, and its forward, backward and update operations, are on its device; tensors between
    layers are sent. The devices work one after the other, so this saves memory, not time. The
    resulting weights are those of one device.

    Args:
        model_or_function: A built functional or Sequential model, whose weights are copied, or a
            function that returns one. A functional model of your own class that calls
            `super().__init__(inputs, outputs)` is accepted, with or without `get_config`; one that
            only defines `call` is not. Nested models are accepted; if an inner one lacks
            `get_config`, pass the function. Or a list of stages, or a function that returns one:
            after a `keras.Input`, layers or subclassed models that each read the output of the one
            before. A model that you pass stays as it is. A model that a function builds is never
            held whole: each weight is initialized on its own device (unless the function also
            compiles the model).
        devices: Names of the devices, one per stage, such as `["GPU:0", "GPU:1"]`; or their number;
            or the result of `tfparallel.connect_to_cluster`, for stages in other processes. If
            None, without `device_map`: each layer on the device of its variables, as your
            `with tf.device(...)` blocks placed them.
        layers_per_stage: The number of consecutive layers on each device. Default: the best cut.
        device_map: The device of each layer, by name, instead of `devices` and `layers_per_stage`.
        balance: What the best cut balances. "memory": weights, gradients, two slots per weight, and
            activations held for the backward pass. "time": forward and backward seconds, measured
            layer by layer before the model is placed. "both": the larger of the two shares.
        device_memory: The memory that each device may use, such as `"16GiB"`; no limit if None.
        batch_size: The examples of a batch, to find the best cut.

    Returns:
        A `keras.Model`; `fit`, `evaluate`, `predict` and callbacks work as always, and `save`
        writes plain Keras, without devices. `print(model.layout)` shows where each layer is, and
        `placement` gives the device of each layer.

    Raises:
        ValueError: If the model is not functional or Sequential, is compiled for a step of its own
            or under a strategy, the layers do not fit the devices, a device is unknown, or no cut
            fits `device_memory` (the error says by how much the best cut exceeds it).

    Example:
        >>> model = tfparallel.model_parallel(build_model, devices=["CPU:0", "CPU:1"])
        >>> model.compile("adam", "mse")
        >>> model.fit(x, y)
    """
    device_memory = layer_devices.read_limits(device_memory, batch_size)
    best = {"balance": balance, "device_memory": device_memory, "batch_size": batch_size}
    return place(
        model_or_function,
        lambda model: in_stages(_placement(model, devices, layers_per_stage, device_map, best)),
        # The devices of variables are known only if they have storage.
        needs_storage=devices is None and device_map is None,
    )


def place(
    model_or_function: keras.Model | Callable[[], keras.Model] | Sequence[keras.Layer],
    decide: Callable[[keras.Model], Layout],
    mixin: type[PlacedModel] = PlacedModel,
    attributes: Mapping[str, Any] | None = None,
    *,
    needs_storage: bool = False,
    finish: Callable[[keras.Model], None] = lambda model: None,
    store: Callable[[StoragelessModel, Layout], None] = lambda built, layout: None,
) -> keras.Model:
    """Builds or copies a model, each layer on its device.

    Args:
        model_or_function: As for `model_parallel`.
        decide: Returns the layout of a model.
        mixin: The class that extends the model's.
        attributes: Attributes of the extended model, besides its layout.
        needs_storage: Whether `decide` needs a model with storage.
        finish: Called with the extended model, before it is compiled like the original.
        store: Called with a model without storage, to store some variables in its own way.

    Raises:
        ValueError: If the model's layers cannot be placed.
    """
    refuse_scope()
    how = (mixin, attributes or {}, finish)
    if isinstance(model_or_function, keras.Model):
        return _copy_of(model_or_function, decide, *how)
    if needs_storage:
        return _copy_of(model_of(model_or_function), decide, *how)
    try:
        built = StoragelessModel(lambda: model_of(model_or_function))
    except NeedsStorage as reason:
        model = model_of(model_or_function)
        try:
            return _copy_of(model, decide, *how)
        except (CannotCarry, NotAlike) as error:
            raise PlacementError(
                f"{str(error).removesuffix(_INSTEAD)} The function's model is cloned, because "
                f"{reason} Or give the layer a `compute_output_spec`, so that it is not called "
                "while the model is built."
            ) from error
    layers = layers_in_order(check_model(built.model))
    layout = decide(built.model)
    placement = layout.placement
    if not all(built.waits_for(variable) for layer in layers for variable in layer.variables):
        # A layer created elsewhere already has variables, on its own device.
        built.initialize_rest()
        return _copy_of(built.model, lambda _: layout, *how)
    devices = {id(v): placement[each.name] for each in reversed(layers) for v in each.variables}
    built.initialize_drawn(lambda variable: devices.get(id(variable)))
    store(built, layout)
    for layer in layers:
        built.initialize(layer.variables, placement[layer.name])
        extend(layer, PlacedLayer, _device=placement[layer.name])
    built.initialize_rest()
    model = extend(built.model, mixin, _layout=layout, **(attributes or {}))
    finish(model)
    return model


def _copy_of(model: keras.Model, decide, mixin, attributes, finish) -> keras.Model:
    layout = decide(check_model(model))
    placement = layout.placement

    def placed(layer):
        if layer.name not in placement:
            return like(layer)
        device = placement[layer.name]
        with tf.device(device):
            copy = like(layer)
        return extend(copy, PlacedLayer, _device=device)

    copy = copy_layers(model, placed) if is_its_graph(model) else _placed_copy(model, placement)
    copy_state(model, copy)
    extend(copy, mixin, _layout=layout, **attributes)
    finish(copy)
    compile_alike(model, copy)
    return copy


def _placed_copy(model, placement) -> keras.Model:
    """Copies a model by its own class, on the CPU, and then moves each layer to its device."""
    with tf.device("CPU:0"):
        copy = rebuilt(model)
    for layer in layers_in_order(copy):
        move_variables(layer.variables, placement[layer.name])
        extend(layer, PlacedLayer, _device=placement[layer.name])
    return copy


def in_stages(placement: Mapping[str, str]) -> Layout:
    """Returns the layout of layers on devices, one stage per device."""
    devices = list(dict.fromkeys(placement.values()))
    stages = {layer: devices.index(device) for layer, device in placement.items()}
    return Layout(Mesh(pipeline=len(devices)), devices, stages)


def _placement(model, devices, layers_per_stage, device_map, best):
    layers = layers_in_order(model)
    if device_map is not None:
        return _by_device_map(layers, devices, layers_per_stage, device_map)
    if devices is None:
        if layers_per_stage is not None:
            raise PlacementError(
                "`layers_per_stage` requires `devices`. Received: "
                f"layers_per_stage={list(layers_per_stage)}, devices=None."
            )
        return layer_devices.by_variables(model)
    problems = Problems()
    names, placement = usable_devices(devices, problems), None
    with problems.gathered():
        if layers_per_stage is not None:
            placement = layer_devices.by_layers_per_stage(layers, names, layers_per_stage)
        else:
            layer_devices.check_cut(layers, names, best["balance"])
    problems.raise_all()
    return layer_devices.by_balance(model, names, **best) if placement is None else placement


def _by_device_map(layers, devices, layers_per_stage, device_map):
    problems = Problems()
    with problems.gathered():
        if devices is not None or layers_per_stage is not None:
            raise PlacementError(
                "`device_map` cannot be combined with `devices` or `layers_per_stage`. Received: "
                f"devices={devices}, layers_per_stage={layers_per_stage} with a device_map. "
                "Pass `device_map` alone."
            )
    with problems.gathered():
        placement = layer_devices.by_device_map(layers, device_map)
    problems.raise_all()
    return placement


def model_of(function: Callable[[], keras.Model] | Sequence[keras.Layer]) -> keras.Model:
    """Returns the model that a function builds, or a Sequential model of a list of stages."""
    if not callable(function) and not isinstance(function, list | tuple):
        raise PlacementError(
            "A keras.Model, or a function that returns one, is required. Received: "
            f"{function!r} (of type {type(function).__name__})."
        )
    model = function() if callable(function) else function
    if isinstance(model, list | tuple):
        model = keras.Sequential(list(model))
    if not isinstance(model, keras.Model):
        raise PlacementError(
            f"{getattr(function, '__name__', 'The function')}() must return a keras.Model. "
            f"Received: {model!r} (of type {type(model).__name__}). Does it end in `return model`?"
        )
    return model


def seen_model(
    model_or_function: keras.Model | Callable[[], keras.Model] | Sequence[keras.Layer],
) -> keras.Model:
    """Returns the model for its layers only; one that a function builds has no storage.

    Raises:
        ValueError: If the model's layers cannot be placed.
        NeedsStorage: If the function cannot build it without storage.
    """
    if isinstance(model_or_function, keras.Model):
        return check_model(model_or_function)
    return check_model(StoragelessModel(lambda: model_of(model_or_function)).model)


def check_model(model: keras.Model) -> keras.Model:
    """Returns the model if its layers can be placed; otherwise raises an error."""
    kind = type(model).__name__
    if is_own(model, "train_step"):
        raise PlacementError(
            "A custom `train_step` uses a GradientTape, which would run the backward pass on one "
            "device. Keras's own `train_step` is required for placed layers. "
            f"Received: {kind}. Express the loss with `compile(loss=...)`, `add_loss` or layers."
        )
    if not isinstance(model, keras.Sequential) and not hasattr(model, "operations"):
        raise PlacementError(
            "Placing layers needs a functional or Sequential model, because the connections "
            f"between a subclassed model's layers are unknown. Received: {kind}. Build it with "
            "`keras.Model(inputs, outputs)`, or give a list of its stages, `[keras.Input(shape), "
            "first, second]`, layers or models that each have a `get_config`."
        )
    if not model.built:
        raise PlacementError(
            f"Model '{model.name}' is not built, so its layers have no sizes. An input shape is "
            "required: begin it with `keras.Input(...)`. Received: a model without variables."
        )
    if isinstance(getattr(model, "_distribute_strategy", None), tf.distribute.Strategy):
        raise PlacementError(
            "The model was built under a strategy's scope, which mirrors its variables. It must "
            f"be built outside the scope. Received: {type(model._distribute_strategy).__name__}."
        )
    return model


def refuse_scope(builder: str = "This builder") -> None:
    """Raises an error within a strategy's scope."""
    if tf.distribute.has_strategy():
        raise PlacementError(
            f"{builder} must be called outside a strategy's scope, which mirrors each variable "
            f"on all its devices. Received: {type(tf.distribute.get_strategy()).__name__} in scope."
            " Move the call, and `compile` and `fit` of its model, out of the `with` block."
        )
