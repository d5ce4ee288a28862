"""All-reduce between the devices of one process, by name of the algorithm.

Relies on TensorFlow internals: a `tf.distribute.CrossDeviceOps` takes and returns distributed
values, which only `seams.distribute.regroup` can create; and TensorFlow's collective ring has no
public name. TensorFlow's hierarchical copy silently drops the last replica of an odd number, so it
is refused there.
"""

import difflib
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives import nccl
from tfparallel.collectives.algorithms import ALGORITHMS
from tfparallel.collectives.algorithms.schedule import MessageSchedule
from tfparallel.collectives.packing import by_dtype, in_vectors
from tfparallel.seams.distribute import (
    CollectiveAllReduce,
    Mirrored,
    PerReplica,
    collective_keys,
    devices_match,
    regroup,
)

# One for the process: two counters would give the same key to two collectives.
_keys = collective_keys(2**21)


def _tf_ring(devices):
    return CollectiveAllReduce(
        [f"/device:{device}" for device in devices],
        len(devices),
        tf.distribute.experimental.CommunicationOptions(),
        _keys,
    )


_TENSORFLOW = {
    "tf_reduce_to_one": (
        lambda devices: tf.distribute.ReductionToOneDevice(),
        "tf.distribute.ReductionToOneDevice",
    ),
    "tf_hierarchical_copy": (
        lambda devices: tf.distribute.HierarchicalCopyAllReduce(),
        "tf.distribute.HierarchicalCopyAllReduce",
    ),
    "tf_ring": (_tf_ring, "TensorFlow CollectiveReduceV2 (RING)"),
    "nccl": (lambda devices: NcclAllReduce(), "tf.distribute.NcclAllReduce"),
}
NAMES = (*ALGORITHMS, *_TENSORFLOW)
# Not in NAMES, since it cannot be measured alone: XLA sums inside the program of each replica.
IN_PROGRAMS = "xla"
# TensorFlow feeds its ring a new key for each call from Python, which a `tf.while_loop` cannot do.
# XLA is untested in loops.
NOT_IN_LOOPS = ("tf_ring", IN_PROGRAMS)


class NcclAllReduce(tf.distribute.NcclAllReduce):
    """TensorFlow's `NcclAllReduce`, safe against pruning and for every gradient dtype.

    The op of one device waits for the ops of the others, but TensorFlow prunes an op whose sum is
    unused: a step that reads only the first device's sums would hang. So each sum depends on all of
    them. bfloat16, which has no kernel, travels as float32.
    """

    def _batch_all_reduce(self, reduce_op, per_replica_values):
        results = [None] * len(per_replica_values)
        firsts = [value.values[0] for value in per_replica_values]
        for dtype, indices in by_dtype(firsts).items():
            terms = [per_replica_values[index] for index in indices]
            if dtype == tf.bfloat16:
                terms = [_mapped(lambda x: tf.cast(x, tf.float32), term) for term in terms]
            totals = super()._batch_all_reduce(reduce_op, terms)
            for index, total in zip(indices, totals, strict=True):
                results[index] = total
        sums = [result for result in results if _is_dense(result)]
        all_done = tf.group(*(tensor for total in sums for tensor in total.values))
        for index, first in enumerate(firsts):
            if _is_dense(results[index]):
                with tf.control_dependencies([all_done]):
                    results[index] = _mapped(
                        lambda x, dtype=first.dtype: tf.cast(tf.identity(x), dtype), results[index]
                    )
        return results


def _mapped(function, value):
    """Applies a function to each device's copy, on that device."""
    copies = []
    for tensor in value.values:
        with tf.device(tensor.device):
            copies.append(function(tensor))
    return regroup(copies, type(value))


