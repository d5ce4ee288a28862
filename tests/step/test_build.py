"""A step is traced once: what it would make is made ahead of it."""

import gc

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tfparallel.seams.keras import GLOBAL_SEED_GENERATOR, get_global, set_global

pytestmark = pytest.mark.slow

DEVICES = ["CPU:0", "CPU:1"]
FORMS = {
    "no form": lambda build: build(),
    "one device": lambda build: tfparallel.data_parallel(build, devices=DEVICES[:1]),
    "data": lambda build: tfparallel.data_parallel(build, devices=DEVICES),
    "model": lambda build: tfparallel.model_parallel(build, DEVICES),
    "tensor": lambda build: tfparallel.tensor_parallel(build, DEVICES),
    "gpipe": lambda build: tfparallel.pipeline_parallel(build, DEVICES, 2, schedule="gpipe"),
    "1f1b": lambda build: tfparallel.pipeline_parallel(build, DEVICES, 2, schedule="1f1b"),
}
OURS = [form for form in FORMS if form != "no form"]
X, Y = np.ones((10, 3), "float32"), np.ones((10, 2), "float32")


@keras.saving.register_keras_serializable("tests")
class Doubled(layers.Layer):
    """A layer of the user's own, of which made-up rows are tried."""

    def call(self, x):
        return 2 * x


def build():
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), Doubled(), layers.Dropout(0.3), layers.Dense(2)]
    )


def counted(form, step):
    """A compiled model, and a list that grows by one at each trace of one of its steps."""
    model, traces = FORMS[form](build), []
    of_class = getattr(type(model), step)

    def counting(self, data):
        traces.append(1)
        return of_class(self, data)

    model.__class__ = type(type(model).__name__, (type(model),), {step: counting})
    model.compile("adam", "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    return model, traces


@pytest.fixture(autouse=True)
def no_global_seed():
    """As a program begins: Keras makes its global generator when a layer first asks for it."""
    before = get_global(GLOBAL_SEED_GENERATOR)
    set_global(GLOBAL_SEED_GENERATOR, None)
    yield
    set_global(GLOBAL_SEED_GENERATOR, before)


@pytest.mark.parametrize("form", OURS)
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_a_step_is_traced_once(form, method):
    model, traces = counted(form, "train_step")
    if method == "fit":
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    else:
        model.train_on_batch(X, Y)
        model.train_on_batch(X, Y)
    assert len(traces) == 1


@pytest.mark.parametrize("form", OURS)
def test_so_is_one_of_evaluation(form):
    model, traces = counted(form, "test_step")
    model.evaluate(X, Y, batch_size=4, verbose=0)
    assert len(traces) == 1


def test_keras_alone_traces_twice():
    """Upstream: a `tf.function` that makes a variable is traced again (see docs/upstream.md)."""
    model, traces = counted("no form", "train_step")
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert len(traces) == 2


class Watched(layers.Layer):
    """Notes, at each call, whether Python's garbage collector is on."""

    calls: list[bool] = []

    def call(self, x):
        Watched.calls.append(gc.isenabled())
        return 2 * x


def watched():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), Watched(), layers.Dense(2)])


@pytest.mark.parametrize("form", OURS)
def test_nothing_is_collected_while_a_step_is_traced(form):
    model = FORMS[form](watched)
    model.compile("adam", "mse")
    Watched.calls.clear()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert not Watched.calls[-1]  # In the trace; before, Keras called it for types.
    assert gc.isenabled()


def test_an_eager_step_is_collected_as_ever():
    model = FORMS["one device"](watched)
    model.compile("adam", "mse", run_eagerly=True)
    Watched.calls.clear()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert Watched.calls and all(Watched.calls)
