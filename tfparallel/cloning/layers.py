"""Builds a model again: layer by layer from each layer's config, or as its own class does.

A functional model whose class has a constructor of its own, as KerasHub's have, is made by that: a
config of its own says nothing of layers, and what `clone_model` returns is of another class.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator

import keras

from tfparallel.cloning.arguments import NotKept, again
from tfparallel.cloning.copy_state import without_draws
from tfparallel.cloning.verify_clone import NotAlike
from tfparallel.extend import classes_of, original_class
from tfparallel.seams.functional import Functional
from tfparallel.seams.keras import SafeModeScope, arguments_of

__all__ = ["copy_layers", "is_its_graph", "like", "rebuilt"]


def is_its_graph(model: keras.Model) -> bool:
    """Whether a functional or Sequential model is made of its layers, and of nothing else."""
    cls = original_class(model)
    if issubclass(cls, keras.Sequential):
        return cls is keras.Sequential
    own, graphs = (inspect.getfullargspec(each.__init__) for each in (cls, Functional))
    hands_on = own.varargs is not None and own.varkw is not None
    return (own.args == graphs.args or hands_on) and cls.get_config is Functional.get_config


def copy_layers(
    model: keras.Model, make: Callable[[keras.Layer], keras.Layer]
) -> keras.Model:
    """Builds a functional or Sequential model again, with new values and not compiled.

    Args:
        model: A built model that is its graph.
        make: Returns the new layer for each layer.

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
    """Builds a model of any class again, with new values and not compiled, as its class does.

    Raises:
        NotAlike: If neither its class can, from its config, nor its layers can be copied.
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
    copy.compiled = False  # Some classes compile what they make.
    return copy


def _without_config(model, error) -> keras.Model:
    """A copy of a model whose class cannot make one from its config, because of an error."""
    try:
        if hasattr(model, "operations") and is_its_graph(model):
            return copy_layers(model, like)
        copy = again(model, _built_alike)
        if not copy.built and (config := model.get_build_config()):
            copy.build_from_config(config)
        return copy
    except (NotAlike, NotImplementedError, TypeError, ValueError, AttributeError) as another:
        if isinstance(another, NotKept) and not _has_own_config(model):
            raise another from None  # Without a config, what it lacks is the way out.
        received = _short(error)
        if another is not error and not isinstance(another, NotKept):
            received += f". {_short(another)}"
        raise NotAlike(
            f"Model '{model.name}' of class {original_class(model).__name__} cannot be rebuilt "
            "from its config. `get_config` and `from_config` are required to clone it. Received: "
            f"{received}. Pass the function that builds the model instead."
        ) from error


def _has_own_config(model) -> bool:
    return not original_class(model).get_config.__module__.startswith("keras.")


def _short(error: Exception) -> str:
    """An error's text without its full stop; of Keras's advice on `get_config`, what it is of."""
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
    """Makes a layer of the same class, as it was before it was extended, and the same config."""
    cls, config = original_class(layer), layer.get_config()
    with SafeModeScope(False):  # A lambda that is in the model already may be trusted.
        try:
            copy = cls.from_config(config)
        except TypeError:
            # A config may name what the constructor does not take.
            arguments = arguments_of(layer)
            if arguments is None:
                raise
            copy = cls(**arguments)
    copy.name = layer.name  # Which a config without `name` leaves to Keras.
    return copy


def _unbuilt(config):
    """A config whose layers the model builds: built alone, their weights lack its name."""
    if isinstance(config, dict):
        return {key: _unbuilt(value) for key, value in config.items() if key != "build_config"}
    return [_unbuilt(part) for part in config] if isinstance(config, list) else config


@contextlib.contextmanager
def _compiled_later(model) -> Iterator[None]:
    """Within it Keras takes the model for one that is not compiled, and copies it without that."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled
