"""Terms of a loss: the pieces' numerators and divisors make Keras's own loss of the whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses

from tfparallel.step.loss_terms import REDUCTIONS, NotByPieces, values_of

ROWS, LENGTH, CLASSES = 11, 3, 4
PIECES = (slice(0, 4), slice(4, 9), slice(9, ROWS))
_random = np.random.default_rng(0)
SCORES = tf.nn.softmax(_random.normal(size=(ROWS, LENGTH, CLASSES)))
IDS = tf.constant(_random.integers(0, CLASSES, (ROWS, LENGTH)))
WEIGHTS = {
    "none": None,
    "a row": tf.constant(_random.uniform(0.2, 2, (ROWS, 1))),
    "a token": tf.constant(_random.uniform(0.2, 2, (ROWS, LENGTH))),
}
MASKS = {"no mask": None, "a mask": tf.constant(_random.uniform(size=(ROWS, LENGTH)) > 0.4)}


def piece(rows, mask):
    scores = SCORES[rows]
    if mask is not None:
        scores._keras_mask = mask[rows]
    return scores


def of_pieces(loss, weight, mask):
    return [
        values_of(loss, IDS[rows], piece(rows, mask), None if weight is None else weight[rows])
        for rows in PIECES
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_pieces_make_the_whole(in_float64, reduction, weight, mask):
    loss = losses.SparseCategoricalCrossentropy(reduction=reduction)
    expected = loss(IDS, piece(slice(None), MASKS[mask]), WEIGHTS[weight])
    of_each = of_pieces(loss, WEIGHTS[weight], MASKS[mask])
    divisor = 1 if reduction == "sum" else sum(values.divisor(len(IDS)) for values in of_each)
    total = sum(values.numerator() for values in of_each) / divisor
    np.testing.assert_allclose(total, expected, rtol=1e-13)

    shares = [values.share(ROWS) for values in of_each]
    by_data = mask == "a mask" or (reduction == "mean_with_sample_weight" and weight != "none")
    if by_data and reduction != "sum":
        assert shares == [None] * len(PIECES)
    else:
        np.testing.assert_allclose(sum(shares), expected, rtol=1e-13)


def test_a_share_in_a_graph_of_unknown_sizes(in_float64):
    ids = tf.TensorSpec((None, None), "int64")
    scores = tf.TensorSpec((None, None, CLASSES), "float64")

    @tf.function(input_signature=[ids, scores, tf.TensorSpec((), "int32")])
    def share(ids, scores, num_rows):
        loss = losses.SparseCategoricalCrossentropy()
        return values_of(loss, ids, scores, None).share(num_rows)

    total = sum(share(IDS[rows], SCORES[rows], ROWS) for rows in PIECES)
    expected = losses.SparseCategoricalCrossentropy()(IDS, SCORES)
    np.testing.assert_allclose(total, expected, rtol=1e-13)


def test_a_piece_without_rows_has_no_part():
    loss = losses.MeanSquaredError()
    empty = values_of(loss, tf.zeros((0, 3)), tf.zeros((0, 3)), None)
    assert (float(empty.numerator()), float(empty.divisor())) == (0.0, 0.0)


class OneNumber(losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(y_true - y_pred)


def test_what_has_no_numerators_is_refused():
    y = tf.ones((2, 3))
    for loss, said in (
        (OneNumber(), "returns one value for the whole batch"),
        (losses.MeanSquaredError(reduction="none"), "with a reduction of 'sum' or a mean"),
    ):
        with pytest.raises(NotByPieces, match=said):
            values_of(loss, y, y, None)


def test_of_no_rows_at_all_the_loss_is_0_as_in_keras():
    """Story: where no worker had a row of a batch, 0/0 made every weight NaN."""
    loss = losses.SparseCategoricalCrossentropy()
    total = values_of(loss, IDS[:0], SCORES[:0], None).share(tf.constant(0))
    assert float(total) == float(loss(IDS[:0], SCORES[:0])) == 0.0
