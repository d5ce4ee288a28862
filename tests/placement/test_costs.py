"""What layers cost: bytes against what a graph holds, plans against what fits."""

import json
import random

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.commands.command_line import ROOT
from tests.commands.command_line import tfparallel as run
from tfparallel.cloning.storageless import StoragelessModel
from tfparallel.placement import layer_timing
from tfparallel.placement.layer_costs import layer_costs, model_costs
from tfparallel.placement.layer_timing import measured_seconds

MIB = 2**20


def perceptron():
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="relu", name="wide")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="narrow")(x))


def test_bytes_of_a_perceptron():
    wide, narrow = layer_costs(perceptron(), 10, optimizer=keras.optimizers.SGD(momentum=0.9))
    assert wide.parameter_bytes == wide.gradient_bytes == wide.slot_bytes == 4 * (8 * 16 + 16)
    # What ReLU puts out is what its gradient and the next layer's read.
    assert wide.activation_bytes(10) == 4 * 10 * 16
    assert narrow.activation_bytes(10) == 0
    assert layer_costs(perceptron(), 10)[1].slot_bytes == 2 * 4 * (16 * 4 + 4)
    adafactor = layer_costs(perceptron(), 10, optimizer=keras.optimizers.Adafactor())
    assert 0 < adafactor[0].slot_bytes < 2 * adafactor[0].parameter_bytes


def test_frozen_weights_have_no_gradient():
    model = perceptron()
    model.get_layer("wide").trainable = False
    wide, _ = layer_costs(model, 10)
    assert wide.gradient_bytes == wide.slot_bytes == 0 < wide.parameter_bytes


@pytest.mark.slow
def test_it_leaves_the_model_as_it_is():
    model = perceptron()
    weights, classes = model.get_weights(), [type(layer) for layer in model.layers]
    model_costs(model, [10], measures_forward=True)
    assert [type(layer) for layer in model.layers] == classes
    assert all((a == b).all() for a, b in zip(weights, model.get_weights(), strict=True))


class Noise(layers.Layer):
    """Draws from Keras's global seed generator."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


@pytest.mark.parametrize("has_drawn", [False, True])
def test_measuring_changes_no_draws(has_drawn):
    """How often a layer runs depends on the clock."""
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(4)(Noise()(inputs)))

    def draws(between):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        if has_drawn:
            keras.random.normal(())
        between()
        return random.random(), float(keras.random.normal(()))

    assert draws(lambda: measured_seconds(model, 4)) == draws(lambda: None)


@pytest.mark.slow
def test_seconds_of_real_layers():
    inputs = keras.Input((512,))
    model = keras.Model(inputs, layers.Dense(4096, name="large")(inputs))
    assert measured_seconds(model, 64)["large"] > 0


def test_nothing_is_stored():
    def build():
        inputs = keras.Input((2**14,))
        return keras.Model(inputs, layers.Dense(2**20, name="vast")(inputs))

    (cost,) = layer_costs(StoragelessModel(build).model, 2)  # 64 GiB of weights.
    assert cost.parameter_bytes == 4 * 2**20 * (2**14 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["memory", "time", "both"])
def test_every_balance_cuts_into_as_many_stages(balance):
    model = tfparallel.model_parallel(
        perceptron, devices=["CPU:0", "CPU:1"], balance=balance, batch_size=4
    )
    assert list(model.placement.values()) == ["CPU:0", "CPU:1"]


def test_a_limit_that_nothing_meets_says_by_how_much():
    with pytest.raises(ValueError, match=r"the best cut has a stage of \d+ bytes, \d+ more\."):
        tfparallel.model_parallel(perceptron, devices=["CPU:0", "CPU:1"], device_memory=100)
    with pytest.raises(ValueError, match="`balance` must be one of memory, time, both"):
        tfparallel.model_parallel(perceptron, devices=["CPU:0", "CPU:1"], balance="weight")


@pytest.mark.slow
def test_plan(tmp_path):
    """As many devices as are needed, and what `train` then does on them."""
    task, report = ROOT / "models" / "mlp.py", tmp_path / "plan.json"
    limit = "--device_memory=60KiB"
    plan = ["plan", task, "--parallel=model"]
    code, shown, _ = run(*plan, "--num_devices=4", limit, f"--report={report}")
    assert code == 0
    first, command = shown.splitlines()[:2]
    assert first == "needs 3 devices of 60 KiB; use --parallel=model; the command:"
    assert command.split()[1:4] == ["train", str(task), "--parallel=model"]
    assert "--num_devices=3" in command
    written = json.loads(report.read_text())
    assert len(written["stages"]) == 3 and written["step_seconds"] > 0
    assert all(stage["held_bytes"] <= 60 * 1024 for stage in written["stages"])
    assert written["largest"]["2"] > 60 * 1024
    code, shown, _ = run(*plan, "--num_devices=2", "--device_memory=8KiB")
    assert code == 1 and "does not fit 2 devices of 8 KiB" in shown
    code, _, errors = run("plan", task, "--device_memory=much", "--num_devices=0")
    assert code == 2 and "such as 16GiB" in errors and "--num_devices=0" in errors


def test_a_shared_layer_counts_each_call_and_equal_layers_are_run_once(monkeypatch):
    measured = iter([2.0, 1.0, 0.5])
    monkeypatch.setattr(layer_timing, "marginal_seconds", lambda program: next(measured))
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    x = shared(shared(layers.Dense(4, name="first")(inputs)))
    x = layers.Dense(4, name="equal")(x)
    model = keras.Model(inputs, layers.Dense(2, name="other")(x))
    # "first" is of the same kind, but sends no gradient back.
    seconds = measured_seconds(model, 8)
    assert seconds == {"first": 2.0, "shared": 2.0, "equal": 1.0, "other": 0.5}


class Both(layers.Layer):
    """Has a weight, and reads two tensors."""

    def build(self, deep_shape, wide_shape):
        self.kernel = self.add_weight(shape=(deep_shape[-1], 8))

    def call(self, deep, wide):
        return keras.ops.concatenate([deep @ self.kernel, wide])


def wide_and_deep():
    inputs = keras.Input((8,), name="wide")
    deep = layers.Dense(16, name="deep")(inputs)
    outputs = layers.Concatenate(name="beside")([inputs, deep])
    return keras.Model(inputs, [layers.Dense(4)(outputs), Both(name="both")(deep, inputs)])


@pytest.mark.slow
def test_a_layer_that_reads_an_input_and_a_computed_tensor():
    """Story: "could not find node key".

    A `keras.Model` of both takes the `Input` away from the user's model, whose config then cannot
    be told any more.
    """
    model = wide_and_deep()
    config = model.get_config()
    assert all(seconds > 0 for seconds in measured_seconds(model, 4).values())
    assert model.get_config() == config


class Counting(layers.Layer):
    """Holds a metric, and no weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name="mean_seen")

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


