"""Each replica keeps and updates its share of the optimizer: `shard_optimizer=True`.

    gradient of a weight, of all rows     g₀ g₁ │ g₂ g₃ │ g₄ ·        in N equal shares
                                            │       │       │
    slots (momentum, …), 1/N a replica     m₀ m₁   m₂ m₃   m₄ ·
                                            ▼       ▼       ▼
    updated share of the weight           θ₀ θ₁ │ θ₂ θ₃ │ θ₄ ·        joined, on each replica

To the optimizer the shares are its variables: of each weight one, a copy of which on a replica's
device holds the replica's own share. It is filled from the weight before an update, and the weight
from all shares behind it; so whoever else writes the weight need not know. Clipping is done
before, by the norms of whole gradients, which are sums over shares where nobody has the
whole, and constraints behind. Files hold whole slots.

`shares.py` says how a weight is cut. Of several workers each gets of the sum of the gradients what
its replicas update (`share_sums.py`).

It is stage 1 of ZeRO: Samyam Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, arXiv:1910.02054.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks import chief_only
from tfparallel.collectives import replica_sums
from tfparallel.collectives.barrier import wait_for_all
from tfparallel.collectives.between_workers import WorkerGroup
from tfparallel.extend import attach, extend, original_class
from tfparallel.newer_keras import MultiOptimizer, ScheduleFreeAdamW
from tfparallel.replication.pending_terms import PendingTerms
from tfparallel.replication.share_sums import clip_factors, share_sums
from tfparallel.replication.shares import (
    Holders,
    Shares,
    cut_out,
    cut_share,
    joined,
    mark,
    shape_shared_out,
)
from tfparallel.seams.tensorflow import PerReplica
from tfparallel.step import elementwise

__all__ = [
    "ShardedOptimizer",
    "check_shardable",
    "refuse_swaps",
    "shard",
    "sums_in_shares",
]


_SAVE_SECONDS = 120.0  # How long a save waits for the other workers.


class WithWholeFiles:
    """Extends an optimizer that holds shares, or others that do."""

    _loaded: list[np.ndarray] | None = None  # By this worker.

    @property
    def _holders(self) -> Holders:
        return Holders(self._distribution_strategy)

    @property
    def variables(self):
        """The variables of the optimizer; of a weight in parts, the first part's stand for all."""
        return [group[0] for group in self._grouped]

    @property
    def _grouped(self) -> list[list[keras.Variable]]:
        """The variables, those of the parts of a weight together."""
        groups: dict[Any, list[keras.Variable]] = {}
        for variable in super().variables:
            groups.setdefault(getattr(variable, "_slot_of", id(variable)), []).append(variable)
        return list(groups.values())

    def save_own_variables(self, store):
        """Saves the optimizer, with whole slots; every worker must call it.

        Raises:
            RuntimeError: If not all have within two minutes.
        """
        self._wait_for_all()
        in_shares = [group for group in self._grouped if hasattr(group[0], "_sharded")]
        wholes = iter(joined([v for group in in_shares for v in group], self._holders))
        for index, group in enumerate(self._grouped):
            if hasattr(group[0], "_sharded"):
                parts = [next(wholes).numpy() for _ in group]
                whole = group[0]._shown
                store[str(index)] = np.concatenate(parts, whole.axis) if parts[1:] else parts[0]
            else:
                store[str(index)] = tf.convert_to_tensor(group[0].value).numpy()

    def load_own_variables(self, store):
        """Loads the optimizer; each replica takes its share of whole slots.

        What one worker has loaded is all of it: it can be sent to the others by `loaded_values`.
        """
        groups = self._grouped
        if self._holders.workers is not None:
            attach(self, _loaded=[np.asarray(store[key]) for key in sorted(store.keys(), key=int)])
        if len(store.keys()) != len(groups):
            super().load_own_variables(store)  # Which says what is missing.
            return
        for index, group in enumerate(groups):
            value = np.asarray(store[str(index)])
            if not hasattr(group[0], "_sharded"):
                group[0].assign(value)
                continue
            whole = group[0]._shown
            if value.shape != tuple(whole.shape):
                raise ValueError(
                    f"'{group[0].path}' is of a weight of shape {tuple(whole.shape)}. Received: a "
                    f"value of shape {value.shape}. Is it the file of this model?"
                )
            parts = [value]
            if group[1:]:
                sizes = [slot._sharded.shape[whole.axis] for slot in group]
                parts = np.split(value, np.cumsum(sizes)[:-1], whole.axis)
            for slot, part in zip(group, parts, strict=True):
                self._share_out(slot, part)

    def loaded_values(self) -> list[np.ndarray] | None:
        """Returns what was loaded last, and forgets it; None if nothing was since."""
        loaded = self._loaded
        attach(self, _loaded=None)
        return loaded

    def _wait_for_all(self) -> None:
        workers = self._holders.workers
        if workers is None:
            return
        try:
            wait_for_all(workers, _SAVE_SECONDS)
        except RuntimeError as error:
            raise RuntimeError(
                "Under shard_optimizer=True each worker has a part of the optimizer, and all "
                f"workers must save it together. {error}"
            ) from error

    def _share_out(self, slot, value):
        """Gives each replica here its share of a slot."""
        holders = self._holders
        shape = shape_shared_out(value.shape, holders.number)
        of_copies = zip(holders.copies(slot), holders.bounds(slot.shape[0]), strict=True)
        for index, (copy, bounds) in enumerate(of_copies):
            with holders.alone(index):
                copy.assign(cut_out(tf.constant(value, copy.dtype), shape, *bounds))


