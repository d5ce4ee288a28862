"""Compares a model with its copy: flags, config, and outputs for one batch."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.cloning.attributes import same
from tfparallel.seams.functional import calls_of, functional_of
from tfparallel.seams.keras import shapes_of_build, takes_training

# Attributes of a variable that the user can set.
OF_A_VARIABLE = ("trainable", "constraint", "regularizer", "overwrite_with_gradient")
_ROWS = 2
# For an axis of unknown length. A depthwise convolution over fewer points than its filter returns
# uninitialized memory (docs/upstream.md), and a sequence may be limited to few points.
_LENGTHS = (32, 8)
# Equal operations on equal values; only a split model sums in another order. Relative to the
# largest output.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_SHOWN, _LONGEST = 3, 80  # Reported differences, and characters per value.


class NotAlike(ValueError):
    """Raised if a copy of a model differs from it."""


def differences(
    model: keras.Model,
    copy: keras.Model,
    layers: Sequence[tuple[keras.Layer, keras.Layer]],
    variables: Sequence[tuple[keras.Variable, keras.Variable]],
) -> list[str]:
    """Returns the differences between a model and its copy as text; empty if there are none.

    Layers and variables are pairs, of the model and of its copy.
    """
    problems = [
        f"`trainable` of layer '{source.path or source.name}' is {source.trainable}, but in its "
        f"clone {target.trainable}"
        for source, target in layers
        if source.trainable != target.trainable
    ]
    problems += [
        f"`{name}` of variable '{source.path}' is {getattr(source, name)!r}, but in its clone "
        f"{getattr(target, name)!r}"
        for source, target in variables
        for name in OF_A_VARIABLE
        if not same(getattr(source, name, None), getattr(target, name, None))
    ]
    copies = {id(source): id(target) for source, target in variables}
    trained = [copies.get(id(variable)) for variable in model.trainable_variables]
    if trained != [id(variable) for variable in copy.trainable_variables] and not problems:
        problems.append("it trains different variables than its clone, or in a different order")
    for source, target in layers[1:]:
        problems += _in_config(source, target)
    return (problems or _in_outputs(model, copy))[:_SHOWN]


def _in_config(source, target) -> list[str]:
    if isinstance(source, keras.Model):  # Its layers are compared one by one.
        return []
    try:
        config, copied = source.get_config(), target.get_config()
    except NotImplementedError:  # An outer layer creates it, and has the config.
        return []
    return [
        f"`{key}` of layer '{source.path or source.name}' is {_short(config[key])}, but in its "
        f"clone {_short(copied.get(key))}"
        for key in config
        if not _same_config(config[key], copied.get(key))
    ]


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _same_config(value, other) -> bool:
    if isinstance(value, dict):
        # The serialized code of a function differs each time.
        if value.get("class_name") in ("__lambda__", "function"):
            return True
        return isinstance(other, dict) and all(
            _same_config(each, other.get(key))
            for key, each in value.items()
            # Registered names of extended classes, and build shapes.
            if key not in ("build_config", "module", "registered_name")
        )
    if isinstance(value, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(value) == len(other)
            and all(map(_same_config, value, other))
        )
    # Objects that no file holds (a layer, a user's object) are not compared here.
    is_value = isinstance(value, str | int | float | bool | None | np.generic | np.ndarray)
    return not is_value or same(value, other)


def _in_outputs(model, copy) -> list[str]:
    for batch in _batches(model):
        try:
            expected = _outputs(model, batch)
        except Exception:  # A user's own model may not accept these rows.
            continue
        if expected is None:
            return []
        try:
            outputs = _outputs(copy, batch)
        except Exception as error:
            return [f"its clone fails on a batch: '{error}'"]
        difference = _apart(expected, outputs)
        if difference and not _apart(expected, _outputs(model, batch)):
            return [
                f"{_first_layer(model, copy, batch)}; the largest difference is {difference:.1e}"
            ]
        return []
    return []


def _batches(model) -> Iterator[Any]:
    """Yields batches that the model may accept, the likeliest first."""
    try:
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    except (AttributeError, ValueError, IndexError):
        shape = shapes_of_build(model)
        is_one = len(shape) == 1 and all(
            isinstance(s, tuple) and all(isinstance(n, int | None) for n in s)
            for s in shape.values()
        )
        if not is_one:
            return
        inputs = keras.KerasTensor(next(iter(shape.values())), model.compute_dtype)
    flat = keras.tree.flatten(inputs)
    if any(getattr(t, "sparse", False) or getattr(t, "ragged", False) for t in flat):
        return
    unknown = any(None in tensor.shape[1:] for tensor in flat)
    for length, zeros in itertools.product(_LENGTHS if unknown else _LENGTHS[:1], (False, True)):
        yield keras.tree.map_structure(lambda t, n=length, z=zeros: _rows(t, n, z), inputs)


def _rows(tensor, length, zeros):
    shape = [tensor.shape[0] or _ROWS, *(n or length for n in tensor.shape[1:])]
    size = int(np.prod(shape))
    if tensor.dtype == "string":
        return tf.reshape(tf.constant([str(i % 2) for i in range(size)]), shape)
    if "float" in tensor.dtype and not zeros:
        values = np.random.default_rng(0).normal(size=shape)
    else:
        values = np.zeros(shape) if zeros else np.reshape(np.arange(size) % 2, shape)
    return tf.cast(tf.constant(values), tensor.dtype)


def _outputs(model, batch) -> list[np.ndarray] | None:
    """The outputs of a model in inference; None if some are no tensors. Drops its writes."""
    with keras.StatelessScope(), _functions_in_python():
        outputs = model(batch, training=False) if takes_training(model) else model(batch)
    flat = [getattr(o, "whole", lambda o=o: o)() for o in keras.tree.flatten(outputs)]
    if not all(isinstance(tensor, tf.Tensor) for tensor in flat):
        return None
    return [tensor.numpy() for tensor in flat]


@contextlib.contextmanager
def _functions_in_python() -> Iterator[None]:
    """Runs each `tf.function` eagerly, so it caches no trace of a call whose writes are dropped."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _apart(expected, outputs) -> float:
    """The largest difference beyond rounding, relative to the largest value; 0 if there is none."""
    largest = 0.0
    for value, other in zip(expected, outputs, strict=True):
        if value.shape != other.shape or value.dtype != other.dtype:
            return float("inf")
        if value.dtype.kind not in "fcV":
            largest = max(largest, 0.0 if np.array_equal(value, other) else 1.0)
            continue
        tolerance = _TOLERANCE.get(value.dtype.name, 1e-4)
        value, other = value.astype("complex128"), other.astype("complex128")
        distance = np.abs(np.where((value == other) | (np.isnan(value) & np.isnan(other)), 0,
                                   value - other))  # fmt: skip
        scale = np.max(np.abs(value[np.isfinite(value)]), initial=1e-6)
        difference = float(np.max(distance, initial=0.0) / scale)
        largest = max(largest, difference if not difference <= tolerance else 0.0)
    return largest


def _first_layer(model, copy, batch) -> str:
    """Names the first layer of a model's graph whose outputs differ."""
    calls_by_model = []
    for each in (model, copy):
        calls = [node for node in calls_of(each) if not node.is_input]
        calls_by_model.append([(node.operation.name, node.outputs) for node in calls])
    if calls_by_model[0]:
        inner = [
            keras.Model(functional_of(each).inputs, [o for _, o in calls])
            for each, calls in zip((model, copy), calls_by_model, strict=True)
        ]
        flat = keras.tree.flatten(batch)
        for (name, _), value, other in zip(
            calls_by_model[0], *(_by_call(each, flat) for each in inner), strict=True
        ):
            if _apart(value, other):
                return f"layer '{name}' and its clone compute different outputs"
    return "it and its clone compute different outputs"


def _by_call(model, batch) -> list[list[np.ndarray]]:
    with keras.StatelessScope(), _functions_in_python():
        outputs = model(batch, training=False)
    return [[t.numpy() for t in keras.tree.flatten(each)] for each in outputs]
