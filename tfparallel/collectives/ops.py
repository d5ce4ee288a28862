"""Collectives for users; where a call is made decides which replicas or workers participate.

| called | participants | a value is |
| --- | --- | --- |
| in a replica: in a function that `strategy.run` runs, or in a layer while Keras trains or \
predicts under a strategy of this package | every replica of every worker | the replica's own |
| outside a replica, eagerly, in a `tf.function` or in a callback, once \
`tfparallel.MultiWorkerMirroredStrategy` exists | every worker | the worker's own |
| the same, with `group=` | the workers of the group, from `tfparallel.new_group` | the same |
| by Keras outside a replica: in a loss, a metric, a `train_step`; in a layer that is called \
directly | this process alone | already that of the global batch |
| in a process that belongs to no job | this process alone | the only one |

With a single participant, every collective returns its input. All participants must make the same
calls in the same order. Every collective has a gradient (see
`tfparallel.collectives.differentiable`), whose backward pass is itself a collective.

A value is a tensor, a variable, a NumPy array or a Python number (which keeps its 64 bits), or a
nested structure of them, as in `tf.nest`; the result is tensors in the same structure. Before an
eager collective, the workers compare what they are about to send, in a reduction of two integers: a
mismatch in call, shape or dtype raises an error that names the workers, instead of hanging. Inside
a `tf.function` nothing is compared; TensorFlow reports different shapes, though less clearly.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.collectives import differentiable
from tfparallel.collectives.coordination import wait_for_all, wait_for_group
from tfparallel.collectives.group import Group, Workers, agreed, find
from tfparallel.collectives.in_replica import Replicas
from tfparallel.collectives.packing import sendable
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.judge.propagation import exchanged, is_judging
from tfparallel.piece import current

# Any structure that `tf.nest` can flatten into tensors.
Value = Any


def all_reduce(value: Value, op: str = "sum", group: Group | None = None) -> Value:
    """Reduces a value over all participants; each of them receives the result.

    Args:
        value: The value to reduce; same shape and dtype on every participant.
        op: `"sum"`, `"mean"`, `"max"` or `"min"`. The mean of integers is a float64. For booleans,
            `"max"` is "any" and `"min"` is "all".
        group: The workers that participate, from `new_group`; None means all of them.

    Returns:
        The result, in the structure and shapes of `value`. In a layer that Keras trains, a replica
        without examples participates and contributes nothing.

    Raises:
        ValueError: If `op` is unknown or does not support the dtype, or if the workers' values
            differ in structure, shape or dtype.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> logs = tfparallel.all_reduce({"loss": 0.5, "seconds": 2.0}, op="mean")
        >>> float(logs["loss"])  # A single process gets its own value back.
        0.5
    """
    ranks, tensors = agreed("all_reduce", value, group, op=op)
    if is_judging():
        terms = map(_as_float, tensors) if op == "mean" else tensors
        return tf.nest.pack_sequence_as(value, [exchanged(each, op) for each in terms])
    return tf.nest.pack_sequence_as(value, _reduce(ranks, tensors, op))


def all_gather(value: Value, group: Group | None = None) -> Value:
    """Concatenates the values of all participants along axis 0, in rank order.

    Use it for losses that compare examples across the global batch (contrastive losses), for
    predictions, and for metrics that are not sums.

    Args:
        value: Tensors of shape `(rows, …)`; `rows` may differ. A scalar is one row.
        group: As for `all_reduce`.

    Returns:
        Tensors of shape `(Σ rows, …)`, equal on every participant.

    Raises:
        ValueError: For a dtype that cannot be sent, or if the workers' values differ in structure,
            dtype or shape beyond axis 0.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def contrast(rows):  # In a replica: sees the rows of all replicas.
        ...     return tf.shape(tfparallel.all_gather(rows))
        >>> strategy.run(contrast, [tf.ones((2, 8))]).values[0].numpy()
        array([4, 8], dtype=int32)
    """
    ranks, tensors = agreed("all_gather", value, group)
    if is_judging():
        return tf.nest.pack_sequence_as(value, [exchanged(each, "gather") for each in tensors])
    return tf.nest.pack_sequence_as(value, _join(ranks, tensors))


def gather(value: Value, root: int = 0, group: Group | None = None) -> Value:
    """Concatenates the values of all participants along axis 0, on the root only.

    It takes as long as `all_gather`, but saves memory on the other participants.

    Args:
        value: As for `all_gather`.
        root: The participant that receives the result: a worker index or, in a replica, a replica
            index.
        group: As for `all_reduce`.

    Returns:
        On the root, tensors of shape `(Σ rows, …)`. Elsewhere, tensors of shape `(0, …)` rather
        than None, so that a traced function returns the same structure everywhere.

    Raises:
        ValueError: As for `all_gather`, or if `root` is out of range.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> errors = tfparallel.gather(tf.abs(model(x) - y))
        >>> if tfparallel.worker_index() == 0:
        ...     np.save("errors.npy", errors)
    """
    ranks, tensors = agreed("gather", value, group, root=root)
    joined = _join(ranks, tensors)
    if ranks.num_ranks > 1:
        is_root = tf.equal(ranks.rank, ranks.members.index(root))
        joined = [rows[: tf.where(is_root, tf.shape(rows)[0], 0)] for rows in joined]
    return tf.nest.pack_sequence_as(value, joined)


def broadcast(value: Value, root: int = 0, group: Group | None = None) -> Value:
    """Sends the root's value to every participant.

    Args:
        value: Same shape and dtype on every participant; only the root's content is used.
        root: The participant whose value is sent: a worker index or, in a replica, a replica index.
        group: As for `all_reduce`.

    Returns:
        The root's value, bit for bit.

    Raises:
        ValueError: For a dtype that cannot be sent, if `root` is out of range, or if the workers'
            values differ in structure, shape or dtype.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> seed = tfparallel.broadcast(np.random.randint(1000))  # The number worker 0 drew.
    """
    ranks, tensors = agreed("broadcast", value, group, root=root)
    if ranks.num_ranks > 1:
        is_root = tf.equal(ranks.rank, ranks.members.index(root))
        # A sum with zeros: negative zeros, since +0.0 would turn the root's -0.0 into 0.0.
        terms = [tf.where(is_root, sent, -tf.zeros_like(sent)) for sent in map(sendable, tensors)]
        tensors = _cast_like(tensors, differentiable.all_reduce(ranks, terms))
    return tf.nest.pack_sequence_as(value, tensors)


def reduce(value: Value, root: int = 0, op: str = "sum", group: Group | None = None) -> Value:
    """Reduces a value over all participants, for the root only.

    It sends what `all_reduce` sends, and the others drop the result. That costs no time: a tree,
    ⌈log₂N⌉(α + Sβ), and a reduce-scatter with a gather, 2⌈log₂N⌉α + 2(N−1)/N·Sβ, take as long as an
    all-reduce of the same kind.

    Args:
        value: As for `all_reduce`.
        root: The participant that receives the result: a worker index or, in a replica, a replica
            index.
        op: As for `all_reduce`.
        group: As for `all_reduce`.

    Returns:
        On the root, what `all_reduce` returns. Elsewhere zeros, or False, of the same shape and
        dtype, so that a traced function returns the same structure everywhere.

    Raises:
        ValueError: As for `all_reduce`, or if `root` is not a participant.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> total = tfparallel.reduce(np.float32(2.0), root=0)
        >>> float(total)
        2.0

    References:
        Rajeev Thakur, Rolf Rabenseifner, William Gropp, "Optimization of Collective Communication
        Operations in MPICH", International Journal of High Performance Computing Applications
        19(1), 2005, §4.4 and 4.5.
    """
    ranks, tensors = agreed("reduce", value, group, root=root, op=op)
    if is_judging():
        return tf.nest.pack_sequence_as(value, [exchanged(each, "by rank") for each in tensors])
    results = _reduce(ranks, tensors, op)
    if ranks.num_ranks > 1:
        is_root = tf.equal(ranks.rank, ranks.members.index(root))
        results = [tf.where(is_root, y, tf.zeros_like(y)) for y in results]
    return tf.nest.pack_sequence_as(value, results)


def reduce_scatter(value: Value, op: str = "sum", group: Group | None = None) -> Value:
    """Reduces a value over all participants; each receives its shard of the rows.

    It takes as long as `all_reduce`, but saves memory.

    Args:
        value: Tensors of shape `(rows, …)`, the same on every participant; `rows` must be a
            multiple of N, the number of participants.
        op: As for `all_reduce`.
        group: As for `all_reduce`.

    Returns:
        Tensors of shape `(rows / N, …)`: rank k receives rows k·rows/N to (k+1)·rows/N of the
        result.

    Raises:
        ValueError: As for `all_reduce`, or if N does not divide `rows`.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> shares = strategy.run(tfparallel.reduce_scatter, [tf.ones((4, 8))])
        >>> shares.values[0].shape, float(tf.reduce_max(shares.values[0]))
        (TensorShape([2, 8]), 2.0)
    """
    ranks, tensors = agreed("reduce_scatter", value, group, op=op)
    results = _reduce(ranks, tensors, op)
    if ranks.num_ranks > 1:
        results = [
            tf.reshape(y, tf.concat([[ranks.num_ranks, -1], tf.shape(y)[1:]], 0))[ranks.rank]
            for y in results
        ]
    return tf.nest.pack_sequence_as(value, results)


def barrier(timeout_seconds: float = 1800.0, group: Group | None = None) -> None:
    """Blocks until every worker of the job has reached the barrier.

    Args:
        timeout_seconds: How long to wait for the other workers.
        group: The workers that meet, from `new_group`; None means all of them.

    Raises:
        ValueError: If `timeout_seconds` is not positive.
        RuntimeError: If a worker does not arrive in time (the error names the missing ones); in a
            replica or a `tf.function`, which cannot wait; in a multi-worker job, before a strategy
            has connected the workers.

    Example:
        >>> if tfparallel.worker_index() == 0:
        ...     model.save("model.keras")
        >>> tfparallel.barrier()  # From here on, every worker can read the file.
    """
    if not 0 < timeout_seconds < float("inf"):
        raise ValueError(
            "The timeout of a barrier must be a positive number of seconds. Received: "
            f"timeout_seconds={timeout_seconds!r}. Omit it to wait up to half an hour."
        )
    ranks = find(group)
    if isinstance(ranks, Replicas) or not tf.executing_eagerly():
        raise RuntimeError(
            "A barrier blocks a worker's Python program. It must be called outside replicas and "
            "outside any `tf.function`. Received: a call inside one. Move the barrier out of the "
            "traced function; collectives there wait for all participants by themselves."
        )
    if isinstance(ranks, Workers) and group is not None:
        wait_for_group(group, timeout_seconds)
    elif isinstance(ranks, Workers):
        wait_for_all(ranks.group, timeout_seconds)


def worker_index() -> int:
    """Returns the index of this worker in its job; 0 for the chief and in a single process.

    Available before any strategy is created: see `tfparallel.Cluster.from_env`.

    Returns:
        The index, from 0.

    Raises:
        ValueError: If the environment does not describe a cluster.

    Example:
        >>> tfparallel.worker_index()
        0
    """
    return _job().worker_index


def num_workers() -> int:
    """Returns the number of workers of this job, at least 1.

    Available before any strategy is created: see `tfparallel.Cluster.from_env`.

    Returns:
        The number.

    Raises:
        ValueError: If the environment does not describe a cluster.

    Example:
        >>> tfparallel.num_workers()
        1
    """
    return _job().num_workers


def _job() -> ProcessGroup | Cluster:
    return ProcessGroup.of_process or Cluster.from_env()


def _reduce(ranks, tensors, op):
    count = ranks.num_ranks
    results = tensors
    if ranks.num_ranks > 1:
        terms = [sendable(tensor) for tensor in tensors]
        piece = current()
        if isinstance(ranks, Replicas) and piece is not None and _some_may_be_idle(piece):
            # A dummy row does not belong to the batch.
            has_rows = tf.greater(piece.num_rows, 0)
            terms = [tf.where(has_rows, x, tf.cast(_neutral(x.dtype, op), x.dtype)) for x in terms]
            (count,) = ranks.all_reduce([tf.cast(has_rows, tf.int32)], "sum")
        ties = None if op in ("sum", "mean") else list(map(differentiable.number_of_ties, tensors))
        results = differentiable.all_reduce(ranks, terms, "sum" if op == "mean" else op, ties)
    if op != "mean":
        return _cast_like(tensors, results)
    totals = map(_as_float, results)
    return [total / tf.cast(count, total.dtype) for total in totals]


def _as_float(tensor):
    return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float64)


def _some_may_be_idle(piece):
    # Not `may_be_idle`, which differs between replicas: all must make the same calls.
    num_rows = piece.num_global_rows
    return not isinstance(num_rows, int) or num_rows < piece.num_replicas


def _neutral(dtype, op):
    """Returns the neutral element of `op`."""
    if op in ("sum", "mean"):
        return 0
    if dtype.is_floating:
        return -np.inf if op == "max" else np.inf
    return dtype.min if op == "max" else dtype.max


def _join(ranks, tensors):
    if ranks.num_ranks == 1:
        return tensors
    local_rows = [ranks.own_rows(sendable(tensor)) for tensor in tensors]
    return _cast_like(tensors, [differentiable.all_gather(ranks, rows) for rows in local_rows])


def _cast_like(tensors, results):
    """Casts the results back to the dtypes of the inputs."""
    return [tf.cast(y, x.dtype) for x, y in zip(tensors, results, strict=True)]
