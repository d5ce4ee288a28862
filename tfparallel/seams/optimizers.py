"""Private names of Keras's optimizers."""

import re
from collections.abc import Sequence
from typing import Any

import keras

__all__ = [
    "accumulators_of",
    "apply_in_replica",
    "check_known",
    "clipped_by_norm",
    "count_of",
    "forget_places",
    "has_a_table",
    "key_of",
    "left_out_of_decay",
    "left_out_pattern",
    "momentums_of",
    "rate_of",
    "weights_of",
]


def rate_of(optimizer: keras.Optimizer) -> Any:
    """The variable of a learning rate, or its schedule."""
    return optimizer._learning_rate


def count_of(optimizer: keras.Optimizer) -> keras.Variable:
    """The variable that counts the batches of an optimizer, also those between two updates."""
    return optimizer._iterations


def weights_of(optimizer: keras.Optimizer | None) -> Sequence[keras.Variable]:
    """What an optimizer was built to train; nothing before."""
    return getattr(optimizer, "_trainable_variables", ())


def left_out_of_decay(optimizer: keras.Optimizer) -> set:
    """By `key_of` the variables without weight decay; what is added to it has none, either."""
    return getattr(optimizer, "_exclude_from_weight_decay", set())


def left_out_pattern(optimizer: keras.Optimizer) -> re.Pattern | None:
    """What the names of further variables without weight decay are like."""
    return getattr(optimizer, "_exclude_from_weight_decay_pattern", None)


def key_of(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
    """By what an optimizer knows a variable, as in the set that is left out of weight decay."""
    return optimizer._var_key(variable)


def check_known(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Raises Keras's error if an optimizer has no slots for one of the variables."""
    optimizer._check_variables_are_known(variables)


def forget_places(optimizer: keras.Optimizer) -> None:
    """Has an optimizer forget where the slots of its variables stand in its lists."""
    optimizer._trainable_variables_indices.clear()


def accumulators_of(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable] | None = None
) -> list[keras.Variable]:
    """Where gradients are accumulated, of some of its variables or of all, in their order."""
    held = getattr(optimizer, "_accumulated_gradients", [])  # None, if it is told so once built.
    if variables is None:
        return held
    return [held[optimizer._get_variable_index(variable)] for variable in variables]


def momentums_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The momentums of an optimizer that has some."""
    return optimizer._momentums


def clipped_by_norm(optimizer: keras.Optimizer, gradient: Any) -> Any:
    """A gradient, clipped by its own norm."""
    return optimizer._clip_by_norm(gradient)


def apply_in_replica(optimizer: keras.Optimizer, gradients, variables) -> None:
    """What a loss scale does in each replica."""
    optimizer._common_apply(gradients, trainable_variables=variables)


def has_a_table(optimizer: keras.Optimizer) -> bool:
    """Whether one of several optimizers is chosen by a table, and by no function."""
    return hasattr(optimizer._optimizer_map, "values")
