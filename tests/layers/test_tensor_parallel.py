"""Layers in parts: the weights of one device, each part where it should be."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.layers.variable import SplitVariable, parts_of
from tfparallel.placement.audit import device_of, short

pytestmark = pytest.mark.slow

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
NUM_EXAMPLES, NUM_CLASSES = 20, 7


@pytest.fixture(autouse=True)
def in_float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def pairs():
    """Two pairs with what works feature by feature in between, and units that 3 do not divide."""
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(7, name="a", kernel_constraint=keras.constraints.MaxNorm(0.5))(x)
    x = layers.BatchNormalization(name="normalize")(x)
    x = layers.PReLU(name="rectify")(x)
    x = layers.Dropout(0.4, name="drop")(x)
    x = layers.Dense(5, activation="tanh", name="b", kernel_regularizer="l2")(x)
    x = layers.Dense(4, activation="gelu", use_bias=False, name="c")(x)
    x = layers.Dense(5, use_bias=False, name="d")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


def convolutions():
    """Channels in parts through pooling, padding and a depthwise convolution; a skip connection."""
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(x)
    y = layers.Conv2D(5, 3, padding="same", name="a", use_bias=False)(x)
    y = layers.BatchNormalization(name="normalize")(y)
    y = layers.ReLU(6.0, name="rectify")(y)
    y = layers.ZeroPadding2D(name="pad")(y)
    y = layers.DepthwiseConv2D(3, depth_multiplier=2, name="deep", activation="relu")(y)
    y = layers.Conv2D(4, 1, name="b")(y)
    x = layers.Add(name="skip")([x, y])
    x = layers.Conv2D(8, 3, strides=2, name="c")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(8, activation="relu", name="d")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


def attention():
    """Heads that 2 and 3 devices do not divide, dropout on the scores, a mask, a model in a model."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Reshape((12, 6), name="rows")(inputs)
    x = layers.Masking(0.0, name="mask")(x)
    x = layers.MultiHeadAttention(5, 3, dropout=0.3, name="attend")(x, x, use_causal_mask=True)
    x = layers.GroupQueryAttention(3, 4, 2, name="grouped")(x, x)
    inner = keras.Sequential(
        [keras.Input((12, 6)), layers.Dense(9, activation="relu"), layers.Dense(6)], name="inner"
    )
    x = layers.Add(name="skip")([x, inner(x)])
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


BUILDERS = [pairs, convolutions, attention]


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_EXAMPLES, 6, 6, 2))
    x[::3, 4:] = 0  # For the mask.
    return x, np.arange(NUM_EXAMPLES) % NUM_CLASSES


def compile_model(model, optimizer=keras.optimizers.Adam, **options):
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(optimizer(0.01, **options), loss, metrics=["accuracy"])
    return model


def train(model, **options):
    x, y = data()
    options = {"epochs": 2} | options
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options).history
    return history, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def seeded(build):
    keras.utils.set_random_seed(3)
    return build()


def assert_equal(found, expected):
    for name in expected[0]:
        np.testing.assert_allclose(found[0][name], expected[0][name], rtol=1e-11, err_msg=name)
    assert len(found[1]) == len(expected[1])
    for value, wanted in zip(found[1], expected[1], strict=True):
        # A bias before batch normalization, or of an attention key, has no true gradient: noise.
        np.testing.assert_allclose(value, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda f: f.__name__)
def test_it_trains_to_the_weights_of_one_device(build, num_devices):
    expected = train(compile_model(seeded(build)))
    model = tfparallel.tensor_parallel(lambda: seeded(build), DEVICES[:num_devices])
    for variable in model.variables:
        if isinstance(variable, SplitVariable):
            found = [short(part.value.device) for part in variable.parts]
            assert found == DEVICES[:num_devices]
    assert_equal(train(compile_model(model)), expected)


def test_what_is_split():
    def split(build, num_devices):
        return tfparallel.tensor_parallel(build, DEVICES[:num_devices]).split

    features = ["normalize", "rectify", "drop"]
    assert split(pairs, 2) == {
        "a": "column", **dict.fromkeys(features, "features"), "b": "row",
        "c": "column", "d": "row", "e": "column, gathered",
    }  # fmt: skip
    assert split(convolutions, 2) == {
        "stem": "column, gathered",
        "a": "column",
        **dict.fromkeys(["normalize", "rectify", "pad", "deep"], "features"),
        "b": "row",
        "c": "column",
        "pool": "features",
        "d": "row",
        "e": "column, gathered",
    }
    # Two groups of heads are too few for three devices.
    found = split(attention, 3)
    assert found["attend"] == "heads" and "grouped" not in found
    assert [kind for name, kind in found.items() if name.startswith("dense")] == ["column", "row"]
