"""Which losses and metrics are computed piece by piece, held against Keras: the parts add up."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses, metrics

from tfparallel.step.additivity import adds_up, adds_up_over_positions, why_not_by_rows
from tfparallel.step.loss_terms import NotByPieces, values_of
from tfparallel.step.piece_sums import growth, of_whole_sequences

ROWS, CLASSES = 11, 4
_random = np.random.default_rng(0)
SCORES = _random.uniform(0.05, 1, (ROWS, CLASSES))
SCORES /= SCORES.sum(axis=1, keepdims=True)
IDS = _random.integers(0, CLASSES, ROWS)
ONE_HOT = np.eye(CLASSES)[IDS]
SIGNS = _random.integers(0, 2, (ROWS, 1)).astype(float)
WEIGHTS = _random.uniform(0.2, 2, ROWS)
CHANCES = SCORES[:, :1]
NUMBERS = _random.normal(size=(ROWS, 3)), _random.normal(size=(ROWS, 3))
LABELS = _random.integers(0, CLASSES, (ROWS, 5))
CHOICES = np.exp(_random.normal(size=(ROWS, 5, CLASSES)))
CHOICES /= CHOICES.sum(-1, keepdims=True)

METRICS = {
    **{
        name: (name, *NUMBERS)
        for name in (
            *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError"),
            *("LogCoshError", "CosineSimilarity", "RootMeanSquaredError", "R2Score"),
        )
    },
    **{
        name: (name, ONE_HOT, SCORES)
        for name in (
            *("CategoricalAccuracy", "CategoricalCrossentropy"),
            *("KLDivergence", "Poisson", "CategoricalHinge", "MeanSquaredLogarithmicError"),
            *("FBetaScore", "F1Score", "BinaryCrossentropy", "Precision", "Recall"),
        )
    },
    **{
        name: (name, SIGNS, CHANCES)
        for name in (
            *("BinaryAccuracy", "AUC", "TruePositives", "TrueNegatives", "FalsePositives"),
            "FalseNegatives",
        )
    },
    **{
        name: (lambda kind=name: getattr(metrics, kind)(0.5), SIGNS, CHANCES)
        for name in (
            *("SensitivityAtSpecificity", "SpecificityAtSensitivity", "PrecisionAtRecall"),
            "RecallAtPrecision",
        )
    },
    **{
        name: (name, IDS, SCORES)
        for name in ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")
    },
    "SparseTopKCategoricalAccuracy": (
        lambda: metrics.SparseTopKCategoricalAccuracy(2), IDS, SCORES.astype("float32"),
    ),
    "TopKCategoricalAccuracy": (
        lambda: metrics.TopKCategoricalAccuracy(2), ONE_HOT, SCORES.astype("float32"),
    ),
    "Accuracy": ("Accuracy", IDS, np.argmax(SCORES, axis=1)),
    "MeanIoU": (lambda: metrics.MeanIoU(CLASSES), IDS, np.argmax(SCORES, axis=1)),
    "IoU": (lambda: metrics.IoU(CLASSES, [0, 2]), IDS, np.argmax(SCORES, axis=1)),
    "BinaryIoU": (lambda: metrics.BinaryIoU(threshold=0.3), SIGNS, CHANCES),
    "OneHotIoU": (lambda: metrics.OneHotIoU(CLASSES, [1]), ONE_HOT, SCORES),
    "OneHotMeanIoU": (lambda: metrics.OneHotMeanIoU(CLASSES), ONE_HOT, SCORES),
}  # fmt: skip

LOSSES = {
    **{
        name: (name, *NUMBERS)
        for name in (
            *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "Huber"),
            *("LogCosh", "CosineSimilarity"),
        )
    },
    **{
        name: (name, ONE_HOT, SCORES)
        for name in (
            *("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence"),
            *("Poisson", "CategoricalHinge", "MeanSquaredLogarithmicError"),
        )
    },
    "CategoricalGeneralizedCrossEntropy": ("CategoricalGeneralizedCrossEntropy", IDS, SCORES),
    "SparseCategoricalCrossentropy": (
        lambda: losses.SparseCategoricalCrossentropy(ignore_class=1), IDS, SCORES,
    ),
    "BinaryCrossentropy": ("BinaryCrossentropy", SIGNS, CHANCES),
    "BinaryFocalCrossentropy": ("BinaryFocalCrossentropy", SIGNS, CHANCES),
}  # fmt: skip


def built(module, what):
    return what() if callable(what) else getattr(module, what)()


def judged(model, y, outputs):
    """What does not add up, of rows like these."""
    types = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in (y, outputs)]
    return adds_up(model, *types, None)


def compiled(loss="mse", metric=None, y=NUMBERS[0], outputs=NUMBERS[1]):
    """A model with this loss and metric, which are built as a first step builds them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", loss, metrics=None if metric is None else [metric])
    y, outputs = tf.constant(y), tf.constant(outputs)
    model._compile_loss.build(y, outputs)
    if metric is not None:
        model._compile_metrics.build(y, outputs)
    return model


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_kerass_adds_up(in_float64, name):
    what, y, outputs = METRICS[name]
    states = []
    for rows in (slice(0, ROWS), slice(0, 4), slice(4, ROWS)):
        metric = built(metrics, what)
        metric.update_state(y[rows], outputs[rows], WEIGHTS[rows])
        states.append([variable.numpy() for variable in metric.variables])
    for whole, first, second in zip(*states, strict=True):
        # Some are float32 alone.
        np.testing.assert_allclose(first + second, whole, rtol=1e-5, atol=1e-12)
    metric = built(metrics, what)
    assert judged(compiled(metric=metric, y=y, outputs=outputs), y, outputs).metrics == {}


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_kerass_is_numerators_over_divisors(in_float64, name, reduction):
    what, y, outputs = LOSSES[name]
    loss = built(losses, what)
    loss.reduction = reduction
    parts = [
        values_of(loss, tf.constant(y[rows]), tf.constant(outputs[rows]), WEIGHTS[rows])
        for rows in (slice(0, 4), slice(4, ROWS))
    ]
    numerator = sum(part.numerator() for part in parts)
    divisor = 1.0 if reduction == "sum" else sum(part.divisor(ROWS) for part in parts)
    np.testing.assert_allclose(numerator / divisor, loss(y, outputs, WEIGHTS), rtol=1e-12)
    assert why_not_by_rows(compiled(loss)) is None
    assert judged(compiled(loss, None, y, outputs), y, outputs).why_not is None


