"""Applies constraints that Keras cannot, since it updates only parts or shares of the weights."""

from collections.abc import Callable, Sequence

import keras

from tfparallel.update.optimizer_kinds import is_keras_object
from tfparallel.variables.sharded import ShardedVariable
from tfparallel.variables.split import SplitVariable, parts_of, whole_of


def apply_constraints(
    parts: Sequence[keras.Variable],
    at_each: Callable[..., None],
    *,
    in_shares: bool,
    num_places: int,
) -> None:
    """Applies the constraints of weights that an optimizer updated in parts or shares.

    Args:
        parts: The weights, or parts of weights.
        at_each: Runs an update at each place, as the optimizer does.
        in_shares: Whether Keras updated shares.
        num_places: The number of local places.
    """
    wholes = {id(whole_of(part)): whole_of(part) for part in parts}.values()
    wholes = [whole for whole in wholes if in_shares or isinstance(whole, SplitVariable)]
    wholes = [whole for whole in wholes if whole.constraint is not None]
    copied = [whole for whole in wholes if not isinstance(whole, ShardedVariable)]
    for whole in wholes:
        if isinstance(whole, ShardedVariable):  # It has one value for all places.
            whole.assign(whole.constraint(whole))
    if copied:
        at_each(
            lambda _: [whole.assign(whole.constraint(whole)) for whole in copied],
            [None] * num_places,
            alike=all(is_keras_object(whole.constraint) for whole in copied),
            written=parts_of(copied),
        )
