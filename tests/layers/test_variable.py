"""A weight in parts, to whoever knows no parts: a tape, an optimizer, a checkpoint."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tests.comparison import seeded

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def text():
    """A table, heads, a pair and what is between it, split in every way that cuts weights."""
    ids = keras.Input((4,), dtype="int64")
    x = layers.Embedding(7, 4, name="embed")(ids)
    x = layers.MultiHeadAttention(3, 3, name="attend")(x, x)
    x = layers.Flatten()(x)
    x = layers.Dense(8, activation="tanh", name="a", kernel_regularizer="l2",
                     kernel_constraint="unit_norm")(x)  # fmt: skip
    x = layers.BatchNormalization(name="normalize")(x)
    return keras.Model(ids, layers.Dense(3, name="b")(x))


def data():
    generator = np.random.default_rng(0)
    return generator.integers(0, 7, (20, 4)), generator.normal(size=(20, 3))


def split(num_devices=2):
    return tfparallel.tensor_parallel(lambda: seeded(text), DEVICES[:num_devices])


def loop(model, optimizer, in_graph):
    """TensorFlow's custom training loop, as its tutorial has it."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean((model(x, training=True) - y) ** 2) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = tf.function(step) if in_graph else step
    x, y = map(tf.constant, data())
    losses = [float(step(x[k : k + 8], y[k : k + 8])) for _ in range(2) for k in range(0, 20, 8)]
    return losses, model.get_weights()


def assert_close(actual, expected):
    for value, expected_value in zip(actual, expected, strict=True):
        # A bias of an attention key has no true gradient: noise.
        np.testing.assert_allclose(value, expected_value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"weight_decay": 0.1, "clipnorm": 0.3, "use_ema": True}),
        ("SGD", {"momentum": 0.9, "global_clipnorm": 0.1}),
    ],
)
def test_a_loop_of_the_users_own(name, options, compiled, in_graph):
    def make():
        return getattr(keras.optimizers, name)(0.01, **options)

    results = []
    for model in (seeded(text), split()):
        if compiled:
            # The model's own optimizer holds slots in parts.
            model.compile(make(), "mse")
            optimizer = model.optimizer
        else:
            optimizer = make()
        optimizer.build(model.trainable_variables)
        results.append(loop(model, optimizer, in_graph))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_close(actual, expected)


def test_an_optimizer_that_looks_at_whole_weights_sees_them_in_a_loop():
    results = []
    for model in (seeded(text), split(3)):
        results.append(loop(model, keras.optimizers.Lamb(0.01), in_graph=False))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_close(actual, expected)


def test_gradients_are_those_of_the_whole():
    gradients = []
    x, _ = data()
    for model in (seeded(text), split(3)):
        kernel, table = model.get_layer("a").kernel, model.get_layer("embed").embeddings
        with tf.GradientTape(persistent=True) as tape:
            total = ops.mean(model(x) ** 2)
            alone = ops.mean(kernel**2)
        sparse = tape.gradient(total, table)
        assert isinstance(sparse, tf.IndexedSlices)
        assert tape.gradient(alone, table) is None
        gradients.append([tape.gradient(total, kernel), tape.gradient(alone, {"k": kernel})["k"],
                      tf.convert_to_tensor(sparse)])  # fmt: skip
    assert_close(gradients[1], gradients[0])


def checkpointed(model):
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


@pytest.mark.parametrize(
    ("written_by", "read_by"),
    [(split, split), (lambda: seeded(text), split), (split, lambda: seeded(text)),
     (split, lambda: split(3))],
    ids=["split", "from plain", "to plain", "to three devices"],
)  # fmt: skip
def test_a_checkpoint_holds_whole_weights_and_slots(written_by, read_by, tmp_path):
    x, y = data()
    model = written_by()
    checkpoint = checkpointed(model)
    model.fit(x, y, verbose=0)
    path = checkpoint.save(tmp_path / "written")
    again = read_by()
    restored = checkpointed(again)
    restored.restore(path).assert_existing_objects_matched().assert_consumed()
    for read, written in zip(
        [*again.variables, *again.optimizer.variables],
        [*model.variables, *model.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(read.numpy(), written.numpy(), err_msg=read.path)


def test_an_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold whole weights. Received.*load_model"):
        split().export(tmp_path / "exported", verbose=False)
