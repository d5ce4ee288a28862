"""Measures the overhead of a mesh: the steps of a tiny model, alone, on replicas, in stages."""

import statistics
from collections.abc import Callable

import keras
import numpy as np

from tfparallel import devices as device_lib
from tfparallel.callbacks.step_measures import StepTime
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.layer_costs import copy_of
from tfparallel.planning.calibration import NUM_MICRO_BATCHES, NUM_ROWS, TinySteps
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.user_log import unnoticed

_NUM_STEPS = 60


def measured_tiny_steps(
    optimizer: keras.Optimizer, *, on_replicas: bool, in_stages: bool, in_shares: bool
) -> TinySteps:
    """Measures the steps of the tiny model; those on two devices only if there are two.

    Args:
        optimizer: The optimizer, which is copied.
        on_replicas: Whether to measure a step on two replicas.
        in_stages: Whether to measure a step in two stages.
        in_shares: Whether to measure a step on two replicas that shard the optimizer.
    """

    def measured(under: Callable[[Callable[[], keras.Model]], keras.Model]) -> float:
        with unnoticed():
            return _step_seconds(under(_build), optimizer)

    alone, replicas, stages, shares = measured(lambda build: build()), None, None, None
    if on_replicas or in_stages:
        try:
            devices = device_lib.choose_devices(num_devices=2)
        except (ValueError, RuntimeError):  # One GPU, or TensorFlow already started with one CPU.
            return TinySteps(alone)
        if on_replicas:
            replicas = measured(lambda build: data_parallel(build, devices=devices))
        if in_shares:
            shares = measured(
                lambda build: data_parallel(build, devices=devices, shard="optimizer")
            )
        if in_stages:
            stages = measured(
                lambda build: pipeline_parallel(
                    build, devices, NUM_MICRO_BATCHES, layers_per_stage=[1, 1]
                )
            )
    return TinySteps(alone, replicas, stages, shares)


def _build() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), *(keras.layers.Dense(1) for _ in range(2))])


def _step_seconds(model: keras.Model, optimizer: keras.Optimizer) -> float:
    """Returns the time of an almost empty step of `fit`."""
    model.compile(copy_of(optimizer), "mse")
    steps = StepTime()
    x = np.zeros((_NUM_STEPS * NUM_ROWS, 1), "float32")
    model.fit(x, x, batch_size=NUM_ROWS, verbose=0, callbacks=[steps])
    return statistics.median(steps.seconds[1:])
