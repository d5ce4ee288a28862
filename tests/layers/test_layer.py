"""A split layer, to whoever is not the next layer of its model."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

DEVICES = ["CPU:0", "CPU:1"]


def pair():
    x = inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", name="a")(x)
    x = layers.BatchNormalization(name="normalize")(x)
    return keras.Model(inputs, layers.Dense(3, name="b")(x))


def attention():
    x = inputs = keras.Input((5, 6))
    return keras.Model(inputs, layers.MultiHeadAttention(2, 3, name="attend")(x, x))


def split(build=pair):
    return tfparallel.tensor_parallel(lambda: seeded(build), DEVICES)


def test_a_submodel_reads_the_whole():
    x = np.random.default_rng(0).normal(size=(12, 6))
    results = []
    for model in (seeded(pair), split()):
        keras.utils.set_random_seed(1)
        submodel = keras.Model(model.inputs, model.get_layer("normalize").output)
        headed = keras.Model(model.inputs, layers.Dense(2)(model.get_layer("a").output))
        headed.compile("adam", "mse")
        history = headed.fit(x, x[:, :2], batch_size=5, shuffle=False, verbose=0).history
        predicted = [submodel.predict(x, verbose=0), np.array(model.get_layer("a")(x))]
        results.append((history, [*state_of(headed), *model.get_weights(), *predicted]))
    assert_equal(*results)


def test_a_layer_that_calls_another_of_the_model_reads_the_whole():
    @keras.saving.register_keras_serializable("test_layer")
    class Squared(keras.Layer):
        """Calls a layer that the model calls, too."""

        def __init__(self, inner, **options):
            super().__init__(**options)
            self.inner = inner

        def call(self, inputs):
            return keras.ops.square(self.inner(inputs))

    def build():
        inputs = keras.Input((6,))
        first = layers.Dense(6, name="a")
        x = layers.Dense(6, name="b")(first(inputs))
        return keras.Model(inputs, layers.Dense(2)(layers.Add()([x, Squared(first)(inputs)])))

    x = np.random.default_rng(0).normal(size=(12, 6))
    results = []
    for make in (lambda: seeded(build), lambda: split(build)):
        model = make()
        model.compile("adam", "mse")
        history = model.fit(x, x[:, :2], batch_size=5, shuffle=False, verbose=0).history
        results.append((history, state_of(model)))
    assert_equal(*results)


@pytest.mark.parametrize("method", ["enable_lora", "quantize"])
@pytest.mark.parametrize("inside", [False, True])
def test_weights_of_a_split_layer_are_all_that_it_has(method, inside):
    layer = split(attention).get_layer("attend")._query_dense if inside else split().get_layer("a")
    argument = 2 if method == "enable_lora" else "int8"
    with pytest.raises(ValueError, match=rf"must keep.*Received: {method}\(\).*plain model"):
        getattr(layer, method)(argument)


def test_what_a_split_layer_computes_is_set_before():
    model = split()
    for name, attribute, value in [("normalize", "momentum", 0.5), ("a", "activation", None)]:
        with pytest.raises(ValueError, match=f"before it is split. Received: {attribute}={value}"):
            setattr(model.get_layer(name), attribute, value)
    model.get_layer("a").trainable = False
    assert [v.path for v in model.trainable_variables] == [
        "normalize/gamma", "normalize/beta", "b/kernel", "b/bias",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no activity regularizer, LoRA, quantization or groups"):
        tfparallel.tensor_parallel(with_lora, DEVICES, split={"attend": "heads"})


def with_lora():
    model = attention()
    model.get_layer("attend")._value_dense.enable_lora(2)
    return model


def test_layers_that_are_not_split():
    def one_slope():
        x = inputs = keras.Input((6,))
        x = layers.Dense(8, name="a")(x)
        x = layers.PReLU(shared_axes=[1], name="rectify")(x)
        return keras.Model(inputs, layers.Dense(1, name="b")(x))

    def headed():
        model = with_lora()
        return keras.Model(model.inputs, layers.Dense(4, name="b")(model.output))

    assert split(headed).split == {"b": "column, gathered"}
    assert split(one_slope).split == {"a": "column, gathered"}


def test_an_activation_with_weights_is_trained():
    def build():
        slopes = layers.PReLU(alpha_initializer="uniform")
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), layers.Dense(5, activation=slopes)]
        )

    x = np.random.default_rng(0).normal(size=(12, 6))
    results = []
    for make in (lambda: seeded(build), lambda: split(build)):
        model = make()
        model.compile("adam", "mse")
        history = model.fit(x, x[:, :5], batch_size=5, shuffle=False, verbose=0).history
        results.append((history, state_of(model)))
    assert_equal(*results)
