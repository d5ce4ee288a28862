"""Prepares an optimizer for the places of a parallelism."""

import keras
import tensorflow as tf

from tfparallel.seams.keras import variables_held_by
from tfparallel.seams.optimizers import count_of, rate_of
from tfparallel.update.built_optimizers import prepare_built, wrapped_by
from tfparallel.update.optimizer import UnitOptimizer, extend_for
from tfparallel.update.optimizer_kinds import check_elementwise
from tfparallel.update.places import Places


def prepare(
    optimizer: keras.Optimizer, places: Places, *, shares: bool = False, parts: bool = False
) -> None:
    """Makes a Keras optimizer update at places, in place.

    Args:
        optimizer: Any Keras optimizer. If it was built elsewhere, its slots are created again with
            their values.
        places: The places.
        shares: Whether each place keeps and updates its share of the slots.
        parts: Whether weights may be split into parts.

    Raises:
        PlacementError: With parts, if the update is not elementwise.
        ValueError: With shares, in the same case.
    """
    if parts or shares:
        check_elementwise(optimizer, shares=shares)
    if _is_prepared(optimizer, places, shares):
        extend_for(optimizer, places, shares)
        return
    with tf.init_scope():
        prepare_built(optimizer, lambda: extend_for(optimizer, places, shares))


def _is_prepared(optimizer, places, shares) -> bool:
    """Whether the slots of an optimizer, and of those it wraps, are already in the right place."""
    inner = wrapped_by(optimizer)
    if not all(_is_prepared(each, places, shares) for each in inner):
        return False
    if not optimizer.built:
        return True
    if isinstance(optimizer, UnitOptimizer):
        return optimizer._places == places and optimizer._in_shares == (shares and not inner)
    not_slots = {id(count_of(optimizer)), id(rate_of(optimizer))}
    slots = [v for v in variables_held_by(optimizer) if id(v) not in not_slots]
    return not shares and places.hold(slots)
