"""The variables of a mirrored strategy, as a single-device program sees them.

Rests on internals of `tf.distribute` (`values`, `values_util`, `distribute_utils`), because two
of their rules stand in the way of a step that is written once, for the global batch, outside
any replica:

* `DistributedVariable.handle` raises outside a replica, so `GradientTape.gradient(loss, v)` is
  impossible there. A mirrored variable's copies are equal by definition; outside a replica the
  handle is the first copy's (`MirroredVariable`).
* A variable that is summed on read, as every Keras metric's is, refuses `assign_add` outside a
  replica, and `assign` writes a share of the value into each copy, which rounds and costs a
  reduction at each read. While a program runs, the first copy holds the whole and the others
  hold zero (`MetricVariable`).

`tests/strategies/test_variables.py` fails on the day that TensorFlow no longer raises.
"""

import tensorflow as tf

from tfparallel.seams.tensorflow import (
    DistributedValues,
    DistributedVariable,
    SyncOnReadVariable,
    create_mirrored_variable,
    replica_index,
)
from tfparallel.seams.tensorflow import MirroredVariable as TensorFlowsMirroredVariable
from tfparallel.strategies import keras_trainer


def _outside_replicas() -> bool:
    return replica_index() is None


class MirroredVariable(TensorFlowsMirroredVariable):
    """A variable with an equal copy on each device."""

    @property
    def handle(self):
        """The resource of this replica's copy; outside a replica, of the first copy."""
        return self._get().handle

    def _get(self):
        # An update under no strategy has the variable itself for TensorFlow's replica index.
        is_outside = _outside_replicas() or not tf.distribute.has_strategy()
        return self._primary if is_outside else super()._get()

    def assign(self, value, *args, **kwargs):
        return self._write("assign", value, *args, **kwargs)

    def assign_add(self, value, *args, **kwargs):
        return self._write("assign_add", value, *args, **kwargs)

    def assign_sub(self, value, *args, **kwargs):
        return self._write("assign_sub", value, *args, **kwargs)

    def _write(self, method: str, value, *args, **kwargs):
        """Writes the variable; outside any strategy, each of its copies.

        So an optimizer that knows of no strategy can train a model that reads this one's layers.
        What a replica of a custom loop writes must not be of its own rows alone.
        """
        strategy = self._distribute_strategy
        if not (_outside_replicas() or strategy.program_is_running or self.trainable):
            if strategy.num_replicas > 1:
                keras_trainer.refuse_own_moments()
        if tf.distribute.has_strategy() or isinstance(value, DistributedValues):
            return getattr(super(), method)(value, *args, **kwargs)
        written = [getattr(copy, method)(value, *args, **kwargs) for copy in self._values]
        return written[0]

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())


class MetricVariable(SyncOnReadVariable):
    """A variable whose value is the sum of its copies.

    Replicas write their own copies, as in TensorFlow. A program writes the first copy and,
    when it assigns, clears the others, so that the sum is what was assigned. What a program wrote
    is whole on every worker; what replicas wrote is summed over the workers, too.
    """

    _is_whole = False  # Whether it was a program that wrote it last, or replicas.

    def _is_sum(self) -> bool:
        return self._aggregation == tf.VariableAggregation.SUM

    def _is_written_whole(self) -> bool:
        """Whether what is written now is the whole, not a replica's part; remembers who writes.

        What is written outside both (Keras resets metrics before an epoch) changes nothing about
        that: steps are traced once, and say only then whether they are programs.
        """
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self._distribute_strategy:
            self._is_whole = False
            return False
        if self._distribute_strategy.program_is_running:
            self._is_whole = True
        return self._is_sum()

    def _own_part(self, value):
        """This worker's share of the whole: all of it where each holds it, else the first's."""
        workers = self._distribute_strategy.workers
        is_own = self._is_whole or workers is None or workers.worker_index == 0
        return value if is_own else tf.zeros_like(value)

    def _get_cross_replica(self):
        if self._is_sum() and self._distribute_strategy.program_is_running:
            return self._primary
        if self._is_sum() and self._is_whole:
            return tf.add_n([tf.convert_to_tensor(copy) for copy in self._values])
        return super()._get_cross_replica()

    def value(self):
        in_program = self._distribute_strategy.program_is_running and _outside_replicas()
        if in_program and self._is_sum():
            return self._primary.value()
        return super().value()

    def assign(self, value, *args, **kwargs):
        if not self._is_written_whole():
            return super().assign(value, *args, **kwargs)
        if not self._distribute_strategy.program_is_running:
            for copy in self._values[1:]:
                copy.assign(tf.zeros_like(copy))
        return self._primary.assign(self._own_part(value), *args, **kwargs)

    def assign_add(self, value, *args, **kwargs):
        if not self._is_written_whole():
            return super().assign_add(value, *args, **kwargs)
        return self._primary.assign_add(self._own_part(value), *args, **kwargs)

    def assign_sub(self, value, *args, **kwargs):
        if not self._is_written_whole():
            return super().assign_sub(value, *args, **kwargs)
        return self._primary.assign_sub(self._own_part(value), *args, **kwargs)


def create(strategy, create_copies, **kwargs):
    """Makes the distributed variable that `create_copies` gives the copies of.

    Args:
        strategy: The strategy that the variable belongs to.
        create_copies: Function of `kwargs` that returns one `tf.Variable` for each device.
        **kwargs: The arguments of `tf.Variable`.

    Returns:
        A `MirroredVariable` or a `MetricVariable`, by the `synchronization` asked for.
    """
    replacements = {
        TensorFlowsMirroredVariable: MirroredVariable,
        SyncOnReadVariable: MetricVariable,
    }
    return create_mirrored_variable(strategy, create_copies, replacements, **kwargs)


def copies(variable) -> tuple:
    """Returns the copies of a Keras or TensorFlow variable, one for each replica.

    A variable that exists once is its own only copy.
    """
    variable = getattr(variable, "_value", variable)
    if isinstance(variable, DistributedVariable):
        return tuple(variable.values)
    return (variable,)


def is_distributed(variable) -> bool:
    """Whether a Keras or TensorFlow variable was made under a strategy."""
    return isinstance(getattr(variable, "_value", variable), DistributedVariable)
