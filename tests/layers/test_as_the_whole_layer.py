"""What Keras's whole layers and losses do at the edges, split layers do, too."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import seeded

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture(name="in_float16")
def mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def split(build, **options):
    return tfparallel.tensor_parallel(build, DEVICES, **options)


def test_a_loss_that_casts_probabilities_clips_them(in_float16):
    """Keras finds no logits behind a cast: a wrong class of probability 0 costs log 1e-7."""

    def build():
        return keras.Sequential([keras.Input((2,)), layers.Dense(4, activation="softmax")])

    losses = []
    for make in (build, lambda: split(build)):
        model = seeded(make)
        model.set_weights([np.array([[40.0, 0, 0, 0], [0, 0, 0, 0]]), np.zeros(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
        losses.append(model.evaluate(np.array([[1.0, 0.0]]), np.array([1]), verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) == pytest.approx(16.1, abs=0.1)


def test_a_loss_in_parts_takes_one_label_per_softmax():
    def build():
        inputs = keras.Input((5, 6))
        return keras.Model(inputs, layers.Dense(4)(inputs))

    x, y = np.zeros((8, 5, 6)), np.zeros((8, 1), int)
    for make in (build, lambda: split(build)):
        model = make()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with pytest.raises(ValueError, match="must have the same shape"):
            model.fit(x, y, verbose=0)


def test_a_mean_of_pixels_does_not_overflow(in_float16):
    def build():
        inputs = keras.Input((300, 300, 1))
        rows = layers.Conv2D(2, 1, kernel_initializer="ones")(inputs)
        return keras.Model(inputs, layers.GlobalAveragePooling2D()(rows))

    x = np.full((1, 300, 300, 1), 3.0)
    predicted = split(build, convolutions="height").predict(x, verbose=0)
    np.testing.assert_allclose(predicted, build().predict(x, verbose=0), rtol=1e-3)


@pytest.mark.parametrize("behind", ["mean", "add", "normalize"])
def test_rows_that_a_dropout_hands_on_stay_rows_in_inference(behind):
    def build():
        inputs = keras.Input((6, 5, 2))
        rows = layers.Dropout(0.5)(layers.Conv2D(4, 3, padding="same")(inputs))
        if behind == "add":
            rows = layers.Add()([rows, rows])
        elif behind == "normalize":
            rows = layers.BatchNormalization()(rows)
        return keras.Model(inputs, layers.GlobalAveragePooling2D()(rows))

    x, y = np.random.default_rng(0).normal(size=(4, 6, 5, 2)), np.zeros((4, 4))
    plain, model = seeded(build), seeded(lambda: split(build, convolutions="height"))
    for each in (plain, model):
        each.compile("sgd", "mse")
        each.fit(x, y, verbose=0, validation_data=(x, y))
    np.testing.assert_allclose(model.predict(x), plain.predict(x), rtol=1e-4, atol=1e-6)


class Convolved(layers.Layer):
    """A block as people write it, whose layers are split by height."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 3, padding="same", name="conv")
        self.norm = layers.BatchNormalization(name="norm")
        self.mean = layers.GlobalAveragePooling2D(name="mean")

    def build(self, shape):
        self.conv.build(shape)
        self.norm.build((*shape[:-1], 4))
        super().build(shape)

    def call(self, inputs, training=None):
        return self.mean(self.norm(self.conv(inputs), training=training))


@pytest.mark.parametrize("form", ["composite", "pipeline"])
def test_rows_that_were_joined_are_cut_again(form):
    def build():
        inputs = keras.Input((6, 5, 2))
        if form == "composite":
            return keras.Model(inputs, Convolved()(inputs))
        rows = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
        rows = layers.Add(name="add")([rows, rows])
        return keras.Model(inputs, layers.GlobalAveragePooling2D(name="mean")(rows))

    def on_a_mesh():
        by_height = {"conv": "height"}  # And the layers behind it.
        return tfparallel.hybrid_parallel(build, tfparallel.Mesh(tensor=2), split=by_height)

    x, y = np.random.default_rng(0).normal(size=(4, 6, 5, 2)), np.zeros((4, 4))
    parallel = on_a_mesh if form == "pipeline" else lambda: split(build, convolutions="height")
    plain, model = seeded(build), seeded(parallel)
    for each in (plain, model):
        each.compile("sgd", "mse")
        each.fit(x, y, epochs=2, verbose=0)
    np.testing.assert_allclose(model.predict(x), plain.predict(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("word", "dtype"), [(-13, "int32"), (-13, "int64"), (10, "int64")])
def test_a_word_outside_of_the_vocabulary_raises(word, dtype):
    def build():
        inputs = keras.Input((1,), dtype=dtype)
        return keras.Model(inputs, layers.Embedding(10, 4)(inputs))

    for make in (build, lambda: split(build)):
        with pytest.raises(Exception, match="not in"):
            make().predict(np.array([[word]]), verbose=0)


class Ridge(keras.regularizers.Regularizer):
    """Without `get_config`, which Keras requires only to save it."""

    def __call__(self, weight):
        return 0.1 * keras.ops.sum(weight**2)


def test_functions_that_keras_cannot_serialize_are_called_on_the_whole():
    leaky = functools.partial(keras.activations.leaky_relu, negative_slope=0.1)

    def build():
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, activation=leaky, kernel_regularizer=Ridge())(inputs)
        return keras.Model(inputs, layers.Dense(2)(hidden))

    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.zeros((6, 2))
    plain, model = seeded(build), seeded(lambda: split(build))
    for each in (plain, model):
        each.compile("sgd", "mse")
        each.fit(x, y, epochs=3, verbose=0)
    for one, other in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)
