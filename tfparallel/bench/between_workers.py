"""The world and the contenders of a job: one rank a process.

Other transports than TensorFlow's own join here: a class with `name`, `implementation`,
`collectives` and `prepare` (see `tfparallel.bench.contender`), and a line in `worker_contenders`.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.collectives.between_workers import WorkerGroup


class Workers:
    """The workers of a job, a rank each.

    Args:
        group: What joins them.
    """

    def __init__(self, group: WorkerGroup):
        self._group = group
        self.num_ranks = group.num_workers
        self.ranks = range(group.worker_index, group.worker_index + 1)
        self.place = f"{group.num_workers} processes"
        self._meet = tf.function(
            lambda here: group.all_reduce([here])[0], autograph=False, reduce_retracing=False
        )

    def barrier(self) -> None:
        """Sums a number that nobody needs, which takes until the last has sent its own."""
        self._meet(tf.ones([1])).numpy()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every worker's values."""
        own = tf.constant([list(values)], tf.float64)
        rows = self._group.all_gather([own], [1] * self.num_ranks)[0]
        return rows.numpy().tolist()


class TensorFlowRing:
    """TensorFlow's own ring between workers, over gRPC, as a training step uses it."""

    name = "ring"
    implementation = "TensorFlow CollectiveReduceV2 (RING)"
    collectives = ("all_reduce",)

    def __init__(self, group: WorkerGroup):
        self._group = group

    def prepare(self, collective: str, count: int, dtype: str) -> "_PreparedRing":
        """Traces an all-reduce of `count` elements."""
        del collective  # There is one.
        return _PreparedRing(self._group, count, dtype)


class _PreparedRing:
    def __init__(self, group, count, dtype):
        self._input = tf.Variable(tf.zeros([count], dtype), trainable=False)
        self._run = tf.function(lambda: group.all_reduce([self._input.read_value()])[0])
        self._run_null = tf.function(lambda: tf.identity(self._input.read_value()))

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        self._input.assign(inputs[0])

    def run(self) -> tf.Tensor:
        return self._concrete(self._run)

    def run_null(self) -> None:
        self._concrete(self._run_null)

    def arrays(self, outcome: tf.Tensor) -> list[np.ndarray]:
        return [outcome.numpy()]

    def _concrete(self, step):
        result = step()
        if "GPU" in result.device:
            result[-1].numpy()  # On a CPU the call returns with the result.
        return result


def worker_contenders(group: WorkerGroup) -> list:
    """Returns all that can run between these workers."""
    return [TensorFlowRing(group)]


def worker_refusals(group: WorkerGroup) -> dict[str, str]:
    """Returns the algorithms that cannot run between these workers, and why."""
    del group
    refused = {}
    if not device_lib.list_devices("GPU"):
        refused["nccl"] = "NCCL joins GPUs, and TensorFlow lists none"
    return refused
