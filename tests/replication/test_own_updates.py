"""Optimizers, schedules and constraints of the user's own, which may draw, count, keep a state."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel import Mesh

FOUR = [f"CPU:{k}" for k in range(4)]
EPOCHS, BATCH = 2, 7
FORMS = {
    "replicas": lambda build: tfparallel.data_parallel(build, devices=FOUR[:2]),
    "shares": lambda build: tfparallel.data_parallel(build, devices=FOUR[:2], shard="optimizer"),
    "stages": lambda build: tfparallel.pipeline_parallel(build, FOUR[:2], num_micro_batches=2),
    "parts": lambda build: tfparallel.tensor_parallel(build, FOUR[:2]),
    "mesh": lambda build: tfparallel.hybrid_parallel(
        build, Mesh(data=2, pipeline=2), num_micro_batches=2
    ),
    "shares on a mesh": lambda build: tfparallel.hybrid_parallel(
        build, Mesh(data=2, tensor=2), shard="optimizer"
    ),
}


class Custom(keras.optimizers.Adam):
    """Whatever it does."""


class Draws(keras.optimizers.SGD):
    """Adds noise to each gradient."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seed = keras.random.SeedGenerator(3)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(gradient.shape, dtype="float64", seed=self.seed)
        super().update_step(gradient + 0.1 * noise, variable, learning_rate)


class Counts(keras.optimizers.SGD):
    """Updates each weight more than the last one."""

    number = 0

    def update_step(self, gradient, variable, learning_rate):
        self.number += 1
        super().update_step(gradient * float(self.number), variable, learning_rate)


class Remembers(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that changes with each call."""

    def __init__(self):
        with tf.init_scope():
            self._number = tf.Variable(0.0, dtype="float64")

    def __call__(self, step):
        return 0.1 / self._number.assign_add(1.0)


class Shrinks(keras.constraints.Constraint):
    """Another factor in each call."""

    def __init__(self):
        with tf.init_scope():
            self._number = tf.Variable(1.0, dtype="float64")

    def __call__(self, w):
        return w * (1.0 - 0.1 / self._number.assign_add(1.0))


def build(constraint=None):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3, kernel_constraint=constraint and constraint()),
        ]
    )


def difference(form, optimizer, constraint=None):
    """Of the weights and of what the optimizer saves, from one device."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(4 * BATCH, 6)), draw.normal(size=(4 * BATCH, 3))
    states = []
    for make in (lambda function: function(), FORMS[form]):
        model = make(lambda: build(constraint))
        model.compile(optimizer(), "mse")
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
        slots: dict = {}
        model.optimizer.save_own_variables(slots)
        states.append([*model.get_weights(), *map(np.asarray, slots.values())])
    return max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(*states, strict=True))


UPDATES = {
    "accumulates": lambda: Custom(0.01, gradient_accumulation_steps=3),
    "rate, accumulates": lambda: keras.optimizers.Adam(lambda: 0.01, gradient_accumulation_steps=3),
    "scaled, accumulates": lambda: keras.optimizers.SGD(
        0.01, gradient_accumulation_steps=3, loss_scale_factor=8.0
    ),
    "draws": lambda: Draws(0.01),
    "counts": lambda: Counts(0.001),
    "remembers": lambda: keras.optimizers.SGD(Remembers()),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["replicas", "stages", "mesh"])
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_of_the_users_own_is_that_of_one_device(in_float64, update, form):
    assert difference(form, UPDATES[update]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("form", ["shares", "shares on a mesh"])
def test_shares_have_one_learning_rate(in_float64, form):
    assert difference(form, UPDATES["remembers"]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("form", ["replicas", "shares", "parts", "mesh"])
def test_a_constraint_is_applied_once(in_float64, form):
    assert difference(form, lambda: keras.optimizers.Adam(0.01), Shrinks) < 1e-12


@pytest.mark.slow
def test_parts_that_a_loss_scale_hands_on_are_left_out_of_decay(in_float64):
    def optimizer():
        inner = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        inner.exclude_from_weight_decay(var_names=["bias"])
        return keras.optimizers.LossScaleOptimizer(inner)

    assert difference("parts", optimizer) < 1e-12


@pytest.mark.slow
def test_what_is_accumulated_is_in_a_checkpoint(in_float64, tmp_path):
    x, y = np.ones((BATCH, 6)), np.ones((BATCH, 3))

    def model_of(steps):
        model = FORMS["replicas"](build)
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        for _ in range(steps):
            model.train_on_batch(x, y)
        return model

    model = model_of(3)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "c"))
    other = model_of(2)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path).assert_consumed()
    for each in (model, other):
        each.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("begins_with_it", [False, True])
def test_what_is_accumulated_outlives_another_compile(in_float64, begins_with_it):
    """Story: terms of all replicas but the first were lost, or counted once for each replica."""
    x, y = np.random.default_rng(0).normal(size=(2, 3 * BATCH, 6)), np.ones((3 * BATCH, 3))

    def trained(parallel):
        keras.utils.set_random_seed(0)
        model = parallel(build)
        kernel = model.layers[0].kernel
        kernel.constraint = Shrinks() if begins_with_it else None
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        for part in x:
            model.compile(optimizer, "mse")
            model.fit(part, y, batch_size=BATCH, shuffle=False, verbose=0)  # Three steps.
            kernel.constraint = None if begins_with_it else Shrinks()
        return model.get_weights()

    for a, b in zip(trained(lambda build: build()), trained(FORMS["replicas"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_values_of_another_number_are_refused():
    model = FORMS["replicas"](build)
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, 6)), np.ones((4, 3)))
    with pytest.raises(ValueError, match="Optimizer 'adam' has 10 variables.*Received: 1 values"):
        model.optimizer.set_weights([np.zeros(())])
