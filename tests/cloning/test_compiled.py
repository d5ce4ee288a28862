"""A clone is compiled as its model was."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.cloning.test_copy_state import BUILDERS, around, every_builder


def data(num_examples=12):
    generator = np.random.default_rng(8)
    return generator.normal(size=(num_examples, 6)), generator.normal(size=(num_examples, 4))


def assert_trains_alike(copy, model):
    x, y = data()
    for each in (copy, model):
        each.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    for ours, theirs in zip(copy.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@every_builder
def test_a_loss_without_a_config(clone):
    factor = 3.0
    model = around()
    model.compile("sgd", loss=lambda y, outputs: factor * keras.ops.mean((y - outputs) ** 2, -1))
    assert_trains_alike(clone(model), model)


@pytest.mark.slow
@every_builder
def test_what_is_left_out_of_weight_decay(clone):
    model = around()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([model.layers[0].kernel], ["bias"])
    model.compile(optimizer, "mse")
    assert_trains_alike(clone(model), model)


@pytest.mark.slow
@every_builder
def test_slots_of_what_was_frozen_since(clone):
    model = around()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = data()
    model.fit(x, y, verbose=0)
    model.layers[0].trainable = False
    model.train_function = None  # Keras takes note of it when it traces a step.
    copy = clone(model)
    assert not copy.layers[0].trainable
    assert len(copy.optimizer.variables) == len(model.optimizer.variables)
    assert_trains_alike(copy, model)


@every_builder
def test_how_steps_are_run(clone):
    model = around()
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
                  run_eagerly=True, steps_per_execution=3)  # fmt: skip
    copy = clone(model)
    assert copy.run_eagerly
    assert copy.steps_per_execution == 3
    x, y = data()
    seen = [each.evaluate(x, y, verbose=0, return_dict=True)["mae"] for each in (copy, model)]
    np.testing.assert_allclose(*seen, rtol=1e-5)
    # Two models do not count into one metric.
    compiled_metrics = [
        next(m for m in e.metrics if m.name == "compile_metrics") for e in (copy, model)
    ]
    assert compiled_metrics[0].metrics[0] is not compiled_metrics[1].metrics[0]


def test_a_step_that_xla_compiles_is_compiled():
    model = around()
    model.compile("sgd", "mse", jit_compile=True)
    assert BUILDERS["data"](model).jit_compile
    assert BUILDERS["model"](model).jit_compile


def test_a_loss_that_was_not_to_be_scaled():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(4)])
        model.compile("sgd", "mse", auto_scale_loss=False)
        copy = tfparallel.model_parallel(model, ["CPU:0", "CPU:1"])
    finally:
        keras.config.set_dtype_policy(policy)
    assert type(copy.optimizer).__name__ == "SGD"


def test_an_optimizer_without_a_config():
    class Odd(keras.optimizers.SGD):
        def __init__(self, rate, other):
            super().__init__(rate)

    model = around()
    model.compile(Odd(0.1, 2), "mse")
    with pytest.raises(ValueError, match="optimizer '.*' of class Odd, which cannot be rebuilt"):
        BUILDERS["data"](model)


class Boosts(keras.optimizers.SGD):
    """Without a `get_config`."""

    def __init__(self, learning_rate=0.01, boost=1.0, **options):
        super().__init__(learning_rate, **options)
        self.boost = boost

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.boost * gradient, variable, learning_rate)


class Lowers(keras.optimizers.SGD):
    """Stores its argument under another name, and a flag that says what has been built."""

    def __init__(self, learning_rate=0.01, factor=1.0, **options):
        super().__init__(learning_rate, **options)
        self._lowered_by = factor
        self._has_sums = False

    def build(self, variables):
        super().build(variables)
        if not self._has_sums:
            self._sums = [self.add_variable_from_reference(v, "sum") for v in variables]
        self._has_sums = True

    def update_step(self, gradient, variable, learning_rate):
        sums = self._sums[self._get_variable_index(variable)]
        self.assign_add(sums, gradient)
        super().update_step(self._lowered_by * sums, variable, learning_rate)


class Within(keras.metrics.MeanMetricWrapper):
    """Without a `get_config` that says its tolerance."""

    def __init__(self, tolerance=0.5, name="within", dtype=None):
        self.tolerance = tolerance
        super().__init__(self.is_within, name, dtype)

    def is_within(self, y, outputs):
        close = keras.ops.abs(y - outputs) < self.tolerance
        return keras.ops.mean(keras.ops.cast(close, "float32"), -1)

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


class Limits(keras.constraints.Constraint):
    """Keras's `get_config` of a constraint is empty."""

    def __init__(self, limit=1.0):
        self.limit = limit

    def __call__(self, weight):
        return keras.ops.clip(weight, -self.limit, self.limit)


