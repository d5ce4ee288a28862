"""Extends the class of a single object, instead of patching anything globally.

The new class keeps the name, module and documentation of the original, so saved files name the
user's class, and plain Keras can load them.
"""

import contextlib
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from tfparallel.seams.keras import KerasSaveable, layers_in

Extended = TypeVar("Extended")

_ATTRIBUTES = "_extended_attributes"


@functools.cache
def extended_class(mixin: type, original: type) -> type:
    """Returns a subclass of `mixin` and `original`, in this order; one class for each pair."""
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
        # Keras saves the registered name; loading must still find the user's class.
        keras.saving.register_keras_serializable(package, name)(extended)
        keras.saving.register_keras_serializable(package, name)(original)
    return extended


def extend(instance: Extended, mixin: type, **attributes: Any) -> Extended:
    """Extends the class of `instance` with `mixin`, and sets attributes.

    Extending a second time with the same mixin only sets the attributes.

    Raises:
        ValueError: If a name of the mixin hides one that the user has defined.
    """
    if not isinstance(instance, mixin):
        _refuse_hidden_names(instance, mixin)
        instance.__class__ = extended_class(mixin, type(instance))
        if hasattr(mixin, "quantize"):
            # The wrapper that Keras stores on each layer would hide the mixin's method.
            vars(instance).pop("quantize", None)
    attach(instance, **attributes)
    return instance


def _refuse_hidden_names(instance: Any, mixin: type) -> None:
    original = original_class(instance)
    users = filter(_is_the_users, original.__mro__)
    of_user = {*vars(instance), *itertools.chain(*map(vars, users))} - extended_attributes(instance)
    of_keras = next(itertools.filterfalse(_is_the_users, original.__mro__), object)
    hidden = [
        name
        for name in dir(mixin)
        if name in of_user and not name.startswith("__") and not hasattr(of_keras, name)
    ]
    if hidden:
        raise ValueError(
            f"tfparallel adds {', '.join(map(repr, hidden))} to an object of class "
            f"{original.__name__}, which must not define the same names. Received: a class or an "
            "object that does. Rename them."
        )


def attach(instance: Any, **attributes: Any) -> None:
    """Sets attributes of this package on a Keras object; Keras does not track or copy them."""
    if attributes:
        attributes[_ATTRIBUTES] = extended_attributes(instance) | {*attributes, _ATTRIBUTES}
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)  # Bypasses Keras's tracking.


@contextlib.contextmanager
def attached(instance: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of this package on an object, and restores the previous ones on exit."""
    before = {name: getattr(instance, name, None) for name in attributes}
    attach(instance, **attributes)
    try:
        yield
    finally:
        attach(instance, **before)


def extended_attributes(instance: Any) -> frozenset[str]:
    """The names of the attributes that `extend` and `attach` set."""
    return frozenset(getattr(instance, _ATTRIBUTES, ()))


def original_class(instance: Any) -> type:
    """Returns the class that `instance` had before it was extended, once or several times."""
    return _before(type(instance))


def is_own(model: keras.Model, method: str) -> bool:
    """Whether the user overrides a method of Keras, in the class or on the instance."""
    is_of_class = getattr(original_class(model), method) is not getattr(keras.Model, method)
    return method in vars(model) or is_of_class


def _before(original: type) -> type:
    while hasattr(original, "_tfparallel_extended_from"):
        original = original._tfparallel_extended_from
    return original


# An object made from an extended class, as `keras.models.clone_model` does, lacks the attributes
# of an extended object. So it is created as one of the original class.


def _new_original(cls, *args, **kwargs):
    return _before(cls)(*args, **kwargs)


def _original_from_config(cls, config, **kwargs):
    return _before(cls).from_config(config, **kwargs)


def _reduce_to_original(self):
    # Keras pickles the class that reads the object, and an extended class is in no module.
    original = original_class(self)
    function, arguments = original.__reduce__(self)
    return getattr(original, function.__name__), arguments


def classes_of(model: keras.Model) -> dict[str, Any]:
    """The user's classes and functions in a model, which Keras must find by name in a config."""
    classes: dict[str, Any] = {}
    for layer in layers_in(model):
        for value in vars(layer).values():
            if isinstance(value, types.FunctionType) and _is_the_users(value):
                classes[value.__name__] = value
            elif isinstance(value, keras.Layer):  # Keras 3.10 does not always track it.
                classes |= _of_the_user(value)
        classes |= _of_the_user(layer)
    return classes


def _of_the_user(layer: keras.Layer) -> dict[str, Any]:
    cls = original_class(layer)
    return {cls.__name__: cls} if _is_the_users(cls) else {}


def has_users_code(instance: Any) -> bool:
    """Whether the class of a loss or metric, or a function that it calls, is the user's."""
    functions = filter(callable, vars(instance).values())
    return any(map(_is_the_users, (original_class(instance), *functions)))


def _is_the_users(value: Any) -> bool:
    return not str(getattr(value, "__module__", None)).startswith("keras.")
