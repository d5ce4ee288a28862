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

from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.collectives import replica_sums
from tfparallel.extend import extend
from tfparallel.replication.checks import check_updated
from tfparallel.replication.pending_terms import PendingTerms
from tfparallel.seams.tensorflow import PerReplica
from tfparallel.step.built_optimizer import prepare_built, wrapped_by
from tfparallel.strategies import keras_trainer, variables
from tfparallel.strategies.program import ProgramStrategy


class PartialSums(PerReplica):
    """A gradient that is not yet summed over the replicas, one term each.

    `extended.update` hands each replica its own term. Adding an accumulator, which is what Keras
    does with the last gradient before an update, sums all terms and all copies of it, over the
    workers too: with the first gradient's sum come those of all others, in one collective.
    """

    update: "_Update | None" = None

    def __add__(self, accumulator):
        return self.update.total(self)

    def __truediv__(self, divisor):
        quotient = PartialSums([term / divisor for term in self.values])
        quotient.update = self.update
        return quotient


class _Update:
    """The gradients of one call of an optimizer, with their accumulators.

    Args:
        partials: One `PartialSums` or None for each variable.
        accumulators: The Keras variables that accumulate them.
        weights: What they are the gradients of.
        strategy: The strategy that the optimizer acts under.
    """

    def __init__(self, partials, accumulators, weights, strategy):
        self._workers = strategy.workers
        self._strategy = strategy
        found = zip(partials, accumulators, weights, strict=True)
        found = [each for each in found if each[0] is not None]
        self._pairs = [(partial, accumulator) for partial, accumulator, _ in found]
        self._weights = [weight for *_, weight in found]
        self._totals: dict = {}
        for partial, _ in self._pairs:
            partial.update = self

    def total(self, partial: PartialSums) -> tf.Tensor:
        """Returns Σ over replicas and workers of the terms and the accumulator's copies."""
        # Keras adds in one branch of a `tf.cond`, a graph of its own.
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph not in self._totals:
            sums = self._sums()
            if self._workers is not None:
                sums = self._workers.all_reduce_gradients(sums, self._weights)
            self._totals[graph] = sums
        index = next(i for i, (pair, _) in enumerate(self._pairs) if pair is partial)
        return self._totals[graph][index]

    def _sums(self):
        """Σ over the replicas here."""
        copies = [
            [tf.convert_to_tensor(copy) for copy in variables.copies(accumulator)]
            for _, accumulator in self._pairs
        ]
        terms = [list(partial.values) for partial, _ in self._pairs]
        ops = self._strategy.all_reduce_ops
        if ops is None:
            return [tf.add_n([*own, *held]) for own, held in zip(terms, copies, strict=True)]
        for own, held in zip(terms, copies, strict=True):
            for rank, device in enumerate(self._strategy.devices):
                with tf.device(device):
                    own[rank] += held[rank]
        return replica_sums.sums(ops, terms)


class ProgramOptimizer:
    """Extends any optimizer: its variables are made under the strategy, whoever builds it."""

    def _clip_gradients(self, grads):
        """Clips; gradients that every device has, on every device, instead of sending them."""
        return replica_sums.map_copies(super()._clip_gradients, grads)

    def build(self, variables):
        """Creates the optimizer's variables for the trainable ones."""
        strategy = self._distribution_strategy
        if isinstance(strategy, ProgramStrategy):
            held = [variable for variable in variables if isinstance(variable, keras.Variable)]
            check_updated(held, strategy, keras_trainer.calling_model())
        with tf.init_scope(), strategy.scope():
            super().build(variables)


