"""The learning rate grows to its target, update by update, in a resumed run too."""

import keras
import numpy as np
import pytest

import tfparallel
from tests.comparison import seeded, state_of
from tfparallel.callbacks import LearningRateWarmup


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def data(number=40):
    random = np.random.default_rng(0)
    return random.normal(size=(number, 3)), random.normal(size=(number, 2))


class Rates(keras.callbacks.Callback):
    """What the rate is in each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def rates_of(warmup, model=None, optimizer=None, epochs=1, others=()):
    model = model or build()
    model.compile(optimizer or keras.optimizers.SGD(7.0), "mse")
    seen = Rates()
    options = {"batch_size": 4, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(*data(), callbacks=[*others, warmup, seen], **options)
    return seen.seen


def test_it_grows_from_a_fraction_to_the_whole():
    seen = rates_of(LearningRateWarmup(0.4, 4))
    np.testing.assert_allclose(seen, [0.1, 0.2, 0.3, *[0.4] * 7], rtol=1e-6)
    seen = rates_of(LearningRateWarmup(0.4, 2, initial=0.5))
    np.testing.assert_allclose(seen, [0.3, *[0.4] * 9], rtol=1e-6)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_a_larger_batch_takes_a_larger_rate(scaling, factor):
    warmup = LearningRateWarmup(0.1, 1, scaling=scaling, batch_size=256, base_batch_size=64)
    assert warmup.target == pytest.approx(0.1 * factor)
    assert rates_of(warmup)[-1] == pytest.approx(0.1 * factor)


def test_later_another_callback_may_lower_it():
    class Lowers(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5:
                self.model.optimizer.learning_rate = 0.01

    seen = rates_of(LearningRateWarmup(0.4, 2), others=[Lowers()])
    np.testing.assert_allclose(seen[4:], [0.4, *[0.01] * 5], rtol=1e-6)


def test_an_execution_of_several_steps_may_pass_the_last_one():
    model = build()
    model.compile(keras.optimizers.SGD(7.0), "mse", steps_per_execution=4)
    model.fit(*data(48), batch_size=4, callbacks=[LearningRateWarmup(0.1, 10)], verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.09)  # Of steps 8 to 11.
    model.fit(*data(64), batch_size=4, callbacks=[LearningRateWarmup(0.1, 22)], verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)


def test_a_later_fit_ends_a_warmup_whose_last_update_was_passed():
    model = build()
    model.compile(keras.optimizers.SGD(7.0), "mse", steps_per_execution=4)
    for expected in (0.09, 0.1):  # Of steps 8 to 11, and later.
        model.fit(*data(48), batch_size=4, callbacks=[LearningRateWarmup(0.1, 10)], verbose=0)
        assert float(model.optimizer.learning_rate) == pytest.approx(expected)
    model.optimizer.learning_rate = 0.05  # A rate of the warmup, too, but not its last one.
    model.fit(*data(48), batch_size=4, callbacks=[LearningRateWarmup(0.1, 10)], verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)


def test_an_accumulating_model_warms_up_by_updates():
    model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"], sync="accumulate:3")
    seen = rates_of(LearningRateWarmup(0.3, 3), model)
    np.testing.assert_allclose(seen, [*[0.1] * 3, *[0.2] * 3, *[0.3] * 4], rtol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    def trained(epochs, *callbacks):
        model = tfparallel.data_parallel(lambda: seeded(build), devices=["CPU:0", "CPU:1"])
        warmup = LearningRateWarmup(0.1, 15)
        return rates_of(warmup, model, epochs=epochs, others=callbacks), state_of(model)

    rates, whole = trained(2)
    trained(1, tfparallel.callbacks.Checkpoint(tmp_path))
    later, resumed = trained(2, tfparallel.callbacks.Checkpoint(tmp_path))
    assert later == rates[10:]
    for value, expected in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, "`learning_rate`: a number above 0 is required"),
        ({"learning_rate": None}, "`learning_rate`: a number above 0 is required. Received: lear"),
        ({"num_steps": float("nan")}, "`num_steps`: a whole number"),
        ({"num_steps": 0}, "`num_steps`: a whole number of at least 1"),
        ({"initial": 2}, "`initial`: a fraction from 0 to 1 is required. Received: initial=2"),
        ({"batch_size": 8}, "`scaling` must say how"),
        ({"scaling": "cubic", "batch_size": 8, "base_batch_size": 4}, "'linear' or 'sqrt', and"),
        ({"scaling": "linear", "batch_size": 8}, "base_batch_size=None"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearningRateWarmup(**{"learning_rate": 0.1, "num_steps": 3} | arguments)


def test_a_schedule_is_refused():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ValueError, match="A number is required. Received: learning_rate=Exp"):
        rates_of(LearningRateWarmup(0.1, 3), optimizer=keras.optimizers.SGD(schedule))


def test_several_optimizers_are_refused():
    several = {".*bias": keras.optimizers.SGD()}
    several = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), several)
    with pytest.raises(ValueError, match="Received: a MultiOptimizer"):
        rates_of(LearningRateWarmup(0.1, 3), optimizer=keras.optimizers.MultiOptimizer(several))
