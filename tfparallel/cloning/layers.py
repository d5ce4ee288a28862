"""Rebuilds a model: layer by layer from each layer's config, or by its own class.

A functional model whose class has its own constructor, as in KerasHub, is created by that: its
config does not list layers, and `clone_model` would return another class. If a model has no config,
its class is called with copies of the original arguments: Keras's examples pass built models to a
custom class, which stores them under the names of its constructor's arguments.

```
   VAE(encoder, decoder)     self.encoder, self.decoder ──► VAE(copy of encoder, copy of decoder)
```
"""

import contextlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfparallel.cloning.attributes import holds_layer
from tfparallel.cloning.copy_state import without_draws
from tfparallel.cloning.verify_clone import NotAlike
from tfparallel.extend import classes_of, original_class
from tfparallel.seams.functional import Functional
from tfparallel.seams.keras import SafeModeScope, arguments_of, layers_in

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class NotKept(NotAlike):
    """Raised if a class does not store its constructor's arguments under their names."""


def is_its_graph(model: keras.Model) -> bool:
    """Whether a functional or Sequential model consists only of its layers."""
    cls = original_class(model)
    if issubclass(cls, keras.Sequential):
        return cls is keras.Sequential
    signature, graphs = (inspect.getfullargspec(each.__init__) for each in (cls, Functional))
    hands_on = signature.varargs is not None and signature.varkw is not None
    return (signature.args == graphs.args or hands_on) and cls.get_config is Functional.get_config


def unbuilt_parts(model: keras.Model) -> list[str]:
    """The names of a model's unbuilt layers that will have variables."""
    return [
        layer.name
        for layer in layers_in(model, include_self=False)
        if not layer.built and original_class(layer).build is not keras.Layer.build
    ]


def copy_layers(model: keras.Model, make: Callable[[keras.Layer], keras.Layer]) -> keras.Model:
    """Rebuilds a model that consists of its layers, each by `make`, without compiling it.

    Raises:
        NotAlike: If a layer cannot be rebuilt from its config.
    """
    with (
        keras.saving.custom_object_scope(classes_of(model)),
        without_draws(),
        _compiled_later(model),
    ):
        try:
            return keras.models.clone_model(model, clone_function=make)
        except (TypeError, NotImplementedError, AttributeError) as error:
            raise NotAlike(
                f"A layer of model '{model.name}' cannot be rebuilt from its config. `get_config` "
                f"and `from_config` are required to clone it. Received: {_short(error)}. Pass the "
                "function that builds the model instead."
            ) from error


def rebuilt(model: keras.Model) -> keras.Model:
    """Rebuilds a model of any class, with new values and uncompiled.

    Raises:
        NotAlike: If its class cannot rebuild it from its config, and its layers cannot be copied.
    """
    cls = original_class(model)
    with (
        keras.saving.custom_object_scope(classes_of(model)),
        without_draws(),
        SafeModeScope(False),  # As in `like`.
    ):
        try:
            copy = cls.from_config(_unbuilt(model.get_config()))
            if not copy.built and (config := model.get_build_config()):
                copy.build_from_config(config)
        except (TypeError, NotImplementedError, ValueError, AttributeError) as error:
            copy = _without_config(model, error)
    copy.compiled = False  # Some classes compile the models that they create.
    return copy


def _without_config(model, error) -> keras.Model:
    """Copies a model whose class failed to rebuild it from its config with `error`."""
    try:
        if hasattr(model, "operations") and is_its_graph(model):
            return copy_layers(model, like)
        copy = again(model, _built_alike)
        if not copy.built and (config := model.get_build_config()):
            copy.build_from_config(config)
        return copy
    except (NotAlike, NotImplementedError, TypeError, ValueError, AttributeError) as another:
        has_config = not original_class(model).get_config.__module__.startswith("keras.")
        if isinstance(another, NotKept) and not has_config:
            raise another from None  # Its message says how to fix it.
        received = _short(error)
        if another is not error and not isinstance(another, NotKept):
            received += f". {_short(another)}"
        raise NotAlike(
            f"Model '{model.name}' of class {original_class(model).__name__} cannot be rebuilt "
            "from its config. `get_config` and `from_config` are required to clone it. Received: "
            f"{received}. Pass the function that builds the model instead."
        ) from error


