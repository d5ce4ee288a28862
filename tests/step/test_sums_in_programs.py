"""`all_reduce="xla"`: each replica is one program, in which XLA sums; it trains as one device does.

On CPUs XLA compiles such a program and does not run it. So TensorFlow's kernels run it here, and
what XLA makes of it is looked at.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import tfparallel
from tests.step.uncompiled import sums_run_on_cpus

DEVICES = ["CPU:1", "CPU:2"]
NUM_ROWS = 19  # Batches of 8, 8 and 3: two replicas have 1 and 2 of the last, three one each.


class Case:
    """A network, and what it is compiled with."""

    def __init__(self, network, shape=(6,), *, devices=DEVICES, rows=None, **options):
        self.network, self.shape, self.devices, self.options = network, shape, devices, options
        self.rows = np.random.default_rng(0).normal(size=(NUM_ROWS, *shape))
        if rows is not None:
            self.rows = np.random.default_rng(0).integers(0, rows, (NUM_ROWS, *shape))

    def trained(self, make, jit_compile):
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        model = make(keras.Sequential([keras.Input(self.shape), *self.network()]))
        options = {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"}
        options |= self.options
        optimizer, metrics = options.pop("optimizer")(), options.pop("metrics", list)()
        weights, loss = options.pop("weights", None), options.pop("loss")
        options["loss"] = loss if isinstance(loss, str) else loss()
        model.compile(optimizer, metrics=metrics, jit_compile=jit_compile, **options)
        targets = np.random.default_rng(1).integers(0, 2, (NUM_ROWS, 2)).astype("float64")
        history = model.fit(
            *(self.rows, targets),
            sample_weight=weights,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history
        results = model.evaluate(self.rows, targets, batch_size=8, verbose=0)
        numbers = [np.ravel(results), *map(np.asarray, history.values())]
        return [*model.get_weights(), model.predict(self.rows, batch_size=8, verbose=0), *numbers]

    def on_replicas(self):
        return self.trained(
            lambda model: tfparallel.data_parallel(model, devices=self.devices, all_reduce="xla"),
            jit_compile=True,
        )


def dense():
    return [layers.Dense(4), layers.BatchNormalization(), layers.Dense(2, "sigmoid")]


def convolutions():
    blocks = [
        [layers.Conv2D(3, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
        for _ in range(3)
    ]
    return [*blocks[0], *blocks[1], *blocks[2], layers.GlobalMaxPooling2D(), layers.Dense(2)]


def masked():
    embedded = [layers.Embedding(7, 4, mask_zero=True), layers.BatchNormalization()]
    return [*embedded, layers.GlobalAveragePooling1D(), layers.Dense(2)]


def with_dropout():
    return [layers.Dense(8), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)]


def accumulating():
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)


def clipping():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1, epsilon=1e-3)


def with_loss_scale():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def mean_by_weights():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def metrics():
    return ["mae", keras.metrics.AUC()]


WEIGHTS = np.random.default_rng(2).uniform(size=NUM_ROWS)
CASES = {
    "metrics": Case(dense, loss="binary_crossentropy", metrics=metrics),
    "three replicas": Case(dense, devices=[*DEVICES, "CPU:3"], metrics=metrics),
    "convolutions": Case(convolutions, (6, 6, 3)),
    "mask": Case(masked, (5,), rows=7),
    "dropout": Case(with_dropout),
    "sample weights": Case(
        dense,
        weights=WEIGHTS,
        loss=mean_by_weights,
    ),
    "accumulation": Case(dense, optimizer=accumulating),
    "clipping": Case(dense, optimizer=clipping),
    "loss scale": Case(dense, optimizer=with_loss_scale),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_losses_and_metrics_are_those_of_one_device(name, in_float64, monkeypatch):
    programs = sums_run_on_cpus(monkeypatch)
    case = CASES[name]
    expected = case.trained(lambda model: model, jit_compile=False)
    actual = case.on_replicas()
    assert any("CollectiveReduceV2" in kinds_of(function) for _, function in programs.traced)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


def kinds_of(function):
    return [op.type for op in function.graph.get_operations()]


# What XLA makes of a program.


def hlo(device, function, num_rows, stage):
    """What XLA is given, or makes, of a program whose arguments are made up."""
    values = []
    for tensor in function.captured_inputs:
        while tensor.dtype == tf.resource and hasattr(tensor, "graph"):
            tensor = next(e for e, inner in tensor.graph.captures if inner is tensor)
        if tensor.dtype != tf.resource:
            shape = [num_rows if size is None else size for size in tensor.shape]
            with tf.device(device):
                tensor = tf.ones(shape, tensor.dtype)
        values.append(tensor)
    return (
        context.context()
        .get_compiler_ir(
            device_name=device,
            platform_name=None,
            function_name=function.name,
            flat_args=values,
            captured_inputs=[],
            stage=stage,
        )
        .decode()
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["hlo", "optimized_hlo"])
@pytest.mark.parametrize(("name", "number"), [("metrics", 1), ("convolutions", 3)])
def test_each_replica_is_a_program_with_the_same_all_reduces(name, number, stage, monkeypatch):
    programs = sums_run_on_cpus(monkeypatch)
    case = CASES[name]
    keras.utils.set_random_seed(5)
    network = keras.Sequential([keras.Input(case.shape), *case.network()])
    model = tfparallel.data_parallel(network, devices=DEVICES, all_reduce="xla")
    model.compile("adam", "mse", jit_compile=True)
    model.train_on_batch(case.rows[:8], np.zeros([8, 2]))
    assert sorted(device[-5:] for device, _ in programs.traced) == DEVICES
    expected = None
    for device, function in programs.traced:
        text = hlo(device, function, 4, stage)
        sums = re.findall(r"(\S+) all-reduce\(.*channel_id=(\d+).*replica_groups=(\S+),", text)
        # Forward and backward of each batch normalization, and what is left at the end.
        assert len(sums) == 2 * number + 1
        assert expected is None or sums == expected
        expected = sums


# Where there is no such thing.


def test_on_cpus_it_is_refused():
    with pytest.raises(ValueError, match=r"Received: xla\. xla sums with NCCL: .*CPU:1"):
        tfparallel.MirroredStrategy(DEVICES, all_reduce="xla")


def compiled(kind=keras.Sequential, **options):
    network = kind([keras.Input((6,)), layers.Dense(2)])
    model = tfparallel.data_parallel(network, devices=DEVICES, all_reduce="xla")
    model.compile("sgd", "mse", **options)


def test_without_programs_it_is_refused(monkeypatch):
    sums_run_on_cpus(monkeypatch)
    message = r"does not compile this model.*Received: all_reduce='xla', jit_compile=False"
    with pytest.raises(ValueError, match=message):
        compiled(jit_compile=False)


def test_several_steps_at_once_are_refused(monkeypatch):
    sums_run_on_cpus(monkeypatch)
    message = r"`steps_per_execution` above 1.*all_reduce='xla'"
    with pytest.raises(ValueError, match=message):
        compiled(jit_compile=True, steps_per_execution=2)


class OwnFunction(keras.Sequential):
    @tf.function
    def train_step(self, data):
        return {"loss": 0.0}


def test_a_step_that_cannot_be_cut_is_refused(monkeypatch):
    sums_run_on_cpus(monkeypatch)
    with pytest.raises(ValueError, match=r"Received: `OwnFunction\.train_step`, a tf\.function"):
        compiled(OwnFunction, jit_compile=True)
    with pytest.raises(ValueError, match="an eager step has none.*Received: run_eagerly=True"):
        compiled(jit_compile=True, run_eagerly=True)
