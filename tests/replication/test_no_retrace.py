"""After the first step nothing is traced again, and steps leave nothing behind."""

from __future__ import annotations

import gc
import os

import keras
import numpy as np
import psutil
import pytest

import tfparallel

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
NUM_STEPS = 1000
# One kept tensor of a batch (16 x 256 floats of 4 bytes) a step would be 16 MiB over the
# 1,000 steps, a kept graph far more. An allocator's pools settle within 8.
GROWTH_LIMIT_BYTES = 8 * 2**20


@pytest.fixture
def traces():
    """Counts how often Python runs the forward pass and the loss of a model."""
    return {"forward": 0, "loss": 0}


@pytest.fixture
def model(traces):
    class Counted(keras.layers.Dense):
        def call(self, inputs):
            traces["forward"] += 1
            return super().call(inputs)

    def loss(y_true, y_pred):
        traces["loss"] += 1
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def build_model():
        return keras.Sequential(
            [keras.Input((8,)), Counted(16, activation="relu"), keras.layers.Dense(3)]
        )

    model = tfparallel.data_parallel(build_model, devices=DEVICES)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def examples(count, features=8):
    x = np.random.default_rng(0).normal(size=(count, features)).astype("float32")
    return x, np.arange(count) % 3


@pytest.mark.slow
def test_steps_and_epochs_after_the_first_trace_nothing(model, traces):
    x, y = examples(52)
    arguments = {"batch_size": 16, "verbose": 0, "validation_data": (x[:20], y[:20])}
    model.fit(x, y, epochs=1, **arguments)
    first = dict(traces)
    model.fit(x, y, epochs=3, **arguments)
    # A last batch of 4 and a middle one of 16 met the same trace: no replica count divides both.
    assert min(first.values()) > 0
    assert traces == first


@pytest.mark.slow
def test_batches_of_new_sizes_trace_once_a_size_at_most(model, traces):
    """`train_on_batch` traces for a second size what serves all others."""
    x, y = examples(40)
    for size in (16, 7):
        model.train_on_batch(x[:size], y[:size])
    second = dict(traces)
    for size in (1, 2, 3, 16, 25, 40, 7):
        model.train_on_batch(x[:size], y[:size])
    assert traces == second


@pytest.mark.slow
def test_predict_and_evaluate_trace_nothing_the_second_time(model, traces):
    x, y = examples(23)
    for _ in range(2):
        model.evaluate(x, y, batch_size=5, verbose=0)
        model.predict(x, batch_size=5, verbose=0)
        seen = dict(traces)
    model.evaluate(x, y, batch_size=5, verbose=0)
    model.predict(x, batch_size=5, verbose=0)
    assert traces == seen


@pytest.mark.slow
def test_memory_does_not_grow_over_a_thousand_steps():
    def build_model():
        return keras.Sequential(
            [keras.Input((256,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
        )

    model = tfparallel.data_parallel(build_model, devices=DEVICES)
    model.compile(
        optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x, y = examples(1600, features=256)
    process = psutil.Process(os.getpid())

    def resident_after(num_steps):
        model.fit(x, y, batch_size=16, epochs=num_steps // 100, verbose=0)
        gc.collect()
        return process.memory_info().rss

    before = resident_after(500)  # the pools of the allocator fill
    after = resident_after(NUM_STEPS)
    assert after - before < GROWTH_LIMIT_BYTES, (
        f"{(after - before) / 2**20:.1f} MiB more after {NUM_STEPS} steps"
    )
