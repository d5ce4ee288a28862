"""The world and the contenders of a job: one rank a process.

Other transports than TensorFlow's own join here: a class with `name`, `implementation`,
`collectives` and `prepare` (see `tfparallel.bench.contender`), and a line in `worker_contenders`.
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
    """The workers of a job, a rank each."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self.num_ranks = group.num_workers
        self.ranks = range(group.worker_index, group.worker_index + 1)
        self.place = f"{group.num_workers} processes"
        self.names = names_of(group)
        # Workers leave TensorFlow's ring up to 2 ms apart, which would count as the collective's.
        closest = _by_mpi(group)[0] or group
        self._meet = tf.function(
            lambda here: closest.all_reduce([here])[0], autograph=False, reduce_retracing=False
        )

    def barrier(self) -> None:
        """Sums a number that nobody needs, which takes until the last has sent its own."""
        self._meet(tf.ones([1])).numpy()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every worker's values."""
        own = tf.constant([list(values)], tf.float64)
        return self._group.all_gather([own], [1] * self.num_ranks)[0].numpy().tolist()


class PreparedStep:
    """One collective of one size and type; see `tfparallel.bench.contender.Prepared`.

    Args:
        collective: Does it, in a `tf.function`.
        count: The elements of this worker's input.
        dtype: Their type.
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
        # Read from a variable: a constant would be exchanged once, when the step is traced.
        steps = (
            lambda: collective(self._input.read_value()),
            lambda: tf.identity(self._input.read_value()),
        )
        self._run, self._run_null = [tf.function(s).get_concrete_function() for s in steps]

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Takes this worker's input."""
        self._input.assign(inputs[0])

    def run(self) -> tf.Tensor:
        """Does the collective once; returns its outcome when it is there in full."""
        self._before()
        return _concrete(self._run())

    def run_null(self) -> None:
        """Does all that `run` does, without the exchange."""
        _concrete(self._run_null())

    def arrays(self, outcome: tf.Tensor) -> list[np.ndarray]:
        """Returns this worker's outcome."""
        return [outcome.numpy()]


def _concrete(result: tf.Tensor) -> tf.Tensor:
    if "GPU" in result.device:
        result[-1].numpy()  # On a CPU the call returns with the result.
    return result


class TensorFlowCollectives:
    """TensorFlow's own collectives between workers, as a training step uses them.

    Args:
        group: The workers, joined by TensorFlow.
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
            self.implementation = f"TensorFlow CollectiveReduceV2 ({by}), zeros but on worker 0"
        num_workers = self._group.num_workers
        own = input_count(collective, count, num_workers)
        steps = {
            "all_reduce": lambda x: self._group.all_reduce([x])[0],
            "all_gather": lambda x: self._group.all_gather([x], [own] * num_workers)[0],
            "broadcast": lambda x: self._group.broadcast([x])[0],
        }
        return PreparedStep(steps[collective], own, dtype)


class MpiContender:
    """One of MPI's algorithms for sums, as a training step uses it; "mpi" does all collectives."""

    def __init__(self, group: MpiProcessGroup, name: str):
        self._group, self.name = group, name
        group.communicator.use(name)
        self.implementation = group.communicator.implementation("all_reduce")
        self.collectives = COLLECTIVES if name == "mpi" else ("all_reduce",)

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces a collective."""
        group = self._group
        own = input_count(collective, count, group.num_workers)
        if collective == "all_reduce":
            use = functools.partial(group.communicator.use, self.name)
            return PreparedStep(lambda x: group.all_reduce([x])[0], own, dtype, before=use)
        self.implementation = group.communicator.implementation(collective)
        is_half = tf.as_dtype(dtype).size == 2
        if collective == "reduce_scatter" and is_half:  # Which MPI's library does not add.
            self.implementation += ", in float32"
            return PreparedStep(
                lambda x: tf.cast(group.run_on_arrays(collective, tf.cast(x, tf.float32)), x.dtype),
                own,
                dtype,
            )
        return PreparedStep(lambda x: group.run_on_arrays(collective, x), own, dtype)


def worker_contenders(group: ProcessGroup) -> tuple[list, dict[str, str]]:
    """Returns all that can run between these workers, and why the other algorithms cannot."""
    tensorflow, refused = group.by_tensorflow, {}
    found: list = [TensorFlowCollectives(tensorflow, name) for name in ("ring", "ring_tuned")]
    if reason := transport.nccl_refusal(tensorflow):
        refused["nccl"] = reason
    else:
        found.append(TensorFlowCollectives(tensorflow, "nccl"))
    by_mpi, problem = _by_mpi(group)
    for name in ALGORITHMS:
        if by_mpi is None:
            refused[name] = problem
            continue
        try:
            found.append(MpiContender(by_mpi, name))
        except ValueError as error:
            refused[name] = str(error)
    return found, refused


@functools.lru_cache(maxsize=1)  # Workers join through MPI once.
def _by_mpi(group):
    """The workers, joined by MPI; or None, and why."""
    try:
        is_joined = group is not group.by_tensorflow
        return (group if is_joined else transport.joined(group, "mpi")), ""
    except RuntimeError as error:
        return None, str(error)
