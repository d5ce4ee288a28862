"""What is known of an optimizer's class: whether it treats each element of a weight by itself.

Then its update is the same for a part of a weight as for the whole: parts lie on several devices,
or each replica updates a share. LAMB's and Adafactor's norms and Muon's matrices are of whole
weights. It also tells Keras's own classes, of which the same update gives the same result twice.
"""

from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.keras_compat import MultiOptimizer, ScheduleFreeAdamW
from tfparallel.problems import PlacementError
from tfparallel.seams.optimizers import has_a_table, rate_of

__all__ = [
    "NAMES",
    "is_keras_object",
    "check_elementwise",
    "is_elementwise",
    "is_keras_class",
    "updates_alike",
]

_optimizers = keras.optimizers
# Looked through one by one: their `update_step` is element by element.
_ELEMENTWISE = (
    _optimizers.SGD, _optimizers.Adam, _optimizers.AdamW, _optimizers.RMSprop, _optimizers.Adagrad,
    _optimizers.Adadelta, _optimizers.Adamax, _optimizers.Nadam, _optimizers.Ftrl,
    _optimizers.Lion, ScheduleFreeAdamW,
)  # fmt: skip
NAMES = ", ".join(sorted(cls.__name__ for cls in _ELEMENTWISE))


def is_elementwise(cls: type) -> bool:
    """Whether an optimizer of this class, and not of one derived from it, is known to be so."""
    return cls in _ELEMENTWISE


def check_elementwise(optimizer: keras.Optimizer, *, shares: bool) -> None:
    """Raises for an optimizer that cannot update parts of weights, or shares of them.

    Args:
        optimizer: Any optimizer; of one that hands gradients on to others, they are looked at.
        shares: Whether it is shares.

    Raises:
        PlacementError: Of parts, if its update looks at more than one element at a time, or is not
            known.
        ValueError: Of shares, likewise.
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
        other = "leave `shard` out" if shares else "`tfparallel.model_parallel`"
        raise error(
            f"{form} supports optimizers that update each element independently ({NAMES}). "
            f"Received: {cls.__name__}, which looks at whole weights, or is not known. Take one of "
            f"these, or {other}."
        )


def _known_wrapped(optimizer, cls) -> list[keras.Optimizer]:
    """What an optimizer hands its variables on to; those that a function makes are not known."""
    if cls is _optimizers.LossScaleOptimizer:
        return [optimizer.inner_optimizer]
    if cls is MultiOptimizer and has_a_table(optimizer):
        return optimizer.optimizers
    return []


def updates_alike(optimizer) -> bool:
    """Whether optimizer and schedule are Keras's.

    One of the user's own may draw, or keep a state that nobody knows of.
    """
    return is_keras_class(original_class(optimizer)) and is_keras_object(rate_of(optimizer))


def is_keras_object(held: Any) -> bool:
    """Whether an object is of a class of Keras's, or None."""
    return held is None or is_keras_class(type(held))


def is_keras_class(cls: type) -> bool:
    """Whether Keras has a class, and not the user."""
    return cls.__module__.startswith("keras.")
