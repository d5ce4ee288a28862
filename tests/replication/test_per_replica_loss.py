"""Losses and metrics are computed where the rows are; outputs are joined only where they must."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, metrics

import tfparallel

THREE = ["CPU:0", "CPU:1", "CPU:2"]
WORDS = 23  # No other tensor of the model has this size in its shape.


def build():
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS + 1, 6, mask_zero=True)(ids)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(ids, layers.Dense(WORDS, activation="softmax", name="words")(x))


def text(num_examples=19, length=4):
    random = np.random.default_rng(0)
    ids = random.integers(0, WORDS, (num_examples, length)).astype("int32")
    return ids, random.integers(0, WORDS, (num_examples, length)).astype("int32")


def compiled(model, loss="sparse_categorical_crossentropy", **kwargs):
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss, **kwargs)
    return model


def joined_in(model) -> int:
    """How many tensors a step of the model joins that hold a probability for each word."""

    @tf.function
    def step(x, y):
        with model.strategy.program():
            return model.train_step((x, y))

    graph = step.get_concrete_function(*map(tf.constant, text())).graph
    return sum(
        op.type == "ConcatV2" and op.outputs[0].shape.rank == 3 and op.outputs[0].shape[-1] == WORDS
        for op in graph.get_operations()
    )


def trained(model, data, **kwargs):
    history = model.fit(*data, batch_size=7, epochs=2, shuffle=False, verbose=0, **kwargs).history
    return history, model.get_weights()


def own_metric(y, outputs):
    return keras.ops.max(outputs, axis=-1)


def own_loss(y, outputs):
    return losses.sparse_categorical_crossentropy(y, outputs)


def of_all_rows(y, outputs):
    return own_loss(y, outputs) * keras.ops.max(outputs)


def crossentropy(**kwargs):
    return losses.SparseCategoricalCrossentropy(**kwargs)


# Made when the test runs, in its precision.
CHOICES = {
    "metrics": lambda: {"metrics": ["accuracy", metrics.SparseCategoricalCrossentropy()]},
    "sum": lambda: {"loss": crossentropy(reduction="sum", ignore_class=2)},
    "weighted mean": lambda: {"loss": crossentropy(reduction="mean_with_sample_weight")},
    "own loss": lambda: {"loss": own_loss},
    "own metric": lambda: {"metrics": [own_metric]},
    "loss of all rows": lambda: {"loss": of_all_rows},
    "metric of all rows": lambda: {"metrics": [of_all_rows]},
}
WHY = {
    "loss of all rows": "loss 'of_all_rows' might mix examples: operation Max",
    "metric of all rows": "metric 'of_all_rows' might not be a sum",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_it_trains_as_one_device_and_joins_where_it_must(in_float64, name):
    seen, weights = [], np.linspace(0.5, 2, 19 * 4).reshape(19, 4)
    for devices in (["CPU:0"], THREE):
        keras.utils.set_random_seed(3)
        model = compiled(tfparallel.data_parallel(build, devices=devices), **CHOICES[name]())
        seen.append(trained(model, text(), sample_weight=weights))
    for key, values in seen[0][0].items():
        np.testing.assert_allclose(seen[1][0][key], values, rtol=1e-12)
    for one, other in zip(seen[0][1], seen[1][1], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)
    assert (model.why_joined or "").startswith(WHY.get(name, ""))
    assert (joined_in(model) > 0) == (name in WHY)


@pytest.mark.slow
def test_a_metric_of_infinite_values():
    """A metric grows from zero; a difference of states would be infinity less infinity."""
    x, y = np.ones((7, 2)), np.array([[0.0]] * 5 + [[np.inf]] * 2)
    seen = []
    for devices in (["CPU:0"], THREE):
        model = tfparallel.data_parallel(
            lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1, "relu", name="d")]),
            devices=devices,
        )
        model.compile("sgd", "mse", metrics=[metrics.MeanAbsoluteError(name="distance")])
        first = model.evaluate(x, 0 * x[:, :1], batch_size=4, verbose=0, return_dict=True)
        assert np.isfinite(first["distance"])
        seen.append(model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)["distance"])
        again = model.evaluate(x, 0 * x[:, :1], batch_size=4, verbose=0, return_dict=True)
        assert again == first
    assert seen == [np.inf, np.inf]


def test_hinge_looks_at_all_labels():
    """Keras takes labels of 0 and 1 for -1 and 1 only if *all* of a batch are."""
    y = np.array([[0.0], [1.0], [-1.0]])
    whole = losses.hinge(y, np.zeros((3, 1)))
    parts = np.concatenate([losses.hinge(y[:2], np.ones((2, 1))), losses.hinge(y[2:], [[1.0]])])
    assert not np.allclose(losses.hinge(y, np.ones((3, 1))), parts), whole
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1)]), devices=THREE
    )
    model.compile("sgd", "hinge")
    model.fit(np.ones((6, 2)), np.ones((6, 1)), verbose=0)
    assert model.why_joined.startswith("loss 'hinge' might mix examples: operation All")


@pytest.mark.slow
def test_targets_of_other_sizes():
    """Of a fixed size the outputs are joined, as on one device; otherwise it is an error."""
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((2,)), layers.Dense(3)]), devices=THREE
    )
    model.compile("sgd", "mse")
    x, one_for_all = tf.ones((6, 2)), tf.ones((1, 3))
    batches = tf.data.Dataset.from_tensors((x, one_for_all))
    model.fit(batches, verbose=0)
    assert model.why_joined == "inputs and targets have [1, 6] rows"
    specs = (tf.TensorSpec((None, 2)), tf.TensorSpec((None, 3)))
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([(x.numpy(), one_for_all.numpy())]), output_signature=specs
    )
    with pytest.raises(ValueError, match=r"one row per example\..*\.$"):
        model.fit(unknown, verbose=0)


class TwoRows(layers.Layer):
    """Multiplies by a constant of two rows: of batches of two, or of one row by both."""

    def call(self, x):
        return x * keras.ops.convert_to_tensor([[1.0], [3.0]], x.dtype)


def test_outputs_with_more_rows_than_examples():
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((2,)), TwoRows(), layers.Dense(1)]),
        devices=["CPU:0", "CPU:1"],
        check_rows=False,
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"one row per example\..*\.$"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), batch_size=2, verbose=0)


@dataclasses.dataclass
class Callable:
    """A loss that has no hash, as a dataclass has none."""

    scale: float = 2.0

    def __call__(self, y, outputs):
        return self.scale * keras.ops.square(y - outputs)


def factors():
    """The product of a user's and an item's factors: outputs of shape (batch,)."""
    user, item = keras.Input((3,)), keras.Input((3,))
    rows = layers.Dense(2)(user) * layers.Dense(2)(item)
    return keras.Model([user, item], keras.ops.sum(rows, axis=-1))


def column(activation=None):
    return lambda: keras.Sequential([keras.Input((3,)), layers.Dense(1, activation)])


def classes():
    return keras.Sequential([keras.Input((3,)), layers.Dense(3, "softmax")])


def two(regularizer=None):
    def build():
        inputs = keras.Input((3,))
        dense = [layers.Dense(1, kernel_regularizer=regularizer, name=name) for name in "ab"]
        return keras.Model(inputs, [dense[0](inputs), dense[1](inputs)])

    return build


def with_a_call_of_its_own():
    loss = losses.MeanSquaredError()
    loss.call = lambda y, p: keras.ops.square(y - p)[:, 0] * keras.ops.max(keras.ops.abs(y - p))
    return loss


def shared():
    metric = metrics.TruePositives(thresholds=0.1)
    return {"loss": ["mse", "mse"], "metrics": [[metric], [metric]]}


NUMBERS = np.random.default_rng(2).uniform(0.1, 1, (11, 3))
SUMS = NUMBERS.sum(axis=1) / 2
THIRDS = np.arange(11)[:, None] % 3
# A model, what it is compiled with, its inputs and targets, and why outputs are joined.
SHAPES = {
    "targets without an axis": (column(), lambda: {"loss": "mse"}, NUMBERS, SUMS, None),
    "a metric that broadcasts": (
        column("sigmoid"),
        lambda: {"loss": "mse", "metrics": ["poisson", "kl_divergence", "categorical_hinge"]},
        *(NUMBERS, SUMS, "metric 'poisson' might not be a sum"),
    ),
    "outputs without an axis": (
        factors,
        lambda: {"loss": "mse", "metrics": ["mae", "cosine_similarity"]},
        *([NUMBERS, NUMBERS[::-1].copy()], SUMS, "one value for the whole batch"),
    ),
    "a loss that broadcasts": (
        classes,
        lambda: {"loss": losses.CategoricalGeneralizedCrossEntropy()},
        *(NUMBERS, THIRDS, "loss 'categorical_generalized_cross_entropy' might mix"),
    ),
    "a metric of two outputs": (two(), shared, NUMBERS, [SUMS[:, None], SUMS[:, None] / 2], None),
    "no losses": (
        two("l2"), lambda: {"loss": [None, None]}, NUMBERS, [SUMS, SUMS], "there is no loss",
    ),
    "a loss without a hash": (
        column(), lambda: {"loss": Callable()}, NUMBERS, SUMS, None,
    ),
    "a loss with a call of its own": (
        column(), lambda: {"loss": with_a_call_of_its_own()}, NUMBERS, SUMS[:, None],
        "might mix examples",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_objects_that_are_not_the_usual_ones(in_float64, name):
    build, compile_with, x, y, reason = SHAPES[name]
    seen = []
    for devices in (["CPU:0"], THREE):
        keras.utils.set_random_seed(3)
        model = tfparallel.data_parallel(build, devices=devices)
        model.compile(keras.optimizers.SGD(0.05), **compile_with())
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
        seen.append(([*history.values(), *evaluated.values()], model.get_weights()))
    for one, other in zip(*(sum(map(list, each), []) for each in seen), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)
    assert model.why_joined is None if reason is None else reason in model.why_joined


def test_weights_of_examples_that_meet_another_axis(in_float64):
    """Weights of shape (3,) weigh places, not examples, of losses of shape (3, 3)."""
    weights, weight = [], np.array([0.5, 1.0, 2.0])
    x = np.random.default_rng(5).normal(size=(3, 3, 2))
    for devices in (["CPU:0"], THREE):
        keras.utils.set_random_seed(3)
        model = tfparallel.data_parallel(
            lambda: keras.Sequential([keras.Input((3, 2)), layers.Dense(2)]), devices=devices
        )
        model.compile("sgd", "mse")
        batches = tf.data.Dataset.from_tensors((x, x, weight))
        model.fit(batches, epochs=3, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_way_is_told_of_each_compile_and_of_fit_before_evaluate(caplog):
    model = tfparallel.data_parallel(column(), devices=THREE)
    with caplog.at_level("INFO", logger="absl"):
        model.compile("sgd", own_square)
        model.fit(NUMBERS, SUMS[:, None], verbose=0)
        assert model.why_joined.startswith("loss 'own_square' might mix examples: ")
        model.compile("sgd", "mse")
        model.evaluate(NUMBERS, SUMS[:, None], verbose=0)
        model.fit(NUMBERS, SUMS[:, None], verbose=0)
    assert model.why_joined is None
    messages = [record.getMessage() for record in caplog.records if "the outputs" in record.message]
    assert [line.partition(", ")[2].partition(": operation")[0] for line in messages] == [
        "fit: gathering the outputs of the whole batch on one device (44 bytes per batch), because "
        "loss 'own_square' might mix examples",
        "evaluate: the outputs stay on the devices that computed them.",
        "fit: the outputs stay on the devices that computed them.",
    ]


def own_square(y, outputs):
    """Looks at all rows, to no effect."""
    return keras.ops.square(y - outputs) + 0 * keras.ops.max(outputs)


class Spectrum(layers.Layer):
    """Complex numbers."""

    def call(self, inputs):
        return tf.signal.fft(tf.cast(inputs, tf.complex64))

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, "complex64")


class InParts(keras.Model):
    """Calls its layers in its step, each of which is spread over the replicas."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2, kernel_initializer="ones")
        self.spectrum = Spectrum()

    def call(self, x):
        return self.spectrum(self.dense(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(loss_of_spectra(y, self(x)))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def loss_of_spectra(y, spectra):
    return tf.reduce_mean(tf.abs(spectra - tf.cast(y, spectra.dtype)) ** 2, -1)


def spectra():
    ones = layers.Dense(2, kernel_initializer="ones")
    return keras.Sequential([keras.Input((3,)), ones, Spectrum()])


@pytest.mark.slow
@pytest.mark.parametrize("build", [spectra, InParts])
def test_outputs_may_be_complex(build):
    weights = []
    for model in (build(), tfparallel.data_parallel(build, devices=THREE)):
        model.compile("sgd", loss_of_spectra)
        model.fit(NUMBERS, SUMS[:, None], verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


class BuiltByItsStep(keras.Model):
    """Calls its layer in its step, and is never called itself."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, name="own")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.dense(x) - y) ** 2)
        weights = self.dense.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.slow
def test_a_look_at_the_outputs_builds_no_model_that_its_step_builds():
    paths = []
    for build in (BuiltByItsStep, lambda: tfparallel.data_parallel(BuiltByItsStep, devices=THREE)):
        model = build()
        model.compile("sgd")
        model.fit(NUMBERS, SUMS[:, None], verbose=0)
        paths.append([variable.path for variable in model.dense.variables])
    assert paths[0] == paths[1]


class WithNothing(keras.Model):
    def build(self, shape):
        self.dense = layers.Dense(1)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x), None


def test_an_output_none_is_refused_in_words():
    model = tfparallel.data_parallel(WithNothing, devices=THREE)
    model.compile("sgd", ["mse", None])
    model.fit(NUMBERS, SUMS[:, None], verbose=0)  # As in Keras, no loss reads it.
    with pytest.raises(ValueError, match="returns None"):
        model.predict(NUMBERS, verbose=0)