class Falls(keras.optimizers.schedules.LearningRateSchedule):
    """With a `get_config` that says nothing."""

    def __init__(self, first=0.5):
        self.first = first

    def __call__(self, step):
        return self.first / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


@pytest.mark.slow
@every_builder
def test_what_a_config_leaves_out(clone):
    """Story: the clone had the defaults of the constructors, and trained to other weights."""
    model = around()
    model.layers[0].kernel_constraint = model.layers[0].kernel.constraint = Limits(0.3)
    model.compile(keras.optimizers.SGD(Falls(0.1)), "mse", metrics=[Within(2.0)])
    copy = clone(model)
    assert_trains_alike(copy, model)
    x, y = data()
    actual, expected = (m.evaluate(x, y, verbose=0, return_dict=True) for m in (copy, model))
    assert actual["within"] == pytest.approx(expected["within"])


class Warms(keras.optimizers.SGD):
    """Makes its schedule itself."""

    def __init__(self, warm_up=2, name="warms"):
        super().__init__(Falls(1.0 / warm_up), name=name)
        self.warm_up = warm_up

    def get_config(self):
        return {"name": self.name}


class OwnF1(keras.metrics.F1Score):
    """Makes its states in its first update."""


@pytest.mark.slow
def test_what_an_optimizer_and_a_metric_make_themselves_is_made_again():
    """Story: flags that say what has been built went with the arguments of the constructor."""
    model = around()
    model.compile(Warms(4), "mse", metrics=[OwnF1()])
    x, y = data()
    model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    copy = tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"])
    assert copy.optimizer.warm_up == 4
    assert_trains_alike(copy, model)


class Weighs(keras.Model):
    """With a `compile` of its own that a config can call again."""

    def compile(self, optimizer, factor):
        super().compile(optimizer=optimizer, loss="mse", loss_weights=factor)
        self.factor = factor

    def get_compile_config(self):
        optimizer = keras.saving.serialize_keras_object(self.optimizer)
        return {"optimizer": optimizer, "factor": self.factor}

    def compile_from_config(self, config):
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"])
        self.compile(optimizer, config["factor"])


@pytest.mark.slow
@every_builder
def test_a_compile_of_its_own_keeps_what_is_left_out_of_weight_decay(clone):
    model = around()
    model = Weighs(model.inputs, model.outputs)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    model.compile(optimizer, 2.0)
    assert_trains_alike(clone(model), model)


@pytest.mark.slow
def test_an_optimizer_whose_config_says_too_little():
    model = around()
    model.compile(Boosts(boost=3.0), "mse")
    assert_trains_alike(tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"]), model)


@pytest.mark.parametrize("is_built", [False, True])
def test_an_argument_that_is_stored_under_another_name(is_built):
    """Story: the clone had the default of the constructor."""
    model = around()
    model.compile(Lowers(factor=0.1), "mse")
    if is_built:
        x, y = data()
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    copy = tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"])
    assert copy.optimizer._lowered_by == 0.1
    assert_trains_alike(copy, model)


def test_an_optimizer_that_was_built_in_another_order():
    """Story: slots of one shape went to each other's weights."""
    x = keras.Input((6,))
    first, second = (layers.Dense(6, use_bias=False) for _ in range(2))
    model = keras.Model(x, layers.Dense(4, use_bias=False)(second(first(x))))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build([second.kernel, first.kernel, model.layers[-1].kernel])
    model.compile(optimizer, "mse")
    inputs, outputs = data()
    model.fit(inputs, outputs, batch_size=5, shuffle=False, verbose=0)
    assert_trains_alike(tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"]), model)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_an_optimizer_that_a_table_names_twice():
    """Story: the config holds it twice; the clone would have two, with separate counts."""
    adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
    table = keras.optimizers.OptimizerMap(sgd, {".*kernel": adam, ".*bias": adam})
    model = around()
    model.compile(keras.optimizers.MultiOptimizer(table), "mse")
    with pytest.raises(ValueError, match="holds 2 optimizers, and 3 when rebuilt from its config"):
        tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"])


def test_an_optimizer_that_accumulates():
    """Whose `iterations` are no variable: Keras makes them of the steps."""
    model = around()
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "mse")
    assert_trains_alike(tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"]), model)


@pytest.mark.slow
@every_builder
def test_updates_that_are_counted_from_another_number(clone):
    """Story: one that resumes a schedule sets it before the optimizer is built; it was lost."""
    model = around()
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
    optimizer.iterations.assign(3)
    model.compile(optimizer, "mse")
    assert_trains_alike(clone(model), model)
