"""Users' own `train_step`, `compute_loss` and `compile`."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from .. import data, refusals
from ..case import fit_arguments, observe
from ..programs import case, compiled, mlp

GROUP = "The user's own training step"


class Net(keras.Model):
    """Two child layers and a batch normalization, called by `call`."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(12, activation="tanh")
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(10)

    def call(self, x, training=False):
        return self.head(self.norm(self.hidden(x), training=training))


class OnComputeLoss(Net):
    """Keras's own example of a custom step, on `compute_loss`."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class GradientsInABranch(Net):
    """Asks for gradients in a branch: a batch normalization exchanges something there."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables

        def no_gradients():
            return [tf.zeros_like(variable) for variable in variables]

        gradients = tf.cond(loss > 0.0, lambda: tape.gradient(loss, variables), no_gradients)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


class LayerByLayer(keras.Model):
    """A step that calls each layer. The attention takes the mask off what the sum reads next.

    Story: off each replica's rows alone, so that the loss was masked, as on one device it is not.
    """

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(20, 8, mask_zero=True)
        self.attend = layers.MultiHeadAttention(2, 4)
        self.skip, self.head = layers.Add(), layers.Dense(20)

    def call(self, tokens):
        x = self.embed(tokens)
        return self.head(self.skip([x, self.attend(x, x)]))

    def train_step(self, batch):
        tokens, y = batch
        with tf.GradientTape() as tape:
            x = self.embed(tokens)
            attended = self.attend(x, x)
            loss = self.compute_loss(y=y, y_pred=self.head(self.skip([x, attended])))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def tokens_to_tokens():
    x, _ = data.tokens()
    return {"x": x, "y": x}


class RawLoss(Net):
    """A formula of the user's own, averaged by hand, clipped by hand."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            each = ops.square(logits - ops.one_hot(y, 10, dtype=logits.dtype))
            loss = ops.mean(ops.sum(each, axis=-1)) + 1e-3 * ops.sum(ops.square(self.hidden.kernel))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.5)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.seen.update_state(loss)
        return {"seen": self.seen.result(), "raw": loss}


class OwnComputeLoss(Net):
    """`compute_loss` overridden: the usual step around a user's own loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.mean(each) + 0.1 * ops.mean(ops.square(y_pred))


class Chatty(Net):
    """A `train_step` that adds to what the usual one returns."""

    def train_step(self, batch):
        logs = super().train_step(batch)
        return {**logs, "size": ops.sum(ops.square(self.head.kernel))}


CASES = [
    case(
        GROUP,
        "on `compute_loss`",
        "train_step on compute_loss",
        build=OnComputeLoss,
        compile=compiled(metrics=lambda: [keras.metrics.SparseCategoricalAccuracy()]),
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "on `compute_loss`",
        "train_step that calls each layer, under a mask",
        build=LayerByLayer,
        data=tokens_to_tokens,
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "on `compute_loss`",
        "train_step that asks for gradients in a branch",
        build=GradientsInABranch,
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "with a raw loss",
        "train_step with a raw loss",
        build=RawLoss,
        compile=compiled(lambda: keras.optimizers.SGD(0.02, momentum=0.9), loss=None),
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "an overridden `compute_loss`",
        "compute_loss overridden",
        build=OwnComputeLoss,
        compile=compiled(loss=None),
        refused=refusals.SUBCLASSED,
    ),
    case(
        GROUP,
        "a `train_step` around `super().train_step`",
        "train_step around super",
        build=Chatty,
        refused=refusals.OWN_TRAIN_STEP,
    ),
]


class Gan(keras.Model):
    """A generator and a discriminator, two optimizers, an overridden `compile`."""

    def __init__(self, latent=6):
        super().__init__()
        self.latent = latent
        self.generator = keras.Sequential(
            [
                keras.Input((latent,)),
                layers.Dense(12),
                layers.BatchNormalization(),
                layers.LeakyReLU(),
                layers.Dense(64, activation="sigmoid"),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [keras.Input((64,)), layers.Dense(12), layers.LeakyReLU(), layers.Dense(1)],
            name="discriminator",
        )
        self.d_seen = keras.metrics.Mean(name="d_loss")
        self.g_seen = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss

    @property
    def metrics(self):
        return [self.d_seen, self.g_seen]

    def call(self, noise):
        return self.discriminator(self.generator(noise))

    def train_step(self, batch):
        real, noise = batch
        fake = self.generator(noise, training=True)
        both = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate([ops.ones_like(fake[:, :1]), ops.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both, training=True))
        variables = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, variables), variables, strict=True)
        )
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True))
            g_loss = self.loss_fn(ops.zeros_like(judged), judged)
        variables = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(
            zip(tape.gradient(g_loss, variables), variables, strict=True)
        )
        self.d_seen.update_state(d_loss)
        self.g_seen.update_state(g_loss)
        return {"d_loss": self.d_seen.result(), "g_loss": self.g_seen.result()}


def compile_gan(model):
    model.compile(
        d_optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
        g_optimizer=keras.optimizers.RMSprop(0.005, clipnorm=1.0),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )


def real_and_noise():
    """The noise is data, so that one device and several see the same."""
    x, _ = data.flat()
    return {"x": x, "y": np.random.RandomState(3).normal(size=(len(x), 6))}


