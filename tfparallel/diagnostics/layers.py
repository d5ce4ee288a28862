"""What a check must know of a model's layers: which draw, and which differ first."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.diagnostics.compare import difference
from tfparallel.seams.functional import Functional, run_through
from tfparallel.seams.keras import layers_in, takes_training

__all__ = ["all_layers", "first_difference", "random_layers", "turn_off_draws"]

Build = Callable[[], keras.Model]
# The attributes that say how strongly Keras's random layers draw.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout", "_dropout", "drop_rate")


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns every layer in the model, nested ones included, in order of creation."""
    # Keras has no public way to reach a layer that another layer holds.
    return layers_in(model, include_self=False)


def random_layers(model: keras.Model) -> list[str]:
    """Returns the names of the layers that draw random numbers in training."""
    return [layer.name for layer in all_layers(model) if _draws(layer)]


def turn_off_draws(model: keras.Model) -> keras.Model:
    """Makes the random layers of a model inactive, in place.

    Known rates are set to 0. A layer without one that takes `training` is
    always called with `training=False`. A layer with neither keeps drawing.

    Returns:
        The same model.
    """
    for layer in all_layers(model):
        if not _draws(layer):
            continue
        rates = [name for name in _RATES if _is_rate(getattr(layer, name, None))]
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
    """Names the first layer that does something else in parallel.

    Args:
        build: Returns the model with the initial weights, draws off.
        make_parallel_model: Makes it parallel.
        batch: `(x, y[, sample_weight])` in NumPy arrays.
        tolerance: The largest relative difference that is rounding.

    Returns:
        The layer's name and what differs, or None if the layers' outputs do
        not tell the two apart.
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
    pairs = zip(single_names, _as_list(expected), _as_list(received), strict=True)
    for name, one, other in pairs:
        found = difference(np.asarray(one), np.asarray(other), tolerance)
        if not found.within:
            return f"layer {name!r}: its output differs by {found.absolute:.1e} on the first batch"
    return None


def _with_all_outputs(model: keras.Model) -> tuple[list[str], keras.Model]:
    """A model on the same layers that puts out what each of them does, with the layers' names.

    All layers are called again, one by one, those of models within the model too: what such a
    model computes inside of itself hangs on inputs of its own, and on none of the outer model's.

    Args:
        model: A functional or Sequential model.

    Returns:
        The names, `"inner/dense"` for a layer of a model within, and the model.
    """
    names: list[str] = []
    outputs: list[keras.KerasTensor] = []
    holders: dict[str, keras.layers.Layer] = {}

    def call_model(model, prefix, inputs):
        if isinstance(model, keras.Sequential):
            for layer in model.layers:
                inputs = call_layer(layer, prefix, inputs)
            return inputs
        return run_through(
            model, inputs, lambda layer, *a, **k: call_layer(layer, prefix, *a, **k)
        )

    def call_layer(layer, prefix, *args, **kwargs):
        if isinstance(layer, Functional | keras.Sequential):
            return call_model(layer, f"{prefix}{layer.name}/", args[0])
        name = f"{prefix}{layer.name}"
        if holders.setdefault(layer.name, layer) is not layer:
            # Two models within may name their layers alike; one model may not.
            layer.name = name.replace("/", "_")
        result = layer(*args, **kwargs)
        if isinstance(layer, keras.layers.Layer):
            found = tf.nest.flatten(result)
            names.extend([name] * len(found))
            outputs.extend(found)
        return result

    call_model(model, "", model.inputs[0] if isinstance(model, keras.Sequential) else model.input)
    return names, keras.Model(model.inputs, outputs)


def _draws(layer: keras.Layer) -> bool:
    """Whether a layer itself, not one that it holds, draws random numbers in training."""
    if not any(isinstance(v, keras.random.SeedGenerator) for v in vars(layer).values()):
        return False
    rates = [getattr(layer, name) for name in _RATES if _is_rate(getattr(layer, name, None))]
    return not rates or any(rate > 0 for rate in rates)


def _is_rate(value: Any) -> bool:
    """Whether an attribute of one of these names is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_training(call: Callable[..., Any]) -> Callable[..., Any]:
    def inactive(*args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        return call(*args, training=False, **kwargs)

    return inactive


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