class AccumulatingOptimizer(ProgramOptimizer):
    """Extends an optimizer with `gradient_accumulation_steps`: one reduction an update.

    An accumulator's value is the sum of its copies.

    Attributes:
        pending_terms: Where a step leaves gradients unsummed until it calls `apply`.
    """

    pending_terms: PendingTerms

    def apply(self, grads, trainable_variables=None):
        """Applies gradients; terms that the step left unsummed are accumulated as they are."""
        if trainable_variables is not None:
            grads = [
                self._partial(gradient, variable)
                for gradient, variable in zip(grads, trainable_variables, strict=True)
            ]
            if not self.built:
                self.build(trainable_variables)
            own = [
                self._accumulated_gradients[self._get_variable_index(variable)]
                for variable in trainable_variables
            ]
            _Update(grads, own, trainable_variables, self._distribution_strategy)
        return super().apply(grads, trainable_variables)

    def _partial(self, gradient, variable):
        if gradient is None:
            return None
        # What the program itself differentiated, a regularizer say, is whole on every worker.
        whole = tf.convert_to_tensor(gradient)
        num_copies = len(variables.copies(variable))
        terms = self.pending_terms.pop(id(variable), [tf.zeros_like(whole)] * num_copies)
        terms = [tf.convert_to_tensor(term) for term in terms]
        if _is_first_worker(self._distribution_strategy):
            terms[0] += whole
        return PartialSums(terms)

    def save_own_variables(self, store):
        """Saves the optimizer; an accumulator as the sum of its copies, on all workers."""
        found = accumulators(self)
        sums = [tf.add_n([*map(tf.convert_to_tensor, variables.copies(a))]) for a in found]
        workers = self._distribution_strategy.workers
        if workers is not None:
            sums = workers.all_reduce(sums)
        for accumulator, total in zip(found, sums, strict=True):
            variables.copies(accumulator)[0].assign(total)
        super().save_own_variables(store)
        hold_in_first_copy(self)

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
    is_first_worker = _is_first_worker(optimizer._distribution_strategy)
    for accumulator in accumulators(optimizer):
        for other in variables.copies(accumulator)[1 if is_first_worker else 0 :]:
            other.assign(tf.zeros_like(other))


def _is_first_worker(strategy) -> bool:
    workers = getattr(strategy, "workers", None)  # One device has TensorFlow's own strategy.
    return workers is None or workers.worker_index == 0


class ScaledProgramOptimizer(ProgramOptimizer):
    """Extends `keras.optimizers.LossScaleOptimizer`, which calls `merge_call` where it may not."""

    def _tf_apply(self, grads, trainable_variables=None):
        if tf.distribute.in_cross_replica_context():
            return self._common_apply(grads, trainable_variables=trainable_variables)
        return super()._tf_apply(grads, trainable_variables)


def prepare(
    optimizer: keras.Optimizer,
    strategy,
    shard: Callable[[keras.Optimizer], None] | None = None,
) -> None:
    """Makes a Keras optimizer act under `strategy`, in place.

    Args:
        optimizer: Any Keras optimizer. The slots of one that was built outside the strategy are
            made again, with their values.
        strategy: The `tfparallel.MirroredStrategy`.
        shard: What makes each replica update its share of the weights; None for whole updates.
    """
    if not _has_slots_elsewhere(optimizer, strategy):
        _extend(optimizer, strategy, shard)
        return
    with tf.init_scope():
        prepare_built(optimizer, lambda: _extend(optimizer, strategy, shard))
        hold_in_first_copy(optimizer)


def _has_slots_elsewhere(optimizer, strategy) -> bool:
    """Whether an optimizer has made slots that the strategy does not hold."""
    apart = {id(optimizer._iterations), id(optimizer._learning_rate)}
    return any(
        getattr(variable.value, "distribute_strategy", None) is not strategy
        for variable in optimizer._variables
        if optimizer.built and id(variable) not in apart
    ) or any(_has_slots_elsewhere(inner, strategy) for inner in wrapped_by(optimizer))


def _extend(optimizer, strategy, shard) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        extend(optimizer, ScaledProgramOptimizer)
    elif optimizer.gradient_accumulation_steps:
        if not isinstance(optimizer, AccumulatingOptimizer):
            pending = PendingTerms(takes_sparse=True)
            extend(optimizer, AccumulatingOptimizer, pending_terms=pending)
    else:
        extend(optimizer, ProgramOptimizer)
    if shard is not None:
        shard(optimizer)
    object.__setattr__(optimizer, "_distribution_strategy", strategy)
    for inner in wrapped_by(optimizer):
        _extend(inner, strategy, shard)


def accumulates(optimizer) -> bool:
    """Whether the step may leave gradients unsummed for this optimizer.

    Not under loss scaling, which must see at each step whether the whole gradient is finite.
    """
    return isinstance(optimizer, AccumulatingOptimizer)
