"""The variables of a mirrored strategy, as a single-device program sees them.

Relies on internals of `tf.distribute` (`values`, `values_util`, `distribute_utils`), because two
of their rules prevent a step that is written once, for the global batch, outside any replica:

* `DistributedVariable.handle` raises outside a replica, so `GradientTape.gradient(loss, v)` is
  impossible there. The copies of a mirrored variable are equal by definition; outside a replica,
  the handle is that of the first copy (`MirroredVariable`). The replicas of a mesh have such
  variables, too, with copies on separate devices and without a strategy.
* A variable that is summed on read, such as those of Keras metrics, refuses `assign_add` outside a
  replica, and `assign` writes a share of the value into each copy, which rounds, and costs a
  reduction at each read. While a program runs, the first copy holds the whole and the others
  hold zero (`MetricVariable`).

`tests/strategies/test_variables.py` fails once TensorFlow no longer raises.
"""

import functools
import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.compute_context import context
from tfparallel.seams.distribute import (
    DistributedValues,
    DistributedVariable,
    SyncOnReadVariable,
    create_mirrored_variable,
    replica_index,
)
from tfparallel.seams.distribute import MirroredVariable as TensorFlowsMirroredVariable
from tfparallel.seams.keras import set_storage, storage_of
from tfparallel.strategies import keras_trainer
from tfparallel.variables.sharded import ShardedVariable

_WRITING = (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update", "scatter_add", "scatter_div"),
    *("scatter_max", "scatter_min", "scatter_mul", "scatter_nd_add", "scatter_nd_max"),
    *("scatter_nd_min", "scatter_nd_sub", "scatter_nd_update", "scatter_sub", "scatter_update"),
    "_strided_slice_assign",  # Called by `variable[2:].assign`.
)


# By the id of the first copy's handle, which lives as long as the variable.
_BY_HANDLE: weakref.WeakValueDictionary[int, DistributedVariable] = weakref.WeakValueDictionary()


class MirroredVariable(TensorFlowsMirroredVariable):
    """A variable with an equal copy on each device."""

    @property
    def handle(self):
        """The resource of this replica's copy; outside a replica, of the first copy."""
        return self._get().handle

    @property
    def device(self):
        """The device of that copy."""
        return self._get().device

    def _get(self):
        if self._replica_at_work is not None:
            return self.values[self._replica_at_work]
        # In an update without a strategy, TensorFlow's replica index is the variable itself.
        is_in_its_replica = tf.distribute.has_strategy() and replica_index() is not None
        is_in_its_replica &= tf.distribute.get_strategy() is self._distribute_strategy
        return super()._get() if is_in_its_replica else self.values[0]

    @property
    def _replica_at_work(self) -> int | None:
        """The replica of a mesh that this thread works for, if it has a copy of this variable."""
        replica = context().replica
        is_here = replica is not None and _has_copies(self, replica.number, default_strategy())
        return replica.index if is_here else None

    __getitem__ = tf.Variable.__getitem__  # Its `variable[1:].assign` writes all copies.

    def _write(self, method: str, *args, **kwargs):
        """Writes the variable; outside any strategy, each of its copies.

        So an optimizer without a strategy can train a model that shares layers with this one. A
        replica of a custom loop must not write values that depend only on its own rows.
        """
        if self._replica_at_work is not None:
            return getattr(self._get(), method)(*args, **kwargs)
        strategy = self._distribute_strategy
        is_in_its_replica = replica_index() is not None
        is_in_its_replica &= strategy is tf.distribute.get_strategy()
        if is_in_its_replica and tf.distribute.has_strategy() and not self.trainable:
            if strategy.num_replicas > 1 and not strategy.program_is_running:
                keras_trainer.refuse_own_moments()
        is_known = is_in_its_replica or method in vars(DistributedVariable)  # By TensorFlow.
        is_whole = not any(isinstance(v, DistributedValues) for v in (*args, *kwargs.values()))
        if is_known and (tf.distribute.has_strategy() or not is_whole):
            return getattr(super(), method)(*args, **kwargs)
        written = [getattr(copy, method)(*args, **kwargs) for copy in self.values]
        return written[0]

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())


def _writing(method: str) -> Callable:
    def write(self, *args, **kwargs):
        return self._write(method, *args, **kwargs)

    write.__name__ = method
    return write


for _method in _WRITING:
    setattr(MirroredVariable, _method, _writing(_method))


