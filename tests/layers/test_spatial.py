"""Pictures in parts along their height: the same rows as of the whole picture."""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import tfparallel
from tests.comparison import seeded
from tfparallel.layers.spatial import _window

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
WINDOWS = [
    *itertools.product(
        [layers.Conv2D, layers.DepthwiseConv2D, layers.MaxPooling2D, layers.AveragePooling2D],
        ["same", "valid"],
        [(3, 1), (3, 2), (2, 3)],
        [1],
    ),
    (layers.Conv2D, "same", (3, 1), 2),
    (layers.Conv2D, "valid", (3, 1), 3),
]


@pytest.mark.slow
def test_windows_of_all_kinds_are_those_of_the_whole_picture():
    """One model a window is slow to build: one model holds them all, side by side."""

    def build(height, num_devices):
        inputs = keras.Input((height, 7, 2))
        outputs, used = [], []
        for index, (cls, padding, (size, stride), dilation) in enumerate(WINDOWS):
            options = {"padding": padding, "strides": stride, "name": f"layer{index}"}
            if cls is layers.Conv2D:
                layer = cls(3, size, dilation_rate=dilation, activation="tanh", **options)
            else:
                layer = cls(size, **options)
            output = layer(inputs)
            used.append(output.shape[1] >= num_devices)
            outputs.append(layers.Flatten()(output))
        return keras.Model(inputs, outputs), used

    for height, num_devices in ((8, 2), (11, 4)):
        plain, used = seeded(lambda h=height, n=num_devices: build(h, n))
        model = tfparallel.tensor_parallel(plain, DEVICES[:num_devices], convolutions="height")
        for index, is_split in enumerate(used):
            assert model.split.get(f"layer{index}") == ("height" if is_split else None)
        x = np.random.default_rng(0).normal(size=(2, height, 7, 2)) - 2  # Below the padding, too.
        expected = plain.predict(x, verbose=0)
        actual = model.predict(x, verbose=0)
        for one, other, case in zip(actual, expected, WINDOWS, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14, err_msg=str(case))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5))
def test_same_padding_covers_each_output_row(length, size, stride):
    layer = layers.MaxPooling2D(size, strides=stride, padding="same")
    window = _window(layer, 0, length)
    number = -(-length // stride)
    last = (number - 1) * stride - window.before + window.extent
    assert last <= length + window.after and window.before <= window.after <= window.before + 1
    assert layer.compute_output_shape((1, length, 1, 1))[1] == number


def network():
    """Everything that stays in rows, up to a mean of all pixels."""
    x = inputs = keras.Input((9, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", name="stem", kernel_regularizer="l2")(x)
    y = layers.BatchNormalization(name="normalize")(x)
    y = layers.Activation("relu", name="rectify")(y)
    y = layers.Dropout(0.4, name="drop")(y)
    y = layers.ZeroPadding2D(((1, 0), (0, 1)), name="pad")(y)
    y = layers.Conv2D(4, 2, name="second", use_bias=False)(y)
    x = layers.Add(name="skip")([x, y])
    x = layers.Concatenate(name="join")([x, y])
    x = layers.AveragePooling2D(3, 2, padding="same", name="halve")(x)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="e")(x))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_it_trains_to_the_weights_of_one_device(num_devices):
    x, y = np.random.default_rng(0).normal(size=(20, 9, 6, 2)), np.arange(20) % 3
    trained = []
    for make in (
        network,
        lambda: tfparallel.tensor_parallel(network, DEVICES[:num_devices], convolutions="height"),
    ):
        model = seeded(make)
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2)
        trained.append(model)
    plain, divided = trained
    names = ["stem", "normalize", "rectify", "drop", "pad", "second", "skip", "join", "halve"]
    assert [n for n, kind in divided.split.items() if kind == "height"] == [*names, "mean"]
    for one, other in zip(plain.variables, divided.variables, strict=True):
        np.testing.assert_allclose(
            other.numpy(), one.numpy(), rtol=1e-9, atol=1e-11, err_msg=one.path
        )
    np.testing.assert_allclose(
        divided.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-9
    )


def test_the_split_of_convolutions_has_a_name():
    with pytest.raises(ValueError, match="must be 'channels' or 'height'. Received: .*'width'"):
        tfparallel.tensor_parallel(network, DEVICES[:2], convolutions="width")


def weights_of_both(make, x, y, learning_rate):
    """The weights on one device, and on two by height."""
    weights = []
    for build in (
        make, lambda: tfparallel.tensor_parallel(make, DEVICES[:2], convolutions="height")
    ):  # fmt: skip
        model = seeded(build)
        model.compile(keras.optimizers.SGD(learning_rate), "mse")
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        weights.append([variable.numpy() for variable in model.variables])
    return model, weights


@pytest.mark.slow
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("kernel", ["zeros", "ones", "glorot_uniform"])
def test_pixels_that_tie_share_the_gradient_of_the_largest(kernel, keepdims):
    """Story: it was shared among the parts, and within each: weights were 0.2 off."""

    def make():
        inputs = keras.Input((7, 7, 1))
        x = layers.Conv2D(2, 2, padding="same", kernel_initializer=kernel, name="conv")(inputs)
        x = layers.GlobalMaxPooling2D(keepdims=keepdims, name="largest")(x)
        return keras.Model(inputs, layers.Dense(1)(x))

    random = np.random.default_rng(0)
    x, y = random.integers(2, size=(12, 7, 7, 1)) * 1.0, random.normal(size=(12, 1, 1, 1))
    model, (plain, divided) = weights_of_both(make, x, y if keepdims else y[:, 0, 0], 0.01)
    assert model.split["largest"] == "height"
    for one, other in zip(plain, divided, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_an_activation_of_ones_own_is_computed_of_the_whole_picture():
    """Story: it was computed part by part; this one subtracts the mean of a picture."""

    def centred(x):
        return (x - keras.ops.mean(x, (1, 2), keepdims=True)) ** 2

    def make():
        inputs = keras.Input((8, 5, 2))
        x = layers.Conv2D(3, 3, padding="same", name="first")(inputs)
        x = layers.Rescaling(0.5)(x)  # Keras hands it no parts.
        x = layers.Conv2D(3, 3, padding="same", activation=centred, name="second")(x)
        x = layers.Activation(centred, name="third")(x)
        return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))

    random = np.random.default_rng(0)
    x, y = random.normal(size=(12, 8, 5, 2)), random.normal(size=(12, 1))
    model, (plain, divided) = weights_of_both(make, x, y, 1e-3)
    assert "first" in model.split and not {"second", "third"} & set(model.split)
    for one, other in zip(plain, divided, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-11)
