"""Collectives for users: among replicas, among workers, or with nobody, by where they are called.

| called | takes part | a value is |
| --- | --- | --- |
| in a replica: in a function that `strategy.run` runs, or in a layer while Keras trains or \
predicts under a strategy of this package | every replica of every worker | the replica's own |
| outside, eagerly or in a `tf.function`, once `tfparallel.MultiWorkerMirroredStrategy` is there; \
in a callback, too | every worker | the worker's own |
| by Keras outside a replica: in a loss, a metric, a `train_step`; in a layer that is called \
directly | nobody else | the global batch's, already |
| in a process that is part of no job | nobody else | all there is |

With nobody else a sum is its only term, and what is joined is its only part. The calls that take
part in a collective must come in the same order everywhere. All of them have gradients (see
`tfparallel.collectives.differentiable`), whose backward passes are collectives themselves.

A value is a tensor, a variable, a NumPy array or a Python number (which keeps its 64 bits), or a
nested structure of them, as in `tf.nest`; the result has the same structure, in tensors. Before an
eager collective between workers, they compare notes on what each is about to send, in a reduction
of two integers: other shapes, dtypes or calls are an error that names the workers, not a hang. In a
`tf.function` nothing is compared; TensorFlow raises for other shapes, if not as clearly.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.collectives import differentiable, group
from tfparallel.collectives.coordination import wait_for_all
from tfparallel.collectives.in_replica import Replicas
from tfparallel.collectives.packing import sendable
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.validate import agreed
from tfparallel.data import rows_of_replica as shards
from tfparallel.judge.propagation import exchanged, is_judging

# Anything made of tensors: `tf.nest` knows how.
Value = Any


def all_reduce(value: Value, op: str = "sum") -> Value:
    """Sums a value over all that take part; each of them receives the result.

    Args:
        value: Of the same shape and dtype everywhere.
        op: `"sum"`, `"mean"`, `"max"` or `"min"`. The mean of integers is a float64. Truth values
            have a "max", whether any is true, and a "min", whether all are.

    Returns:
        The result, of the structure and shapes of `value`. In a layer that Keras trains, a replica
        without examples takes part and adds nothing.

    Raises:
        ValueError: For another `op`, a dtype that it does not have, or if the workers' values
            differ in structure, shape or dtype.
        RuntimeError: In a job whose workers no strategy has joined yet.

    Example:
        >>> logs = tfparallel.all_reduce({"loss": 0.5, "seconds": 2.0}, op="mean")
        >>> float(logs["loss"])  # Of one process: its own.
        0.5
    """
    ranks, tensors = agreed("all_reduce", value, op=op)
    if is_judging():
        own = map(_of_fractions, tensors) if op == "mean" else tensors
        return tf.nest.pack_sequence_as(value, [exchanged(each, op) for each in own])
    return tf.nest.pack_sequence_as(value, _reduce(ranks, tensors, op))


def all_gather(value: Value) -> Value:
    """Joins the values of all that take part along axis 0, in the order of their indices.

    For losses that compare examples across the global batch (contrastive ones), for predictions
    and for metrics that no sum can hold.

    Args:
        value: Tensors of shape `(rows, …)`; `rows` may differ. A scalar is one row.

    Returns:
        Tensors of shape `(Σ rows, …)`, equal everywhere.

    Raises:
        ValueError: For a dtype that cannot be sent, or if the workers' values differ in structure,
            dtype or shape behind axis 0.
        RuntimeError: In a job whose workers no strategy has joined yet.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def contrast(rows):  # In a replica: with the rows of the others.
        ...     return tf.shape(tfparallel.all_gather(rows))
        >>> strategy.run(contrast, [tf.ones((2, 8))]).values[0].numpy()
        array([4, 8], dtype=int32)
    """
    ranks, tensors = agreed("all_gather", value)
    if is_judging():
        return tf.nest.pack_sequence_as(value, [exchanged(each, "gather") for each in tensors])
    return tf.nest.pack_sequence_as(value, _join(ranks, tensors))


def gather(value: Value, root: int = 0) -> Value:
    """Joins the values of all that take part along axis 0, for one of them.

    It costs what `all_gather` costs; what it saves is the memory of the others.

    Args:
        value: As for `all_gather`.
        root: Who receives the result: the index of a worker or, in a replica, of a replica.

    Returns:
        On the root, tensors of shape `(Σ rows, …)`. Elsewhere, tensors of shape `(0, …)`, not
        None: a traced function then returns the same structure wherever it runs.

    Raises:
        ValueError: As for `all_gather`, or if there is no such root.
        RuntimeError: In a job whose workers no strategy has joined yet.

    Example:
        >>> errors = tfparallel.gather(tf.abs(model(x) - y))
        >>> if tfparallel.worker_index() == 0:
        ...     np.save("errors.npy", errors)
    """
    ranks, tensors = agreed("gather", value, root=root)
    joined = _join(ranks, tensors)
    if ranks.num_ranks > 1:
        is_root = tf.equal(ranks.rank, root)
        joined = [rows[: tf.where(is_root, tf.shape(rows)[0], 0)] for rows in joined]
    return tf.nest.pack_sequence_as(value, joined)


def broadcast(value: Value, root: int = 0) -> Value:
    """Returns one participant's value everywhere.

    Args:
        value: Of the same shape and dtype everywhere; only the root's counts.
        root: Whose: the index of a worker or, in a replica, of a replica.

    Returns:
        The root's value, to the last bit.

    Raises:
        ValueError: For a dtype that cannot be sent, if there is no such root, or if the workers'
            values differ in structure, shape or dtype.
        RuntimeError: In a job whose workers no strategy has joined yet.

    Example:
        >>> seed = tfparallel.broadcast(np.random.randint(1000))  # That of worker 0.
    """
    ranks, tensors = agreed("broadcast", value, root=root)
    if ranks.num_ranks > 1:
        is_root = tf.equal(ranks.rank, root)
        # A sum with zeros. Negative ones: 0.0 would turn a root's -0.0 into 0.0.
        terms = [tf.where(is_root, sent, -tf.zeros_like(sent)) for sent in map(sendable, tensors)]
        tensors = _as_sent(tensors, differentiable.all_reduce(ranks, terms))
    return tf.nest.pack_sequence_as(value, tensors)


def reduce_scatter(value: Value, op: str = "sum") -> Value:
    """Sums a value over all that take part; each receives its own share of the rows.

    It costs what `all_reduce` costs; what it saves is memory.

    Args:
        value: Tensors of shape `(rows, …)`, the same everywhere, `rows` a multiple of the number N
            of those that take part.
        op: As for `all_reduce`.

    Returns:
        Tensors of shape `(rows / N, …)`: rows k·rows/N to (k+1)·rows/N of the result for the one
        of index k.

    Raises:
        ValueError: As for `all_reduce`, or if the rows do not divide.
        RuntimeError: In a job whose workers no strategy has joined yet.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> shares = strategy.run(tfparallel.reduce_scatter, [tf.ones((4, 8))])
        >>> shares.values[0].shape, float(tf.reduce_max(shares.values[0]))
        (TensorShape([2, 8]), 2.0)
    """
    ranks, tensors = agreed("reduce_scatter", value, op=op)
    results = _reduce(ranks, tensors, op)
    if ranks.num_ranks > 1:
        results = [
            tf.reshape(y, tf.concat([[ranks.num_ranks, -1], tf.shape(y)[1:]], 0))[ranks.rank]
            for y in results
        ]
    return tf.nest.pack_sequence_as(value, results)


def barrier(timeout_seconds: float = 1800.0) -> None:
    """Waits until every worker of the job has come here.

    Args:
        timeout_seconds: How long to wait for the others.

    Raises:
        ValueError: If `timeout_seconds` is not positive.
        RuntimeError: If a worker did not come in time, with the names of those missing; in a
            replica or a `tf.function`, which cannot wait; in a job whose workers no strategy has
            joined yet.

    Example:
        >>> if tfparallel.worker_index() == 0:
        ...     model.save("model.keras")
        >>> tfparallel.barrier()  # From here on every worker finds the file.
    """
    if not 0 < timeout_seconds < float("inf"):
        raise ValueError(
            "The deadline of a barrier must be a positive number of seconds. Received: "
            f"timeout_seconds={timeout_seconds!r}. Leave it out to wait for half an hour."
        )
    ranks = group.find()
    if isinstance(ranks, Replicas) or not tf.executing_eagerly():
        raise RuntimeError(
            "A barrier holds up a worker's Python program. It must be called outside replicas and "
            "outside any `tf.function`. Received: a call in one. A collective waits for all that "
            "take part by itself; move the barrier out of the traced function."
        )
    if isinstance(ranks, group.Workers):
        wait_for_all(ranks.group, timeout_seconds)


def worker_index() -> int:
    """Returns the index of this worker in its job; 0 is the chief, and a process that is alone.

    Known from the start, before any strategy is made: see `tfparallel.Cluster.from_env`.

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

    Known from the start, before any strategy is made: see `tfparallel.Cluster.from_env`.

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
        shard = shards.current()
        if isinstance(ranks, Replicas) and shard is not None and _some_may_be_idle(shard):
            # A dummy row is no part of the batch.
            has_rows = tf.greater(shard.num_rows, 0)
            terms = [tf.where(has_rows, x, tf.cast(_neutral(x.dtype, op), x.dtype)) for x in terms]
            (count,) = ranks.all_reduce([tf.cast(has_rows, tf.int32)], "sum")
        ties = None if op in ("sum", "mean") else list(map(differentiable.number_of_ties, tensors))
        results = differentiable.all_reduce(ranks, terms, "sum" if op == "mean" else op, ties)
    if op != "mean":
        return _as_sent(tensors, results)
    totals = map(_of_fractions, results)
    return [total / tf.cast(count, total.dtype) for total in totals]


def _of_fractions(tensor):
    return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float64)


def _some_may_be_idle(shard):
    # Not `may_be_idle`, which is the replica's own: all must make the same calls.
    num_rows = shard.num_global_rows
    return not isinstance(num_rows, int) or num_rows < shard.num_replicas


def _neutral(dtype, op):
    """What changes no sum, no maximum or no minimum."""
    if op in ("sum", "mean"):
        return 0
    if dtype.is_floating:
        return -np.inf if op == "max" else np.inf
    return dtype.min if op == "max" else dtype.max


def _join(ranks, tensors):
    if ranks.num_ranks == 1:
        return tensors
    own = [ranks.own_rows(sendable(tensor)) for tensor in tensors]
    return _as_sent(tensors, [differentiable.all_gather(ranks, rows) for rows in own])


def _as_sent(tensors, results):
    """The results in the types of the tensors that were sent."""
    return [tf.cast(y, x.dtype) for x, y in zip(tensors, results, strict=True)]
