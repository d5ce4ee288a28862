"""The variables that a step reads and that Keras does not track.

It tracks its own variables in layers, metrics and optimizers. It does not track those of losses and
of schedules, nor a `tf.Variable` in a layer.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cloning.attributes import read_by
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.keras import layers_in
from tfparallel.seams.optimizers import rate_of
from tfparallel.update.built_optimizers import optimizers_of, with_wrapped

_LIBRARIES = {"builtins", "keras", "numpy", "tensorflow", "tfparallel"}

Variable = keras.Variable | tf.Variable


def untracked_variables(model: keras.Model) -> list[tuple[str, Variable]]:
    """Returns variables that Keras does not track, each with a name, always in the same order.

    Of layers and optimizers, these are each `tf.Variable` in an attribute, also in lists and
    dictionaries, and the variables that a schedule of the learning rate reads.

    The losses are those of `compile`, also in lists and dictionaries, and objects of
    `keras.losses.Loss` in the model's own attributes. Of a loss, these are the variables in its
    attributes, in what its functions close over or are bound to, or read of their module, and those
    of layers in it, unless frozen.

    Args:
        model: The model. Its own variables are among the results if a loss reads them.
    """
    roots = [("loss", (compile_arguments(model) or {}).get("loss"))]
    for name, value in vars(model).items():
        values = value.values() if isinstance(value, dict) else value
        elements = values if isinstance(value, list | tuple | dict) else [value]
        losses = [each for each in elements if isinstance(each, keras.losses.Loss)]
        if losses and not name.startswith("_"):
            roots.append((name, losses))
    for layer in layers_in(model):
        roots.append((layer.name, _of_tensorflow(layer)))
    optimizers = [each for whole in optimizers_of(model) for each in with_wrapped(whole)]
    for optimizer in optimizers:
        roots.append((optimizer.name, _of_tensorflow(optimizer)))
        if isinstance(rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule):
            roots.append((f"{optimizer.name}/learning_rate", rate_of(optimizer)))
    by_id: dict[int, tuple[str, Variable]] = {}
    waiting, seen = roots[::-1], {}
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Variable):
            by_id.setdefault(id(value), (name, value))
        elif isinstance(value, keras.Layer | keras.Metric | tf.Module):
            if getattr(value, "trainable", True):
                waiting += reversed([(f"{name}/{_name_of(v)}", v) for v in value.variables])
        elif id(value) not in seen:
            seen[id(value)] = value  # Kept, so that no other object gets its id.
            children = [(f"{name}/{key}", each) for key, each in _read_by(value)]
            waiting += reversed(children)
    return list(by_id.values())


def _of_tensorflow(owner: keras.Layer | keras.Optimizer) -> dict[str, Any]:
    """Returns the attributes that hold a `tf.Variable`, directly or in a list or dictionary."""
    attributes = {}
    for name, value in vars(owner).items():
        elements = list(value.values()) if isinstance(value, dict) else value
        elements = elements if isinstance(elements, list | tuple) else [value]
        variables = [each for each in elements if isinstance(each, tf.Variable)]
        if variables and not name.startswith("_self_"):  # TensorFlow's own bookkeeping.
            attributes[name] = variables
    return attributes


def _name_of(variable: Variable) -> str:
    return getattr(variable, "path", variable.name)


def _read_by(value) -> Iterator[tuple[Any, Any]]:
    """Yields what a loss, or something that it reads, reads in turn."""
    value = getattr(value, "python_function", value)  # Of a `tf.function`.
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, functools.partial):
        yield from enumerate((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield from enumerate((value.__func__, value.__self__))
    elif isinstance(value, types.FunctionType):
        if not _is_of_library(value):
            yield from enumerate(read_by(value))
    elif isinstance(value, keras.losses.Loss | keras.random.SeedGenerator) or not (
        isinstance(value, type | types.ModuleType) or _is_of_library(type(value))
    ):
        yield from getattr(value, "__dict__", {}).items()
        for each in type(value).__mro__:
            if not _is_of_library(each):
                yield from (pair for pair in vars(each).items() if callable(pair[1]))


def _is_of_library(function_or_class) -> bool:
    return (function_or_class.__module__ or "").partition(".")[0] in _LIBRARIES
