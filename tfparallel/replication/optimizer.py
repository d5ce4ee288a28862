"""What Keras's optimizers need to run in a program, and to accumulate without reducing.

In a program a Keras optimizer is handed the global gradient, clips it, decays the weights, and
updates every replica's copy on its own device. Three things are missing:

* an optimizer that a user's step builds makes its variables outside the strategy
  (`ProgramOptimizer`);
* `LossScaleOptimizer` insists on a replica (`ScaledProgramOptimizer`);
* gradient accumulation would reduce at every step, where once an update is enough
  (`AccumulatingOptimizer`): each replica adds its own gradients to its own accumulators, and the
  sum over replicas is taken when the accumulated gradient is used.
"""

import keras
import tensorflow as tf
from tensorflow.python.distribute import values

from tfparallel.replication.extend import extend
from tfparallel.strategies import variables


class PartialSums(values.PerReplica):
    """A gradient that is not yet summed over the replicas, one term each.

    `extended.update` hands each replica its own term. Adding an accumulator, which is what Keras
    does with the last gradient before an update, sums all terms and all copies of it.
    """

    def __add__(self, accumulator):
        copies = variables.copies(accumulator)
        return tf.add_n([*self.values, *[tf.convert_to_tensor(copy) for copy in copies]])

    def __truediv__(self, divisor):
        return PartialSums([term / divisor for term in self.values])


class ProgramOptimizer:
    """Extends any optimizer: its variables are made under the strategy, whoever builds it."""

    def build(self, variables):
        """Creates the optimizer's variables for the trainable ones."""
        with tf.init_scope(), self._distribution_strategy.scope():
            super().build(variables)


class AccumulatingOptimizer(ProgramOptimizer):
    """Extends an optimizer with `gradient_accumulation_steps`: one reduction an update.

    An accumulator's value is the sum of its copies.
    """

    def apply(self, grads, trainable_variables=None):
        """Applies gradients; terms that the step left unsummed are accumulated as they are."""
        if trainable_variables is not None:
            grads = [
                self._partial(gradient, variable)
                for gradient, variable in zip(grads, trainable_variables, strict=True)
            ]
        return super().apply(grads, trainable_variables)

    def _partial(self, gradient, variable):
        if gradient is None:
            return None
        first = tf.convert_to_tensor(gradient)
        others = (self._pending_terms or {}).pop(id(variable), None)
        if others is None:
            others = [tf.zeros_like(first)] * (len(variables.copies(variable)) - 1)
        return PartialSums([first, *[tf.convert_to_tensor(term) for term in others]])

    def save_own_variables(self, store):
        """Saves the optimizer; an accumulator as the sum of its copies."""
        for accumulator in accumulators(self):
            copies = variables.copies(accumulator)
            copies[0].assign(tf.add_n([tf.convert_to_tensor(copy) for copy in copies]))
        hold_in_first_copy(self)
        super().save_own_variables(store)

    def load_own_variables(self, store):
        """Loads the optimizer; an accumulator's value goes into its first copy."""
        super().load_own_variables(store)
        hold_in_first_copy(self)


def accumulators(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns the accumulated gradients of an optimizer, or of the one that it wraps."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return [a for a in getattr(optimizer, "_accumulated_gradients", ()) if a is not None]


def hold_in_first_copy(optimizer: keras.Optimizer) -> None:
    """Clears all copies of the accumulators but the first, after a value went into each."""
    for accumulator in accumulators(optimizer):
        for other in variables.copies(accumulator)[1:]:
            other.assign(tf.zeros_like(other))


class ScaledProgramOptimizer(ProgramOptimizer):
    """Extends `keras.optimizers.LossScaleOptimizer`, which calls `merge_call` where it may not."""

    def _tf_apply(self, grads, trainable_variables=None):
        if tf.distribute.in_cross_replica_context():
            return self._common_apply(grads, trainable_variables=trainable_variables)
        return super()._tf_apply(grads, trainable_variables)


def prepare(optimizer: keras.Optimizer, strategy, pending_terms: dict | None = None) -> None:
    """Makes a Keras optimizer act under `strategy`, in place.

    Args:
        optimizer: Any Keras optimizer, unbuilt or built under the strategy's scope.
        strategy: The `tfparallel.MirroredStrategy`.
        pending_terms: Where the step leaves gradients unsummed, `{id(variable): [g_1, …]}`.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        extend(optimizer, ScaledProgramOptimizer)
    elif optimizer.gradient_accumulation_steps:
        extend(optimizer, AccumulatingOptimizer, _pending_terms=pending_terms)
    else:
        extend(optimizer, ProgramOptimizer)
    object.__setattr__(optimizer, "_distribution_strategy", strategy)
    for inner in _wrapped_by(optimizer):
        prepare(inner, strategy)


def _wrapped_by(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizers that do the work of a loss-scaling one, or of one that shares it out."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return []


def accumulates(optimizer) -> bool:
    """Whether the step may leave gradients unsummed for this optimizer.

    Not under loss scaling, which must see at each step whether the whole gradient is finite.
    """
    return isinstance(optimizer, AccumulatingOptimizer)
