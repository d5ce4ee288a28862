"""Contenders on the devices of one process, each a `tf.distribute.CrossDeviceOps`."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfparallel.collectives import cross_device
from tfparallel.collectives.algorithm_selection import variables_on_each


class DeviceContender:
    """An algorithm of `cross_device.make` between the devices of this process."""

    collectives = ("all_reduce",)

    def __init__(self, name: str, devices: Sequence[str], inputs: Callable):
        self.name = name
        self._ops = cross_device.make(name, devices)
        self._inputs = inputs
        self.implementation = cross_device.implementation(name)

    def prepare(self, collective: str, count: int, dtype: str) -> "_PreparedReduce":
        """Traces an all-reduce of `count` elements."""
        del collective  # Always "all_reduce".
        return _PreparedReduce(self._ops, self._inputs(count, dtype))


def device_contenders(
    devices: Sequence[str], names: Sequence[str], parts: Sequence[int] | None = None
) -> list[DeviceContender]:
    """Returns the contenders of these names, which share their inputs.

    Args:
        devices: Names of the devices.
        names: The algorithms.
        parts: The element counts of the tensors that make up a vector; by default it is one tensor.
    """

    @functools.lru_cache(maxsize=1)  # Shared by all contenders of a size: inputs may be large.
    def inputs(count, dtype):
        return variables_on_each(devices, [(part, dtype) for part in parts or [count]])

    return [DeviceContender(name, devices, inputs) for name in names]


class _PreparedReduce:
    def __init__(self, ops, inputs):
        self._inputs = inputs
        # Trace now: TensorFlow warns of retracing if many functions are traced in a loop.
        self._run, self._run_null = [
            tf.function(lambda ops=ops: self._step(ops), autograph=False).get_concrete_function()
            for ops in (ops, None)
        ]

    def _step(self, ops):
        values = []
        for of_all in self._inputs:
            values.append([])
            for variable in of_all:
                # Read from a variable: a constant would be summed only once, at trace time.
                with tf.device(variable.device):
                    values[-1].append(variable.read_value())
        results = values if ops is None else cross_device.all_reduce(ops, values)
        lasts = [result[-1] for of_all in results for result in of_all]
        with tf.device("CPU:0"):
            return results, tf.stack(lasts)

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        ends = np.cumsum([of_all[0].shape[0] for of_all in self._inputs])
        for rank, values in enumerate(inputs):
            for of_all, part in zip(self._inputs, np.split(values, ends[:-1]), strict=True):
                of_all[rank].assign(part)

    def run(self):
        return self._run_and_wait(self._run)

    def run_null(self) -> None:
        self._run_and_wait(self._run_null)

    def arrays(self, outcome) -> list[np.ndarray]:
        by_rank = zip(*outcome, strict=True)
        return [np.concatenate([part.numpy() for part in of_rank]) for of_rank in by_rank]

    def _run_and_wait(self, step):
        results, lasts = step()
        lasts.numpy()  # One element of each result: waits until all results are complete.
        return results
