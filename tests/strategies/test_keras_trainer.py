"""Which model's training loop is calling, and which optimizers a custom loop may not have."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.strategies import keras_trainer

DEVICES = ["CPU:0", "CPU:1"]


class WatchedStrategy(tfparallel.MirroredStrategy):
    """Notes which model each call of the strategy was for."""

    def __init__(self, devices):
        super().__init__(devices)
        self.models = []

    def run(self, fn, args=(), kwargs=None, options=None):
        self.models.append(keras_trainer.calling_model())
        return super().run(fn, args, kwargs, options)


@pytest.fixture(name="strategy")
def make_strategy():
    return WatchedStrategy(DEVICES)


def plain_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    return model


X, Y = np.ones((5, 3), "float32"), np.ones((5, 2), "float32")

CALLS = {
    "fit": lambda model: model.fit(X, Y, batch_size=3, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, batch_size=3, verbose=0),
    "predict": lambda model: model.predict(X, batch_size=3, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CALLS)
def test_the_model_is_found(strategy, method):
    """Fails on the day that Keras moves its trainer, or its loop gets deeper than is looked."""
    with strategy.scope():
        model, other = plain_model(), plain_model()
    CALLS[method](model)
    outermost = [candidate for candidate in strategy.models if candidate is not None]
    assert outermost
    assert all(candidate is model for candidate in outermost)
    CALLS[method](other)
    assert any(candidate is other for candidate in strategy.models)


@pytest.mark.parametrize(
    ("run_eagerly", "steps_per_execution"),
    [
        (True, 1),
        (False, 2),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in [(False, 1), (True, 2)]),
    ],
)
def test_the_model_is_found_however_its_step_is_traced(strategy, run_eagerly, steps_per_execution):
    with strategy.scope():
        model = plain_model()
        model.compile(
            "sgd", "mse", run_eagerly=run_eagerly, steps_per_execution=steps_per_execution
        )
    model.fit(X, Y, batch_size=2, verbose=0)
    assert any(candidate is model for candidate in strategy.models)


def test_nobody_is_found_for_a_custom_loop(strategy):
    with strategy.scope():
        model = plain_model()

    def step():
        return strategy.run(lambda: model(X, training=True))

    step()
    tf.function(step)()
    assert strategy.models
    assert all(candidate is None for candidate in strategy.models)


def test_a_custom_loop_in_a_callback_is_the_users(strategy):
    """Keras is above the callback in the stack, and yet it is not Keras that calls `run`."""
    with strategy.scope():
        model = plain_model()
    seen = []

    class Probe(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            replica = strategy.run(lambda: tf.constant(1))
            seen.append(len(strategy.experimental_local_results(replica)))

    model.fit(X, Y, batch_size=5, verbose=0, callbacks=[Probe()])
    assert seen == [2]


# --- An unprepared optimizer in a custom loop -------------------------------------------------


def custom_step(strategy, optimizer):
    with strategy.scope():
        variable = tf.Variable([3.0, 4.0])
        optimizer.build([variable])

    @tf.function
    def step():
        def on_replica():
            optimizer.apply_gradients([(tf.constant([3.0, 4.0]), variable)])

        strategy.run(on_replica)

    step()
    return variable


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"clipnorm": 1.0}, "{'clipnorm': 1.0}"),
        ({"global_clipnorm": 2.0}, "{'global_clipnorm': 2.0}"),
        ({"clipvalue": 0.5}, "{'clipvalue': 0.5}"),
    ],
    ids=["clipnorm", "global_clipnorm", "clipvalue"],
)
def test_an_optimizer_that_clips_is_refused(strategy, arguments, received):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, **arguments)
    with pytest.raises(ValueError) as raised:
        custom_step(strategy, optimizer)
    message = str(raised.value)
    assert "SGD clips or accumulates gradients" in message
    assert f"Received: {received}." in message
    assert "tfparallel.distribute_optimizer(optimizer)" in message


def test_an_optimizer_that_does_neither_is_not_refused(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    # TensorFlow's own rule stays: the replicas' gradients are summed.
    variable = custom_step(strategy, optimizer)
    np.testing.assert_allclose(variable.numpy(), [0.0, 0.0], atol=1e-6)


def test_an_optimizer_that_accumulates_is_refused(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"Received: \{'gradient_accumulation_steps': 2\}"):
        custom_step(strategy, optimizer)


def test_tensorflows_strategy_clips_before_the_sum():
    """The fault behind the refusal; it fails on the day that Keras clips after the reduction.

    Two replicas with gradient (3, 4), clipped to norm 1 on each and then summed, step by (1.2,
    1.6); their sum, clipped, would step by (0.6, 0.8).
    """
    strategy = tf.distribute.MirroredStrategy(
        DEVICES, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0, clipnorm=1.0)
    variable = custom_step(strategy, optimizer)
    np.testing.assert_allclose(variable.numpy(), [3.0 - 1.2, 4.0 - 1.6], rtol=1e-6)


def test_compile_under_the_scope_is_recognized(strategy, monkeypatch):
    """Rests on the loss tracker, which `keras.src.trainers.trainer` makes in `compile`."""
    compiled = []
    monkeypatch.setattr(
        WatchedStrategy, "extend_model", lambda self, model: compiled.append(model), raising=False
    )
    with strategy.scope():
        model = plain_model()
        keras.layers.Dense(2).build((None, 3))
        keras.metrics.Mean()
    assert compiled and set(map(id, compiled)) == {id(model)}


def test_a_loss_of_a_single_replica_is_divided_by_nobody():
    strategy = tfparallel.MirroredStrategy(DEVICES[:1])
    weight = tf.constant(2.0)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            value = keras.losses.MeanSquaredError()(tf.zeros([2]), variable)
        return tfparallel.reduce_gradients(tape.gradient(value, [variable]), weight)

    np.testing.assert_allclose(strategy.run(step)[0], [1.0, 2.0])


LOSSES = {
    "function": lambda y, outputs: tf.reduce_mean(keras.losses.mean_squared_error(y, outputs)),
    "without a mean": lambda y, outputs: tf.reduce_mean(
        keras.losses.MeanSquaredError(reduction="none")(y, outputs)
    ),
}


def divided(y, outputs):
    return keras.losses.MeanSquaredError()(y, outputs)


@pytest.fixture(name="reduced", params=["eager", "traced"])
def make_step(strategy, request):
    """Computes the gradients of a loss on each replica, and reduces them with a weight or none."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def gradients(loss):
        with tf.GradientTape() as tape:
            value = loss(Y, model(X))
        return tape.gradient(value, model.trainable_variables)

    def reduced(loss, weight):
        def run():
            step = lambda: tfparallel.reduce_gradients(gradients(loss), weight)  # noqa: E731
            return strategy.run(step)

        return (tf.function(run) if request.param == "traced" else run)()

    reduced.gradients = gradients
    return reduced


def test_a_loss_that_keras_has_divided_is_refused(reduced):
    with pytest.raises(ValueError, match="divided its mean by the 2 replicas"):
        reduced(divided, 5.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_another_loss_is_not_refused_though_a_run_before_divided_one(strategy, reduced, loss):
    shares = reduced(divided, None)  # A sum of shares: as under TensorFlow's strategy.
    means = reduced(LOSSES[loss], 5.0)
    for *totals, expected in zip(shares, means, reduced.gradients(LOSSES[loss]), strict=True):
        for each in totals:
            each = strategy.experimental_local_results(each)[0]
            np.testing.assert_allclose(each, expected, rtol=1e-6)
