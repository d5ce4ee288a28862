"""Optimizers that were built before they were prepared for several devices, and what they know.

Keras builds an optimizer in the first step. Whoever restores a state builds it before, and its
slots then lie where plain Keras puts them: once, whole, on the first device. They belong
beside their weights, so they are made again, with the same values.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.seams.keras import untrack, variables_held_by
from tfparallel.seams.optimizers import count_of, forget_places, rate_of, weights_of

__all__ = [
    "check_known",
    "optimizers_of",
    "own_variables",
    "prepare_built",
    "trained_by",
    "wrapped_by",
]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """The optimizers that a model holds: as `model.optimizer`, attributes, or in containers."""
    held = [vars(model).values()]
    held += [value for value in vars(model).values() if isinstance(value, list | tuple)]
    held += [value.values() for value in vars(model).values() if isinstance(value, dict)]
    found = {id(v): v for values in held for v in values if isinstance(v, keras.Optimizer)}
    return list(found.values())


def wrapped_by(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """What an optimizer hands gradients on to."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "optimizers", []))


def own_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, without the model's."""
    trained = {id(variable) for variable in weights_of(optimizer)}
    return [variable for variable in variables_held_by(optimizer) if id(variable) not in trained]


def trained_by(optimizer: keras.Optimizer | None) -> dict[int, keras.Variable]:
    """The weights that an optimizer was built for, by their id: wholes, of parts and of shares."""
    found = {}
    for variable in weights_of(optimizer):
        variable = getattr(variable, "_sharded", variable)
        variable = getattr(variable, "_whole", variable)
        found[id(variable)] = variable
    return found


def prepare_built(optimizer: keras.Optimizer, prepare: Callable[[], None]) -> None:
    """Prepares an optimizer for several devices; what it has built is built again, as it was.

    Args:
        optimizer: One that is built or not, or wraps others that are.
        prepare: Prepares it, in place, as if nothing were built.

    Raises:
        ValueError: If it does not make the same variables again.
    """
    built = [(each, _values(each), trained_by(each)) for each in _outermost_built(optimizer)]
    for each, _, _ in built:
        _forget_slots(each)
    prepare()
    for each, values, weights in built:
        each.build(list(weights.values()))
        _load(each, values)


def _outermost_built(optimizer) -> list[keras.Optimizer]:
    """Itself, or those that it wraps: Keras wraps a built one to scale the loss."""
    if optimizer.built:
        return [optimizer]
    return [each for inner in wrapped_by(optimizer) for each in _outermost_built(inner)]


def _values(optimizer) -> dict[str, Any]:
    values: dict[str, Any] = {}
    optimizer.save_own_variables(values)
    return values


def _load(optimizer, values) -> None:
    made = optimizer.variables
    if len(made) != len(values):
        raise ValueError(
            f"Optimizer '{optimizer.name}' was built before its model was compiled, and must make "
            "its state again on the model's devices. An optimizer whose `build` makes all "
            f"variables but the learning rate is required. Received: {len(values)} variables, and "
            f"{len(made)} when it was built again. Compile the model with an optimizer that is "
            "not built."
        )
    optimizer.load_own_variables(values)


def _forget_slots(optimizer) -> None:
    kept = {id(count_of(optimizer)), id(rate_of(optimizer))}
    for variable in list(variables_held_by(optimizer)):
        if id(variable) not in kept:
            untrack(optimizer, variable)
    forget_places(optimizer)
    optimizer.built = False
    for inner in wrapped_by(optimizer):
        _forget_slots(inner)


def check_known(model: keras.Model) -> None:
    """Raises if a model trains a weight that its optimizer was not built for.

    Keras says so too, of a tensor within the step.

    Raises:
        ValueError: If there is such a weight.
    """
    optimizer = getattr(model, "optimizer", None)  # A model that is not compiled has none.
    if optimizer is None or not optimizer.built:
        return
    if original_class(model).train_step is not keras.Model.train_step:
        return  # What it updates only the user's step knows.
    known = trained_by(optimizer)
    unknown = [weight.path for weight in model.trainable_variables if id(weight) not in known]
    if unknown:
        weights = "1 weight" if len(unknown) == 1 else f"{len(unknown)} weights"
        raise ValueError(
            f"Optimizer '{optimizer.name}' was built for other weights than model '{model.name}' "
            "trains. An optimizer that is not built, or was built for all of them, is required. "
            f"Received: {weights} that it does not know, such as {unknown[0]}. Compile the model "
            "with a new optimizer, after `trainable` is set."
        )
