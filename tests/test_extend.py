"""A class that extends another: what is made from it is of the original class."""

import copy
import pickle

import keras
import numpy as np
import pytest

import tfparallel
from tests.cloning.test_copy_state import around, every_builder
from tfparallel.extend import extend, extended_attributes, original_class


class Noting:
    def call(self, inputs):
        self.noted = True
        return super().call(inputs)


def test_what_is_made_from_an_extended_class_is_not_extended():
    layer = extend(keras.layers.Dense(3), Noting, _device="CPU:1")
    extend(layer, type("Twice", (), {}))
    assert original_class(layer) is keras.layers.Dense
    assert extended_attributes(layer) >= {"_device"}
    for other in (type(layer)(3), type(layer).from_config(layer.get_config())):
        assert type(other) is keras.layers.Dense
        assert other.units == 3


class Asks(keras.Model):
    def _take_step(self, data):
        return keras.Model.train_step(self, data)

    def train_step(self, data):
        return self._take_step(data)


def test_names_of_the_user_are_not_hidden():
    """Story: the user's method was replaced by one of the same name."""

    def build():
        inputs = keras.Input((3,))
        return Asks(inputs, keras.layers.Dense(2)(inputs))

    with pytest.raises(ValueError, match=r"tfparallel adds '_take_step' to .* class Asks"):
        tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])
    behind = type("Behind", (keras.layers.Dense, type("Mixin", (), {"noted_by": 1})), {})
    with pytest.raises(ValueError, match="'noted_by'"):
        extend(behind(2), type("Hides", (), {"noted_by": 2}))
    layer = keras.layers.Dense(2)
    layer.noted_by = 1
    with pytest.raises(ValueError, match="'noted_by'"):
        extend(layer, type("Hides", (), {"noted_by": 2}))


@every_builder
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), keras.models.clone_model],
    ids=["deepcopy", "pickle", "clone_model"],
)
def test_copies_of_a_model_are_plain_keras(clone, copied):
    model = clone(around())
    model.compile("sgd", "mse")
    other = copied(model)
    if copied is keras.models.clone_model:  # Which has weights of its own.
        other.set_weights(model.get_weights())
    assert not any(
        kind.__module__.startswith("tfparallel")
        for part in [other, other.optimizer, *other.layers]
        for kind in type(part).__mro__
    )
    x = np.random.default_rng(1).normal(size=(5, 6))
    np.testing.assert_allclose(other(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["model", "pipeline", "tensor"])
def test_placed_layers_are_not_quantized(form):
    """Story: Keras warned that it quantizes no class of another name, and left all in float."""
    builder = getattr(tfparallel, f"{form}_parallel")
    model = builder(around, ["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="Placed layers cannot be quantized"):
        model.quantize("int8")


def test_replicated_layers_are_quantized():
    model = tfparallel.data_parallel(around, devices=["CPU:0", "CPU:1"])
    plain = around()
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        each.quantize("int8")
    assert [str(w.dtype) for w in model.weights] == [str(w.dtype) for w in plain.weights]
    x = np.random.default_rng(1).normal(size=(5, 6))
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-4,
                               atol=1e-5)  # fmt: skip
