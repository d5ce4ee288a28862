"""The strategy: programs, and what crashes under TensorFlow's own and runs under this one."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests import comparison
from tfparallel.strategies import variables

THREE = ["CPU:0", "CPU:1", "CPU:2"]


def data(num_examples=20):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(num_examples, 4)).astype("float32")
    return x, (x @ generator.normal(size=(4, 2))).astype("float32")


def compiled_model(**arguments):
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)]
    )
    model.compile(**({"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"} | arguments))
    return model


def tensorflows_strategy():
    return tf.distribute.MirroredStrategy(
        THREE[:2], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def assert_same_weights(model, expected):
    # float32; sums over replicas are taken in another order.
    for value, expected_weight in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected_weight, rtol=1e-5, atol=1e-6)


# --- A program --------------------------------------------------------------------------------


def test_a_program_is_that_of_one_device():
    strategy = tfparallel.MirroredStrategy(THREE)
    assert not strategy.program_is_running
    assert strategy.num_replicas_in_sync == 3
    with strategy.program():
        assert strategy.program_is_running
        assert strategy.num_replicas_in_sync == 1
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_strategy() is strategy
        assert tf.add(1, 1).device.endswith("CPU:0")
        with strategy.program():
            pass
        assert strategy.program_is_running
    assert strategy.num_replicas_in_sync == 3


def test_a_program_that_raises_ends():
    strategy = tfparallel.MirroredStrategy(THREE)
    with pytest.raises(KeyError), strategy.program():
        raise KeyError
    assert strategy.num_replicas_in_sync == 3


def test_run_in_a_program_reaches_every_replica():
    strategy = tfparallel.MirroredStrategy(THREE)

    @tf.function
    def indices():
        with strategy.program():
            return strategy.run(
                lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 0
            )

    assert [int(index) for index in strategy.experimental_local_results(indices())] == [0, 1, 2]


def test_an_optimizer_in_a_program_updates_every_copy_on_its_device():
    strategy = tfparallel.MirroredStrategy(THREE)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([variable])

    @tf.function
    def step():
        with strategy.program():
            optimizer.apply([tf.constant([1.0, -1.0])], [variable])

    step()
    alone = keras.Variable([1.0, 2.0])
    keras.optimizers.Adam(0.1).apply([tf.constant([1.0, -1.0])], [alone])
    for copy in variable.value.values:
        np.testing.assert_array_equal(copy.numpy(), alone.numpy())
    updates = [
        operation
        for operation in step.get_concrete_function().graph.get_operations()
        if operation.type.startswith("Assign") and operation.inputs[0] is not None
    ]
    assert {operation.device[-5:] for operation in updates} == set(THREE)


# --- What crashes under TensorFlow's strategy -------------------------------------------------


def test_tensorflows_strategy_cannot_accumulate():
    """keras#20582: fails on the day that it is mended, and `_use_merge_call` may go."""
    with tensorflows_strategy().scope():
        model = compiled_model(
            optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        )
    with pytest.raises(RuntimeError, match="merge_call"):
        model.fit(*data(), batch_size=4, verbose=0)