class Vae(keras.Model):
    """An encoder and a decoder called by `call`, its divergence by `add_loss`."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(12, activation="tanh")
        self.mean, self.spread = layers.Dense(3), layers.Dense(3)
        self.decoder = keras.Sequential([layers.Dense(12, activation="tanh"), layers.Dense(64)])

    def call(self, inputs):
        pixels, noise = inputs
        hidden = self.encoder(pixels)
        mean, spread = self.mean(hidden), self.spread(hidden)
        divergence = ops.exp(spread) + ops.square(mean) - 1.0 - spread
        self.add_loss(0.05 * ops.mean(ops.sum(divergence, axis=-1)))
        return self.decoder(mean + ops.exp(0.5 * spread) * noise)


def vae_data():
    x, _ = data.flat()
    return {"x": (x, np.random.RandomState(3).normal(size=(len(x), 3))), "y": x}


class VaeStep(Vae):
    """The same, its step written out over the sub-layers."""

    def train_step(self, batch):
        (pixels, noise), _ = batch
        with tf.GradientTape() as tape:
            hidden = self.encoder(pixels)
            mean, spread = self.mean(hidden), self.spread(hidden)
            again = self.decoder(mean + ops.exp(0.5 * spread) * noise)
            rebuilt = ops.mean(ops.sum(ops.square(again - pixels), axis=-1))
            divergence = ops.exp(spread) + ops.square(mean) - 1.0 - spread
            loss = rebuilt + 0.05 * ops.mean(ops.sum(divergence, axis=-1))
        variables = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"objective": loss, "rebuilt": rebuilt}


class GradientPenalty(keras.Model):
    """A critic whose loss holds the norm of its own gradient: a gradient of a gradient."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [keras.Input((64,)), layers.Dense(12, activation="tanh"), layers.Dense(1)]
        )

    def call(self, x):
        return self.critic(x)

    def train_step(self, batch):
        x, y = batch
        sign = ops.cast(y % 2, x.dtype)[:, None] * 2 - 1
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                judged = self.critic(x, training=True)
            slope = inner.gradient(judged, x)
            norm = ops.sqrt(ops.sum(ops.square(slope), axis=1) + 1e-12)
            loss = ops.mean(sign * judged) + 10.0 * ops.mean(ops.square(norm - 1.0))
        variables = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"objective": loss}


class TargetNet(keras.Model):
    """Learns from a slowly moving copy of itself, moved by `assign` in the step."""

    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(), mlp()
        self.target.trainable = False

    def call(self, x):
        return self.online(x)

    def train_step(self, batch):
        x, y = batch
        goal = ops.stop_gradient(self.target(x))
        with tf.GradientTape() as tape:
            out = self.online(x, training=True)
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
            ) + ops.mean(ops.square(out - goal))
        variables = self.online.trainable_weights
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"objective": loss}


# A step that returns the keys of the model's own metrics alone is shown their
# results by Keras, not what it returned: hence "objective" and not "loss".


class TwoTapes(Net):
    """One persistent tape, two losses, another optimizer for the head."""

    def compile(self, head_optimizer, **arguments):
        super().compile(**arguments)
        self.head_optimizer = head_optimizer

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
            size = ops.mean(ops.square(y_pred))
            both = loss + 0.1 * size
        body = self.hidden.trainable_weights + self.norm.trainable_weights
        head = self.head.trainable_weights
        self.optimizer.apply(tape.gradient(loss, body), body)
        self.head_optimizer.apply(tape.gradient(both, head), head)
        return {"objective": loss, "size": size}


class Accumulating(Net):
    """Reads the model twice in one step, on two halves of its features."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            first = self(x, training=True)
            second = self(1.0 - x, training=True)
            loss = self.compute_loss(x, y, first) + ops.mean(ops.square(first - second))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"objective": loss}


class OwnTestStep(OnComputeLoss):
    """Own `test_step` and `predict_step` beside the training step."""

    def test_step(self, batch):
        x, y = batch
        y_pred = self(x, training=False)
        return {
            "loss": self.compute_loss(y=y, y_pred=y_pred),
            "peak": ops.mean(ops.max(y_pred, -1)),
        }

    def predict_step(self, batch):
        x = batch[0] if isinstance(batch, tuple) else batch
        return ops.softmax(self(x, training=False))


def test_and_predict(form, case):
    model = form.model(case)
    history = model.fit(**fit_arguments(case))
    x, y = data.flat(40)
    return observe(
        model,
        history.history,
        scores=model.evaluate(x, y, batch_size=17, verbose=0, return_dict=True),
        predictions=model.predict(x, batch_size=17, verbose=0),
    )


CASES += [
    case(
        GROUP,
        "a GAN: two optimizers as attributes, an overridden `compile`",
        "GAN",
        build=Gan,
        compile=compile_gan,
        data=real_and_noise,
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "a GAN: two optimizers as attributes, an overridden `compile`",
        "two optimizers, one tape",
        build=TwoTapes,
        compile=compiled(head_optimizer=lambda: keras.optimizers.Adam(0.01)),
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "a VAE: `add_loss` and several sub-layers",
        "VAE with add_loss",
        build=Vae,
        compile=compiled(lambda: keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError),
        data=vae_data,
        refused=refusals.SUBCLASSED,
    ),
    case(
        GROUP,
        "a VAE: `add_loss` and several sub-layers",
        "VAE with its own step",
        build=VaeStep,
        compile=compiled(lambda: keras.optimizers.Adam(0.01), loss=None),
        data=vae_data,
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "a gradient penalty (a gradient of a gradient)",
        "gradient penalty",
        build=GradientPenalty,
        compile=compiled(lambda: keras.optimizers.SGD(0.01), loss=None),
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "a target network moved by `assign`",
        "target network",
        build=TargetNet,
        compile=compiled(loss=None),
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "the model called twice in a step",
        "model called twice",
        build=Accumulating,
        refused=refusals.OWN_TRAIN_STEP,
    ),
    case(
        GROUP,
        "own `test_step` and `predict_step`",
        "test_step and predict_step",
        build=OwnTestStep,
        train=test_and_predict,
        refused=refusals.OWN_TRAIN_STEP,
    ),
]
