"""Builds a functional or Sequential model again, layer by layer, from each layer's config."""

import contextlib
from collections.abc import Callable, Iterator

import keras

from tfparallel.cloning.complete import without_draws
from tfparallel.cloning.likeness import NotAlike
from tfparallel.extend import classes_of, original_class
from tfparallel.seams.keras import SafeModeScope

__all__ = ["copy_layers", "like"]


def copy_layers(
    model: keras.Model, make: Callable[[keras.Layer], keras.Layer]
) -> keras.Model:
    """Builds a functional or Sequential model again, with new values and not compiled.

    Args:
        model: A built model.
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
        except (TypeError, NotImplementedError) as error:
            raise NotAlike(
                f"A layer of model '{model.name}' cannot be rebuilt from its config. `get_config` "
                f"and `from_config` are required to clone it. Received: {error}. Pass the function "
                "that builds the model instead."
            ) from error


def like(layer: keras.Layer) -> keras.Layer:
    """Makes a layer of the same class, as it was before it was extended, and the same config."""
    with SafeModeScope(False):  # A lambda that is in the model already may be trusted.
        copy = original_class(layer).from_config(layer.get_config())
    copy.name = layer.name  # Which a config without `name` leaves to Keras.
    return copy


@contextlib.contextmanager
def _compiled_later(model) -> Iterator[None]:
    """Within it Keras takes the model for one that is not compiled, and copies it without that."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled
