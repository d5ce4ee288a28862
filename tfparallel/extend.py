"""Gives an object a class that extends its own, so that nothing global is patched.

The new class keeps the name, the module and the documentation of the old one, so that what is
saved names the user's class, and plain Keras can load it.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from tfparallel.seams.keras import KerasSaveable, layers_in

Extended = TypeVar("Extended")

_ATTRIBUTES = "_extended_attributes"


@functools.cache
def extended_class(mixin: type, original: type) -> type:
    """Returns the class that puts `mixin` before `original`; one class for each pair."""
    extended = type(
        original.__name__,
        (mixin, original),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__new__": _new_original,
            "_tfparallel_extended_from": original,
        },
    )
    if hasattr(original, "from_config"):
        extended.from_config = classmethod(_original_from_config)
    if issubclass(original, KerasSaveable):
        extended.__reduce__ = _reduce_to_original
    package, _, name = keras.saving.get_registered_name(original).rpartition(">")
    if package:
        # A registered class is saved under its registered name; loading still finds the user's.
        keras.saving.register_keras_serializable(package, name)(extended)
        keras.saving.register_keras_serializable(package, name)(original)
    return extended


def extend(instance: Extended, mixin: type, **attributes: Any) -> Extended:
    """Changes the class of `instance` to one that extends it with `mixin`, and sets attributes.

    Extending twice with the same mixin changes the attributes alone.
    """
    if not isinstance(instance, mixin):
        instance.__class__ = extended_class(mixin, type(instance))
        if hasattr(mixin, "quantize"):
            # What Keras puts on each layer, to wrap its method, would hide the mixin's.
            vars(instance).pop("quantize", None)
    attach(instance, **attributes)
    return instance


def attach(instance: Any, **attributes: Any) -> None:
    """Sets attributes of this package's on an object of Keras's: no part of it, nor of its copy."""
    if attributes:
        attributes[_ATTRIBUTES] = extended_attributes(instance) | {*attributes, _ATTRIBUTES}
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)  # Past Keras's tracking.


@contextlib.contextmanager
def attached(instance: Any, **attributes: Any) -> Iterator[None]:
    """Within it an object has attributes of this package's; then those that it had before."""
    before = {name: getattr(instance, name, None) for name in attributes}
    attach(instance, **attributes)
    try:
        yield
    finally:
        attach(instance, **before)


def extended_attributes(instance: Any) -> frozenset[str]:
    """The names of the attributes that `extend` and `attach` have set."""
    return frozenset(getattr(instance, _ATTRIBUTES, ()))


def original_class(instance: Any) -> type:
    """Returns the class that `instance` had before it was extended, once or several times."""
    return _before(type(instance))


def is_own(model: keras.Model, method: str) -> bool:
    """Whether a method is the user's own and not Keras's: one of the class, or set on the model."""
    is_of_class = getattr(original_class(model), method) is not getattr(keras.Model, method)
    return method in vars(model) or is_of_class


def _before(original: type) -> type:
    while hasattr(original, "_tfparallel_extended_from"):
        original = original._tfparallel_extended_from
    return original


# What is made from an extended class, as `keras.models.clone_model` does, has none of the
# attributes of an extended object: it is one of the original class.


def _new_original(cls, *args, **kwargs):
    return _before(cls)(*args, **kwargs)


def _original_from_config(cls, config, **kwargs):
    return _before(cls).from_config(config, **kwargs)


def _reduce_to_original(self):
    # Keras pickles what it saves, and the class that reads it; an extended one has no module.
    original = original_class(self)
    function, arguments = original.__reduce__(self)
    return getattr(original, function.__name__), arguments


def classes_of(model: keras.Model) -> dict[str, Any]:
    """The user's own classes and functions in a model, which a config names and Keras must find."""
    found: dict[str, Any] = {}
    for layer in layers_in(model):
        for value in vars(layer).values():
            if isinstance(value, types.FunctionType) and _is_the_users(value):
                found[value.__name__] = value
            elif isinstance(value, keras.Layer):  # Which Keras 3.10 does not always track.
                found |= _of_the_user(value)
        found |= _of_the_user(layer)
    return found


def _of_the_user(layer: keras.Layer) -> dict[str, Any]:
    cls = original_class(layer)
    return {cls.__name__: cls} if _is_the_users(cls) else {}


def _is_the_users(value: Any) -> bool:
    return not value.__module__.startswith("keras.")
