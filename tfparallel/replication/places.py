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

__all__ = ["ReplicaPlaces"]


class ReplicaPlaces(Places):
    """The devices of a strategy, each with a copy of every variable that was made under it.

    Args:
        strategy: A `tfparallel.MirroredStrategy`, of one worker or of several.
        share_out: Called before an optimizer makes what it holds of weights: has the places share
            them out, where they are to.
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
        """The workers of the job, unless the strategy is apart from them."""
        return self.strategy.workers

    @property
    def all_reduce_ops(self):
        """The algorithm that sums over the devices here."""
        return self.strategy.all_reduce_ops

    def before_build(self, weights: Sequence[keras.Variable]) -> None:
        """Has weights shared out, if they are to be; raises for those of another strategy."""
        known = [weight for weight in weights if isinstance(weight, keras.Variable)]
        check_updated(known, self.strategy, keras_trainer.calling_model())
        if self._share_out is not None:
            self._share_out()

    def hold(self, slots: Sequence[keras.Variable]) -> bool:
        """Whether the strategy made slots."""
        return all(getattr(v.value, "distribute_strategy", None) is self.strategy for v in slots)

    @contextlib.contextmanager
    def make(self) -> Iterator[None]:
        """Outside of a step that is traced, on all devices."""
        with tf.init_scope(), self.strategy.scope_of_variables():
            yield

    def copy(self, found: Iterable[keras.Variable]) -> None:
        """Gives those a copy on each device that were made outside of the scope."""
        for variable in found:
            held = getattr(variable, "_value", None)
            if not isinstance(held, tf.Variable) or variables.is_distributed(held):
                continue
            with self.make():
                made = tf.Variable(
                    held,
                    trainable=held.trainable,
                    dtype=held.dtype,
                    name=held.name.partition(":")[0],
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )
                set_storage(variable, made)

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """What each device has of a variable."""
        return variables.copies(variable)

    def all(self) -> AbstractContextManager:
        """The program of the strategy."""
        if self.strategy.program_is_running and tf.distribute.in_cross_replica_context():
            return contextlib.nullcontext()
        return self.strategy.program()

    @contextlib.contextmanager
    def at(self, index: int) -> Iterator[None]:
        """On one device, whose copies are then read and written."""
        with tf.device(self.strategy.devices[index]), updating_replica(index):
            yield

    def each(self, update: Callable[[int, Any], None], given: Sequence[Any]) -> None:
        """Makes an update at each place; while a graph is traced, it is traced once."""
        if tf.executing_eagerly() or len(given) < len(self):
            super().each(update, given)
            return
        with self.at(0):
            ReplicaTrace(self.strategy).update(lambda own: update(0, own), given)

    def gradient(self, gradient: Any, unit: keras.Variable, index: int) -> Any:
        """A gradient on one device: what an all-reduce has left there, or what is sent there."""
        found = reducer.on_each_device(gradient)
        if isinstance(found, PerReplica):
            return found.values[index]
        if index == 0 or not isinstance(gradient, tf.Tensor):
            return gradient
        return tf.identity(gradient)

    def beside(self, variable: keras.Variable) -> AbstractContextManager:
        """Anywhere: a strategy knows where slots belong."""
        return contextlib.nullcontext()

    def updating(self, gradient: Any, held: tf.Variable) -> AbstractContextManager:
        """On the device at hand: gradients of all weights come at once, in no order."""
        return contextlib.nullcontext()
