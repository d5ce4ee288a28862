"""Clones a built Keras model under a strategy: weights, frozen layers, compile state."""

from collections.abc import Callable

import keras

from tfparallel.cloning.compiled import compile_alike
from tfparallel.cloning.complete import complete, without_draws
from tfparallel.extend import classes_of, original_class
from tfparallel.replication.optimizer import hold_in_first_copy


def clone_under(
    model: keras.Model,
    strategy,
    prepare: Callable[[keras.Optimizer], None] | None = None,
) -> keras.Model:
    """Makes a copy of `model` whose variables the strategy holds.

    Args:
        model: A built model, compiled or not.
        strategy: What has the `scope()` to build under.
        prepare: Called with the copy's optimizer before it is built.

    Returns:
        The copy, with equal variables (seeds of random layers included), the same layers frozen
        and, if the model was compiled, the same optimizer (with its state), losses and metrics.

    Raises:
        ValueError: If the model is not built, or its class cannot be rebuilt from its config.
    """
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' is not built, so it has no weights to clone. A built model, or "
            "the function that builds it, is required. Received: a model without variables. Call "
            "it on a batch first, or pass the function."
        )
    with (
        strategy.scope(),
        keras.saving.custom_object_scope(classes_of(model)),
        without_draws(),
    ):
        try:
            copy = original_class(model).from_config(_unbuilt(model.get_config()))
            if not copy.built and (config := model.get_build_config()):
                copy.build_from_config(config)
        except (TypeError, NotImplementedError, ValueError) as error:
            raise ValueError(
                f"Model '{model.name}' of class {type(model).__name__} cannot be rebuilt from its "
                "config. `get_config` and `from_config` are required to clone it. Received: "
                f"{error}. Pass the function that builds the model instead."
            ) from error
    complete(model, copy, strategy.scope)
    with strategy.scope():
        compile_alike(model, copy, prepare)
    if copy.compiled and copy.optimizer is not None and copy.optimizer.built:
        hold_in_first_copy(copy.optimizer)
    return copy


def _unbuilt(config):
    """A config whose layers the model builds: built alone, their weights lack its name."""
    if isinstance(config, dict):
        return {key: _unbuilt(value) for key, value in config.items() if key != "build_config"}
    return [_unbuilt(part) for part in config] if isinstance(config, list) else config