class ScheduledAllReduce(tf.distribute.CrossDeviceOps):
    """An all-reduce algorithm of this package, between the devices of one process.

    Computes sums and means of dense values of any shape, on the devices that hold them. Sparse
    values, and values with another destination (the host), go through
    `tf.distribute.ReductionToOneDevice`, which concatenates the rows of sparse values.

    Args:
        name: One of `algorithms.ALGORITHMS`.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self._elsewhere = tf.distribute.ReductionToOneDevice()

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        """Reduces one value; called by `reduce`."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """Reduces several values, one vector per dtype; called by `batch_reduce`."""
        results, scheduled = [None] * len(value_destination_pairs), {}
        for index, (value, destinations) in enumerate(value_destination_pairs):
            if _is_dense(value) and devices_match(value, destinations):
                scheduled.setdefault((value._devices, value.values[0].dtype), []).append(index)
            else:
                results[index] = self._elsewhere.reduce(reduce_op, value, destinations, options)
        for (devices, _), indices in scheduled.items():
            terms = [value_destination_pairs[index][0].values for index in indices]
            totals = _sums(self.name, terms, devices)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                totals = [_divided(total, devices) for total in totals]
            for index, total in zip(indices, totals, strict=True):
                results[index] = regroup(total, Mirrored)
        return results


@tf.autograph.experimental.do_not_convert
def _sums(name, terms, devices):
    """Sums each tensor over the devices: `terms[tensor][device]` to `sums[tensor][device]`."""
    schedule = ALGORITHMS[name].schedule(len(devices))
    if schedule.num_blocks == 1:
        # With a single block there is nothing to concatenate, which saves two copies.
        return [execute(schedule, copies, devices) for copies in terms]
    vectors = []
    for rank, device in enumerate(devices):
        with tf.device(device):
            vectors.append(tf.concat([tf.reshape(copies[rank], [-1]) for copies in terms], 0))
    totals = execute(schedule, vectors, devices)
    sums: list[list[tf.Tensor]] = [[] for _ in terms]
    for rank, device in enumerate(devices):
        with tf.device(device):
            sizes = [tf.size(copies[rank]) for copies in terms]
            parts = tf.split(totals[rank], sizes, num=len(terms))
            for outputs, part, copies in zip(sums, parts, terms, strict=True):
                like = copies[rank]
                outputs.append(tf.ensure_shape(tf.reshape(part, tf.shape(like)), like.shape))
    return sums


def _divided(total, devices):
    quotients = []
    for tensor, device in zip(total, devices, strict=True):
        with tf.device(device):
            quotients.append(tensor / len(devices))
    return quotients


def _is_dense(value):
    return not any(isinstance(term, tf.IndexedSlices) for term in value.values)


# Schedules are generators, which AutoGraph cannot convert and need not convert.
@tf.autograph.experimental.do_not_convert
def execute(
    schedule: MessageSchedule, vectors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Runs a schedule of messages.

    A message is a tensor that one device produces and another reads: TensorFlow copies it between
    separate memories, and passes it by reference within one. An incoming term is not added at once:
    all terms of a block are added in one pass when the block is next needed.

    Args:
        schedule: The schedule, with as many ranks as there are vectors.
        vectors: One per device, shape `(count,)`, all of one dtype; any shape if the schedule has
            one block.
        devices: Names of the devices.

    Returns:
        The sum, of the same shape, on each device; bitwise equal on all of them.
    """
    num_blocks = schedule.num_blocks
    # terms_of[rank][block]: the terms of the block that the rank has received and not yet added.
    terms_of = [
        [[part] for part in _split(vector, schedule, device)]
        for vector, device in zip(vectors, devices, strict=True)
    ]

    def settled(rank, block):
        terms = terms_of[rank][block]
        if len(terms) > 1:
            with tf.device(devices[rank]):
                terms_of[rank][block] = terms = [tf.add_n(terms)]
        return terms[0]

    for step in schedule.steps():
        sent = [
            (target, block, settled(source, block))
            for source, target, start, stop in step.messages()
            for block in range(start, stop)
        ]
        for target, block, value in sent:
            with tf.device(devices[target]):
                value = tf.identity(value)
            terms_of[target][block] = [*terms_of[target][block], value] if step.adds else [value]

    results = []
    for rank, device in enumerate(devices):
        blocks = [settled(rank, block) for block in range(num_blocks)]
        with tf.device(device):
            results.append(blocks[0] if num_blocks == 1 else tf.concat(blocks, 0))
    return results


def _split(vector, schedule, device):
    if schedule.num_blocks == 1:
        return [vector]
    count = vector.shape[0]
    with tf.device(device):
        bounds = schedule.bounds(tf.size(vector) if count is None else count)
        sizes = [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        return tf.split(vector, sizes, num=schedule.num_blocks)


def refusals(devices: Sequence[str]) -> dict[str, str]:
    """Returns the algorithms that cannot run on these devices, with the reasons."""
    refused = {}
    if reason := nccl.refusal(devices):
        refused["nccl"] = reason
        refused[IN_PROGRAMS] = f"{IN_PROGRAMS} sums with NCCL: {reason}"
    if len(devices) % 2:
        refused["tf_hierarchical_copy"] = (
            f"TensorFlow's implementation omits one device if their number is odd ({len(devices)})"
        )
    return refused


def runnable(devices: Sequence[str]) -> list[str]:
    """Returns the algorithms that can run on these devices."""
    refused = refusals(devices)
    return [name for name in NAMES if name not in refused]


def make(name: str, devices: Sequence[str]) -> tf.distribute.CrossDeviceOps | None:
    """Creates an algorithm for these devices; returns None for `IN_PROGRAMS`.

    Raises:
        ValueError: If the name is unknown, or the algorithm cannot run on these devices.
    """
    refused = refusals(devices)
    if name == IN_PROGRAMS and name not in refused:
        return None
    if name not in runnable(devices):
        raise ValueError(unknown([name], runnable(devices), refused))
    if name in ALGORITHMS:
        return ScheduledAllReduce(name)
    return _TENSORFLOW[name][0](list(devices))


def implementation(name: str) -> str:
    """Returns the implementation behind a name, for tables."""
    if name in ALGORITHMS:
        return f"tfparallel schedule {name}, in TensorFlow"
    return _TENSORFLOW[name][1]


def unknown(names: Sequence[str], runnable_names: Sequence[str], refused: dict[str, str]) -> str:
    """Returns the error message for algorithms that cannot run, with reasons and alternatives."""
    fixes = []
    for name in names:
        if why := refused.get(name):
            fixes.append(f"{why}." if why.startswith(name) else f"{name} cannot run here: {why}.")
        elif matches := difflib.get_close_matches(name, runnable_names, n=1):
            fixes.append(f"Did you mean {matches[0]}?")
    return " ".join(
        [
            "Unknown all-reduce algorithm, or one that cannot run here. It must be one of "
            f"{', '.join(runnable_names)}. Received: {', '.join(names)}.",
            *fixes,
        ]
    )


def all_reduce(
    ops: tf.distribute.CrossDeviceOps, tensors: Sequence[Sequence[tf.Tensor]]
) -> list[list[tf.Tensor]]:
    """Sums each tensor over the devices: `tensors[tensor][device]` to `sums[tensor][device]`."""
    results: list = [None] * len(tensors)
    # TensorFlow's own algorithms concatenate their inputs, and so accept one dtype at a time.
    for indices in in_vectors([copies[0] for copies in tensors]):
        terms = [regroup(tensors[index], PerReplica) for index in indices]
        sums = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(term, term) for term in terms])
        for index, total in zip(indices, sums, strict=True):
            results[index] = list(total.values)
    return results
