"""Models whose outputs have several rows for each example, on pieces of different sizes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import seeded
from tfparallel.judge.check_rows import rows_per_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

NUM_EXAMPLES = 10  # Two batches of 4, and one of 2: of three replicas, one is then idle.
DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


class RowsOfAxisOne(layers.Layer):
    """Turns `(batch, n, units)` into `(batch · n, units)`."""

    def call(self, x):
        return keras.ops.reshape(x, (-1, x.shape[-1]))

    def compute_output_shape(self, input_shape):
        return None, input_shape[-1]


class Repeated(layers.Layer):
    """Returns each row of axis 1 as three rows."""

    def call(self, x):
        return keras.ops.repeat(x[:, 0], 3, axis=0)

    def compute_output_shape(self, input_shape):
        return None, input_shape[-1]


def build(last=RowsOfAxisOne, activation=None, length=3, model=keras.Model):
    inputs = keras.Input((length, 2))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    return model(inputs, layers.Dense(2, activation=activation)(last()(hidden)))


class MeanOfSquares(keras.Model):
    """Weights each row of the output by its place, so that a row in another place counts."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = weighted_squares(self(x, training=True), y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Penalized(keras.Model):
    """Adds the squares of the gradient of the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = weighted_squares(self(x, training=True), y)
            loss += tf.reduce_mean(inner.gradient(loss, x) ** 2)
        gradients = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class LossOfTheBatch(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return weighted_squares(y_pred, y)


def weighted_squares(outputs, y):
    errors = outputs - tf.reshape(y, [-1, 2])
    places = tf.range(tf.shape(errors)[0])
    return tf.reduce_mean(tf.cast(places, errors.dtype)[:, None] * errors**2)


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(NUM_EXAMPLES, 3, 2)), random.normal(size=(NUM_EXAMPLES, 3, 2))


def replicated(make, **options):
    return tfparallel.data_parallel(lambda: seeded(make), devices=DEVICES, **options)


def trained(model, **options):
    before = np.concatenate([weight.ravel() for weight in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.1), **options)
    model.fit(*data(), batch_size=4, shuffle=False, verbose=0)
    after = np.concatenate([weight.ravel() for weight in model.get_weights()])
    assert np.abs(after - before).max() > 1e-3
    return after


def assert_trains_alike(make, place, **options):
    expected, actual = trained(seeded(make), **options), trained(place(make), **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)  # Sums in another order.


PLACES = {
    "data": replicated,
    "hybrid": lambda make: tfparallel.hybrid_parallel(
        lambda: seeded(make), tfparallel.Mesh(data=3), DEVICES
    ),
}


@pytest.mark.parametrize(
    "make",
    [
        build,
        lambda: build(Repeated),
        lambda: build(activation="softmax"),  # Its logits are joined.
    ],
    ids=["reshaped", "repeated", "logits"],
)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_all_rows_are_predicted_in_their_order(place, make):
    x, _ = data()
    expected = seeded(make).predict(x, batch_size=4, verbose=0)
    assert len(expected) == 3 * NUM_EXAMPLES
    predicted = place(make).predict(x, batch_size=4, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-12, atol=1e-14)


def of_any_length():
    """Batches of 4, 4 and 2 sequences, of another length each."""
    x, _ = data()
    batches = [x[:4], x[4:8, :2], np.tile(x[8:], (1, 2, 1))]
    spec = tf.TensorSpec((None, None, 2), "float64")
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_number_of_rows_may_be_known_only_in_the_step(place):
    def make():
        return build(length=None)

    expected, model = seeded(make).predict(of_any_length(), verbose=0), place(make)
    assert len(expected) == 4 * 3 + 4 * 2 + 2 * 6
    predicted = model.predict(of_any_length(), verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-12, atol=1e-14)
    (number,) = rows_per_example(model)  # The name of a size.
    assert not isinstance(number, int) and number is not None


@pytest.mark.parametrize("kind", [MeanOfSquares, Penalized])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_users_own_step_trains_as_on_one_device(kind, run_eagerly):
    assert_trains_alike(lambda: build(model=kind), replicated, run_eagerly=run_eagerly)


def test_an_own_loss_of_the_batch_trains_as_on_one_device():
    def make():
        return build(model=LossOfTheBatch)

    assert_trains_alike(make, replicated)
    assert_trains_alike(
        make,
        lambda make: tfparallel.pipeline_parallel(
            lambda: seeded(make), DEVICES[:2], 3, schedule="gpipe"
        ),
    )


class TwoKinds(keras.Model):
    """Calls a layer with one row per example, and with two: by turns, in an eager step."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([RowsOfAxisOne(), layers.Dense(2)])

    def build(self, input_shape):
        self.inner.build((None, 3, 2))

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            calls = [(self.inner(x[:, :n]), y[:, :n]) for n in (1, 2, 1, 2)]
            loss = tf.add_n([weighted_squares(*call) for call in calls])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def two_kinds():
    model = TwoKinds()
    model.build((None, 3, 2))
    return model


def test_calls_with_other_numbers_of_rows_by_turns():
    assert_trains_alike(two_kinds, replicated, run_eagerly=True)


def squares(y, outputs):
    return keras.ops.mean(outputs**2, -1)


@pytest.mark.parametrize(
    "place",
    [
        replicated,
        lambda make: tfparallel.pipeline_parallel(make, DEVICES[:2], 3, schedule="gpipe"),
        lambda make: tfparallel.pipeline_parallel(make, DEVICES[:2], 3, schedule="1f1b"),
    ],
    ids=["data", "gpipe", "1f1b"],
)
def test_a_loss_of_pieces_needs_one_row_per_example(place):
    model = place(build)
    model.compile("sgd", squares)
    x, y = data()
    with pytest.raises(ValueError, match=r"one row per example\. .* an output of 3 rows per exa"):
        model.fit(x, y[:, 0], batch_size=4, verbose=0)


def test_a_number_that_is_not_proved_must_be_one():
    x, _ = data()
    model = replicated(build, check_rows=False)
    with pytest.raises(ValueError, match="fixed number of rows per example"):
        model.predict(x, batch_size=4, verbose=0)
    single = replicated(lambda: build(last=layers.Flatten), check_rows=False)
    expected = seeded(lambda: build(last=layers.Flatten)).predict(x, verbose=0)
    predicted = single.predict(x, batch_size=4, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-12, atol=1e-14)


def test_the_proof_tells_how_many_rows_an_example_has():
    model = replicated(build)
    assert rows_per_example(model) is None
    model.predict(data()[0], verbose=0)
    assert rows_per_example(model) == [3]
