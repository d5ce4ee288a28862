"""Clones a built Keras model under a strategy: weights, frozen layers, compile state."""

from collections.abc import Callable

import keras

from tfparallel.cloning.compiled import compile_alike
from tfparallel.cloning.copy_state import copy_state
from tfparallel.cloning.layers import rebuilt, unbuilt_parts


def clone_under(
    model: keras.Model,
    strategy,
    prepare: Callable[[keras.Optimizer], None] | None = None,
) -> keras.Model:
    """Copies `model` into the scope of a strategy.

    Args:
        model: A built model, compiled or not; or a user's class that is composed of built models.
        strategy: An object with the `scope()` to build under.
        prepare: Called with the copy's optimizer before it is built.

    Returns:
        The copy, with equal variables (seeds of random layers included), the same layers frozen
        and, if the model was compiled, the same optimizer (with its state), losses and metrics.

    Raises:
        ValueError: If the model is not built, or its class cannot be rebuilt from its config.
    """
    unbuilt = [] if model.built else unbuilt_parts(model)
    if not model.built and (unbuilt or not model.variables):
        received = (
            f"layers without weights: {', '.join(unbuilt)}" if unbuilt else "no layer with weights"
        )
        raise ValueError(
            f"Model '{model.name}' is not built, so it has no weights to clone. A built model, a "
            "model composed of built ones, or the function that builds it, is required. Received: "
            f"{received}. Call it on a batch first, or pass the function."
        )
    with strategy.scope():
        copy = rebuilt(model)
    copy_state(model, copy, strategy.scope)
    with strategy.scope():
        compile_alike(model, copy, prepare)
    return copy

