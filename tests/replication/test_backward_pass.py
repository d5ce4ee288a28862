"""Gradients of gradients: forces, differential equations, penalties, on several replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfparallel

pytestmark = pytest.mark.slow

TWO, THREE = ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]
# 22 examples in batches of 5: the last of 2 leaves a third replica idle.
GENERATOR = np.random.default_rng(4)
X, ENERGIES = GENERATOR.normal(size=(22, 4)), GENERATOR.normal(size=(22, 1))
FORCES = GENERATOR.normal(size=(22, 4))


class Net(keras.Model):
    """A net, and a step around a loss of gradients by the input."""

    hidden = staticmethod(lambda: [])

    def __init__(self):
        super().__init__()
        first = keras.layers.Dense(5, activation="tanh")
        last = [keras.layers.Dense(4, activation="softplus"), keras.layers.Dense(1)]
        self.net = keras.Sequential([keras.Input((4,)), first, *self.hidden(), *last])

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, batch):
        x, (energies, forces) = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, energies, forces)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"objective": loss}


class Forces(Net):
    """A loss of energies and of forces."""

    def loss_of(self, x, energies, forces):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self(x, training=True)
        error = tape.gradient(energy, x) + forces
        return ops.mean(ops.square(energy - energies)) + ops.mean(ops.square(error))


class NormalizedForces(Forces):
    """TensorFlow's second derivative lacks a term, and so must ours: see `tf.nn.moments`."""

    hidden = staticmethod(lambda: [keras.layers.BatchNormalization()])


class MaskedForces(Forces):
    """Under a mask Keras computes the moments itself, whose second derivative is whole."""

    hidden = staticmethod(
        lambda: [
            keras.layers.Reshape((5, 1)),
            keras.layers.Masking(),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
        ]
    )


class DroppedForces(Forces):
    """Both passes see one mask."""

    hidden = staticmethod(lambda: [keras.layers.Dropout(0.4, seed=2)])


class Equation(Net):
    """The residual of u'' = f: a gradient of a gradient of a gradient."""

    def loss_of(self, x, energies, forces):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                u = self(x, training=True)
            slope = inner.gradient(u, x)
        residual = outer.gradient(slope, x) - forces
        return ops.mean(ops.square(residual)) + ops.mean(ops.square(u - energies))


class NormalizedEquation(Equation):
    """Batch normalization, differentiated three times."""

    hidden = staticmethod(lambda: [keras.layers.BatchNormalization()])


class Penalty(Net):
    """A critic with a gradient penalty, as in WGAN-GP: three calls of one net, one penalized."""

    def loss_of(self, x, energies, forces):
        mixed = x + energies * (forces - x)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            judged = self.net(mixed, training=True)
        slope = tape.gradient(judged, mixed)
        norm = ops.sqrt(ops.sum(ops.square(slope), axis=1))
        penalty = 10 * ops.mean(ops.square(norm - 1))
        return ops.mean(self.net(forces)) - ops.mean(self.net(x)) + penalty


class SmallGradients(Net):
    """A penalty on the gradient by the weights, which is a sum over the replicas."""

    def loss_of(self, x, energies, forces):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - energies))
        gradients = tape.gradient(loss, self.trainable_variables)
        return loss + 0.1 * sum(ops.sum(ops.square(each)) for each in gradients)


class ComputesLoss(Net):
    """Keras's own step, with a loss that differentiates another call."""

    train_step = keras.Model.train_step

    def compute_loss(self, x, y, y_pred, *_, **__):
        return Forces.loss_of(self, x, *y)


class Attacked(Net):
    """Keras's own step, trained on rows moved along their gradient, which is no part of the loss.

    The inner tape leaves the gradient of the weights unused; it must not reach the update.
    """

    train_step = keras.Model.train_step

    def compute_loss(self, x, y, y_pred, *_, **__):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = ops.mean(ops.square(self(x) - y[0]))
        moved = ops.stop_gradient(x + 0.3 * tape.gradient(loss, x))
        return ops.mean(ops.square(self(moved) - y[0]))


class PredictsForces(Net):
    """Forces are an output: the inner tape is in the call."""

    train_step = keras.Model.train_step

    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.net(x, training=training)
        return energy, -tape.gradient(energy, x)


