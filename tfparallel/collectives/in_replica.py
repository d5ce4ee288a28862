"""Collectives between the replicas of `strategy.run`, with gradients.

The gradient of TensorFlow's `ReplicaContext.all_reduce` reuses the context of the forward pass, and
therefore fails if the backward pass runs in another `strategy.run`. These functions use the context
that is current when they run.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives import differentiable
from tfparallel.collectives.traffic import ROWS
from tfparallel.piece import current
from tfparallel.tracing import static_shapes


class Replicas:
    """All replicas of all workers, as `tfparallel.collectives.differentiable.Ranks`."""

    def __init__(self):
        context = tf.distribute.get_replica_context()
        # In a program `num_replicas_in_sync` is 1, as Keras requires.
        strategy = context.strategy
        self.num_ranks = getattr(strategy, "num_replicas", strategy.num_replicas_in_sync)
        self.members = range(self.num_ranks)
        self.rank = context.replica_id_in_sync_group

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str) -> Sequence[tf.Tensor]:
        piece = current()
        if op == "sum" and piece is not None:
            tensors = piece.terms_if_it_has_rows(tensors)
        # Not `context.all_reduce`, which is a `tf.custom_gradient`.
        combine = {
            "sum": tf.add_n,
            "max": lambda copies: tf.reduce_max(tf.stack(copies), 0),
            "min": lambda copies: tf.reduce_min(tf.stack(copies), 0),
        }[op]
        strategy = tf.distribute.get_strategy()
        is_program = getattr(strategy, "program_is_running", False)
        if is_program and strategy.workers is None:
            return [combine(copies) for copies in of_all_here(tensors)]

        def reduce(strategy, *values):
            transport = getattr(getattr(strategy, "workers", None), "transport", "ring")
            if op == "sum" and transport.startswith("ring") and not is_program:
                # A custom loop uses TensorFlow's own collectives.
                return strategy.extended.batch_reduce_to(
                    tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
                )
            parts = [strategy.experimental_local_results(value) for value in values]
            workers = _workers(strategy, len(parts[0]))
            reduced = [combine(copies) for copies in parts]
            return reduced if workers is None else workers.all_reduce(reduced, op)

        return tf.distribute.get_replica_context().merge_call(reduce, args=_distinct(tensors))

    def own_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the rows to gather: all of them, minus the dummy row of an idle replica."""
        piece = current()
        return tensor if piece is None else piece.without_dummy_row(tensor)

    def all_gather(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def join(strategy, value):
            return join_rows(strategy, strategy.experimental_local_results(value))

        return tf.distribute.get_replica_context().merge_call(join, args=_distinct([tensor]))

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        def deal(strategy, value):
            return _dealt_out(strategy, strategy.experimental_local_results(value), self.num_ranks)

        context = tf.distribute.get_replica_context()
        by_replica = context.merge_call(deal, args=_distinct([tensor]))
        return by_replica[self.rank % by_replica.shape[0]]

    def scatter(self, tensor: tf.Tensor, root: int) -> tf.Tensor:
        def deal(strategy, value):
            copies = strategy.experimental_local_results(value)
            num_local, workers = len(copies), _workers(strategy, len(copies))
            rows = copies[root % num_local]
            if workers is not None:
                rows = workers.scatter(rows, root // num_local)
            return static_shapes.in_parts(rows, num_local)

        context = tf.distribute.get_replica_context()
        by_replica = context.merge_call(deal, args=_distinct([tensor]))
        return by_replica[self.rank % by_replica.shape[0]]


def _distinct(tensors):
    """Gives each replica its own tensors; `merge_call` would pass a shared one only once."""
    return tuple(map(tf.identity, tensors))


def of_all_here(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Returns, for each tensor, its values on all replicas of this process, in replica order."""

    def hand_out(strategy, *values):
        return tuple(tuple(strategy.experimental_local_results(value)) for value in values)

    by_tensor = tf.distribute.get_replica_context().merge_call(hand_out, args=_distinct(tensors))
    return [list(each) for each in by_tensor]


def all_reduce(tensor: tf.Tensor) -> tf.Tensor:
    """Sums a tensor over the replicas; see `differentiable.all_reduce`."""
    return differentiable.all_reduce(Replicas(), [tf.convert_to_tensor(tensor)])[0]


def all_gather(tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates the replicas' rows, without dummy rows; see `differentiable.all_gather`."""
    ranks = Replicas()
    return differentiable.all_gather(ranks, ranks.own_rows(tf.convert_to_tensor(tensor)))


def join_rows(strategy, rows) -> tuple[tf.Tensor, tf.Tensor]:
    """Concatenates the rows of all replicas of all workers, in the cross-replica context.

    Args:
        strategy: The running strategy.
        rows: One tensor of shape `(n_k, …)` for each replica of this worker.

    Returns:
        The rows, shape `(Σ n_k, …)`, and the counts n_k, shape `(num_replicas,)`.
    """
    joined, counts = tf.concat(rows, 0), tf.stack([tf.shape(part)[0] for part in rows])
    workers = _workers(strategy, len(rows))
    if workers is None:
        return joined, counts
    all_counts = workers.all_gather([counts], [len(rows)] * workers.num_workers)[0]
    by_worker = tf.reduce_sum(tf.reshape(all_counts, [workers.num_workers, -1]), 1)
    counts_by_worker = tf.unstack(by_worker, num=workers.num_workers)
    (joined,) = workers.all_gather([joined], counts_by_worker, ROWS)
    return joined, all_counts


def _dealt_out(strategy, values, num_ranks):
    """Returns what each replica of this worker receives from all: shape `(K, rows, …)`.

    K replicas of each of W workers; s sends and r receives:

        here                     (worker of r, s, r, rows)
        after the all-to-all     (worker of s, s, r, rows)
    """
    num_local, workers = len(values), _workers(strategy, len(values))
    parts = [static_shapes.in_parts(value, num_ranks) for value in values]
    size = [num_ranks // num_local, num_local, *static_shapes.shape_of(parts[0])[1:]]
    parts = tf.stack([tf.reshape(part, size) for part in parts], 1)
    if workers is not None:
        parts = workers.all_to_all(parts)
    by_replica = tf.stack(tf.unstack(parts, num_local, axis=2))
    return tf.reshape(by_replica, [num_local, *static_shapes.shape_of(values[0])])


def _workers(strategy, num_local_replicas):
    """Returns the `ProcessGroup` of the running strategy; None for a single worker."""
    workers = getattr(strategy, "workers", None)
    if workers is None and strategy.num_replicas_in_sync > num_local_replicas:
        raise RuntimeError(
            "TensorFlow's own strategy can only sum over its workers. "
            "tfparallel.MultiWorkerMirroredStrategy is required. Received: a "
            f"{type(strategy).__module__}.{type(strategy).__name__} of "
            f"{strategy.num_replicas_in_sync} replicas, {num_local_replicas} of them here. Replace "
            "`tf.distribute.` by `tfparallel.`."
        )
    return workers
