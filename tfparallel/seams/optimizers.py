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
    "leaves_out",
    "left_out_of_decay",
    "left_out_pattern",
    "momentums_of",
    "rate_of",
    "set_decay",
    "weights_of",
]


def rate_of(optimizer: keras.Optimizer) -> Any:
    """Returns the variable of a learning rate, or its schedule."""
    return optimizer._learning_rate


def count_of(optimizer: keras.Optimizer) -> keras.Variable:
    """Returns the variable that counts an optimizer's batches, also those between updates."""
    return optimizer._iterations


def weights_of(optimizer: keras.Optimizer | None) -> Sequence[keras.Variable]:
    """Returns the variables that an optimizer was built to train; empty before."""
    return getattr(optimizer, "_trainable_variables", ())


def left_out_of_decay(optimizer: keras.Optimizer) -> set:
    """Returns the variables without weight decay, by `key_of`."""
    return getattr(optimizer, "_exclude_from_weight_decay", set())


def left_out_pattern(optimizer: keras.Optimizer) -> re.Pattern | None:
    """Returns the pattern of the names of further variables without weight decay."""
    return getattr(optimizer, "_exclude_from_weight_decay_pattern", None)


def leaves_out(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    """Returns whether a variable was excluded from weight decay, by key or by name."""
    keys, pattern = left_out_of_decay(optimizer), left_out_pattern(optimizer)
    if keys and key_of(optimizer, variable) in keys:
        return True
    # On one device, Keras searches the name of the variable's storage, which is its path.
    return pattern is not None and pattern.search(f"{variable.path}:0") is not None


def set_decay(optimizer: keras.Optimizer, variable: keras.Variable, decays: bool) -> None:
    """Decides whether a variable decays, before Keras looks at its key and name."""
    decisions = vars(optimizer).setdefault("_exclude_from_weight_decay_cache", {})
    decisions[key_of(optimizer, variable)] = decays


def key_of(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
    """Returns an optimizer's key of a variable, as in the set without weight decay."""
    return optimizer._var_key(variable)


def check_known(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Raises Keras's error if an optimizer has no slots for one of the variables."""
    optimizer._check_variables_are_known(variables)


def forget_places(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer forget the indices of its variables' slots."""
    optimizer._trainable_variables_indices.clear()


def accumulators_of(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable] | None = None
) -> list[keras.Variable]:
    """Returns the gradient accumulators of some of its variables or all, in their order."""
    accumulators = getattr(optimizer, "_accumulated_gradients", [])  # May be None once built.
    if variables is None:
        return accumulators
    return [accumulators[optimizer._get_variable_index(variable)] for variable in variables]


def momentums_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns the momentums of an optimizer that has some."""
    return optimizer._momentums


def clipped_by_norm(optimizer: keras.Optimizer, gradient: Any) -> Any:
    """Returns a gradient clipped by its own norm."""
    return optimizer._clip_by_norm(gradient)


def apply_in_replica(optimizer: keras.Optimizer, gradients, variables) -> None:
    """Applies gradients as a loss scale does in each replica."""
    optimizer._common_apply(gradients, trainable_variables=variables)


def has_a_table(optimizer: keras.Optimizer) -> bool:
    """Returns whether a table, not a function, chooses between several optimizers."""
    return hasattr(optimizer._optimizer_map, "values")
