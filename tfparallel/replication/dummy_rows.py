"""The gradients of a replica without rows: zeros, whatever its dummy row gives.

The loss weighs a dummy row by 0, but its backward pass may compute 0 · ∞ or 0 / 0. So a gradient is
selected, not multiplied, where it leaves the replica: as a term of a weight's gradient, and in a
collective of the backward pass.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.piece import Piece

Gradient = tf.Tensor | tf.IndexedSlices | None


def zeros_without_rows(piece: Piece | None, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns a replica's gradients, or zeros if it computes only a dummy row.

    Args:
        piece: Its rows; None outside of a replicated call.
        gradients: Dense, sparse, or None.
    """
    if piece is None or not piece.may_be_idle:
        return list(gradients)
    selected = list(gradients)
    dense = [place for place, each in enumerate(gradients) if isinstance(each, tf.Tensor)]
    terms = piece.terms_if_it_has_rows([gradients[place] for place in dense])
    for place, term in zip(dense, terms, strict=True):
        selected[place] = term
    for place, each in enumerate(gradients):
        if isinstance(each, tf.IndexedSlices):
            selected[place] = indexed_slices.with_values(each, piece.if_it_has_rows)
    return selected
