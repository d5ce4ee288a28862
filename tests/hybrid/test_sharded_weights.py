"""Replicas of stages that each keep a share of the weights train as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfparallel
from tests.comparison import seeded
from tests.replication import test_sharded_parameters as replicated
from tests.replication.test_sharded_optimizer import ACCUMULATING, OPTIMIZERS, apart
from tests.replication.test_sharded_parameters import SIZE, data, sharded
from tests.tensor_bytes import tensor_bytes
from tfparallel import Mesh
from tfparallel.problems import PlacementError
from tfparallel.replication import sharding
from tfparallel.strategies.variables import copies as copies_of
from tfparallel.tracing.audit import short

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
MESH = Mesh(data=2, pipeline=2)


@pytest.fixture(autouse=True)
def all_weights_are_large(monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 20)


def build(dropout=0.3):
    x = keras.Input((SIZE,))
    hidden = layers.Dense(11, "tanh", name="first")(x)
    hidden = layers.Dense(7, "tanh", kernel_regularizer="l2", name="second")(hidden)
    hidden = layers.Dropout(dropout, seed=3)(hidden)
    hidden = layers.Dense(9, "tanh", activity_regularizer="l1", name="third")(hidden)
    return keras.Model(x, layers.Dense(3, name="head")(hidden))


def without_dropout():
    return build(dropout=0.0)


def build_frozen():
    model = build()
    for name in ("second", "third"):
        model.get_layer(name).trainable = False
    return model


def on_mesh(function=build, mesh=MESH, **options):
    options = {"num_micro_batches": 2, "shard": "parameters", "balance": "memory"} | options
    devices = DEVICES[: mesh.size]
    return tfparallel.hybrid_parallel(lambda: seeded(function), mesh, devices, **options)


def trained(model, optimizer=None, rows=8, epochs=2, number=29, callbacks=(), **options):
    optimizer = optimizer or optimizers.Adam(0.05, global_clipnorm=0.5)
    model.compile(optimizer, options.pop("loss", "mse"), **options)
    if not hasattr(model, "strategy"):  # Keras builds it in each step, which begins anew.
        optimizer.build(model.trainable_variables)
    model.fit(
        *data(number),
        batch_size=rows,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def compares(y_true, y_pred):
    of_all = keras.ops.mean(keras.ops.square(keras.ops.mean(y_pred, 0)))
    return (1 + of_all) * keras.ops.mean(keras.ops.square(y_pred - y_true))


WAYS = {
    "1f1b": ({}, {}),
    "gpipe": ({"schedule": "gpipe"}, {}),
    "joined outputs": ({"schedule": "gpipe"}, {"loss": compares}),
    "interleaved": ({"schedule": "interleaved"}, {}),
    "recomputed": ({"recompute": "except_last", "num_micro_batches": 3}, {}),
    "four replicas": ({"mesh": Mesh(data=4), "num_micro_batches": 1}, {}),
    "eager": ({}, {"run_eagerly": True}),
}


@pytest.mark.parametrize(
    "way", ["1f1b", *(pytest.param(way, marks=pytest.mark.slow) for way in [*WAYS][1:])]
)
def test_it_trains_as_one_device_does(in_float64, way):
    """With uneven batches: the last one has fewer rows than there are pieces of a full one."""
    options, compiled = WAYS[way]
    model, one = trained(on_mesh(**options), **compiled), trained(seeded(build), **compiled)
    assert len(sharded(model)) == 4 and apart(model, one) < 1e-9
    x, y = data()
    assert model.evaluate(x, y, verbose=0) == pytest.approx(one.evaluate(x, y, verbose=0), 1e-9)
    np.testing.assert_allclose(model.predict(x, verbose=0), one.predict(x, verbose=0), 1e-9)


MODELS = {
    "frozen": build_frozen,
    "a frozen table": replicated.build_frozen_table,
    "tables, one of them tied": replicated.build_tables,
    "weights read twice": replicated.build_shared,
    "recurrent": replicated.build_recurrent,
    "a constraint": lambda: keras.Sequential(
        [keras.Input((SIZE,)), layers.Dense(9, kernel_constraint="non_neg"), layers.Dense(3)]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run_eagerly"),
    [*((name, False) for name in MODELS), ("tables, one of them tied", True)],
)
def test_models(in_float64, name, run_eagerly):
    options = {"optimizer": optimizers.Adam(0.05), "run_eagerly": run_eagerly}
    model = trained(on_mesh(MODELS[name], num_micro_batches=3), **options)
    one = trained(seeded(MODELS[name]), **options | {"optimizer": optimizers.Adam(0.05)})
    assert sharded(model) and apart(model, one) < 1e-9


STEPS = {name: OPTIMIZERS[name] for name in ("clipnorm", "loss scaling", "several")}
STEPS |= {f"{name}, of several steps": ACCUMULATING[name] for name in ("Adam", "global_clipnorm")}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_optimizers(in_float64, name):
    model, one = trained(on_mesh(), STEPS[name]()), trained(seeded(build), STEPS[name]())
    assert sharded(model) and apart(model, one) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global_clipnorm", "loss scaling"])
def test_gradients_of_several_batches_are_added_up_in_shares(in_float64, name):
    model = on_mesh(without_dropout, sync="accumulate:3")
    trained(model, OPTIMIZERS[name](), rows=6, number=36)
    one = trained(seeded(without_dropout), OPTIMIZERS[name](), rows=18, number=36)
    assert apart(model, one) < 1e-9
    (kernel, accumulators), *_ = model._policy._accumulators.values()
    assert kernel.shape == (SIZE, 11)
    assert [each.shape for each in accumulators] == [(33, 11), (33, 11)]
    assert [short(each.device) for each in accumulators] == ["CPU:0", "CPU:2"]


def test_a_device_holds_a_share_of_the_weights_of_its_stage_and_of_their_slots():
    model = on_mesh(layers_per_stage=[2, 3])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    pairs = [["CPU:0", "CPU:2"]] * 2 + [["CPU:1", "CPU:3"]] * 2
    for weight, devices in zip(sharded(model), pairs, strict=True):
        assert [short(share.device) for share in weight.pieces] == devices
        rows, columns = weight.shape
        assert {tuple(share.shape) for share in weight.pieces} == {(-(-rows // 2), columns)}
        slots = [v for v in model.optimizer._variables if getattr(v, "_sharded", None) is weight]
        for copies in map(copies_of, slots):
            assert [short(copy.device) for copy in copies] == devices
            assert {copy.shape for copy in copies} == {share.shape for share in weight.pieces}
        assert len(slots) == 2


WIDTH, NUMBER = 512, 24


def build_deep():
    """Weights of 1 MiB."""
    hidden = [layers.Dense(WIDTH, "relu") for _ in range(NUMBER)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(3)])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_few_weights_are_whole_at_a_time(recompute):
    """On each of four devices, in a stage of twelve; no gather is kept from pass to pass."""
    half = NUMBER // 2
    model = on_mesh(build_deep, layers_per_stage=[half, half + 1], recompute=recompute)
    for layer in model.layers[1:NUMBER]:  # Without their gradients, whose sums are kept.
        layer.trainable = False
    model.compile(optimizers.SGD(0.01), "mse", jit_compile=False)
    x, y = np.ones((8, WIDTH), "float32"), np.ones((8, 3), "float32")
    for step in (model.train_on_batch, model.test_on_batch):
        step(x, y)
        before = tensor_bytes("current")
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(x, y)
        whole = (tensor_bytes("peak") - before) / replicated.MIB
        assert whole < 10  # Two on each device; in the four stages are 48.


@pytest.mark.slow
def test_files_are_of_plain_keras_and_are_read_anywhere(in_float64, tmp_path):
    first = trained(on_mesh(without_dropout), epochs=1)
    first.save(tmp_path / "first.keras")
    plain = keras.saving.load_model(tmp_path / "first.keras")
    first.save_weights(tmp_path / "first.weights.h5")
    read = on_mesh(without_dropout, Mesh(data=4), num_micro_batches=1)
    read.load_weights(tmp_path / "first.weights.h5")
    assert apart(plain, first) == apart(read, first) == 0
    built = tfparallel.hybrid_parallel(
        plain, MESH, DEVICES, num_micro_batches=2, balance="memory", shard="parameters"
    )
    assert len(sharded(built)) == 4
    for model in (first, plain, built):
        model.fit(*data(), batch_size=8, shuffle=False, verbose=0)
    whole = trained(seeded(without_dropout))
    assert apart(first, whole) < 1e-9 and apart(built, plain) < 1e-9
    for epochs, mesh in ((1, MESH), (2, Mesh(data=4))):
        checkpoint = tfparallel.callbacks.Checkpoint(tmp_path / "checkpoint")
        model = on_mesh(without_dropout, mesh, num_micro_batches=1)
        trained(model, epochs=epochs, callbacks=[checkpoint])
    assert checkpoint.resumed and apart(model, whole) < 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": Mesh(data=2, tensor=2)}, "must not be split .* a mesh of data=2, tensor=2"),
        ({"mesh": Mesh(data=2, sequence=2)}, "must not be split .* a mesh of data=2, sequence=2"),
        ({"compression": "bf16"}, "shard='parameters', compression='bf16'"),
        ({"shard": "gradients"}, "Received: shard='gradients'"),
    ],
)
def test_what_cannot_be_sharded_is_refused(options, message):
    with pytest.raises(PlacementError, match=message):
        on_mesh(**options)


class Traced(layers.Dense):
    @tf.function
    def call(self, x):
        return tf.matmul(x, self.kernel)


class Scaled(layers.Dense):
    def call(self, x):
        @tf.custom_gradient
        def function(x):
            def backward(upstream, variables=()):
                return upstream, [tf.ones(v.shape, v.dtype) for v in variables]

            return tf.matmul(x, self.kernel), backward

        return function(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Traced, "read in a `tf.function` of the layer"),
        (Scaled, "read inside a function under `tf.custom_gradient`"),
    ],
)
def test_what_no_gather_serves_is_refused(layer, message):
    def function():
        return keras.Sequential([keras.Input((SIZE,)), layer(SIZE), layers.Dense(3)])

    # Within what Keras and TensorFlow make of it.
    with pytest.raises(Exception, match=message):
        trained(on_mesh(function, check_rows=False, layers_per_stage=[1, 1]))