class PredictsCurvature(Net):
    """The second derivative is an output."""

    train_step = keras.Model.train_step

    def call(self, x, training=False):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                u = self.net(x, training=training)
            slope = inner.gradient(u, x)
        return u, outer.gradient(slope, x)


class NormalizesInForces(PredictsForces):
    """The energy of each row depends on the batch, and so do its forces: no rule knows how."""

    hidden = staticmethod(lambda: [keras.layers.BatchNormalization()])


class DropsInForces(PredictsForces):
    """A mask in an output that is a gradient."""

    hidden = staticmethod(lambda: [keras.layers.Dropout(0.4, seed=2)])


def trained(build, place, steps_per_update=None, **arguments):
    keras.utils.set_random_seed(3)
    model = place(build)
    loss = "mse" if issubclass(build, PredictsForces | PredictsCurvature) else None
    optimizer = keras.optimizers.SGD(0.05, 0.9, gradient_accumulation_steps=steps_per_update)
    model.compile(optimizer, loss, **arguments)
    model.fit(X, (ENERGIES, FORCES), batch_size=5, shuffle=False, verbose=0)
    return [w.numpy() for w in model.weights if "seed" not in w.path]


def on_replicas(devices, **options):
    return lambda build: tfparallel.data_parallel(build, devices=devices, **options)


def assert_equal(actual, expected):
    for value, weight in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, weight, rtol=1e-11, atol=1e-13)  # Sums in another order.


@pytest.mark.parametrize(
    "build",
    [
        Forces, NormalizedForces, MaskedForces, DroppedForces, Equation, NormalizedEquation,
        Penalty, SmallGradients, ComputesLoss, Attacked, PredictsForces, PredictsCurvature,
        DropsInForces,
    ],
)  # fmt: skip
def test_it_trains_to_the_weights_of_one_device(build, in_float64):
    assert_equal(trained(build, on_replicas(THREE)), trained(build, lambda build: build()))


@pytest.mark.parametrize("build", [Attacked, ComputesLoss])
def test_with_accumulated_gradients(build, in_float64):
    accumulated = trained(build, on_replicas(TWO), steps_per_update=2)
    assert_equal(accumulated, trained(build, lambda build: build(), steps_per_update=2))


@pytest.mark.parametrize("build", [Forces, PredictsForces])
def test_with_a_share_of_the_optimizer_on_each_replica(build, in_float64):
    shares = trained(build, on_replicas(TWO, shard="optimizer"))
    assert_equal(shares, trained(build, lambda build: build()))


@pytest.mark.parametrize("build", [Equation, PredictsForces])
@pytest.mark.parametrize("how", ["run_eagerly", "jit_compile"])
def test_eager_and_compiled(build, how, in_float64):
    expected = trained(build, lambda build: build())
    assert_equal(trained(build, on_replicas(TWO), **{how: True}), expected)


class LooksUp(SmallGradients):
    """The penalty covers an embedding table, whose gradient is rows."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(3, 4)

    def call(self, x, training=False):
        return self.net(x + self.table(ops.cast(x[:, 0] > 0, "int32")))


class InAFunction(Net):
    """TensorFlow differentiates a function by its graph.

    Story: it trained to other weights, without a word; so did `tf.gradients`, below.
    """

    @tf.function
    def predicted(self, x):
        return self(x, training=True)

    def loss_of(self, x, energies, forces):
        return ops.mean(ops.square(self.predicted(x) - energies))


class ByTheGraph(Net):
    """`tf.gradients` finds the copies of one replica alone."""

    def train_step(self, batch):
        x, (energies, _) = batch
        loss = ops.mean(ops.square(self(x, training=True) - energies))
        variables = self.trainable_variables
        gradients = tf.gradients(loss, [variable.value for variable in variables])
        self.optimizer.apply(gradients, variables)
        return {"objective": loss}


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (NormalizesInForces, "A layer mixes examples.*'batch_normalization'"),
        (LooksUp, "Cannot differentiate the gradient of a weight that is sharded .* 'looks_up'"),
        (InAFunction, "Only a `tf.GradientTape` can differentiate .* Received: a gradient of"),
        (ByTheGraph, "Only a `tf.GradientTape` can differentiate .* Received: a gradient of"),
    ],
)
def test_it_refuses(build, said, in_float64):
    with pytest.raises(ValueError, match=said):
        trained(build, on_replicas(TWO))
