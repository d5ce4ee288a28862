"""Models of built models, without a config: the pattern of Keras's examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.cloning.layers import again
from tfparallel.cloning.verify_clone import NotAlike

TWO = ["CPU:0", "CPU:1"]


class AutoEncoder(keras.Model):
    """Two models that are given to it, a step of its own, and no config."""

    def __init__(self, encoder, decoder, weight=0.5, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.weight = weight
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            code = self.encoder(data)
            decoded = self.decoder(code)
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(data - decoded), 1))
            loss += self.weight * tf.reduce_mean(tf.abs(code))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def parts():
    keras.utils.set_random_seed(2)
    encoder = keras.Sequential([keras.Input((6,)), layers.Dense(3, "tanh")], name="encoder")
    decoder = keras.Sequential([keras.Input((3,)), layers.Dense(6)], name="decoder")
    return encoder, decoder


def trained(model):
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    x = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
    history = model.fit(x, epochs=2, batch_size=8, shuffle=False, verbose=0).history
    return history, [*model.encoder.get_weights(), *model.decoder.get_weights()]


@pytest.mark.slow
def test_it_trains_to_the_weights_of_one_device():
    """Story: it was refused as a model without variables, of which it has four."""
    model = AutoEncoder(*parts(), weight=0.25)
    copy = tfparallel.data_parallel(model, devices=TWO)
    assert copy.weight == 0.25 and copy.encoder is not model.encoder
    history, weights = trained(copy)
    expected_history, expected = trained(AutoEncoder(*parts(), weight=0.25))
    # float32; sums over replicas are taken in another order.
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=1e-5)
    for value, reference in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)
    for value, reference in zip(model.encoder.get_weights(), parts()[0].get_weights(), strict=True):
        np.testing.assert_array_equal(value, reference)  # The model given is as it was.


def test_a_model_that_is_given_twice_is_copied_once():
    encoder, _ = parts()
    copy = again(AutoEncoder(encoder, encoder), keras.models.clone_model)
    assert copy.encoder is copy.decoder is not encoder


def test_a_part_that_is_not_built_is_named():
    encoder = keras.Sequential([layers.Dense(3, name="unbuilt")])
    with pytest.raises(ValueError, match="is not built, .*layers without weights: .*unbuilt"):
        tfparallel.data_parallel(AutoEncoder(encoder, parts()[1]), devices=TWO)


class Renaming(AutoEncoder):
    """Keeps what it is given under another name."""

    def __init__(self, first, second):
        super().__init__(first, second)


def test_what_is_kept_under_another_name_is_not_found():
    """Story: Keras's fifteen lines on `get_config` hid what the user could do."""
    message = (
        "requires the arguments that Renaming was created with.*Received: no attribute `first`, "
        "`second`. Pass the function that builds it, or store each argument under its own name "
        r"\(`self.first = first`\)"
    )
    with pytest.raises(NotAlike, match=message) as raised:
        tfparallel.data_parallel(Renaming(*parts()), devices=TWO)
    assert "\n" not in str(raised.value)


def test_a_config_that_lacks_an_argument_is_told_with_keras_reason():
    class Forgetful(Renaming):
        def get_config(self):
            return {"first": self.encoder}

    with pytest.raises(NotAlike, match="(?s)cannot be rebuilt.*positional argument: 'second'"):
        tfparallel.data_parallel(Forgetful(*parts()), devices=TWO)


def test_an_optimizer_has_no_copy():
    class Holding(AutoEncoder):
        def __init__(self, encoder, decoder, optimizer):
            super().__init__(encoder, decoder)
            self.optimizer = optimizer

    model = Holding(*parts(), keras.optimizers.SGD())
    with pytest.raises(NotAlike, match="A SGD passed to the constructor of Holding"):
        again(model, keras.models.clone_model)
