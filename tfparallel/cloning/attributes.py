"""The attributes of a layer that are neither variables nor config: numbers, functions, tensors.

Such as a rate that was set after the layer was built, `lora_alpha`, an activation that was
replaced, the mean of an adapted `Normalization`, and anything that a user's own layer stores and
its `get_config` omits.
"""

import copy as copy_lib
import dataclasses
import dis
import enum
import functools
import inspect
import itertools
import re
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.extend import extended_attributes, original_class
from tfparallel.seams.keras import unlocked

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, re.Pattern,
    np.generic, np.ndarray, tf.DType, tf.TensorShape,
)  # fmt: skip
_BY_CONFIG = (
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.losses.Loss,
    keras.DTypePolicy,
)
# Attributes of any layer that the user may set; the rest of a bare layer is Keras's bookkeeping.
_SET_BY_USERS = {"_supports_masking", "activity_regularizer", "autocast", "_remat_mode"}
_ABSENT = object()
_MOST_OBJECTS = 10_000


class CannotCarry(ValueError):
    """Raised if an attribute cannot be copied; the message names it and its value."""


def carry_attributes(source: Any, target: Any) -> None:
    """Copies a layer's attributes to its copy, where they differ.

    Functions, regularizers, constraints, losses and tensors are shared, since they have no state.
    Records are copied. Objects that Keras tracks (variables, layers, metrics) are skipped.

    Raises:
        CannotCarry: If a value is tied to the source, such as a bound method.
    """
    skipped = _bookkeeping() | extended_attributes(source)
    for name, value in list(vars(source).items()):
        if name in skipped:
            continue
        copy = vars(target).get(name, _ABSENT)
        if copy is value:
            continue
        if isinstance(value, keras.random.SeedGenerator) and copy in (_ABSENT, None):
            # A dropout layer whose rate was set to zero still has its generator.
            with unlocked(target):
                setattr(target, name, keras.random.SeedGenerator(0, name=value.name))
        elif isinstance(value, tf.Variable):
            _assign(name, value, copy)
        elif _is_value(value) and not same(value, copy):
            if callable(value) and _is_method(original_class(source), name):
                raise CannotCarry(
                    f"its method `{name}` was replaced by {value!r}, which uses the original layer"
                )
            if holds_layer(value):
                raise CannotCarry(f"`{name}` is {value!r}, which belongs to the original layer")
            setattr(target, name, copy_lib.deepcopy(value) if _is_record(value) else value)


def same(value: Any, other: Any) -> bool:
    """Whether two values of an attribute are equivalent, as far as can be seen."""
    if value is other:
        return True
    if tf.is_tensor(value) or isinstance(value, np.ndarray | np.generic):
        return _same_arrays(value, other)
    if isinstance(value, list | tuple | set | frozenset | dict):
        return _same_containers(value, other)
    if isinstance(value, _BY_CONFIG) or _is_record(value):
        # A config may omit constructor arguments; Keras's default config is empty.
        return type(value) is type(other) and all(
            _same_containers(each(value), each(other)) for each in (_config_of, _values_in)
        )
    if isinstance(value, functools.partial):
        parts = ("func", "args", "keywords")
        return isinstance(other, functools.partial) and all(
            same(getattr(value, part), getattr(other, part)) for part in parts
        )
    if isinstance(value, types.MethodType):
        return (
            isinstance(other, types.MethodType)
            and value.__func__ is other.__func__
            and (isinstance(value.__self__, keras.Layer) or _same_holder(value, other))
        )
    if isinstance(value, types.FunctionType):
        return isinstance(other, types.FunctionType) and _same_functions(value, other)
    try:
        return bool(value == other)
    except (TypeError, ValueError):
        return False


def _same_holder(method, other) -> bool:
    """Whether the objects that two methods are bound to have the same values."""
    one, another = method.__self__, other.__self__
    return type(one) is type(another) and _same_containers(_values_in(one), _values_in(another))


def _is_method(cls, name) -> bool:
    """Whether a class has a method of this name, which is behaviour and not state."""
    return callable(getattr(cls, name, None)) and not name.endswith("_config")


def _is_record(value) -> bool:
    """Whether a value is a plain collection of named values."""
    is_one = isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value)
    return is_one and not isinstance(value, type) and hasattr(value, "__dict__")


def _config_of(value) -> dict:
    try:
        return value.get_config()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return {}


def _values_in(value) -> dict:
    """The attributes of an object that are values."""
    attributes = getattr(value, "__dict__", {})
    return {name: each for name, each in attributes.items() if _is_value(each, (value,))}


def _is_value(value, around=()) -> bool:
    """Whether this module can compare, and so copy, a value.

    An object that refers to one of those `around` it is not a value: comparing would not end.
    """
    if isinstance(value, keras.KerasTensor) or any(value is each for each in around):
        return False
    if isinstance(value, tf.Tensor):
        return not tf.is_symbolic_tensor(value)
    content = vars(value) if _is_record(value) else value
    if isinstance(content, dict | list | tuple | set | frozenset):
        inner = content.values() if isinstance(content, dict) else content
        return all(_is_value(each, (*around, value)) for each in inner)
    return isinstance(
        value,
        (*_PLAIN, *_BY_CONFIG, types.FunctionType, types.MethodType, functools.partial),
    )


