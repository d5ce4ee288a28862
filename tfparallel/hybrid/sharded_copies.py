"""Each replica of a mesh keeps and updates its share of the optimizer: `shard_optimizer=True`.

A share is a variable with a copy in each replica, which holds what that replica updates, and so
are its slots (`replication/sharded_optimizer.py` has the picture). Each replica runs the optimizer
on its own copies; then every copy of a weight is given what all of them have come to, those of
other workers too. Every element is updated once, so that replicas cannot come apart. Of a layer in
parts each part is a weight; files hold the wholes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from tfparallel.collectives.between_workers import WorkerGroup
from tfparallel.extend import attach, extend, original_class
from tfparallel.hybrid.optimizer import in_parts, updates_alike
from tfparallel.layers.variable import parts_of, whole_of
from tfparallel.newer_keras import MultiOptimizer
from tfparallel.placement.copies import Replica, at_work, copies_of, copy_to, replica_at_work
from tfparallel.placement.problems import PlacementError
from tfparallel.replication.sharded_optimizer import ShardedOptimizer, check_shardable
from tfparallel.replication.shares import Holders, cut_share, shape_shared_out

__all__ = ["shard_copies"]


class HoldersOnMesh(Holders):
    """The replicas of a mesh that hold shares.

    Args:
        replicas: Those of this process.
        workers: Each of which has as many; None for one process.
    """

    def __init__(self, replicas: Sequence[Replica], workers: WorkerGroup | None):
        self._replicas = replicas
        self.workers = workers
        self.number = len(replicas) * (1 if workers is None else workers.num_workers)
        self.first = 0 if workers is None else len(replicas) * workers.worker_index

    def scope(self) -> AbstractContextManager:
        """Where shares are made: each beside its weight, wherever that is."""
        return contextlib.nullcontext()

    def program(self) -> AbstractContextManager:
        """Anywhere."""
        return contextlib.nullcontext()

    def bounds(self, size: int) -> Iterator[tuple[int, int]]:
        """Of each replica here the first element, or row, of its share, and the end."""
        for k in range(self.first, self.first + len(self._replicas)):
            yield k * size, (k + 1) * size

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """What each replica has of a variable."""
        return copies_of(variable)

    def alone(self, index: int) -> AbstractContextManager:
        """Where writing the copy of a replica writes no other."""
        return at_work(self._replicas[index])

    def beside(self, weight: keras.Variable) -> AbstractContextManager:
        """The device of a weight, so that stages need not wait for each other."""
        return tf.device(weight._value.device)


class ShardedCopies(ShardedOptimizer):
    """Extends an optimizer that updates the copies of variables (`hybrid/optimizer.py`)."""

    @property
    def _holders(self) -> Holders:
        return HoldersOnMesh(self._replicas, self._workers_of_shares)

    def build(self, weights):
        """Makes the shares of the weights, or of their parts, and the slots of the shares."""
        left_out = getattr(self, "_exclude_from_weight_decay", set())
        for whole in weights:
            if self._var_key(whole) in left_out:
                left_out.update(map(self._var_key, parts_of([whole])))
        super().build(parts_of(weights))

    def apply(self, grads, trainable_variables=None):
        """Applies gradients of whole weights, or of their parts, the same on all workers."""
        if trainable_variables is None:
            trainable_variables = self._weights
        grads, parts = in_parts(list(grads), list(trainable_variables))
        super().apply(grads, parts)
        pairs = zip(parts, grads, strict=True)
        changed = {id(whole_of(part)): part for part, found in pairs if found is not None}
        for part in changed.values():
            whole = whole_of(part)
            if whole is not part and whole.constraint is not None:
                whole.assign(whole.constraint(whole))

    def finalize_variable_values(self, var_list):
        """Overwrites the weights with their averages, where there are some."""
        super().finalize_variable_values(parts_of(var_list))

    def _backend_apply_gradients(self, grads, trainable_variables):
        # By the norm of a weight: of all its parts.
        attach(self, _applied_to=[share._sharded for share in trainable_variables])
        super()._backend_apply_gradients(grads, trainable_variables)

    def _made_share(self, weight):
        with tf.device(weight._value.device):
            share = super()._made_share(weight)
        copy_to(self._replicas, [share])
        return share

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Makes a slot beside its share, with a copy in each replica."""
        with tf.device(reference_variable._value.device):
            slot = super().add_variable_from_reference(reference_variable, name, initializer)
        copy_to(self._replicas, [slot])
        return slot

    @contextlib.contextmanager
    def _in_replicas(self, updated, gradients=()) -> Iterator[Sequence[Replica]]:
        yield self._replicas  # Each updates what no other does.

    def _cut(self, gradient, share):
        """What the share of the replica at work has of a gradient."""
        shape = shape_shared_out(share._sharded.shape, self._num_shares)
        k, size = self._holders.first + replica_at_work().index, share.shape[0]
        return cut_share(gradient, shape, (k * size, (k + 1) * size))

    def _update_model_variables_moving_average(self, trainable_variables):
        # Keras's own, of the copies of the replica at work.
        super(ShardedOptimizer, self)._update_model_variables_moving_average(trainable_variables)


def shard_copies(optimizer: keras.Optimizer, workers: WorkerGroup | None) -> None:
    """Makes each replica update its share, in place.

    Args:
        optimizer: One that updates the copies of variables.
        workers: Those that have the replicas; None for one process.

    Raises:
        ValueError: If its update looks at more than one element at a time, or is not known; or if
            it wraps others, or has a schedule of the user's own.
    """
    if isinstance(optimizer, ShardedCopies):
        return
    if original_class(optimizer) in (
        keras.optimizers.LossScaleOptimizer,
        MultiOptimizer,
    ):
        raise PlacementError(
            "Under shard_optimizer=True a mesh takes an optimizer that wraps no others. Received: "
            f"{original_class(optimizer).__name__}. Take another, `data_parallel`, or leave "
            "shard_optimizer out."
        )
    if not updates_alike(optimizer):
        raise PlacementError(
            "Under shard_optimizer=True each replica of a mesh computes the learning rate. A "
            "number, or a schedule of Keras's, is required. Received: a "
            f"{type(optimizer._learning_rate).__name__}. Take one of these, or leave "
            "shard_optimizer out."
        )
    check_shardable(optimizer)
    extend(optimizer, ShardedCopies, _workers_of_shares=workers)
