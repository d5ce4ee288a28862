"""Collectives between the replicas of `strategy.run`, with gradients.

TensorFlow's own `ReplicaContext.all_reduce` keeps the context of the forward pass for its
gradient, and so refuses a backward pass that is another `strategy.run`. These take the context of
the moment.
"""

import tensorflow as tf

from tfparallel.collectives.gradient import call_with_gradient
from tfparallel.data import shard as shards


def all_reduce(tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
    """Sums or averages a tensor over the replicas; every replica receives the result.

    y = Σ_k x_k, and ∂J/∂x_k = Σ_j ∂J_j/∂y.

    Args:
        tensor: x_k, of the same shape and dtype on each replica.
        op: `"sum"` or `"mean"`.

    Returns:
        The result, of the shape of `tensor`. Outside a replica, `tensor` itself: a program sees
        the whole batch already.

    Raises:
        ValueError: For another `op`.
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"`op` of an all-reduce must be 'sum' or 'mean'. Received: op={op!r}.")
    if tf.distribute.in_cross_replica_context():
        return tensor
    (total,) = call_with_gradient("all_reduce", _all_reduce_sum, [tf.convert_to_tensor(tensor)])
    if op == "sum":
        return total
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return total / tf.cast(num_replicas, total.dtype)


def all_gather(tensor: tf.Tensor) -> tf.Tensor:
    """Joins the replicas' tensors along axis 0, in the order of the replicas.

    For losses that compare examples across the global batch (contrastive ones), in a custom loop
    or in a layer's own `add_loss`.

    Args:
        tensor: Shape `(rows, …)`; `rows` may differ between replicas.

    Returns:
        Shape `(Σ rows, …)`, equal on all replicas. Outside a replica, `tensor` itself. Its
        gradient is the sum of the replicas' gradients at the rows that are this replica's.
    """
    if tf.distribute.in_cross_replica_context():
        return tensor
    shard = shards.current()
    if shard is not None:
        tensor = shard.without_dummy_row(tensor)
    (joined,) = call_with_gradient("all_gather", _all_gather, [tf.convert_to_tensor(tensor)])
    return joined


def _all_reduce_sum(tensor):
    # Not `context.all_reduce`, which is a `tf.custom_gradient`.
    def reduce(strategy, value):
        workers = _workers_of_program(strategy)
        if workers is None:
            return strategy.extended.reduce_to(
                tf.distribute.ReduceOp.SUM, value, destinations=value
            )
        return workers.all_reduce([tf.add_n(strategy.experimental_local_results(value))])[0]

    total = tf.distribute.get_replica_context().merge_call(reduce, args=(tensor,))
    return [total], lambda upstream: [all_reduce(upstream)]


def _all_gather(tensor):
    context = tf.distribute.get_replica_context()
    replica = context.replica_id_in_sync_group

    def join(strategy, value):
        return join_rows(strategy, strategy.experimental_local_results(value))

    joined, counts = context.merge_call(join, args=(tensor,))

    def backward(upstream):
        start = tf.reduce_sum(counts[:replica])
        return [all_reduce(upstream)[start : start + counts[replica]]]

    return [joined], backward


def join_rows(strategy, rows) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins the rows of all replicas, of all workers, outside a replica.

    Args:
        strategy: The strategy that is running.
        rows: One tensor of shape `(n_k, …)` for each replica of this worker.

    Returns:
        The joined rows, shape `(Σ n_k, …)`, and the numbers n_k, shape `(num_replicas,)`.
    """
    joined, counts = tf.concat(rows, 0), tf.stack([tf.shape(part)[0] for part in rows])
    workers = getattr(strategy, "workers", None)
    if workers is None:
        return joined, counts
    all_counts = workers.all_gather([counts], [len(rows)] * workers.num_workers)[0]
    by_worker = tf.reduce_sum(tf.reshape(all_counts, [workers.num_workers, -1]), 1)
    joined = workers.all_gather([joined], tf.unstack(by_worker, num=workers.num_workers))[0]
    return joined, all_counts


def _workers_of_program(strategy):
    """What joins the workers, in a program; a custom loop has TensorFlow's own collectives."""
    return strategy.workers if getattr(strategy, "program_is_running", False) else None
