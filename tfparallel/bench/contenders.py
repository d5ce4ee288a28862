"""The implementations that a benchmark compares, between devices or between workers.

To add a transport, write a class with `name`, `implementation`, `collectives` and `prepare` (see
`tfparallel.bench.measure.Contender`), and add a line to `worker_contenders`.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfparallel.bench.collectives import input_count
from tfparallel.bench.sizes import COLLECTIVES
from tfparallel.collectives import cross_device, messages, transport
from tfparallel.collectives.algorithm_selection import variables_on_each
from tfparallel.collectives.mpi.communicator import ALGORITHMS
from tfparallel.collectives.mpi.workers import MpiProcessGroup
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.transport_selection import names_of

_MESSAGE = {"tag": 0, "timeout_seconds": 600.0, "described": "a message of the benchmark"}


class Workers:
    """The workers of a job, one rank each: a `tfparallel.bench.measure.World`."""

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
    """One collective of one size and type; see `tfparallel.bench.measure.Prepared`.

    Args:
        inputs: The input of each rank of this process, in one or several variables:
            `inputs[part][rank]`.
        collective: Called in a `tf.function`: takes `tensors[part][rank]`, and returns the same.
        before: Called before each run.
    """

    def __init__(
        self,
        inputs: Sequence[Sequence[tf.Variable]],
        collective: Callable[[list[list[tf.Tensor]]], list[list[tf.Tensor]]],
        before: Callable[[], None] = lambda: None,
    ):
        self._inputs, self._before = inputs, before
        # Trace now: TensorFlow warns of retracing if many functions are traced in a loop.
        self._run, self._run_null = [
            tf.function(lambda f=f: self._step(f), autograph=False).get_concrete_function()
            for f in (collective, lambda tensors: tensors)
        ]

    def _step(self, collective):
        tensors = [[] for _ in self._inputs]
        for of_part, variables in zip(tensors, self._inputs, strict=True):
            for variable in variables:
                # Read from a variable: a constant would be exchanged only once, at trace time.
                with tf.device(variable.device):
                    of_part.append(variable.read_value())
        results = collective(tensors)
        lasts = [result[-1] for of_part in results for result in of_part]
        with tf.device("CPU:0"):
            # One element of each result, for which to wait until all of them are complete.
            return results, tf.stack(lasts) if len(lasts) > 1 else None

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Sets the input of each rank of this process."""
        ends = np.cumsum([variables[0].shape[0] for variables in self._inputs])
        for rank, values in enumerate(inputs):
            parts = np.split(values, ends[:-1])
            for variables, part in zip(self._inputs, parts, strict=True):
                variables[rank].assign(part)

    def run(self) -> list[list[tf.Tensor]]:
        """Runs the collective once; returns its complete results."""
        self._before()
        return _complete(self._run())

    def run_null(self) -> None:
        """Does the same as `run` without the exchange."""
        _complete(self._run_null())

    def arrays(self, outcome: list[list[tf.Tensor]]) -> list[np.ndarray]:
        """Returns the result of each rank of this process."""
        by_rank = zip(*outcome, strict=True)
        return [np.concatenate([part.numpy() for part in of_rank]) for of_rank in by_rank]


def _complete(outcome):
    results, lasts = outcome
    if lasts is not None:
        lasts.numpy()
    elif "GPU" in results[0][0].device:  # On a CPU the call returns with a single result.
        results[0][0][-1].numpy()
    return results


