"""The places of an optimizer under a strategy: its devices."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives import reducer
from tfparallel.replication.refusals import check_updated
from tfparallel.seams.distribute import PerReplica, updating_replica
from tfparallel.seams.keras import set_storage
from tfparallel.strategies import keras_trainer, variables
from tfparallel.strategies.replica_trace import ReplicaTrace
from tfparallel.update.places import Places


class ReplicaPlaces(Places):
    """The devices of a strategy, each with a copy of every variable created under it.

    Args:
        strategy: A `tfparallel.MirroredStrategy`, of one worker or of several.
        share_out: Called before an optimizer creates its slots, to shard weights over the places.
    """

    sums_late = True

    def __init__(self, strategy, share_out: Callable[[], None] | None = None):
        self.strategy, self._share_out = strategy, share_out

    @property
    def _key(self) -> Any:
        return id(self.strategy)

    def __len__(self) -> int:
        return len(self.strategy.devices)

    @property
    def workers(self):
        """The workers of the job; None while the strategy runs apart from them."""
        return self.strategy.workers

    @property
    def all_reduce_ops(self):
        """The algorithm that sums over the local devices."""
        return self.strategy.all_reduce_ops

    def before_build(self, weights: Sequence[keras.Variable]) -> None:
        """Shards weights if required; raises for weights of another strategy."""
        keras_variables = [weight for weight in weights if isinstance(weight, keras.Variable)]
        check_updated(keras_variables, self.strategy, keras_trainer.calling_model())
        if self._share_out is not None:
            self._share_out()

    def hold(self, slots: Sequence[keras.Variable]) -> bool:
        """Whether slots belong to the strategy."""
        return all(getattr(v.value, "distribute_strategy", None) is self.strategy for v in slots)

    @contextlib.contextmanager
    def make(self) -> Iterator[None]:
        """Creates variables on all devices, outside of the step that is being traced."""
        with tf.init_scope(), self.strategy.scope_of_variables():
            yield

    def copy(self, created: Iterable[keras.Variable]) -> None:
        """Copies variables that were created outside of the scope to each device."""
        for variable in created:
            storage = getattr(variable, "_value", None)
            if not isinstance(storage, tf.Variable) or variables.is_distributed(storage):
                continue
            with self.make():
                copies = tf.Variable(
                    storage,
                    trainable=storage.trainable,
                    dtype=storage.dtype,
                    name=storage.name.partition(":")[0],
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )
                set_storage(variable, copies)

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """The copies of a variable, one per device."""
        return variables.copies(variable)

    def all(self) -> AbstractContextManager:
        """The program of the strategy."""
        if self.strategy.program_is_running and tf.distribute.in_cross_replica_context():
            return contextlib.nullcontext()
        return self.strategy.program()

    @contextlib.contextmanager
    def at(self, index: int) -> Iterator[None]:
        """Runs on one device, and reads and writes its copies."""
        with tf.device(self.strategy.devices[index]), updating_replica(index):
            yield

    def each(self, update: Callable[[int, Any], None], arguments: Sequence[Any]) -> None:
        """Runs an update at each place; in a graph, it is traced once and replayed."""
        if tf.executing_eagerly() or len(arguments) < len(self):
            super().each(update, arguments)
            return
        with self.at(0):
            ReplicaTrace(self.strategy).update(lambda argument: update(0, argument), arguments)

    def gradient(self, gradient: Any, unit: keras.Variable, index: int) -> Any:
        """A gradient on one device: the local result of an all-reduce, or a copy sent there."""
        local_gradient = reducer.on_each_device(gradient)
        if isinstance(local_gradient, PerReplica):
            return local_gradient.values[index]
        if index == 0 or not isinstance(gradient, tf.Tensor):
            return gradient
        return tf.identity(gradient)

    def beside(self, variable: keras.Variable) -> AbstractContextManager:
        """A null context: the strategy places slots itself."""
        return contextlib.nullcontext()

    def updating(self, gradient: Any, variable: tf.Variable) -> AbstractContextManager:
        """A null context: the gradients of all weights arrive at once, in no order."""
        return contextlib.nullcontext()
