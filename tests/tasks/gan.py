"""A generative adversarial network with its own training step.

Two optimizers as attributes, an overridden `compile`, raw losses without
`compute_loss`: the code of Keras's own example, at the size of scikit-learn's digits.
The noise is part of the data, so that every form trains on the same draws.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

LATENT = 8
NUM_EXAMPLES = 500


class Gan(keras.Model):
    """A generator and a discriminator that are trained against each other."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(32, name="g_hidden"),
                layers.BatchNormalization(name="g_norm"),
                layers.LeakyReLU(name="g_relu"),
                layers.Dense(64, activation="sigmoid", name="g_pixels"),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(32, name="d_hidden"),
                layers.LeakyReLU(name="d_relu"),
                layers.Dense(1, name="d_logit"),
            ],
            name="discriminator",
        )
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def call(self, noise, training=False):
        return self.discriminator(self.generator(noise, training=training), training=training)

    def train_step(self, data):
        noise, real = data
        fake = self.generator(noise, training=True)
        images = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate([ops.ones_like(fake[:, :1]), ops.zeros_like(fake[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))

        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.loss_fn(ops.zeros_like(judged), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))

        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def test_step(self, data):
        noise, real = data
        judged = self(noise, training=False)
        d_loss = self.loss_fn(ops.zeros_like(judged), self.discriminator(real, training=False))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(self.loss_fn(ops.zeros_like(judged), judged))
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def build_model():
    return Gan(name="gan")


def compile_model(model):
    model.compile(
        d_optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
        g_optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )


def load_data():
    pixels, _ = load_digits(return_X_y=True)
    real = (pixels / 16.0)[: NUM_EXAMPLES + 100]
    noise = np.random.default_rng(0).normal(size=(len(real), LATENT))
    return (noise[:NUM_EXAMPLES], real[:NUM_EXAMPLES]), (noise[NUM_EXAMPLES:], real[NUM_EXAMPLES:])