class PreparedMessages:
    """`tfparallel.send` and `recv` round a ring; see `tfparallel.bench.measure.Prepared`.

    Args:
        group: The workers. Each sends to the next one, and receives from the one before.
    """

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._tensor = tf.zeros([0])

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Sets what this worker sends."""
        self._tensor = tf.constant(inputs[0])

    def run(self) -> tf.Tensor:
        """Sends and receives once; workers of even index send first."""
        rank, num_ranks = self._group.worker_index, self._group.num_workers
        to = functools.partial(
            messages.send_between, self._group, [self._tensor], (rank + 1) % num_ranks
        )
        if rank % 2 == 0:
            to(**_MESSAGE)
        spec = tf.TensorSpec(self._tensor.shape, self._tensor.dtype)
        source = (rank - 1) % num_ranks
        (received,) = messages.receive_between(self._group, [spec], source, **_MESSAGE)
        if rank % 2:
            to(**_MESSAGE)
        return received

    def run_null(self) -> None:
        """Does nothing: no graph runs."""

    def arrays(self, outcome: tf.Tensor) -> list[np.ndarray]:
        """Returns what arrived."""
        return [outcome.numpy()]


class DeviceContender:
    """An algorithm of `cross_device.make` between the devices of this process.

    Args:
        name: The algorithm.
        devices: Names of the devices.
        inputs: Takes a count and a dtype; returns the variables of the devices.
    """

    collectives = ("all_reduce",)

    def __init__(self, name: str, devices: Sequence[str], inputs: Callable):
        self.name = name
        self._ops = cross_device.make(name, devices)
        self._inputs = inputs
        self.implementation = cross_device.implementation(name)

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces an all-reduce of `count` elements."""
        del collective  # Always "all_reduce".
        reduce = functools.partial(cross_device.all_reduce, self._ops)
        return PreparedStep(self._inputs(count, dtype), reduce)


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
            self.collectives += ("all_gather", "broadcast", "reduce")
        if name == "ring":  # Between GPUs these pass through the hosts, too.
            self.collectives += ("reduce_scatter", "all_to_all", "scatter", "send_recv")

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces a collective."""
        by = "NCCL" if self.name == "nccl" else "RING"
        implementations = {
            "all_gather": f"CollectiveGatherV2 ({by})",
            "broadcast": f"CollectiveReduceV2 ({by}), zeros except on worker 0",
            "reduce": f"CollectiveReduceV2 ({by}), zeros kept except on worker 0",
            "reduce_scatter": "CollectiveAllToAllV2, added by each worker",
            "all_to_all": "CollectiveAllToAllV2",
            "scatter": "CollectiveAllToAllV2, worker 0's parts kept",
            "send_recv": "CollectiveBcastSendV2 in groups of two",
        }
        if collective in implementations:
            self.implementation = f"TensorFlow {implementations[collective]}"
        if collective == "send_recv":
            return PreparedMessages(self._group)
        num_workers = self._group.num_workers
        num_elements = input_count(collective, count, num_workers)
        steps = {
            "all_reduce": lambda x: self._group.all_reduce([x])[0],
            "all_gather": lambda x: self._group.all_gather([x], [num_elements] * num_workers)[0],
            "broadcast": lambda x: self._group.broadcast([x])[0],
            "reduce": lambda x: _for_worker_0(self._group, x),
            "reduce_scatter": lambda x: self._group.reduce_scatter([x])[0],
            "all_to_all": self._group.all_to_all,
            "scatter": lambda x: self._group.scatter(x, 0),
        }
        return _of_worker(steps[collective], num_elements, dtype)


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
            return _of_worker(lambda x: group.all_reduce([x])[0], num_elements, dtype, use)
        if collective == "reduce":
            self.implementation += ", zeros kept except on worker 0"
            return _of_worker(functools.partial(_for_worker_0, group), num_elements, dtype)
        self.implementation = group.communicator.implementation(collective)
        if collective == "send_recv":
            return PreparedMessages(group)
        sent_as = dtype
        if collective == "reduce_scatter" and tf.as_dtype(dtype).size == 2:
            self.implementation += ", in float32"  # MPI's library cannot add 16 bits.
            sent_as = "float32"

        def step(x):
            return tf.cast(group.run_on_arrays(collective, tf.cast(x, sent_as)), dtype)

        return _of_worker(step, num_elements, dtype)


def _for_worker_0(group, tensor):
    """Returns the sum on worker 0, zeros elsewhere, as `tfparallel.reduce`."""
    (total,) = group.all_reduce([tensor])
    return tf.zeros_like(total) if group.worker_index else total


def _of_worker(collective, count, dtype, before=lambda: None) -> PreparedStep:
    variable = tf.Variable(tf.zeros([count], dtype), trainable=False)
    return PreparedStep([[variable]], lambda tensors: [[collective(tensors[0][0])]], before)


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
