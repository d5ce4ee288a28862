"""Losses and metrics are computed where the rows are; outputs are joined only where they must."""

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


def crossentropy(**kwargs):
    return losses.SparseCategoricalCrossentropy(**kwargs)


# Made when the test runs, in its precision.
CHOICES = {
    "metrics": lambda: {"metrics": ["accuracy", metrics.SparseCategoricalCrossentropy()]},
    "sum": lambda: {"loss": crossentropy(reduction="sum", ignore_class=2)},
    "weighted mean": lambda: {"loss": crossentropy(reduction="mean_with_sample_weight")},
    "own loss": lambda: {"loss": own_loss},
    "own metric": lambda: {"metrics": [own_metric]},
}
WHY = {
    "own loss": "loss 'own_loss' may look at several examples",
    "own metric": "metric 'own_metric' may not be a sum over the examples",
}


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
    assert model.why_joined == WHY.get(name)
    assert (joined_in(model) > 0) == (name in WHY)


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
    assert model.why_joined == "loss 'hinge' may look at several examples"


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
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row for each example"):
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
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row for each example"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), batch_size=2, verbose=0)
