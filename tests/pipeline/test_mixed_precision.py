"""Stages under a mixed precision: operations of the graph find the model's own dtype."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfparallel

DEVICES = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Noted(layers.Layer):
    """Notes the dtype of what it is called on, and leaves it as it is."""

    dtypes: list[str] = []

    def __init__(self, **kwargs):
        super().__init__(**kwargs | {"autocast": False})

    def call(self, x):
        Noted.dtypes.append(x.dtype.name)
        return 1 * x


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    """A policy that is the global one."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def build():
    """A model whose graph has an operation that reads a weight itself."""
    x = keras.Input((4,))
    tied = layers.Dense(4, use_bias=False, name="tied")
    again = ops.matmul(ops.tanh(tied(x)), tied.kernel)
    return keras.Model(x, layers.Dense(1, dtype="float32")(Noted()(again)))


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_operation_that_reads_a_weight_computes_in_the_dtype_of_the_policy(
    policy, schedule, run_eagerly
):
    model = tfparallel.pipeline_parallel(build, DEVICES, 2, schedule=schedule)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    Noted.dtypes.clear()
    model.fit(X, Y, batch_size=8, verbose=0)
    assert {*Noted.dtypes} == {policy.removeprefix("mixed_")}
