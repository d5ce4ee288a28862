"""Optimizers that were built before they were prepared for several devices.

Keras builds an optimizer in the first step. Code that restores a state builds it earlier, and plain
Keras then puts the slots on the first device, whole. They belong beside their weights, so we create
them again, with the same values.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.seams.keras import untrack, variables_held_by
from tfparallel.seams.optimizers import count_of, forget_places, rate_of, weights_of


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """The optimizers of a model: `model.optimizer`, other attributes, or in containers."""
    groups = [vars(model).values()]
    groups += [value for value in vars(model).values() if isinstance(value, list | tuple)]
    groups += [value.values() for value in vars(model).values() if isinstance(value, dict)]
    by_id = {id(v): v for values in groups for v in values if isinstance(v, keras.Optimizer)}
    return list(by_id.values())


def wrapped_by(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizers that an optimizer passes gradients on to."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "optimizers", []))


def with_wrapped(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizer and those that it wraps, at any depth."""
    return [optimizer, *(each for inner in wrapped_by(optimizer) for each in with_wrapped(inner))]


def own_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, without those of the model."""
    trained = {id(variable) for variable in weights_of(optimizer)}
    return [variable for variable in variables_held_by(optimizer) if id(variable) not in trained]


def trained_by(optimizer: keras.Optimizer | None) -> dict[int, keras.Variable]:
    """The weights that an optimizer was built for, by id; whole weights for parts and shares."""
    weights = {}
    for variable in weights_of(optimizer):
        variable = getattr(variable, "_sharded", variable)
        variable = getattr(variable, "_whole", variable)
        weights[id(variable)] = variable
    return weights


def prepare_built(optimizer: keras.Optimizer, prepare: Callable[[], None]) -> None:
    """Prepares an optimizer for several devices; rebuilds its state with the same values.

    Args:
        optimizer: An optimizer that may be built, or wrap built ones.
        prepare: Prepares it in place, as if it were not built.

    Raises:
        ValueError: If it does not create the same variables again.
    """
    built = [(each, _values(each), trained_by(each)) for each in _outermost_built(optimizer)]
    for each, _, _ in built:
        _forget_slots(each)
    prepare()
    for each, values, weights in built:
        each.build(list(weights.values()))
        _load(each, values)


def _outermost_built(optimizer) -> list[keras.Optimizer]:
    """The optimizer itself, or those that it wraps: Keras wraps a built one to scale the loss."""
    if optimizer.built:
        return [optimizer]
    return [each for inner in wrapped_by(optimizer) for each in _outermost_built(inner)]


def _values(optimizer) -> dict[str, Any]:
    values: dict[str, Any] = {}
    optimizer.save_own_variables(values)
    return values


def _load(optimizer, values) -> None:
    created = optimizer.variables
    if len(created) != len(values):
        raise ValueError(
            f"Optimizer '{optimizer.name}' was built before its model was compiled, so its state "
            "must be created again on the model's devices. An optimizer whose `build` creates all "
            f"variables except the learning rate is required. Received: {len(values)} variables, "
            f"and {len(created)} after it was built again. Compile the model with an optimizer "
            "that is not built."
        )
    optimizer.load_own_variables(values)


def _forget_slots(optimizer) -> None:
    not_slots = {id(count_of(optimizer)), id(rate_of(optimizer))}
    for variable in list(variables_held_by(optimizer)):
        if id(variable) not in not_slots:
            untrack(optimizer, variable)
    forget_places(optimizer)
    optimizer.built = False
    for inner in wrapped_by(optimizer):
        _forget_slots(inner)


def check_known(model: keras.Model) -> None:
    """Raises if a model trains a weight that its optimizer was not built for.

    Keras would raise as well, but for a tensor inside the step.

    Raises:
        ValueError: If there is such a weight.
    """
    optimizer = getattr(model, "optimizer", None)  # A model that was not compiled has none.
    if optimizer is None or not optimizer.built:
        return
    if original_class(model).train_step is not keras.Model.train_step:
        return  # Only the user's step knows what it updates.
    trained = trained_by(optimizer)
    unknown = [weight.path for weight in model.trainable_variables if id(weight) not in trained]
    if unknown:
        weights = "1 weight" if len(unknown) == 1 else f"{len(unknown)} weights"
        raise ValueError(
            f"Optimizer '{optimizer.name}' was not built for all the weights that model "
            f"'{model.name}' trains. An optimizer that is not built, or was built for all of them, "
            f"is required. Received: {weights} unknown to the optimizer, such as {unknown[0]}. Set "
            "`trainable`, then compile the model with a new optimizer."
        )
