"""Generate handwritten digits with a variational autoencoder and a custom `train_step`.

Parallelism: `data` on two devices (also checked: two workers).
Why: `data` supports a custom `train_step`; it replicates the calls of the networks.

    tfparallel check models/vae.py --parallel=data --num_devices=2
    tfparallel check models/vae.py --parallel=data --num_workers=2
    tfparallel train models/vae.py --parallel=data --num_devices=2

The images are scikit-learn's digits, without their labels. The step draws its noise once for the
whole batch, so any number of devices trains on the same noise. Of the files in `models/`, only this
one imports TensorFlow, for the gradient tape of its step.

References:
    Kingma, Welling. Auto-Encoding Variational Bayes. arXiv 1312.6114, 2013.
"""

import keras
import numpy as np
import tensorflow as tf
from digits_cnn import load_digits
from keras import ops

EPOCHS = 20
SIDE = 8
NUM_LATENTS = 4


@keras.saving.register_keras_serializable(package="tfparallel_models")
class VariationalAutoencoder(keras.Model):
    """An encoder to the mean and the log-variance of a code, and a decoder back to pictures."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder(), decoder()
        self.seeds = keras.random.SeedGenerator(0)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.pixels_tracker = keras.metrics.Mean(name="pixels")
        self.divergence_tracker = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self):
        """What `fit` and `evaluate` reset and tell."""
        return [self.loss_tracker, self.pixels_tracker, self.divergence_tracker]

    def call(self, images):
        """Returns the pictures as the mean code tells them, `(batch, 8, 8, 1)` from 0 to 1."""
        mean, _ = self.encoder(images)
        return ops.sigmoid(self.decoder(mean))

    def losses_of(self, images, training):
        """Returns the cross-entropy of the pixels and the divergence of the code, in nats."""
        mean, log_variance = self.encoder(images, training=training)
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        logits = self.decoder(mean + ops.exp(0.5 * log_variance) * noise, training=training)
        pixels = ops.binary_crossentropy(images, logits, from_logits=True)
        pixels = ops.mean(ops.sum(pixels, axis=(1, 2, 3)))
        terms = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        return pixels, ops.mean(-0.5 * ops.sum(terms, axis=1))

    def train_step(self, data):
        """One update on the images of a batch."""
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            pixels, divergence = self.losses_of(images, training=True)
            loss = pixels + divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.update_metrics(pixels, divergence)

    def test_step(self, data):
        """The same losses, without an update."""
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.update_metrics(*self.losses_of(images, training=False))

    def update_metrics(self, pixels, divergence):
        """Adds a batch's losses to the epoch's means, and returns them."""
        self.loss_tracker.update_state(pixels + divergence)
        self.pixels_tracker.update_state(pixels)
        self.divergence_tracker.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}


def encoder():
    """Returns the network from `(batch, 8, 8, 1)` to mean and log-variance, `(batch, 4)` each."""
    images = keras.Input((SIDE, SIDE, 1), name="image")
    x = keras.layers.Conv2D(
        16, 3, strides=2, padding="same", activation="gelu", name="conv"
    )(images)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(64, activation="gelu", name="hidden")(x)
    mean = keras.layers.Dense(NUM_LATENTS, name="mean")(x)
    log_variance = keras.layers.Dense(NUM_LATENTS, name="log_variance")(x)
    return keras.Model(images, [mean, log_variance], name="encoder")


def decoder():
    """Returns the network from a code, `(batch, 4)`, to a logit for each pixel."""
    code = keras.Input((NUM_LATENTS,), name="code")
    x = keras.layers.Dense(64, activation="gelu", name="hidden")(code)
    x = keras.layers.Dense(4 * 4 * 16, activation="gelu", name="maps")(x)
    x = keras.layers.Reshape((4, 4, 16), name="reshape")(x)
    x = keras.layers.Conv2DTranspose(
        16, 3, strides=2, padding="same", activation="gelu", name="enlarge"
    )(x)
    logits = keras.layers.Conv2D(1, 3, padding="same", name="logit")(x)
    return keras.Model(code, logits, name="decoder")


def build_model():
    """Returns the autoencoder, with its weights."""
    model = VariationalAutoencoder(name="vae")
    model(np.zeros((1, SIDE, SIDE, 1), "float32"))
    return model


def compile_model(model):
    """Compiles the autoencoder with Adam; the losses are those of its step."""
    model.compile(optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-4))


def load_data():
    """Returns (train, validation), each `(images, labels)`; the step leaves the labels alone."""
    return load_digits(SIDE)
