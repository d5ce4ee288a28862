"""What shapes do to losses and metrics: rows are broadcast, or their axis taken for the last."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses, metrics

from tfparallel.step.additivity import adds_up, why_not_by_rows
from tfparallel.step.loss_terms import NotByPieces
from tfparallel.step.piece_sums import growth, states, terms

ROWS = 7
PIECES = (slice(0, 3), slice(3, 5), slice(5, ROWS))
LOSSES = [
    *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "Huber", "LogCosh"),
    *("MeanSquaredLogarithmicError", "CosineSimilarity", "KLDivergence", "Poisson"),
    *("CategoricalHinge", "BinaryCrossentropy", "BinaryFocalCrossentropy"),
    *("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "SparseCategoricalCrossentropy"),
    "CategoricalGeneralizedCrossEntropy",
]
METRICS = [
    *("MeanSquaredError", "MeanAbsoluteError", "CosineSimilarity", "KLDivergence", "Poisson"),
    *("CategoricalHinge", "BinaryCrossentropy", "BinaryAccuracy", "Accuracy"),
    *("CategoricalAccuracy", "SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
    *("RootMeanSquaredError", "LogCoshError", "AUC", "Precision", "TruePositives", "R2Score"),
]
# Of targets, outputs and weights; what follows axis 0.
SHAPES = [
    ((), (1,), None), ((1,), (1,), None), ((1,), (), None), ((), (), None), ((), (3,), None),
    ((3,), (3,), None), ((1,), (3,), None), ((3,), (1,), None), ((3, 1), (3, 4), None),
    ((3,), (3, 4), None), ((3, 4), (3, 4), None), ((3,), (3,), ()), ((3,), (3,), (1,)),
    ((3, 4), (3, 4), (3,)), ((3, 4), (3, 4), ()), ((4,), (1, 4), None), ((1, 4), (4,), None),
    ((1, 4), (1, 4), None), ((33,), (1, 33), None), ((34,), (1, 34), None),
]  # fmt: skip
# The sizes behind axis 0 are also those of a batch, of which nothing then fails.
SAME = [tuple(None if s is None else (ROWS,) * len(s) for s in shapes) for shapes in SHAPES]


def compiled(loss, metric, y, outputs):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", loss, weighted_metrics=None if metric is None else [metric])
    model._compile_loss.build(y, outputs)
    if metric is not None:
        model._compile_metrics.build(y, outputs)
    return model


def rows_of(shapes):
    random = np.random.default_rng(1)
    y, outputs, weight = (
        None if shape is None else tf.constant(random.uniform(0.1, 0.9, (ROWS, *shape)))
        for shape in shapes
    )
    return tf.round(y), outputs, weight


def why_not_apart(model, *types):
    """Why the loss, or the metric, differs of rows apart."""
    tried = adds_up(model, *types)
    return tried.why_not or next(iter(tried.metrics.values()), None)


def types_of(data):
    return tuple(
        None if each is None else tf.TensorSpec([None, *each.shape[1:]], each.dtype)
        for each in data
    )


def piece(data, rows):
    return tuple(None if each is None else each[rows] for each in data)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_taken_apart_is_that_of_the_whole(in_float64, name):
    loss = getattr(losses, name)()
    for shapes in dict.fromkeys(SHAPES + SAME):
        data = rows_of(shapes)
        try:
            expected = float(loss(*data))
        except (ValueError, tf.errors.InvalidArgumentError):
            continue  # Keras takes no such shapes.
        model = compiled(loss, None, *data[:2])
        if why_not_by_rows(model) or why_not_apart(model, *types_of(data)):
            continue
        terms_of_pieces = [terms(model._compile_loss, *piece(data, rows), ROWS) for rows in PIECES]
        (of_pieces,) = zip(*terms_of_pieces, strict=True)
        total, *divisor = [sum(term) for term in zip(*of_pieces, strict=True)]
        value = total / divisor[0] if divisor else total
        np.testing.assert_allclose(value, expected, rtol=1e-9, err_msg=str(shapes))


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_is_taken_apart_is_that_of_the_whole(in_float64, name):
    for shapes in dict.fromkeys(SHAPES + SAME):
        data = rows_of(shapes)
        try:
            model = compiled("mse", getattr(metrics, name)(), *data[:2])
            model._compile_metrics.update_state(*data)
        except (ValueError, tf.errors.InvalidArgumentError):
            continue
        expected = [variable.numpy() for variable in states(model._compile_metrics)]
        if why_not_apart(model, *types_of(data)):
            continue
        parts = [growth(model._compile_metrics, *piece(data, rows)) for rows in PIECES]
        for value, *of_pieces in zip(expected, *parts, strict=True):
            total = sum(of_pieces)
            np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-9, err_msg=str(shapes))


def test_the_usual_shapes_are_taken_apart():
    """Or nothing of the above would mean anything."""
    usual = [
        ("MeanSquaredError", ((1,), (1,), None)),
        ("MeanSquaredError", ((), (1,), None)),
        ("MeanSquaredError", ((3, 4), (3, 4), (3,))),
        ("SparseCategoricalCrossentropy", ((), (3,), (1,))),
        ("SparseCategoricalCrossentropy", ((3,), (3, 4), (3,))),
        ("CategoricalCrossentropy", ((3,), (3,), None)),
    ]
    for name, shapes in usual:
        data = rows_of(shapes)
        model = compiled(getattr(losses, name)(), None, *data[:2])
        assert why_not_apart(model, *types_of(data)) is None, (name, shapes)


def test_lengths_that_are_not_known():
    scores = tf.TensorSpec((None, None, 4))
    for y in (tf.TensorSpec((None, None), "int64"), tf.TensorSpec((None, 9), "int64")):
        data = tf.zeros((2, 9), "int64"), tf.ones((2, 9, 4)) / 4
        model = compiled("sparse_categorical_crossentropy", "accuracy", *data)
        assert why_not_apart(model, y, scores, None) is None


def test_the_loss_or_the_metric_at_fault_is_named():
    data = rows_of(((), (1,), None))
    model = compiled("mse", "poisson", *data[:2])
    said = why_not_apart(model, *types_of(data))
    assert said.startswith("metric 'poisson' might not be a sum over the examples: operation ")
    data = rows_of(((), (), None))
    said = why_not_apart(compiled("mse", None, *data[:2]), *types_of(data))
    assert "one value for the whole batch" in said
    data = rows_of(((3,), (3,), (4,)))
    assert why_not_apart(compiled("mse", None, *data[:2]), *types_of(data))
    data = rows_of(((), (), None))
    with pytest.raises(NotByPieces):
        terms(compiled("mse", None, *data[:2])._compile_loss, *data, ROWS)


def test_rows_of_many_words_are_tried_without_an_array_of_their_size():
    words = 10**12
    types = (tf.TensorSpec([None, 64]), tf.TensorSpec([None, 64, words]), None)
    model = compiled(
        losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics.SparseCategoricalAccuracy(),
        *rows_of(((64,), (64, 3), None))[:2],
    )
    assert why_not_apart(model, *types) is None


@pytest.mark.slow
@pytest.mark.parametrize("weight, joined", [(None, False), ((40,), True)])
def test_a_metric_with_a_state_for_each_of_many_labels(weight, joined):
    data = rows_of(((40,), (40,), weight))
    metric = metrics.AUC(multi_label=True, num_labels=40)
    model = compiled("binary_crossentropy", metric, *data[:2])
    assert (why_not_apart(model, *types_of(data)) is not None) == joined