@pytest.mark.parametrize("name", ["Hinge", "SquaredHinge", "Dice", "Tversky", "Circle", "CTC"])
def test_a_loss_that_looks_at_the_batch_is_joined(name):
    why_not = judged(compiled(getattr(losses, name)()), *NUMBERS).why_not
    assert "might mix examples" in why_not or "cannot be computed" in why_not


def own_square(y, outputs):
    return keras.ops.mean((y - outputs) ** 2, -1)


def less_the_mean(y, outputs):
    return keras.ops.mean((y - outputs - keras.ops.mean(outputs, 0)) ** 2, -1)


def test_a_loss_of_ones_own_is_judged_by_what_it_computes():
    assert judged(compiled(own_square), *NUMBERS).why_not is None
    why_not = judged(compiled(less_the_mean), *NUMBERS).why_not
    assert "'less_the_mean' might mix examples: operation Sub (line" in why_not


def test_a_loss_that_reads_a_state_of_the_model_is_joined():
    """Story: a piece reads what its own rows have made of the state in the same step."""
    normalization, dense = keras.layers.BatchNormalization(), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((2,)), normalization, dense])
    dense.trainable = False
    for variable in (normalization.moving_mean, dense.bias):
        model.compile("sgd", lambda y, outputs, v=variable: own_square(y, outputs) * v[0])
        model._compile_loss.build(*map(tf.constant, NUMBERS))
        why_not = judged(model, *NUMBERS).why_not
        is_state = variable is normalization.moving_mean
        assert (why_not is not None) == is_state
        assert not is_state or "moving_mean', which the model may have changed" in why_not


def test_ctc_cannot_be_computed_for_no_examples():
    """The reason why it is joined."""
    labels, logits = tf.ones([2, 3], tf.int32), tf.zeros([2, 7, CLASSES])
    assert losses.ctc(labels, logits).shape == (2,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="empty output shape"):
        losses.ctc(labels[:0], logits[:0])


@pytest.mark.parametrize("metric", [
    metrics.Hinge, metrics.SquaredHinge, lambda: metrics.CosineSimilarity(axis=0),
    lambda: metrics.MeanMetricWrapper(lambda y, p: 1.0), lambda: metrics.MeanMetricWrapper(
        lambda y, p: tf.reduce_max(p)),
])  # fmt: skip
def test_a_metric_that_may_not_add_up_is_joined(metric):
    verdict = judged(compiled(metric=metric()), *NUMBERS)
    (reason,) = verdict.metrics.values()
    assert "might not be a sum" in reason
    assert verdict.why_not is None  # The loss stays.


