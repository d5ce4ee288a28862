"""Finds the random layers of a model, and the first layer that differs in parallel."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.diagnostics.compare import distance_between, is_float
from tfparallel.seams.functional import Functional, run_through
from tfparallel.seams.keras import layers_in, takes_training

Build = Callable[[], keras.Model]
# The attributes that hold the rates of Keras's random layers.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout", "_dropout", "drop_rate")


def random_layers(model: keras.Model) -> list[str]:
    """Returns the names of the layers that draw random numbers in training."""
    return [layer.name for layer in layers_in(model, include_self=False) if _draws(layer)]


def turn_off_draws(model: keras.Model) -> keras.Model:
    """Makes the random layers of a model inactive, in place.

    Known rates are set to 0. A layer without a rate that takes `training` always receives
    `training=False`. A layer with neither stays random.
    """
    for layer in layers_in(model, include_self=False):
        if not _draws(layer):
            continue
        rates = _rates_of(layer)
        for name in rates:
            setattr(layer, name, 0.0)
        if not rates and takes_training(layer):
            layer.call = _without_training(layer.call)
    return model


def first_difference(
    build: Build,
    make_parallel_model: Callable[[Build], keras.Model],
    batch: tuple[Any, ...],
    tolerance: float,
) -> str | None:
    """Finds the first layer whose output differs in parallel.

    Args:
        build: Returns the model with its initial weights and random layers off.
        make_parallel_model: Makes it parallel.
        batch: `(x, y[, sample_weight])` in NumPy arrays.
        tolerance: The largest relative difference that counts as rounding.

    Returns:
        The layer's name and the difference; None if all outputs agree.
    """
    names: list[str] = []

    def build_probe() -> keras.Model:
        names[:], probe = _with_all_outputs(build())
        return probe

    if not getattr(build(), "inputs", None):
        return None
    expected = build_probe().predict_on_batch(batch[0])
    single_names = list(names)
    received = make_parallel_model(build_probe).predict_on_batch(batch[0])
    outputs = map(keras.tree.flatten, (expected, received))
    pairs = zip(single_names, *outputs, strict=True)
    for name, alone, parallel in pairs:
        alone, parallel = np.asarray(alone), np.asarray(parallel)
        distance = distance_between(alone, parallel)
        if not distance.is_within(tolerance if is_float(alone) or np.iscomplexobj(alone) else 0.0):
            return (
                f"layer {name!r}: its output differs by {distance.absolute:.1e} on the first batch"
            )
    return None


def _with_all_outputs(model: keras.Model) -> tuple[list[str], keras.Model]:
    """Builds a model of the same layers that outputs every layer's result; returns its layer names.

    It calls all layers again one by one, including those of nested models, named `"inner/dense"`:
    the existing tensors inside a nested model depend on its own inputs, not on the outer model's.
    """
    names: list[str] = []
    outputs: list[keras.KerasTensor] = []
    holders: dict[str, keras.layers.Layer] = {}

    def call_model(model, prefix, inputs):
        if isinstance(model, keras.Sequential):
            for layer in model.layers:
                inputs = call_layer(layer, prefix, inputs)
            return inputs
        return run_through(model, inputs, lambda layer, *a, **k: call_layer(layer, prefix, *a, **k))

    def call_layer(layer, prefix, *args, **kwargs):
        if isinstance(layer, Functional | keras.Sequential):
            return call_model(layer, f"{prefix}{layer.name}/", args[0])
        name = f"{prefix}{layer.name}"
        if holders.setdefault(layer.name, layer) is not layer:
            # Layers of two nested models may share a name; layers of one model may not.
            layer.name = name.replace("/", "_")
        result = layer(*args, **kwargs)
        if isinstance(layer, keras.layers.Layer):
            layer_outputs = tf.nest.flatten(result)
            names.extend([name] * len(layer_outputs))
            outputs.extend(layer_outputs)
        return result

    call_model(model, "", model.inputs[0] if isinstance(model, keras.Sequential) else model.input)
    return names, keras.Model(model.inputs, outputs)


def _draws(layer: keras.Layer) -> bool:
    """Whether a layer itself, not a sublayer, draws random numbers in training."""
    if not any(isinstance(v, keras.random.SeedGenerator) for v in vars(layer).values()):
        return False
    rates = _rates_of(layer).values()
    return not rates or any(rate > 0 for rate in rates)


def _rates_of(layer: keras.Layer) -> dict[str, float]:
    values = {name: getattr(layer, name, None) for name in _RATES}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _without_training(call: Callable[..., Any]) -> Callable[..., Any]:
    def inactive(*args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        return call(*args, training=False, **kwargs)

    return inactive
