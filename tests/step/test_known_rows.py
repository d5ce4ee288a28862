"""Losses and metrics that ask Python for the number of rows, in data sets of whole batches.

Story: `y_pred.shape[0]` is the number of the batch on one device, and None in a piece, so a loss
that divides by it had another divisor on several devices, without an error.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tests.step.test_adds_up import NUMBERS, ROWS, compiled
from tfparallel.placement.layer_devices import PlacementError
from tfparallel.step.additivity import adds_up

BATCH = 8
DEVICES = [f"CPU:{k}" for k in range(4)]
FORMS = {
    "data": lambda build: tfparallel.data_parallel(build, devices=DEVICES[:3]),
    "gpipe": lambda build: tfparallel.pipeline_parallel(build, DEVICES[:2], 2, schedule="gpipe"),
    "hybrid": lambda build: tfparallel.hybrid_parallel(
        build, tfparallel.Mesh(data=2, pipeline=2), DEVICES, num_micro_batches=2, schedule="gpipe"
    ),
}
# Of one piece each.
WHOLE = {
    "one replica": lambda build: tfparallel.data_parallel(build, devices=DEVICES[1:2]),
    "one micro-batch": lambda build: tfparallel.pipeline_parallel(
        build, DEVICES[:2], 1, schedule="gpipe"
    ),
    "two parts": lambda build: tfparallel.hybrid_parallel(
        build, tfparallel.Mesh(tensor=2), DEVICES[:2]
    ),
    "placed": lambda build: tfparallel.model_parallel(build, DEVICES[:2]),
}


def square(y, outputs):
    return ops.sum((y - outputs) ** 2, -1)


def by_number(y, outputs):
    return square(y, outputs) / (outputs.shape[0] or 1)


def by_number_of_targets(y, outputs):
    return square(y, outputs) / (y.shape[0] or 1)


def times_three(number):
    def of_number(y, outputs):
        return square(y, outputs) * (3.0 if outputs.shape[0] == number else 1.0)

    return of_number


def of_pairs(y, outputs):
    """Joined, whatever Python knows."""
    return ops.mean(square(y, ops.roll(outputs, 1, 0))) * ops.ones(outputs.shape[0] or 1)


class Mine(keras.losses.Loss):
    def call(self, y, outputs):
        return by_number(y, outputs)


class Total(keras.metrics.Metric):
    """Adds up what a function returns."""

    def __init__(self, function):
        super().__init__(name="mine")
        self.function, self.total = function, self.add_variable((), "zeros", name="total")

    def update_state(self, y, outputs, sample_weight=None):
        values = self.function(y, outputs)
        self.total.assign_add(ops.cast(ops.sum(values), self.total.dtype))

    def result(self):
        return self.total


WRONG = {
    "divides": by_number,
    "divides by targets": by_number_of_targets,
    "one number": times_three(BATCH),
    "a class": Mine,
}
RIGHT = {
    "asks for the shape": lambda y, p: square(y, p) * ops.ones(ops.shape(p)[:1]),
    "known, or asked for": lambda y, p: square(y, tf.reshape(p, [p.shape[0] or tf.shape(p)[0], 3])),
    "as many zeros": lambda y, p: square(ops.zeros_like(y), p) + ops.zeros(ops.shape(y)[0]),
    "another axis": lambda y, p: square(y, p) / p.shape[1],
}


def of(what):
    return what() if isinstance(what, type) else what


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_a_loss_that_differs_is_joined(in_float64, loss):
    model, (y, outputs) = compiled(of(loss)), NUMBERS
    assert adds_up(model, y, outputs, None).why_not is None  # One device does not know it, either.
    why_not = adds_up(model, y, outputs, None, row_counts=[BATCH]).why_not
    assert "computes something else where Python knows the number of rows" in why_not
    metric = Total(square if isinstance(loss, type) else loss)
    reasons = adds_up(compiled(metric=metric), y, outputs, None, row_counts=[BATCH]).metrics
    assert bool(reasons) == (not isinstance(loss, type))


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_a_loss_that_does_not_is_computed_by_pieces(in_float64, loss):
    for model in (compiled(loss), compiled(metric=Total(loss)), compiled(metric=loss)):
        judged = adds_up(model, *NUMBERS, None, row_counts=[BATCH, ROWS])
        assert (judged.why_not, judged.metrics) == (None, {})


def build():
    middle = keras.layers.Dense(4, activation="tanh")
    return keras.Sequential([keras.Input((3,)), middle, keras.layers.Dense(2)])


def trained(model, eagerly=False, **options):
    random = np.random.default_rng(0)
    rows = tf.data.Dataset.from_tensor_slices(
        (random.normal(size=(2 * BATCH, 3)), random.normal(size=(2 * BATCH, 2)))
    ).batch(BATCH, drop_remainder=True)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly, **options)
    history = model.fit(rows, epochs=2, verbose=0).history
    history["evaluated"] = model.evaluate(rows, verbose=0)
    return history, state_of(model)


PROGRAMS = {
    **{name: (lambda loss=loss: {"loss": of(loss)}) for name, loss in WRONG.items()},
    "pairs": lambda: {"loss": of_pairs},
    "metric": lambda: {"loss": "mse", "metrics": [Total(by_number)]},
    "metric of a function": lambda: {"loss": "mse", "metrics": [by_number]},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", PROGRAMS.values(), ids=PROGRAMS)
def test_the_joined_rows_have_the_number_of_one_device(in_float64, form, options):
    expected = trained(seeded(build), **options())
    model = FORMS[form](lambda: seeded(build))
    assert_equal(trained(model, **options()), expected, rtol=1e-6)  # Metrics are float32.
    assert model.why_joined is not None


class ByNumber(keras.layers.Layer):
    def call(self, x):
        return x / (x.shape[0] or 1)


def divides():
    middle = [keras.layers.Dense(4, activation="tanh"), ByNumber()]
    return keras.Sequential([keras.Input((3,)), *middle, keras.layers.Dense(2)])


@pytest.mark.slow
@pytest.mark.parametrize("form", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize(
    ("build", "loss"), [(build, by_number), (divides, "mse")], ids=["loss", "layer"]
)
def test_a_single_piece_has_the_number_of_one_device(in_float64, form, build, loss):
    expected = trained(seeded(build), loss=loss)
    model = form(lambda: seeded(build))
    assert_equal(trained(model, loss=loss), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "gpipe"])
@pytest.mark.parametrize("number", [2, 4], ids=["of a piece", "of another piece"])
def test_a_piece_of_an_eager_step_knows_its_number(in_float64, form, number):
    options = {"eagerly": True, "loss": times_three(number)}
    expected = trained(seeded(build), **options)
    model = FORMS[form](lambda: seeded(build))
    assert_equal(trained(model, **options), expected, rtol=1e-9)


@pytest.mark.slow
def test_a_schedule_that_starts_early_refuses_it(in_float64):
    model = tfparallel.pipeline_parallel(build, DEVICES[:2], 2, schedule="1f1b")
    with pytest.raises(PlacementError, match="Use schedule='gpipe'"):
        trained(model, loss=by_number)