class Rows(metrics.Metric):
    """Keeps rows in Python."""

    def __init__(self, has_variable):
        super().__init__()
        self.rows = []
        if has_variable:
            self.number = self.add_variable((), "zeros")

    def update_state(self, y, outputs, sample_weight=None):
        self.rows.append((y, outputs))

    def result(self):
        return len(self.rows)


@pytest.mark.parametrize("has_variable", [False, True])
def test_a_metric_that_keeps_rows_is_joined(has_variable):
    metric = Rows(has_variable)
    (reason,) = judged(compiled(metric=metric), *NUMBERS).metrics.values()
    assert "its state is not in its variables" in reason
    assert not any(tf.is_symbolic_tensor(each) for pair in metric.rows for each in pair)


@pytest.mark.parametrize("metric", [
    metrics.PearsonCorrelation, metrics.ConcordanceCorrelation,
    type("Mine", (metrics.MeanSquaredError,), {}), lambda: metrics.MeanMetricWrapper(own_square),
])  # fmt: skip
def test_a_metric_that_adds_up_by_what_it_computes(metric):
    assert judged(compiled(metric=metric()), *NUMBERS).metrics == {}


def test_what_a_user_overrides_sees_joined_outputs():
    class Overriding(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    model = Overriding([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    assert why_not_by_rows(model) == "`compute_loss` is overridden"
    model = compiled()
    object.__setattr__(model, "compute_metrics", model.compute_metrics)
    assert why_not_by_rows(model) == "`compute_metrics` is overridden"
    model = compiled()
    model._compile_loss.built = False
    assert why_not_by_rows(model) == "the loss and the metrics are not built"


def test_a_loss_that_is_not_reduced():
    loss = losses.MeanSquaredError(reduction="none")
    assert why_not_by_rows(compiled(loss)) == "loss 'mean_squared_error' has reduction='none'"


def test_a_loss_that_reduces_in_its_own_way():
    class OwnReduction(losses.MeanSquaredError):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    with pytest.raises(NotByPieces, match="with a reduction of 'sum' or a mean, is required"):
        values_of(OwnReduction(), *map(tf.constant, NUMBERS), None)
    with pytest.raises(NotByPieces, match="returns one value for the whole batch"):
        values_of(losses.Dice(), *map(tf.constant, NUMBERS), None)


LENGTHS = 2, 0, 3
IN_SEQUENCES = {
    **{
        name: (name, np.eye(CLASSES)[LABELS], CHOICES)
        for name in ("CategoricalAccuracy", "CategoricalCrossentropy", "KLDivergence")
    },
    **{
        name: (name, LABELS, CHOICES)
        for name in ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")
    },
    "MeanSquaredError": ("MeanSquaredError", CHOICES, CHOICES[::-1]),
}


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("name", IN_SEQUENCES)
def test_a_metric_adds_up_over_the_positions_of_sequences(in_float64, name, weighs):
    what, *pair = IN_SEQUENCES[name]
    y, outputs = map(tf.constant, pair)
    weights = tf.constant(_random.uniform(0.2, 2, LABELS.shape)) if weighs else None
    model = compiled("mse", built(metrics, what), y, outputs)
    metric = model._compile_metrics
    judged = adds_up_over_positions(
        model, metric, y, outputs, weights, [None], [sum(LENGTHS), *LENGTHS]
    )
    assert judged.growth is not None
    cut = [None if t is None else tf.split(t, LENGTHS, 1) for t in (y, outputs, weights)]
    parts = [
        growth(metric, *(None if each is None else each[k] for each in cut))
        for k in range(len(LENGTHS))
    ]
    whole = growth(metric, y, outputs, weights)
    for actual, expected in zip(
        of_whole_sequences(parts, judged.growth, LENGTHS), whole, strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (lambda y, z: tf.reduce_mean(tf.square(z - y), -1), True),
        (lambda y, z: tf.reduce_sum(tf.square(z - y), [1, 2]), True),  # One value per example.
        (lambda y, z: tf.reduce_mean(tf.square(z - y), [1, 2]), False),
        (lambda y, z: tf.square(tf.reduce_sum(z - y, [1, 2])), False),
        (lambda y, z: tf.reduce_mean(tf.square(z - tf.reverse(y, [1])), -1), False),
        (lambda y, z: tf.reduce_mean(z * (2.0 if z.shape[1] == 3 else 1.0), -1), False),
    ],
)
def test_which_losses_add_up_over_the_positions_of_sequences(in_float64, loss, is_sum):
    y = outputs = tf.constant(CHOICES)
    model = compiled(loss, None, y, outputs)
    judged = adds_up_over_positions(model, None, y, outputs, None, [None], [5, 2, 3])
    assert (judged.why_not is None) == is_sum
