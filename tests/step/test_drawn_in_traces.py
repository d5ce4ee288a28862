"""Losses and metrics whose Python code draws numbers: constants, which differ in each trace.

Story: a loss with `np.random.normal()` had another constant in pieces than on one device, since a
step in pieces is traced, and judged, before it runs.
"""

import random
import threading

import keras
import numpy as np
import pytest
from keras import ops

import tfparallel
from tests.step.test_adds_up import NUMBERS, compiled
from tfparallel.judge.host_random import HostRandom
from tfparallel.step.additivity import adds_up

DEVICES = ["CPU:0", "CPU:1"]
FORMS = {
    "data": lambda build: tfparallel.data_parallel(build, devices=DEVICES),
    "gpipe": lambda build: tfparallel.pipeline_parallel(build, DEVICES, 2, schedule="gpipe"),
}
_generator = np.random.default_rng(0)


def square(y, outputs):
    return ops.sum((y - outputs) ** 2, -1)


DRAWING = {
    "NumPy": lambda y, outputs: square(y, outputs * np.random.normal()),
    "a generator": lambda y, outputs: square(y, outputs * _generator.normal()),
    "Python": lambda y, outputs: square(y, outputs) * (2.0 if random.random() < 0.5 else 3.0),
}
SAME = {
    "a seed": lambda y, outputs: square(y, outputs * np.random.default_rng(1).normal()),
    "keras.random": lambda y, outputs: square(y, outputs * keras.random.normal((), seed=1)),
    "no draws": square,
}


@pytest.mark.parametrize("function", DRAWING.values(), ids=DRAWING)
def test_numbers_that_python_draws_are_seen(function):
    assert adds_up(compiled(function), *NUMBERS, None).drawing == "loss 'lambda'"
    metric = keras.metrics.MeanMetricWrapper(function, name="mine")
    assert adds_up(compiled(metric=metric), *NUMBERS, None).drawing == "metric 'mine'"


@pytest.mark.parametrize("function", SAME.values(), ids=SAME)
def test_equal_numbers_of_each_trace_are_not(in_float64, function):
    for model in (compiled(function), compiled(metric=function)):
        assert adds_up(model, *NUMBERS, None).drawing is None


@pytest.mark.parametrize("function", SAME.values(), ids=SAME)
def test_draws_of_another_thread_are_not(function):
    """Story: a `PyDataset` that augmented pictures was taken for the loss."""
    begun, ended = threading.Event(), threading.Event()

    def draw():  # For longer than two traces take.
        while not ended.wait(0.001):
            np.random.normal()
            begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    timer = threading.Timer(0.3, ended.set)
    try:
        assert begun.wait(10)
        timer.start()
        assert adds_up(compiled(function), *NUMBERS, None).drawing is None
    finally:
        ended.set()
        thread.join()
        timer.join()


def test_states_of_random_numbers_are_restored():
    before = random.getstate(), np.random.get_state()
    with HostRandom() as host:
        random.random()
        np.random.normal()
    assert host.has_drawn
    assert repr(before) == repr((random.getstate(), np.random.get_state()))
    with HostRandom() as host:
        pass
    assert not host.has_drawn


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_such_a_loss_is_refused_before_weights_change(form):
    def build():
        layers = [keras.layers.Dense(4), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((3,)), *layers])

    model = FORMS[form](build)
    model.compile("sgd", DRAWING["NumPy"])
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"loss 'lambda' .* draws numbers with NumPy"):
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