@pytest.mark.slow
def test_accumulation_runs():
    def make():
        return compiled_model(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

    expected = make()
    expected.fit(*data(), batch_size=7, epochs=2, shuffle=False, verbose=0)
    with tfparallel.MirroredStrategy(THREE).scope():
        model = make()
    model.fit(*data(), batch_size=7, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(model, expected)


def test_tensorflows_strategy_needs_a_first_batch_that_the_replicas_divide():
    with tensorflows_strategy().scope():
        model = compiled_model()
    with pytest.raises(Exception, match="(?i)shape"):
        model.fit(*data(9), batch_size=9, shuffle=False, verbose=0)


class AccumulatingByHand(keras.Model):
    """Adds up the gradients of two batches, and then takes a step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def build(self, shape):
        self.dense.build(shape)
        zeros = {"initializer": "zeros", "trainable": False}
        self.num_batches = self.add_weight((), dtype="int64", **zeros)
        self.sums = [self.add_weight(each.shape, **zeros) for each in self.dense.trainable_weights]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        weights = self.dense.trainable_weights
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(self.sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient)
        self.num_batches.assign_add(1)
        tf.cond(self.num_batches % 2 == 0, self.take_step, lambda: None)
        return {"loss": loss}

    def take_step(self):
        gradients = [total / 2 for total in self.sums]
        self.optimizer.apply(gradients, self.dense.trainable_weights)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


@pytest.mark.slow
def test_gradients_that_a_model_accumulates_by_hand(in_float64):
    """Its optimizer is built before it is compiled, and both outside of the scope."""
    x, y = (array.astype("float64") for array in data(21))
    seen = []
    for scope in (contextlib.nullcontext(), tfparallel.MirroredStrategy(THREE).scope()):
        keras.utils.set_random_seed(11)
        with scope:
            model = AccumulatingByHand()
            model.build((None, 4))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        losses = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
        assert int(optimizer.iterations.numpy()) == 4
        seen.append((losses, comparison.state_of(model)))
    comparison.assert_equal(*seen[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("num_examples, batch_size", [(10, 10), (20, 7), (2, 2), (1, 1)])
def test_a_first_batch_that_the_replicas_do_not_divide(num_examples, batch_size):
    arguments = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = compiled_model()
    expected_losses = expected.fit(*data(num_examples), **arguments).history["loss"]
    with tfparallel.MirroredStrategy(THREE).scope():
        model = compiled_model()
    seen = model.fit(*data(num_examples), **arguments).history["loss"]
    assert_same_weights(model, expected)
    np.testing.assert_allclose(seen, expected_losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [2, 3])
def test_several_steps_an_execution(steps_per_execution):
    """20 examples in batches of 3 are 7 steps: the last execution is short of steps."""
    arguments = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = compiled_model()
    expected_losses = expected.fit(*data(), **arguments).history["loss"]
    with tfparallel.MirroredStrategy(THREE).scope():
        model = compiled_model(steps_per_execution=steps_per_execution)
    seen = model.fit(*data(), **arguments).history["loss"]
    assert_same_weights(model, expected)
    np.testing.assert_allclose(seen, expected_losses, rtol=1e-5)
    assert int(model.optimizer.iterations.numpy()) == 14


@pytest.mark.slow
def test_two_strategies_in_one_process():
    arguments = {"batch_size": 7, "epochs": 1, "shuffle": False, "verbose": 0}
    expected = compiled_model()
    strategies = [tfparallel.MirroredStrategy(THREE), tfparallel.MirroredStrategy(THREE[:2])]
    models = []
    for strategy in strategies:
        with strategy.scope():
            models.append(compiled_model())
    for _ in range(2):  # Turn by turn.
        expected.fit(*data(), **arguments)
        for model in models:
            model.fit(*data(), **arguments)
    for model in models:
        assert_same_weights(model, expected)


@pytest.mark.slow
def test_a_second_step_adds_no_trace():
    with tfparallel.MirroredStrategy(THREE).scope():
        model = compiled_model()
    arguments = {"batch_size": 5, "epochs": 1, "shuffle": False, "verbose": 0}
    traces = []
    loss = model.compute_loss

    def counted(*args, **kwargs):
        traces.append(1)
        return loss(*args, **kwargs)

    model.compute_loss = counted
    model.fit(*data(), **arguments)
    after_first = len(traces)
    assert after_first >= 1
    model.fit(*data(), **(arguments | {"epochs": 3}))
    assert len(traces) == after_first


@pytest.mark.parametrize(
    "devices, message",
    [
        (["CPU:0", "CPU:9"], "CPU:9 does not exist"),
        (["CPU:1", "CPU:1"], "CPU:1 is listed 2 times"),
        ([], "the list is empty"),
    ],
)
def test_devices_that_cannot_be_used(devices, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.MirroredStrategy(devices)


@pytest.mark.slow
def test_train_on_batch_of_a_model_that_was_compiled_outside_the_scope():
    """Story: "Mixing different tf.distribute.Strategy objects", where `fit` trained as it should.

    It is `fit` that asks the strategy to distribute its data; a single batch asks for nothing
    before the optimizer is built.
    """

    def build():
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = build()
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(2, 5, 3)), generator.normal(size=(2, 5, 2))
    seen = []
    for each in (model, build()):
        each.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
        losses = [each.train_on_batch(*batch) for batch in zip(x, y, strict=True)]
        seen.append([losses, each.test_on_batch(x[0], y[0]), each.predict_on_batch(x[0])])
        seen[-1] += each.get_weights()
    for value, expected in zip(*seen, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    ["adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "lion", "adamw"))],
)
def test_an_optimizer_that_knows_no_strategy_writes_all_copies(optimizer):
    """A plain model, trained on its one device, whose layers are a replicated model's."""

    def build():
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])

    inner = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1", "CPU:2"])
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(10, 3)), generator.normal(size=(10, 2))
    weights = []
    for each in (inner, build()):
        model = keras.Sequential([each, keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.get(optimizer), "mse")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for value, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    for variable in inner.variables:
        for copy in variables.copies(variable):
            np.testing.assert_array_equal(copy, variables.copies(variable)[0])


def test_a_strategy_says_what_it_is():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    text = "tfparallel.MirroredStrategy: 2 replicas on CPU:0, CPU:1; gradients: summed on CPU:0"
    assert str(strategy) == text and repr(strategy) == f"<{text}>"
