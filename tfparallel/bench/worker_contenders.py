"""The world and the contenders of a multi-worker job: one rank per process.

To add a transport, write a class with `name`, `implementation`, `collectives` and `prepare` (see
`tfparallel.bench.contender`), and add a line to `worker_contenders`.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfparallel.bench.collectives import input_count
from tfparallel.bench.sizes import COLLECTIVES
from tfparallel.collectives import transport
from tfparallel.collectives.mpi.communicator import ALGORITHMS
from tfparallel.collectives.mpi.workers import MpiProcessGroup
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.transport_selection import names_of


class Workers:
    """The workers of a job, one rank each."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self.num_ranks = group.num_workers
        self.ranks = range(group.worker_index, group.worker_index + 1)
        self.place = f"{group.num_workers} processes"
        self.names = names_of(group)
        # Workers leave TensorFlow's ring up to 2 ms apart, which would count as collective time.
        closest = _by_mpi(group)[0] or group
        self._meet = tf.function(
            lambda value: closest.all_reduce([value])[0], autograph=False, reduce_retracing=False
        )

    def barrier(self) -> None:
        """Waits for all workers, with an all-reduce of one element."""
        self._meet(tf.ones([1])).numpy()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every worker's values."""
        tensor = tf.constant([list(values)], tf.float64)
        return self._group.all_gather([tensor], [1] * self.num_ranks)[0].numpy().tolist()


class PreparedStep:
    """One collective of one size and type; see `tfparallel.bench.contender.Prepared`.

    Args:
        collective: The collective, called in a `tf.function`.
        count: The number of elements of this worker's input.
        dtype: Their dtype.
        before: Called before each run.
    """

    def __init__(
        self,
        collective: Callable[[tf.Tensor], tf.Tensor],
        count: int,
        dtype: str,
        before: Callable[[], None] = lambda: None,
    ):
        self._before = before
        self._input = tf.Variable(tf.zeros([count], dtype), trainable=False)
        # Read from a variable: a constant would be exchanged only once, at trace time.
        steps = (
            lambda: collective(self._input.read_value()),
            lambda: tf.identity(self._input.read_value()),
        )
        self._run, self._run_null = [tf.function(s).get_concrete_function() for s in steps]

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Sets this worker's input."""
        self._input.assign(inputs[0])

    def run(self) -> tf.Tensor:
        """Runs the collective once; returns its complete result."""
        self._before()
        return _wait(self._run())

    def run_null(self) -> None:
        """Does the same as `run` without the exchange."""
        _wait(self._run_null())

    def arrays(self, outcome: tf.Tensor) -> list[np.ndarray]:
        """Returns this worker's result."""
        return [outcome.numpy()]


def _wait(result: tf.Tensor) -> tf.Tensor:
    if "GPU" in result.device:
        result[-1].numpy()  # On a CPU the call returns with the result.
    return result


class TensorFlowCollectives:
    """TensorFlow's collectives between workers, as in a training step.

    Args:
        group: The workers, connected by TensorFlow.
        name: "ring", over gRPC with TensorFlow's settings; "ring_tuned"; or "nccl".
    """

    def __init__(self, group: ProcessGroup, name: str):
        self.name = name
        self._group = group.with_transport(name)
        self.implementation = self._group.implementation
        self.collectives = ("all_reduce",)
        if name in ("ring", "nccl"):
            self.collectives += ("all_gather", "broadcast")

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces a collective."""
        by = "NCCL" if self.name == "nccl" else "RING"
        if collective == "all_gather":
            self.implementation = f"TensorFlow CollectiveGatherV2 ({by})"
        if collective == "broadcast":
            self.implementation = f"TensorFlow CollectiveReduceV2 ({by}), zeros except on worker 0"
        num_workers = self._group.num_workers
        num_elements = input_count(collective, count, num_workers)
        steps = {
            "all_reduce": lambda x: self._group.all_reduce([x])[0],
            "all_gather": lambda x: self._group.all_gather([x], [num_elements] * num_workers)[0],
            "broadcast": lambda x: self._group.broadcast([x])[0],
        }
        return PreparedStep(steps[collective], num_elements, dtype)


class MpiContender:
    """An MPI all-reduce algorithm, as in a training step; "mpi" supports all collectives."""

    def __init__(self, group: MpiProcessGroup, name: str):
        self._group, self.name = group, name
        group.communicator.use(name)
        self.implementation = group.communicator.implementation("all_reduce")
        self.collectives = COLLECTIVES if name == "mpi" else ("all_reduce",)

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces a collective."""
        group = self._group
        num_elements = input_count(collective, count, group.num_workers)
        if collective == "all_reduce":
            use = functools.partial(group.communicator.use, self.name)
            return PreparedStep(lambda x: group.all_reduce([x])[0], num_elements, dtype, before=use)
        self.implementation = group.communicator.implementation(collective)
        is_half = tf.as_dtype(dtype).size == 2
        if collective == "reduce_scatter" and is_half:  # MPI's library cannot add it.
            self.implementation += ", in float32"
            return PreparedStep(
                lambda x: tf.cast(group.run_on_arrays(collective, tf.cast(x, tf.float32)), x.dtype),
                num_elements,
                dtype,
            )
        return PreparedStep(lambda x: group.run_on_arrays(collective, x), num_elements, dtype)


def worker_contenders(group: ProcessGroup) -> tuple[list, dict[str, str]]:
    """Returns the contenders that can run between these workers, and why the others cannot."""
    tensorflow, refused = group.by_tensorflow, {}
    contenders: list = [TensorFlowCollectives(tensorflow, name) for name in ("ring", "ring_tuned")]
    if reason := transport.nccl_refusal(tensorflow):
        refused["nccl"] = reason
    else:
        contenders.append(TensorFlowCollectives(tensorflow, "nccl"))
    by_mpi, problem = _by_mpi(group)
    for name in ALGORITHMS:
        if by_mpi is None:
            refused[name] = problem
            continue
        try:
            contenders.append(MpiContender(by_mpi, name))
        except ValueError as error:
            refused[name] = str(error)
    return contenders, refused


@functools.lru_cache(maxsize=1)  # Workers join through MPI once.
def _by_mpi(group):
    """Returns the workers connected by MPI, or None and the reason."""
    try:
        is_joined = group is not group.by_tensorflow
        return (group if is_joined else transport.joined(group, "mpi")), ""
    except RuntimeError as error:
        return None, str(error)