@pytest.mark.slow
def test_a_subclassed_model_that_is_a_layer_is_measured_as_one():
    class Inner(keras.Model):
        def __init__(self):
            super().__init__(name="inner")
            self.dense = layers.Dense(8)

        def call(self, x):
            return self.dense(x)

    def build():
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(4, name="narrow")(Inner()(inputs)))

    assert set(measured_seconds(build(), 4)) == {"inner", "narrow"}


def test_a_layer_that_holds_a_metric_is_measured_on_a_copy():
    """Story: "'NoneType' object has no attribute 'assign'", where the model had no storage yet."""

    def build():
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(4)(Counting(name="counting")(inputs)))

    model = build()
    assert measured_seconds(model, 4)["counting"] > 0
    assert model.get_layer("counting").mean.total.numpy() == 0.0
    assert measured_seconds(StoragelessModel(build).model, 4)["counting"] > 0


def test_a_variable_that_is_trained_in_a_frozen_layer_has_a_gradient():
    model = perceptron()
    model.get_layer("wide").trainable = False
    model.get_layer("wide").bias.trainable = True
    assert layer_costs(model, 10)[0].gradient_bytes == 4 * 16


def of_seven_rows(declared):
    inputs = keras.Input((4,), batch_size=declared)
    x = layers.Dense(3)(inputs) * np.ones((7, 1), "float32")
    return keras.Model(inputs, layers.Dense(1)(x))


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["time", "memory"])
def test_a_model_of_one_batch_size_is_cut_by_what_such_a_batch_costs(balance):
    two = ["CPU:0", "CPU:1"]
    cut = tfparallel.model_parallel(lambda: of_seven_rows(7), devices=two, balance=balance)
    assert len(set(cut.placement.values())) == 2
    with pytest.raises(ValueError, match="Pass the `batch_size` that you train with"):
        tfparallel.model_parallel(lambda: of_seven_rows(None), devices=two, balance=balance)
    tfparallel.model_parallel(
        lambda: of_seven_rows(None), devices=two, balance=balance, batch_size=7
    )