def again(model: keras.Model, copied: Callable[[keras.Layer], keras.Layer]) -> keras.Model:
    """Calls the constructor of a model's class with copies of its arguments.

    Args:
        model: A model that stores each argument of its constructor in an attribute of that name.
        copied: Returns a copy of a layer or model.

    Raises:
        NotKept: If it does not store an argument.
        NotAlike: If an argument cannot be copied.
    """
    cls, arguments, missing, copies = original_class(model), {}, [], {}

    def copy_of(value: Any) -> Any:
        if isinstance(value, keras.Layer):
            if id(value) not in copies:
                copies[id(value)] = copied(value)
            return copies[id(value)]
        if isinstance(value, keras.Variable | keras.Optimizer | keras.Metric):
            raise NotAlike(
                f"A {type(value).__name__} passed to the constructor of {cls.__name__} belongs to "
                f"one model and cannot be copied. Received: {value}."
            )
        return value

    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind in _VARIABLE:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments["name"] = model.name
        elif hasattr(model, name):
            arguments[name] = keras.tree.map_structure(copy_of, getattr(model, name))
        elif parameter.default is inspect.Parameter.empty:
            missing.append(name)
    if missing:
        attributes = ", ".join(f"`{name}`" for name in missing)
        raise NotKept(
            f"Cloning model '{model.name}' requires the arguments that {cls.__name__} was created "
            "with: an attribute named after each argument, or a `get_config` that returns them. "
            f"Received: no attribute {attributes}. Pass the function that builds it, or store each "
            f"argument under its own name (`self.{missing[0]} = {missing[0]}`)."
        )
    return cls(**arguments)


def _short(error: Exception) -> str:
    """An error's text without its full stop; shortens Keras's advice on `get_config`."""
    of_keras = re.match(r"\s*Object (\w+) was created by passing\s+non-serializable", str(error))
    return f"{of_keras[1]} has no `get_config`" if of_keras else str(error).strip().rstrip(".")


def _built_alike(layer) -> keras.Layer:
    if isinstance(layer, keras.Model):
        return rebuilt(layer)
    copy = like(layer)
    if layer.built and not copy.built:
        copy.build_from_config(layer.get_build_config() or {})
    return copy


def like(layer: keras.Layer) -> keras.Layer:
    """Creates a layer of the same original class and the same config."""
    cls, lambdas = original_class(layer), _lambdas_of(layer)
    config = layer.get_config()
    if cls is not keras.layers.Lambda:  # It would not take a function in its config.
        config |= {name: lambdas[name] for name in lambdas if name in config}
    with SafeModeScope(False):  # A lambda that is already in the model is trusted.
        try:
            copy = cls.from_config(config)
        except TypeError:
            # A config may contain arguments that the constructor does not take.
            arguments = arguments_of(layer)
            if arguments is None:
                raise
            copy = cls(**arguments)
    copy.name = layer.name  # Keras chooses a name if the config has none.
    for name, value in lambdas.items():
        if name in vars(copy):
            setattr(copy, name, value)
    return copy


def _lambdas_of(layer) -> dict[str, types.FunctionType]:
    """The lambdas that a layer holds; its config has their code, without their module's names."""
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"
        if not holds_layer(value)
    }


def _unbuilt(config):
    """Removes build configs, so the model builds its layers and names their weights after it."""
    if isinstance(config, dict):
        return {key: _unbuilt(value) for key, value in config.items() if key != "build_config"}
    return [_unbuilt(part) for part in config] if isinstance(config, list) else config


@contextlib.contextmanager
def _compiled_later(model) -> Iterator[None]:
    """Hides from Keras that the model is compiled, so it copies it uncompiled."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled
