"""The numbers of rows of inputs, targets, weights and outputs: of a batch, or of a piece of it."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.judge.check_rows import has_rows, rows_per_example
from tfparallel.piece import Piece, count_rows, where_it_is

AS_MANY = "A model must return one row per example."
FIXED = "A call in pieces must return a fixed number of rows per example."
ALIGNED = "Inputs, targets and sample weights must have one row per example."


def aligned(x, y, sample_weight):
    """Targets and weights, after asserting that they have a row for each example.

    Known sizes need no assertion; if they differ, the outputs are joined.
    """
    expected, *others = row_counts(x, y, sample_weight)
    checks = _equal(
        [(other, expected) for other in others],
        f"{ALIGNED} Received tensors that differ in the size of axis 0. Use batches of a fixed "
        "size (`drop_remainder=True`), so that the outputs of the whole batch are gathered.",
    )

    def behind_them(tensor):
        if tensor is None:
            return None
        with tf.control_dependencies(checks), where_it_is(tensor):
            return tf.identity(tensor)

    return keras.tree.map_structure(behind_them, (y, sample_weight))


def as_many_rows(model: keras.Model, outputs: list[tf.Tensor], num_rows) -> list[tf.Operation]:
    """Asserts that outputs have a row for each example; a loss would broadcast a single row.

    Args:
        model: The model, after it was judged.
        outputs: The flat outputs of a piece.
        num_rows: The number of rows of the piece.

    Raises:
        ValueError: If an output is proved to have several.
    """
    if has_rows(model):
        return []
    numbers = rows_per_example(model) or ()
    several = [number for number in numbers if isinstance(number, int) and number != 1]
    if several:
        raise ValueError(
            f"{AS_MANY} Received of model '{model.name}' an output of {several[0]} rows per "
            f"example. Give them an axis of their own, as in shape (batch, {several[0]}, …), or "
            "override `compute_loss`, which gets the outputs of the whole batch."
        )
    return _equal(
        [(count_rows(output), num_rows) for output in outputs],
        f"{AS_MANY} Received of model '{model.name}', for a part of the batch, outputs whose "
        "number of rows differs from the number of examples, perhaps because of a constant with "
        "several rows. Train on one device, or give the constant one row.",
    )


def rows_of_examples(
    layer: keras.Layer, outputs: Sequence[tf.Tensor], piece: Piece
) -> list[int | tf.Tensor | None]:
    """Returns how many rows of each output belong to an example; all pieces have the same number.

    A number that is not proved must be 1. It depends on an assertion, so its readers do, too.

    Args:
        layer: The layer or model, after it was judged.
        outputs: The flat outputs of a piece, with the dummy row of an idle one.
        piece: The piece.

    Returns:
        The numbers; None for the only piece, which has all rows.
    """
    proved = rows_per_example(layer) or [None] * len(outputs)
    return [_per_example(layer, *each, piece) for each in zip(outputs, proved, strict=True)]


def _per_example(layer, output, proved, piece) -> int | tf.Tensor | None:
    if isinstance(proved, int):
        return proved
    if proved is None and piece.num_replicas == 1:
        return None
    num_rows, checks = count_rows(output), []
    if proved is None:
        checks = _equal(
            [(num_rows, piece.num_rows_used)],
            f"{FIXED} Received of '{layer.name}', for a part of the batch, outputs whose number "
            "of rows differs from the number of examples and is not proved to be a multiple of it. "
            "Return one row per example, leave out `check_rows=False`, or use one device.",
        )
    with tf.control_dependencies(checks):
        return num_rows // piece.num_rows_used


def row_counts(*structures) -> list:
    """The row count of each tensor with a batch axis: an int, or a tensor if unknown."""
    return [count_rows(leaf) for leaf in keras.tree.flatten(structures) if _rank(leaf) != 0]


def _rank(leaf) -> int | None:
    """The number of axes of a tensor, if known; 0 for other objects."""
    return tf.TensorShape(leaf.shape).rank if hasattr(leaf, "shape") else 0


def why_unaligned(data) -> str | None:
    """Why targets or weights do not have one row per example; None if nothing is known."""
    _, *others = keras.utils.unpack_x_y_sample_weight(data)
    leaves = [leaf for leaf in keras.tree.flatten(others) if leaf is not None]
    if any(_rank(leaf) == 0 for leaf in leaves):
        return "a target or sample weight of shape () applies to all rows"
    static_rows = known_counts(data)
    return f"inputs and targets have {sorted(static_rows)} rows" if len(static_rows) > 1 else None


def known_counts(data) -> set[int]:
    """The numbers of rows that Python knows."""
    return {n for n in row_counts(data) if isinstance(n, int)}


def _equal(pairs, message) -> list[tf.Operation]:
    """Asserts the pairs that are not known to be equal; eager assertions raise at once."""
    checks = [
        tf.debugging.assert_equal(one, other, message)
        for one, other in pairs
        if not (isinstance(one, int) and isinstance(other, int) and one == other)
    ]
    return [check for check in checks if check is not None]
