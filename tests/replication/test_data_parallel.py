"""The builder: what it returns, what it copies, what it refuses."""

import contextlib
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.forked import run_python
from tests.own_steps import updated
from tfparallel.replication import refusals
from tfparallel.replication.data_parallel_model import DataParallelModel
from tfparallel.strategies import variables

TWO, THREE = ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]
DEADLINE_SECONDS = 120


def mlp():
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)]
    )


def compiled(model, **arguments):
    model.compile(**({"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | arguments))
    return model


def data(num_examples=10):
    generator = np.random.default_rng(8)
    return generator.normal(size=(num_examples, 3)), generator.normal(size=(num_examples, 2))


def assert_weights(model, expected, **tolerance):
    for value, weight in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, weight, **tolerance)


# --- What it returns --------------------------------------------------------------------------


class OwnModel(keras.Model):
    """A model of the user's own class."""

    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return super().get_config() | {"units": self.units}


def test_the_users_class_is_extended():
    model = tfparallel.data_parallel(OwnModel, devices=TWO)
    assert isinstance(model, OwnModel)
    assert isinstance(model, DataParallelModel)
    assert type(model).__name__ == "OwnModel"
    assert type(model).__module__ == __name__
    assert [name[-5:] for name in model.strategy.devices] == TWO
    assert type(OwnModel()) is OwnModel  # The class itself is as it was.


@pytest.mark.slow
def test_each_variable_has_a_copy_on_each_device():
    model = tfparallel.data_parallel(mlp, devices=THREE)
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(*data(), verbose=0)
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        assert [copy.device[-5:] for copy in variable.value.values] == THREE, variable.path


def test_all_devices_by_default():
    model = tfparallel.data_parallel(mlp)
    assert [name[-5:] for name in model.strategy.devices] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


# Trains and predicts on one device and on twelve: "CPU:10" comes behind "CPU:9", not "CPU:1".
TWELVE = """
import keras, numpy as np, tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.tracing.audit import short
from tfparallel.strategies.variables import copies

devices = tfparallel.devices.split_cpu(12)
assert devices == tfparallel.devices.list_devices() == [f"CPU:{k}" for k in range(12)]
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
x, y = np.random.default_rng(8).normal(size=(2, 41, 3))

def build():
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.4, seed=5), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((3,)), *layers])

def trained(model):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(x, y, batch_size=29, epochs=2, shuffle=False, verbose=0).history
    return history, [*state_of(model), model.predict(x, batch_size=29, verbose=0)]

model = tfparallel.data_parallel(lambda: seeded(build))
assert_equal(trained(model), trained(seeded(build)))
assert [short(copy.device) for copy in copies(model.variables[0])] == devices
"""


@pytest.mark.slow
def test_twelve_replicas_are_one_device_in_the_order_of_their_numbers():
    """Batches of 29 and 12 rows: of two or three, and of one each."""
    done = run_python(["-c", TWELVE], timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_given_strategy_is_used():
    strategy = tfparallel.MirroredStrategy(TWO)
    assert tfparallel.data_parallel(mlp, strategy).strategy is strategy


@pytest.mark.slow
def test_one_replica_costs_nothing():
    """No strategy, plain variables, and Keras's own step: the trace has plain Keras's ops."""
    model = compiled(tfparallel.data_parallel(mlp, devices=["CPU:0"]))
    plain = compiled(mlp())
    assert model.strategy is None
    assert model.distribute_strategy is plain.distribute_strategy
    assert all(isinstance(v.value, type(plain.variables[0].value)) for v in model.variables)
    x, y = data()
    counts = []
    for each in (model, plain):
        each.fit(x, y, verbose=0)
        step = tf.function(lambda model=each: model.train_step((tf.ones((4, 3)), tf.ones((4, 2)))))
        counts.append(len(step.get_concrete_function().graph.get_operations()))
    # Some identities under a control dependency on the data.
    assert counts[0] == pytest.approx(counts[1], rel=0.05)


def test_one_device_that_is_not_the_default_holds_all():
    model = compiled(tfparallel.data_parallel(mlp, devices=["CPU:2"]))
    model.fit(*data(), verbose=0)
    for variable in model.variables:
        assert [copy.device[-5:] for copy in variables.copies(variable)] == ["CPU:2"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["predict", "evaluate", "train_on_batch"])
def test_methods_without_a_fit_before(method):
    x, y = data()
    model, plain = compiled(tfparallel.data_parallel(mlp, devices=THREE)), compiled(mlp())
    plain.set_weights(model.get_weights())
    arguments = {"predict": (x,), "evaluate": (x, y), "train_on_batch": (x, y)}[method]
    options = {} if method == "train_on_batch" else {"batch_size": 4, "verbose": 0}
    seen = getattr(model, method)(*arguments, **options)
    expected = getattr(plain, method)(*arguments, **options)
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    assert_weights(model, plain.get_weights(), rtol=1e-5, atol=1e-6)


# --- A clone ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clone_keeps_weights_frozen_layers_and_compile_state():
    x, y = data()
    model = mlp()
    model.layers[0].trainable = False
    compiled(model, metrics=["mae"])
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    copy = tfparallel.data_parallel(model, devices=THREE)
    assert copy is not model
    assert_weights(copy, model.get_weights(), rtol=0, atol=0)
    assert [layer.trainable for layer in copy.layers] == [False, True]
    assert type(copy.optimizer).__name__ == "Adam"
    for ours, theirs in zip(copy.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=theirs.path)
    before = [value.copy() for value in model.get_weights()]
    # Both train on, alike; the original is not touched by its copy's training.
    copy.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_weights(model, before, rtol=0, atol=0)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_weights(copy, model.get_weights(), rtol=1e-5, atol=1e-6)
    seen, expected = (
        each.evaluate(x, y, verbose=0, return_dict=True) for each in (copy, model)
    )
    assert seen.keys() == expected.keys() == {"loss", "mae"}
    np.testing.assert_allclose(list(seen.values()), list(expected.values()), rtol=1e-5)


def test_a_clone_of_the_users_own_class():
    model = OwnModel(units=3)
    model(tf.ones((1, 4)))
    copy = tfparallel.data_parallel(model, devices=TWO)
    assert isinstance(copy, OwnModel)
    assert_weights(copy, model.get_weights(), rtol=0, atol=0)
    x = np.ones((5, 4))
    np.testing.assert_allclose(
        copy.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6
    )


@pytest.mark.slow
def test_a_clone_continues_the_draws_of_random_layers():
    def build():
        return compiled(
            keras.Sequential(
                [keras.Input((3,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(2)]
            )
        )

    x, y = data()
    model = build()
    model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    copy = tfparallel.data_parallel(model, devices=THREE)
    for each in (model, copy):
        each.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    assert_weights(copy, model.get_weights(), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_not_built_cannot_be_cloned():
    with pytest.raises(ValueError, match="is not built, so it has no weights to clone"):
        tfparallel.data_parallel(OwnModel(), devices=TWO)


def test_a_model_whose_config_cannot_rebuild_it_cannot_be_cloned():
    class WithoutConfig(keras.Model):
        def __init__(self, dense):
            super().__init__()
            self.inner = dense

        def call(self, inputs):
            return self.inner(inputs)

    model = WithoutConfig(keras.layers.Dense(2))
    model(tf.ones((1, 3)))
    with pytest.raises(ValueError, match="no attribute `dense`.*`self.dense = dense`"):
        tfparallel.data_parallel(model, devices=TWO)


# --- What is saved ----------------------------------------------------------------------------


@pytest.mark.slow
def test_plain_keras_loads_what_is_saved(tmp_path):
    """In a process that has no tfparallel, with the optimizer's state, and it trains on."""
    x, y = data()

    def build():
        inputs = keras.Input((3,))
        # No bias: its gradient before batch normalization is rounding noise.
        hidden = keras.layers.Dense(4, use_bias=False)(inputs)
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.BatchNormalization()(hidden)))

    keras.utils.set_random_seed(4)
    model = tfparallel.data_parallel(build, devices=THREE)
    compiled(model, metrics=["mae"])
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    program = """
import sys
sys.modules["tfparallel"] = None  # An import of it would raise.
import json, pathlib, keras, numpy as np
folder = pathlib.Path(sys.argv[1])
model = keras.models.load_model(folder / "model.keras")
data = np.load(folder / "data.npz")
result = {
    "class": f"{type(model).__module__}.{type(model).__name__}",
    "iterations": int(model.optimizer.iterations.numpy()),
    "weights": [w.tolist() for w in model.get_weights()],
    "predictions": model.predict(data["x"], verbose=0).tolist(),
}
model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)
result["trained"] = [w.tolist() for w in model.get_weights()]
print(json.dumps(result))
"""
    finished = run_python(["-c", program, tmp_path], timeout=DEADLINE_SECONDS, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    loaded = json.loads(finished.stdout.splitlines()[-1])
    assert loaded["class"].startswith("keras.")
    assert loaded["iterations"] == 6
    for value, weight in zip(loaded["weights"], model.get_weights(), strict=True):
        np.testing.assert_array_equal(np.asarray(value, weight.dtype), weight)
    np.testing.assert_allclose(
        loaded["predictions"], model.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_weights(model, [np.asarray(value) for value in loaded["trained"]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_saved_file_does_not_name_the_package(tmp_path):
    import zipfile

    model = compiled(tfparallel.data_parallel(mlp, devices=TWO))
    model.fit(*data(), verbose=0)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert b"tfparallel" not in archive.read("config.json")
        assert b"Sequential" in archive.read("config.json")


def test_weights_load_after_building(tmp_path):
    plain = mlp()
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = tfparallel.data_parallel(mlp, devices=THREE)
    model.load_weights(tmp_path / "plain.weights.h5")
    for variable, plain_variable in zip(model.variables, plain.variables, strict=True):
        for copy in variable.value.values:
            np.testing.assert_array_equal(copy.numpy(), plain_variable.numpy())


# --- Bad input, on the text -------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices, message",
    [
        (["CPU:0", "CPU:7"], r"CPU:7 does not exist.*Received: devices=\['CPU:0', 'CPU:7'\]"),
        (["GPU:x"], "'GPU:x' is not a device name"),
        (["CPU:0", "cpu:0"], "CPU:0 is listed 2 times"),
        ([], "the list is empty"),
        ("CPU:0,CPU:1", "a list of names"),
    ],
)
def test_devices_that_cannot_be_used(devices, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.data_parallel(mlp, devices=devices)


def returns_nothing():
    mlp()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("mlp", r"needs a function .* Received: 'mlp' \(of type str\)"),
        (None, r"needs a function .* Received: None \(of type NoneType\)"),
        (returns_nothing, "must return .* Received: None .* from returns_nothing.*`return model`"),
        (lambda: "model", r"must return a Keras model. Received: 'model' \(of type str\)"),
        (lambda: keras.layers.Dense(1), "must return a Keras model. Received: <Dense"),
    ],
    ids=["a name", "nothing", "no return", "a string", "a layer"],
)
def test_a_function_that_builds_no_model_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.data_parallel(wrong, devices=TWO)


@pytest.mark.parametrize("strategy", ["mirrored", None, 2])
def test_what_is_no_strategy(strategy):
    with pytest.raises(ValueError, match=f"must be 'auto', .* Received: strategy={strategy!r}"):
        tfparallel.data_parallel(mlp, strategy)


def test_tensorflows_strategy_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="replace `tf.distribute.` with `tfparallel.`"):
        tfparallel.data_parallel(mlp, tf.distribute.MirroredStrategy(TWO))
    with pytest.raises(ValueError, match=r"Pass devices as `devices=\['CPU:0', 'CPU:1'\]`"):
        tfparallel.data_parallel(mlp, TWO)


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("sync", "local-sgd:8", "Did you mean 'local_sgd:8'"),
        ("sync", "LocalSGD:8", "Did you mean 'local_sgd:8'"),
        ("shard", "params", "Pass shard='parameters'"),
        ("strategy", "multi_worker", "Leave out `strategy`"),
    ],
)
def test_near_misses_name_what_was_meant(option, value, fix):
    with pytest.raises(ValueError, match=fix):
        tfparallel.data_parallel(mlp, devices=TWO, **{option: value})


def test_a_strategy_and_devices_contradict_each_other():
    with pytest.raises(ValueError, match="A strategy already defines its devices"):
        tfparallel.data_parallel(mlp, tfparallel.MirroredStrategy(TWO), devices=THREE)


@pytest.mark.parametrize("scope_of", [tf.distribute.MirroredStrategy, tfparallel.MirroredStrategy])
def test_a_model_of_another_scope(scope_of):
    with scope_of(TWO).scope():
        model = mlp()
    message = "was built in the scope of another strategy.*Received: variable '.*kernel' of a Mirr"
    with pytest.raises(ValueError, match=message):
        tfparallel.data_parallel(model, devices=THREE)


def test_a_local_strategy_among_several_workers_is_refused(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    strategy = tfparallel.MirroredStrategy(TWO)
    with pytest.raises(RuntimeError, match="one of 2 workers .TF_CONFIG.*independent_workers=True"):
        tfparallel.data_parallel(mlp, strategy)
    model = tfparallel.data_parallel(mlp, strategy, allow_independent_workers=True)
    assert len(model.strategy.devices) == 2


@pytest.mark.parametrize(
    "cluster", ["{}", json.dumps({"cluster": {"worker": ["localhost:1"]}})]
)
def test_one_worker_is_no_cluster(monkeypatch, cluster):
    monkeypatch.setenv("TF_CONFIG", cluster)
    assert tfparallel.data_parallel(mlp, devices=TWO).strategy is not None


@pytest.fixture(name="model", params=["one device", "three devices"])
def make_model(request):
    devices = THREE if request.param == "three devices" else THREE[:1]
    return compiled(tfparallel.data_parallel(mlp, devices=devices))


@pytest.mark.parametrize("batch_size", [0, -3, 2.5, "8"])
def test_a_global_batch_size_below_one(model, batch_size):
    message = f"of `fit` must be an integer of at least 1.* Received: batch_size={batch_size!r}"
    with pytest.raises(ValueError, match=message):
        model.fit(*data(), batch_size=batch_size, verbose=0)


@pytest.mark.slow
def test_a_numpy_integer_is_an_integer(model):
    model.fit(*data(), batch_size=np.int64(4), verbose=0)


def test_empty_arrays(model):
    with pytest.raises(ValueError, match=r"data given to `fit` is empty.*arrays of \[0\] examples"):
        model.fit(np.zeros((0, 3)), np.zeros((0, 2)), verbose=0)


def test_an_empty_data_set(model):
    dataset = tf.data.Dataset.from_tensor_slices(data(3)).batch(4, drop_remainder=True)
    with pytest.raises(ValueError, match="data set given to `fit` is empty.*drop_remainder"):
        model.fit(dataset, verbose=0)


@pytest.mark.slow
def test_an_infinite_data_set(model):
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(4).repeat()
    with pytest.raises(ValueError, match="infinite.*`steps_per_epoch` is required"):
        model.fit(dataset, verbose=0)
    history = model.fit(dataset, steps_per_epoch=2, verbose=0)
    assert len(history.history["loss"]) == 1
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.slow
def test_fit_takes_its_arguments_by_position_as_keras_does(model):
    x, y = data()
    model.fit(x, y, 5, 2, 0)
    assert int(model.optimizer.iterations.numpy()) == 4


def test_a_model_that_is_not_compiled():
    model = tfparallel.data_parallel(mlp, devices=TWO)
    with pytest.raises(ValueError, match="(?i)compile"):
        model.fit(*data(), verbose=0)


def test_jit_compile_by_position():
    for devices in (TWO, TWO[:1]):
        model = tfparallel.data_parallel(mlp, devices=devices)
        model.compile("sgd", "mse", None, None, None, False, 1, True)
        assert model.jit_compile is True


@pytest.mark.slow
def test_jit_compile_under_the_drop_in_strategy():
    with tfparallel.MirroredStrategy(TWO).scope():
        model = mlp()
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(*data(), verbose=0)
    assert model.jit_compile is True


def stateful():
    return keras.Sequential(
        [keras.Input(batch_shape=(4, 5, 2)), keras.layers.LSTM(3, stateful=True, name="memory")]
    )


def test_a_stateful_recurrent_layer():
    with pytest.raises(ValueError, match=r"Stateful recurrent layers.*3 replicas.*\['memory'\]"):
        tfparallel.data_parallel(stateful, devices=THREE)
    assert tfparallel.data_parallel(stateful, devices=THREE[:1]).layers[0].stateful


def test_an_output_without_a_batch_axis():
    class Mean(keras.layers.Layer):
        def call(self, inputs):
            return keras.ops.mean(inputs)

    model = compiled(
        tfparallel.data_parallel(lambda: keras.Sequential([keras.Input((3,)), Mean()]), devices=TWO)
    )
    with pytest.raises(ValueError, match="class Mean .*output 0 .* is Mean"):
        model.fit(data()[0], np.ones(10), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("synchronize", [True, False])
def test_a_part_of_a_model_predicts_on_its_own_after_training(synchronize):
    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            self.inner = keras.Sequential([keras.Input((3,)), *layers])

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x - self.inner(x, training=True)) ** 2)
            gradients = tape.gradient(loss, self.inner.trainable_variables)
            self.optimizer.apply(gradients, self.inner.trainable_variables)
            return {"loss": loss}

    x = data()[0]
    weights = []
    for asks in (False, True):
        keras.utils.set_random_seed(3)
        model = tfparallel.data_parallel(
            Autoencoder, devices=TWO, synchronize_batch_norm=synchronize
        )
        compiled(model, loss=None)
        for _ in range(2):
            model.fit(x, batch_size=5, shuffle=False, verbose=0)
            if asks:
                outputs = model.inner.predict(x, batch_size=4, verbose=0)
                np.testing.assert_allclose(outputs, model.inner(x), rtol=1e-5, atol=1e-6)
                assert model.inner.layers[-1].synchronize is synchronize
        weights.append(model.get_weights())
    assert_weights(model, weights[0], rtol=0, atol=0)


# --- Faults of Keras that the model answers ---------------------------------------------------


def generator_batches(num_batches=10):
    x, y = data(4 * num_batches)
    for start in range(0, len(x), 4):
        yield x[start : start + 4], y[start : start + 4]


@pytest.mark.slow
def test_a_generator_loses_no_batch():
    model = compiled(tfparallel.data_parallel(mlp, devices=THREE))
    model.fit(generator_batches(), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 10


@pytest.mark.slow
def test_keras_under_tensorflows_strategy_loses_batches_of_a_generator():
    """It fails on the day that Keras looks at the spec instead of a batch."""
    strategy = tf.distribute.MirroredStrategy(
        TWO, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        model = compiled(mlp())
    model.fit(generator_batches(), verbose=0)
    assert int(model.optimizer.iterations.numpy()) < 10


def accumulating():
    keras.utils.set_random_seed(6)
    return mlp()


def trained_on(model, batches):
    compiled(model, optimizer=keras.optimizers.SGD(0.5, gradient_accumulation_steps=4))
    model.fit(batches, verbose=0)
    model.fit(*data(8), batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


def known_length():
    dataset = tf.data.Dataset.from_tensor_slices(data(24))
    return dataset.batch(4)


@pytest.mark.slow
def test_keras_loses_the_pending_gradient_when_a_generator_ends():
    """Six steps, one update, two pending: the seventh, without data, resets the accumulators.

    It fails on the day that Keras keeps them, and the control dependency may go.
    """
    expected = trained_on(accumulating(), known_length())
    lost = trained_on(accumulating(), generator_batches(6))
    apart = max(np.abs(a - b).max() for a, b in zip(lost, expected, strict=True))
    assert apart > 1e-3


@pytest.mark.slow
def test_the_pending_gradient_outlives_the_end_of_a_generator():
    expected = trained_on(accumulating(), known_length())
    model = tfparallel.data_parallel(accumulating, devices=THREE)
    seen = trained_on(model, generator_batches(6))
    for value, weight in zip(seen, expected, strict=True):
        np.testing.assert_allclose(value, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [None, THREE], ids=["keras", "three devices"])
def test_keras_counts_the_end_of_a_generator_as_a_step(devices):
    """Six batches, and plain Keras counts a seventh; it fails on the day that it counts six."""
    model = accumulating() if devices is None else tfparallel.data_parallel(mlp, devices=devices)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(generator_batches(6), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == (7 if devices is None else 6)


def has_avx512():
    processor = pathlib.Path("/proc/cpuinfo")
    return processor.exists() and "avx512f" in processor.read_text()


def test_a_convolution_of_no_images_has_the_wrong_shape_on_the_cpu():
    """Why a replica without examples computes a dummy row; it fails once TensorFlow mends it."""
    empty = tf.nn.conv2d(tf.zeros((0, 8, 8, 1)), tf.zeros((3, 3, 1, 6)), 1, "VALID")
    if empty.shape == (0, 6, 6, 6) and not has_avx512():
        pytest.skip("only a convolution of processors with AVX-512 has this fault")
    assert empty.shape != (0, 6, 6, 6)


def test_the_first_draw_may_be_inside_a_trace():
    """A program that is traced before Keras has made its global seeds."""
    model = tfparallel.data_parallel(mlp, devices=THREE)
    keras.utils.set_random_seed(1)  # Drops the global seeds, to be made anew.

    @tf.function
    def forward(x):
        with model.strategy.program():
            return model(x, training=True)

    assert forward.get_concrete_function(tf.TensorSpec((6, 3))).structured_outputs.shape == (6, 2)


@pytest.mark.slow
def test_unequal_shares_train_to_the_same_weights():
    """Five rows of every eight to one replica, one to the last, in batches of 7 and 3."""
    expected = compiled(mlp())
    model = tfparallel.data_parallel(mlp, devices=THREE, replica_weights=[5, 2, 1])
    compiled(model).set_weights(expected.get_weights())
    for each in (expected, model):
        each.fit(*data(), batch_size=7, epochs=3, shuffle=False, verbose=0)
    # Sums in another order, in float32.
    assert_weights(model, expected.get_weights(), rtol=1e-5, atol=1e-6)


def test_weights_for_another_number_of_replicas():
    with pytest.raises(ValueError, match=r"Received: \[3, 1\] for 3 replicas"):
        tfparallel.data_parallel(mlp, devices=THREE, replica_weights=[3, 1])


def test_schedule_free_training_averages_on_one_device_as_on_two():
    x = np.random.default_rng(0).normal(size=(40, 4))
    y = x.sum(axis=1, keepdims=True)

    def weights(devices):
        keras.utils.set_random_seed(2)
        build = lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])  # noqa: E731
        model = tfparallel.data_parallel(build, devices=devices)
        model.compile(keras.optimizers.ScheduleFreeAdamW(0.1), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for one, two in zip(weights(["CPU:0"]), weights(["CPU:0", "CPU:1"]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4)


def test_a_variable_that_was_made_outside_the_scope_cannot_be_trained():
    """Story: "`colocate_vars_with` must only be passed a variable created in this scope"."""
    model = compiled(tfparallel.data_parallel(mlp, devices=TWO))
    model.layers[0].enable_lora(2)
    message = "(?s)created outside its strategy's scope.*2 replicas.*lora_kernel_a, .*lora_kernel_b"
    with pytest.raises(ValueError, match=message):
        model.fit(*data(), verbose=0)
    with pytest.raises(ValueError, match=message):
        compiled(model)


@pytest.mark.slow
def test_lora_within_the_scope():
    model = tfparallel.data_parallel(mlp, devices=TWO)
    plain = mlp()
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        keras.utils.set_random_seed(3)
        with each.distribute_strategy.scope():
            each.layers[0].enable_lora(2, lora_alpha=6)
        compiled(each).fit(*data(), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_weights(model, plain.get_weights(), rtol=1e-4, atol=1e-5)


def test_an_activity_that_keras_sums_over_the_batch_is_refused(monkeypatch):
    dense = keras.layers.Dense(2, activity_regularizer="l2", name="costly")
    model = keras.Sequential([keras.Input((3,)), dense])
    monkeypatch.setattr(refusals, "ACTIVITY_IS_SUMMED", True)  # As before Keras 3.14.
    model = tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match=r"sums an activity regularizer .*\['costly'\]"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("compiled", ["within the scope", "outside"])
def test_a_model_built_outside_the_scope_is_told(compiled):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")])
    message = r"built outside the scope.*on each of 2 replicas.*2 weights.*only/kernel.*no scope"
    with pytest.raises(ValueError, match=message):
        with strategy.scope() if compiled == "within the scope" else contextlib.nullcontext():
            model.compile("adam", "mse")
        with strategy.scope():
            model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)


@pytest.mark.parametrize("steps", ["Keras's", "its own"])
def test_a_model_built_outside_the_scope_is_told_on_one_device(steps):
    """Story: `colocate_vars_with` "must only be passed a variable created in this scope"."""

    class OwnSteps(keras.Sequential):
        def train_step(self, data):
            return {"loss": updated(self, data)}

    strategy = tfparallel.MirroredStrategy(["CPU:0"])
    cls = keras.Sequential if steps == "Keras's" else OwnSteps
    model = cls([keras.Input((4,)), keras.layers.Dense(1, name="only")], name="early")
    message = (
        r"Model 'early' was built outside the scope.*Weights that belong to the strategy are "
        r"required\. Received: 2 weights outside the scope, such as early/only/kernel\. Build"
    )
    with pytest.raises(ValueError, match=message), strategy.scope():
        model.compile("adam", "mse")
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=message), strategy.scope():
        model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)


def test_an_optimizer_of_a_custom_loop_is_told_of_weights_outside_the_scope():
    strategy = tfparallel.MirroredStrategy(["CPU:0"])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")])
    with strategy.scope():
        optimizer = tfparallel.distribute_optimizer(keras.optimizers.Adam())
        with pytest.raises(ValueError, match="A model was built outside the scope.*2 weights"):
            optimizer.build(model.trainable_variables)


def encoder_and_decoder():
    encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="encoder")
    decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)], name="decoder")
    return encoder, decoder


@pytest.mark.parametrize("outside", ["both", "one"])
def test_a_function_that_uses_what_was_built_before_is_told(outside):
    """Story: the message spoke of a strategy's scope, or of LoRA, and the user had neither."""

    class AutoEncoder(keras.Model):
        def __init__(self, encoder, decoder):
            super().__init__()
            self.encoder, self.decoder = encoder, decoder

        def call(self, inputs):
            return self.decoder(self.encoder(inputs))

    encoder, decoder = encoder_and_decoder()

    def build():
        decoder_used = decoder if outside == "both" else encoder_and_decoder()[1]
        return AutoEncoder(encoder, decoder_used)

    model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])
    parts, them = ("`encoder` and `decoder`", "them") if outside == "both" else ("`encoder`", "it")
    message = (
        f"function passed to `data_parallel`.*2 replicas.*Received: {parts}, built outside the "
        f"function. Create {them} inside the function, or pass the built model"
    )
    with pytest.raises(ValueError, match=message):
        model.compile("adam", "mse")


def test_a_function_whose_graph_holds_a_model_built_before_is_told():
    encoder, _ = encoder_and_decoder()

    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(4)(encoder(inputs)))

    model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="Received: `encoder`, built outside the function"):
        model.compile("adam", "mse")


@pytest.mark.parametrize("scope", [tf.distribute.MirroredStrategy, tfparallel.MirroredStrategy])
@pytest.mark.parametrize("call", ["the builder", "compile", "fit"])
def test_the_scope_of_another_strategy_is_told(scope, call):
    def build():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    other, devices = scope(["CPU:0", "CPU:1"]), ["CPU:0", "CPU:1"]
    message = r"outside another strategy's scope. Received: MirroredStrategy in scope. Move the"
    model = tfparallel.data_parallel(build, devices=devices)
    if call == "fit":
        model.compile("sgd", "mse")
    with other.scope(), pytest.raises(ValueError, match=message):
        if call == "the builder":
            tfparallel.data_parallel(build, devices=devices)
        elif call == "compile":
            model.compile("sgd", "mse")
        else:
            model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)


def test_the_scope_of_the_strategy_itself_is_no_other():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = tfparallel.data_parallel(
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), strategy
        )
        model.compile("sgd", "mse")
    assert model.distribute_strategy is strategy