def holds_layer(value) -> bool:
    """Whether a value is bound to a layer or variable, so that a copy would use the source's."""
    if isinstance(value, types.MethodType):
        return has_state(value.__self__)
    if isinstance(value, functools.partial):
        return any(map(_is_layer_or_holds_one, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, types.FunctionType):
        return any(map(_is_layer_or_holds_one, read_by(value)))
    if isinstance(value, dict):
        return any(map(holds_layer, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(holds_layer, value))
    return (isinstance(value, _BY_CONFIG) or _is_record(value)) and has_state(value)


def read_by(function: types.FunctionType) -> list[Any]:
    """Returns the objects that a function reads: of its closure, its module, and defaults."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*_closed_over(function), *_globals_of(function), *defaults]


def _is_layer_or_holds_one(value) -> bool:
    is_bound = isinstance(value, types.MethodType)
    return isinstance(value, keras.Layer | keras.Variable) or (is_bound and holds_layer(value))


def has_state(value) -> bool:
    """Whether a layer or a variable can be reached from an object's attributes."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, keras.Layer | keras.Variable | tf.Variable):
            return True
        if id(each) in seen or isinstance(each, (*_PLAIN, type, types.ModuleType)):
            continue
        if len(seen) == _MOST_OBJECTS:  # Too many objects for a setting.
            return True
        seen.add(id(each))
        if isinstance(each, dict | list | tuple | set | frozenset):
            waiting += each.values() if isinstance(each, dict) else each
        else:
            waiting += getattr(each, "__dict__", {}).values()
    return False


def _same_arrays(value, other) -> bool:
    if not (tf.is_tensor(other) or isinstance(other, np.ndarray | np.generic)):
        return False
    value, other = np.asarray(value), np.asarray(other)
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    if value.dtype.kind in "fcV":  # bfloat16 is of kind "V".
        return bool(np.array_equal(value.astype("complex128"), other.astype("complex128"), True))
    return bool(np.array_equal(value, other))


def _same_containers(value, other) -> bool:
    if isinstance(value, dict):
        return isinstance(other, dict) and value.keys() == other.keys() and all(
            same(each, other[key]) for key, each in value.items()
        )
    if isinstance(value, set | frozenset):
        return value == other
    return (
        isinstance(other, list | tuple)
        and len(value) == len(other)
        and all(map(same, value, other))
    )


def _same_functions(value, other) -> bool:
    """Whether two functions have the same code and values; a config creates new functions.

    One that a config creates lacks the names of its module, such as `ops`.
    """
    if value.__code__ != other.__code__:
        return False
    if value.__globals__ is not other.__globals__ and not holds_layer(value):
        return False
    pairs = [
        *zip(_closed_over(value), _closed_over(other), strict=True),
        *zip(value.__defaults__ or (), other.__defaults__ or (), strict=False),
    ]
    # Other objects, such as `self`, may differ.
    return all(same(*pair) for pair in pairs if _is_value(pair[0]))


def _globals_of(function) -> list:
    """The current values of the module names that a function reads."""
    names, scope = function.__code__.co_names, function.__globals__
    return [scope[name] for name in names if name in scope]


def _closed_over(function) -> list:
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # The name has no value yet.
            values.append(None)
    return values


def carry_arguments(source: Any, target: Any) -> None:
    """Copies the constructor arguments of a user's own class to a new object.

    An optimizer or metric stores them under their names or others; a config may omit some.
    """
    for name in _names_of_arguments(original_class(source)):
        value, copy = (vars(each).get(name, _ABSENT) for each in (source, target))
        if value is not _ABSENT and _is_value(value) and not same(value, copy):
            if not holds_layer(value):
                setattr(target, name, value)


def _names_of_arguments(cls: type) -> list[str]:
    """The names under which a user's class may store its constructor's arguments.

    Those of the parameters, and what constructors and setters of properties assign; without what
    a method that Keras calls assigns, too, such as a flag that says what has been built.
    """
    mro = cls.__mro__
    classes = list(itertools.takewhile(lambda c: not c.__module__.startswith("keras."), mro))
    of_keras = {name for each in mro[len(classes) :] for name in vars(each)}
    names = [name for c in classes for name in list(inspect.signature(c.__init__).parameters)[1:]]
    stored, changed = [], {"built"}
    for method, member in [pair for each in classes for pair in vars(each).items()]:
        is_property = isinstance(member, property)
        if method == "__init__" or is_property:
            stored += _stored_in(member.fset if is_property else member)
        elif method in of_keras:
            changed.update(_stored_in(member))
    return list(dict.fromkeys([*names, *(name for name in stored if name not in changed)]))


def _stored_in(function: Any) -> list[str]:
    """The attributes that a function assigns, of any object."""
    if not isinstance(function, types.FunctionType):
        return []
    return [each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"]


def _assign(name, value, copy) -> None:
    fits = isinstance(copy, tf.Variable) and (copy.shape, copy.dtype) == (value.shape, value.dtype)
    if not fits:
        raise CannotCarry(f"`{name}` is a `tf.Variable` that the clone does not have")
    copy.assign(value)


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """The attributes that every Keras layer or model has."""
    inputs = keras.Input((1,), name="bare")
    outputs = keras.layers.Identity(name="bare_output")(inputs)
    models = [keras.Model(inputs, outputs, name="bare"), keras.Sequential(name="bare")]
    bare = [keras.Layer(name="bare"), *models]
    names = {name for each in bare for name in vars(each)} | {"_compile_config", "stop_training"}
    return frozenset(names - _SET_BY_USERS)
