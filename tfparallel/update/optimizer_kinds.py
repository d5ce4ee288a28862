"""Classifies optimizers: whether an update treats each element of a weight independently.

Such an update is the same for a part of a weight as for the whole, so parts may lie on several
devices, or each replica may update a share. LAMB and Adafactor compute norms of whole weights, and
Muon needs whole matrices. Also identifies Keras's own classes, whose updates are deterministic.
"""

from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.keras_compat import MultiOptimizer, ScheduleFreeAdamW
from tfparallel.problems import PlacementError
from tfparallel.seams.optimizers import has_a_table, rate_of

_optimizers = keras.optimizers
# Checked one by one: their `update_step` is elementwise.
_ELEMENTWISE = (
    _optimizers.SGD, _optimizers.Adam, _optimizers.AdamW, _optimizers.RMSprop, _optimizers.Adagrad,
    _optimizers.Adadelta, _optimizers.Adamax, _optimizers.Nadam, _optimizers.Ftrl,
    _optimizers.Lion, ScheduleFreeAdamW,
)  # fmt: skip
NAMES = ", ".join(sorted(cls.__name__ for cls in _ELEMENTWISE))


def is_elementwise(cls: type) -> bool:
    """Whether this class itself, not a base class, is known to be elementwise."""
    return cls in _ELEMENTWISE


def check_elementwise(optimizer: keras.Optimizer, *, shares: bool) -> None:
    """Raises for an optimizer that cannot update parts or shares of weights.

    Args:
        optimizer: Any optimizer; for one that wraps others, those are checked.
        shares: Whether it updates shares, not parts.

    Raises:
        PlacementError: For parts, if its update is not elementwise, or is unknown.
        ValueError: For shares, in the same case.
    """
    cls = original_class(optimizer)
    wrapped = _known_wrapped(optimizer, cls)
    for inner in wrapped:
        check_elementwise(inner, shares=shares)
    if wrapped:
        return
    if not is_elementwise(cls):
        form, error = (
            ("`shard`", ValueError) if shares else ("tensor_parallel", PlacementError)
        )
        other = "remove `shard`" if shares else "`tfparallel.model_parallel`"
        raise error(
            f"{form} supports optimizers that update each element independently ({NAMES}). "
            f"Received: {cls.__name__}, which uses whole weights or is unknown. Use one of these, "
            f"or {other}."
        )


def _known_wrapped(optimizer, cls) -> list[keras.Optimizer]:
    """The optimizers that an optimizer wraps; those that a function creates are unknown."""
    if cls is _optimizers.LossScaleOptimizer:
        return [optimizer.inner_optimizer]
    if cls is MultiOptimizer and has_a_table(optimizer):
        return optimizer.optimizers
    return []


def updates_alike(optimizer) -> bool:
    """Whether optimizer and schedule are Keras's.

    A user's own may draw random numbers, or keep a hidden state.
    """
    return is_keras_class(original_class(optimizer)) and is_keras_object(rate_of(optimizer))


def is_keras_object(value: Any) -> bool:
    """Whether an object is an instance of a Keras class, or None."""
    return value is None or is_keras_class(type(value))


def is_keras_class(cls: type) -> bool:
    """Whether a class belongs to Keras, not to the user."""
    return cls.__module__.startswith("keras.")
