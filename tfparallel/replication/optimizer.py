"""What Keras's optimizers need to run in a program, and to accumulate without reducing.

In a program a Keras optimizer is handed the global gradient, clips it, decays the weights, and
updates every replica's copy on its own device. Two things are missing:

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
        terms = [tf.convert_to_tensor(term) for term in self.values]
        return tf.add_n(terms + [tf.convert_to_tensor(c) for c in variables.copies(accumulator)])

    def __truediv__(self, divisor):
        return PartialSums([term / divisor for term in self.values])


class AccumulatingOptimizer:
    """Extends an optimizer with `gradient_accumulation_steps`: one reduction an update."""

    def apply(self, grads, trainable_variables=None):
        """Applies gradients; those left unsummed by the step are accumulated as they are."""
        pending = self._pending_terms
        if pending and trainable_variables is not None:
            grads = [
                PartialSums([tf.convert_to_tensor(term) for term in (gradient, *pending[id(v)])])
                if gradient is not None and id(v) in pending
                else gradient
                for gradient, v in zip(grads, trainable_variables, strict=True)
            ]
            pending.clear()
        return super().apply(grads, trainable_variables)

    def save_own_variables(self, store):
        """Saves the optimizer; an accumulator as the sum of its copies."""
        for accumulator in self._accumulators():
            first, *others = variables.copies(accumulator)
            first.assign(tf.add_n([tf.convert_to_tensor(c) for c in (first, *others)]))
            for other in others:
                other.assign(tf.zeros_like(other))
        super().save_own_variables(store)

    def load_own_variables(self, store):
        """Loads the optimizer; an accumulator's sum goes into its first copy."""
        super().load_own_variables(store)
        for accumulator in self._accumulators():
            for other in variables.copies(accumulator)[1:]:
                other.assign(tf.zeros_like(other))

    def _accumulators(self):
        return [a for a in getattr(self, "_accumulated_gradients", ()) if a is not None]


class ScaledProgramOptimizer:
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
        prepare(optimizer.inner_optimizer, strategy)
    elif optimizer.gradient_accumulation_steps:
        extend(optimizer, AccumulatingOptimizer, _pending_terms=pending_terms)
    object.__setattr__(optimizer, "_distribution_strategy", strategy)


def accumulates(optimizer) -> bool:
    """Whether the step may leave gradients unsummed for this optimizer.

    Not under loss scaling, which must see at each step whether the whole gradient is finite.
    """
    return isinstance(optimizer, AccumulatingOptimizer)
