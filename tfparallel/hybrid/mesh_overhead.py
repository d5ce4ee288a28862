"""What a mesh takes beside the layers: a tiny model's step, alone, on replicas, in stages."""

import functools

import keras

from tfparallel import devices as device_lib
from tfparallel.layout.calibration import NUM_MICRO_BATCHES, NUM_ROWS, TinySteps
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.timing import measured_overhead
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.user_log import unnoticed

__all__ = ["measured_tiny_steps"]


def measured_tiny_steps(optimizer: keras.Optimizer, num_devices: int) -> TinySteps:
    """Measures the steps of the tiny model; those on two devices where there are two.

    Args:
        optimizer: One like this updates it.
        num_devices: How many devices are planned for.
    """
    measured = functools.partial(measured_overhead, optimizer, NUM_ROWS)
    if num_devices == 1:
        return TinySteps(measured())
    try:
        devices = device_lib.choose_devices(num_devices=2)
    except (ValueError, RuntimeError):  # One GPU; or TensorFlow has started on one CPU.
        return TinySteps(measured())
    with unnoticed():
        return TinySteps(
            measured(),
            measured(lambda build: data_parallel(build, devices=devices)),
            measured(
                lambda build: pipeline_parallel(
                    build, devices, NUM_MICRO_BATCHES, layers_per_stage=[1, 1]
                )
            ),
        )