class MetricVariable(SyncOnReadVariable):
    """A variable whose value is the sum of its copies.

    Replicas write their own copies, as in TensorFlow. A program writes the first copy and,
    when it assigns, clears the others, so the sum is the assigned value. Values written by a
    program are whole on every worker; those written by replicas are summed over the workers, too.
    """

    _is_whole = False  # Whether a program wrote it last, not replicas.

    def _is_sum(self) -> bool:
        return self.aggregation == tf.VariableAggregation.SUM

    def _is_written_whole(self) -> bool:
        """Whether the current write is whole, not a replica's part; records who writes.

        Writes outside of both (Keras resets metrics before an epoch) do not change the record:
        steps are traced once, and only the trace shows whether they are programs.
        """
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self._distribute_strategy:
            self._is_whole = False
            return False
        if self._distribute_strategy.program_is_running:
            self._is_whole = True
        return self._is_sum()

    def _own_part(self, value):
        """This worker's share of the whole: all of it, or zeros if the first worker has it."""
        workers = self._distribute_strategy.workers
        is_own = self._is_whole or workers is None or workers.worker_index == 0
        return value if is_own else tf.zeros_like(value)

    def _get_cross_replica(self):
        if self._is_sum() and self._distribute_strategy.program_is_running:
            return self.values[0]
        if self._is_sum() and self._is_whole:
            return tf.add_n([tf.convert_to_tensor(copy) for copy in self.values])
        return super()._get_cross_replica()

    def value(self):
        in_program = self._distribute_strategy.program_is_running and replica_index() is None
        if in_program and self._is_sum():
            return self.values[0].value()
        return super().value()

    def assign(self, value, *args, **kwargs):
        if not self._is_written_whole():
            return super().assign(value, *args, **kwargs)
        if not self._distribute_strategy.program_is_running:
            for copy in self.values[1:]:
                copy.assign(tf.zeros_like(copy))
        return self.values[0].assign(self._own_part(value), *args, **kwargs)

    def assign_add(self, value, *args, **kwargs):
        if not self._is_written_whole():
            return super().assign_add(value, *args, **kwargs)
        return self.values[0].assign_add(self._own_part(value), *args, **kwargs)

    def assign_sub(self, value, *args, **kwargs):
        if not self._is_written_whole():
            return super().assign_sub(value, *args, **kwargs)
        return self.values[0].assign_sub(self._own_part(value), *args, **kwargs)


def create(strategy, create_copies, **kwargs):
    """Creates a distributed variable from the copies of `create_copies`.

    Args:
        strategy: The strategy that the variable belongs to.
        create_copies: Takes `kwargs`, and returns one `tf.Variable` for each device.
        **kwargs: The arguments of `tf.Variable`.

    Returns:
        A `MirroredVariable` or a `MetricVariable`, by the requested `synchronization`.
    """
    replacements = {
        TensorFlowsMirroredVariable: MirroredVariable,
        SyncOnReadVariable: MetricVariable,
    }
    variable = create_mirrored_variable(strategy, create_copies, replacements, **kwargs)
    if isinstance(variable, MetricVariable) and variable._is_sum():
        with tf.init_scope():  # The initial value counts once.
            for copy in variable.values[1:]:
                copy.assign(tf.zeros(copy.shape, copy.dtype))
    _BY_HANDLE[id(variable.values[0].handle)] = variable
    return variable


@functools.cache
def default_strategy() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, even within the scope of another."""
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


def mirror(variable: keras.Variable, devices: Sequence[str]) -> None:
    """Copies a Keras variable to other devices, with its value.

    A variable that already has copies, or has no memory of its own, stays unchanged.
    """
    first = storage_of(variable)
    if not isinstance(first, tf.Variable) or is_distributed(first) or not devices:
        return
    copies = [first]
    # Keeps the name, by which an optimizer may exclude it from weight decay.
    kwargs = {
        "trainable": first.trainable,
        "dtype": first.dtype,
        "name": first.name.partition(":")[0],
    }
    with tf.init_scope():
        for device in devices:
            with tf.device(device):
                copies.append(tf.Variable(first, **kwargs))
        set_storage(variable, create(default_strategy(), lambda **_: copies))


def copies(variable) -> tuple:
    """Returns the copies, or shares, of a Keras or TensorFlow variable, one for each replica.

    A variable without copies is its own only copy.
    """
    if isinstance(variable, ShardedVariable):
        return tuple(variable.pieces)
    variable = getattr(variable, "_value", variable)
    if isinstance(variable, DistributedVariable):
        return tuple(variable.values)
    return (variable,)


def copy_of(
    handle: tf.Tensor, index: int, number: int, strategy: tf.distribute.Strategy | None = None
) -> tf.Tensor:
    """The handle, in another replica, of the variable with this first handle.

    Args:
        handle: The handle of any variable.
        index: The index of the replica.
        number: The number of replicas.
        strategy: The strategy of the replicas; None for those of a mesh.

    Returns:
        The handle of the replica's copy; the same handle, if not each replica has a copy.
    """
    variable = _BY_HANDLE.get(id(handle))
    if variable is None or not _has_copies(variable, number, strategy or default_strategy()):
        return handle
    return variable.values[index].handle


def _has_copies(variable: DistributedVariable, number: int, strategy) -> bool:
    """Whether a variable has a copy in each of `number` replicas of a strategy."""
    return variable.distribute_strategy is strategy and len(variable.values) == number


def is_distributed(variable) -> bool:
    """Whether a Keras or TensorFlow variable has copies on several devices."""
    return isinstance(getattr(variable, "_value", variable), DistributedVariable)