class ShardedOptimizer(WithWholeFiles):
    """Extends an optimizer whose update treats each element by itself; behind `prepare`."""

    pending_terms: PendingTerms | None = None  # Of a step of several workers, unsummed.
    _share_of: dict[int, keras.Variable] = {}  # By the id of a weight.
    _weights: list[keras.Variable] = []

    @property
    def _num_shares(self) -> int:
        return self._holders.number

    def build(self, weights):
        """Makes the shares of the weights, and the slots of the shares."""
        if self.built:
            return
        weights = list(weights)
        written = [w.path for w in weights if getattr(w, "overwrite_with_gradient", False)]
        if written:
            raise ValueError(
                "Under shard_optimizer=True weights are updated by the optimizer. Received: "
                f"{written}, which take their gradient for their value. Leave shard_optimizer out."
            )
        with tf.init_scope(), self._holders.scope():
            shares = [self._made_share(weight) for weight in weights]
        by_id = {id(weight): share for weight, share in zip(weights, shares, strict=True)}
        attach(self, _share_of=by_id, _weights=weights)
        left_out = getattr(self, "_exclude_from_weight_decay", set())
        for weight, share in zip(weights, shares, strict=True):
            if self._var_key(weight) in left_out:
                left_out.add(self._var_key(share))
        with tf.init_scope(), self._holders.program():
            self._fill(weights)
        super().build(shares)
        if original_class(self) is ScheduleFreeAdamW:
            with tf.init_scope():
                for slot, share in zip(self._momentums, shares, strict=True):  # Begins as it.
                    holders = self._holders
                    pairs = zip(holders.copies(slot), holders.copies(share), strict=True)
                    for index, (own, part) in enumerate(pairs):
                        with holders.alone(index):
                            own.assign(part)

    def _made_share(self, weight):
        number, *rest = shape_shared_out(weight.shape, self._num_shares)
        shape = (-(-number // self._num_shares), *rest)
        share = keras.Variable("zeros", shape, weight.dtype, trainable=True, name=weight.name)
        share._path = weight.path  # Slots are named by it.
        mark(share, weight)
        return share

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Makes a slot; that of a share knows its weight."""
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        weight = getattr(reference_variable, "_sharded", None)
        if weight is not None:
            mark(slot, weight)
            attach(slot, _slot_of=(id(slot._shown), name))
        return slot

    def apply(self, grads, trainable_variables=None):
        """Applies gradients of whole weights, the same on all workers; or `pending_terms`."""
        grads = list(grads)
        if trainable_variables is None:
            trainable_variables = self._weights
        weights = list(trainable_variables)
        if not self.built:
            self.build(weights)
        shares = [self._share_of.get(id(weight), weight) for weight in weights]
        known = [(w, g) for w, g in zip(weights, grads, strict=True) if id(w) in self._share_of]
        changed = [w for w, g in known if g is not None]
        # A moving average is of all weights, also of those that others write.
        self._fill(self._weights if self.use_ema else changed)
        super().apply(grads, shares)
        self._join(self._weights if self.ema_overwrite_frequency else changed)
        for weight in changed:
            if weight.constraint is not None:
                weight.assign(weight.constraint(weight))

    def _backend_apply_gradients(self, grads, trainable_variables):
        if self.pending_terms:
            cut = self._summed_in_shares(grads, trainable_variables)
        else:
            pairs = zip(super()._clip_gradients(grads), trainable_variables, strict=True)
            cut = [self._cut(gradient, share) for gradient, share in pairs]
        super()._backend_apply_gradients(cut, trainable_variables)

    def _clip_gradients(self, grads):
        return grads  # Which is done: see above.

    def _summed_in_shares(self, grads, shares) -> list[Shares]:
        """Each replica's shares of gradients that no worker has the whole of, clipped."""
        workers, number = self._holders.workers, self._num_shares
        here = number // workers.num_workers
        pending, wholes = [], []
        for i, share in enumerate(shares):
            terms = self.pending_terms.pop(id(share._sharded), None)
            if terms is not None:
                shape = shape_shared_out(share._sharded.shape, number)
                pending.append(i)
                wholes.append([cut_out(t, shape, 0, number * share.shape[0]) for t in terms])
        self.pending_terms.clear()
        # What the program itself differentiated, a regularizer say, is whole on every worker.
        cut = [self._cut(gradient, share) for gradient, share in zip(grads, shares, strict=True)]
        sums = share_sums(wholes, self._distribution_strategy.all_reduce_ops, workers)
        sums = [
            total + tf.concat([tf.convert_to_tensor(part) for part in cut[i].values], 0)
            for i, total in zip(pending, sums, strict=True)
        ]
        others = [i for i in range(len(cut)) if i not in pending]
        if self.clipnorm or self.global_clipnorm:
            wholes_left = [grads[i] for i in others]
            of_sums, of_others = clip_factors(self, sums, wholes_left, workers)
            sums = [s * tf.cast(f, s.dtype) for s, f in zip(sums, of_sums, strict=True)]
            for i, factor in zip(others, of_others, strict=True):
                # By the norm of all gradients Keras makes dense ones of an embedding's.
                whole = grads[i] if self.clipnorm else tf.convert_to_tensor(grads[i])
                cut[i] = self._cut(_times(whole, factor), shares[i])
        elif self.clipvalue:
            sums = super()._clip_gradients(sums)
            for i in others:
                (clipped,) = super()._clip_gradients([grads[i]])
                cut[i] = self._cut(clipped, shares[i])
        for i, total in zip(pending, sums, strict=True):
            cut[i] = Shares(tf.split(total, here))
        return cut

    def _cut(self, gradient, share) -> Shares:
        """Each replica's share of a gradient, where it is needed."""
        found = replica_sums.on_each_device(gradient)
        copies = found.values if isinstance(found, PerReplica) else None
        shape = shape_shared_out(share._sharded.shape, self._num_shares)
        parts = []
        for k, bounds in enumerate(self._holders.bounds(share.shape[0])):
            if isinstance(gradient, tf.IndexedSlices):
                parts.append(cut_share(gradient, shape, bounds))
                continue
            # Of one tensor for all, the share is cut where the tensor is, and sent.
            whole = gradient if copies is None else copies[k]
            with tf.device(whole.device):
                parts.append(cut_share(whole, shape, bounds))
        return Shares(parts)

    def _fill(self, weights) -> None:
        """Gives each share what its replica's copy of the weight holds."""
        holders = self._holders
        for weight in weights:
            share = self._share_of[id(weight)]
            shape = shape_shared_out(weight.shape, self._num_shares)
            copies = holders.copies(share), holders.copies(weight)
            found = zip(*copies, holders.bounds(share.shape[0]), strict=True)
            for index, (own, whole, bounds) in enumerate(found):
                with holders.alone(index), tf.device(own.device):
                    own.assign(cut_out(tf.convert_to_tensor(whole), shape, *bounds))

    def _join(self, weights) -> None:
        """Gives every copy of the weights what all shares hold."""
        shares = [self._share_of[id(weight)] for weight in weights]
        wholes = joined(shares, self._holders)
        for weight, whole in zip(weights, wholes, strict=True):
            for index, copy in enumerate(self._holders.copies(weight)):
                with self._holders.alone(index), tf.device(copy.device):
                    copy.assign(whole)

    def _update_model_variables_moving_average(self, trainable_variables):
        # Keras's own reads the first replica's share for all.
        def on_each(average, share, momentum):
            momentum = tf.cast(momentum, average.dtype)
            average.assign(momentum * average + (1 - momentum) * share)

        is_later = tf.cast(tf.convert_to_tensor(self.iterations.value) != 0, tf.float64)
        pairs = zip(trainable_variables, self._model_variables_moving_average, strict=True)
        for share, average in pairs:
            self._distribution_strategy.extended.update(
                average.value,
                on_each,
                args=(share.value, is_later * self.ema_momentum),
                group=False,
            )

    def finalize_variable_values(self, var_list):
        """Overwrites the weights with their averages, where there are some."""
        if not self.use_ema:
            return
        weights = [weight for weight in var_list if id(weight) in self._share_of]
        with self._holders.program():
            self._fill(weights)
            super().finalize_variable_values([self._share_of[id(w)] for w in weights])
            self._join(weights)


def shard(optimizer: keras.Optimizer) -> None:
    """Makes each replica update its share, in place; of one that wraps others, them.

    Raises:
        ValueError: If the update looks at more than one element at a time, or is not known; or if
            the optimizer accumulates gradients.
    """
    if isinstance(optimizer, ShardedOptimizer | WithWholeFiles):
        return
    cls = original_class(optimizer)
    if cls in (keras.optimizers.LossScaleOptimizer, MultiOptimizer):
        extend(optimizer, WithWholeFiles)
        return
    check_shardable(optimizer)
    extend(optimizer, ShardedOptimizer, pending_terms=PendingTerms(takes_sparse=False))


def sums_in_shares(optimizer: keras.Optimizer, workers: WorkerGroup | None) -> bool:
    """Whether a step of Keras's own leaves gradients to the optimizer, which sums its shares.

    Not under loss scaling, which must see whether all of them are finite, nor what compression
    knows by the weight.
    """
    is_sharded = isinstance(optimizer, ShardedOptimizer)
    return is_sharded and workers is not None and workers.compression is None


def _times(gradient, factor: tf.Tensor):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient * tf.cast(factor, gradient.dtype)
    values = gradient.values * tf.cast(factor, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def refuse_swaps(callbacks) -> None:
    """Raises for a callback of a `fit` that swaps what the optimizer holds with the weights.

    Raises:
        ValueError: If there is one.
    """
    flat = chief_only.flatten(callbacks)
    if any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in flat):
        raise ValueError(
            "SwapEMAWeights swaps the weights with averages that, under shard_optimizer=True, "
            "each replica has a share of. An optimizer with whole averages is required. "
            "Received: SwapEMAWeights with shard_optimizer=True. Leave one of them out."
        )


def check_shardable(optimizer: keras.Optimizer) -> None:
    """Raises for an optimizer that cannot be held in shares.

    Raises:
        ValueError: As `shard`.
    """
    cls = original_class(optimizer)
    if not elementwise.is_elementwise(cls):
        raise ValueError(
            "shard_optimizer=True supports optimizers that update each element independently "
            f"({elementwise.NAMES}). Received: {cls.__name__}, which looks at whole weights, or is "
            "not known. Take one of these, or leave shard_optimizer out."
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "Under shard_optimizer=True gradients are accumulated by the step, and an update in "
            "each call of the optimizer is required. Received: gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}. Take "
            f"sync='accumulate:{optimizer.gradient_accumulation_steps}' in its place."
        )
