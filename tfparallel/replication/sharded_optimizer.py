"""Each replica keeps and updates its share of the optimizer: `shard_optimizer=True`.

    gradient of a weight, of all rows     g₀ g₁ │ g₂ g₃ │ g₄ ·        in N equal shares
                                            │       │       │
    slots (momentum, …), 1/N a replica     m₀ m₁   m₂ m₃   m₄ ·
                                            ▼       ▼       ▼
    updated share of the weight           θ₀ θ₁ │ θ₂ θ₃ │ θ₄ ·        joined, on each replica

To the optimizer the shares are its variables: of each weight one, a copy of which on a replica's
device holds the replica's own share. It is filled from the weight before an update, and the weight
from all shares behind it; so whoever else writes the weight need not know. Clipping is done
before, of whole gradients, and constraints behind. Files hold whole slots.

A matrix is shared out by rows, so that a sparse gradient, of an embedding's rows, stays sparse:
Keras's optimizers treat a row that a batch reads twice as two. Everything else is flat.

It is stage 1 of ZeRO: Samyam Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, arXiv:1910.02054.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks import chief_only
from tfparallel.collectives import replica_sums
from tfparallel.extend import attach, extend, original_class
from tfparallel.seams.tensorflow import PerReplica
from tfparallel.step import elementwise
from tfparallel.strategies import variables

__all__ = [
    "Holders",
    "ShardedOptimizer",
    "check_shardable",
    "cut_share",
    "refuse_swaps",
    "shape_shared_out",
    "shard",
]


class Shares(PerReplica):
    """What each replica here has of a gradient."""


class Holders:
    """The replicas that hold shares: those of a strategy.

    Args:
        strategy: What holds their variables.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self.number = strategy.num_replicas
        self.workers = strategy.workers

    def scope(self) -> AbstractContextManager:
        """Where shares are made."""
        return self._strategy.scope()

    def program(self) -> AbstractContextManager:
        """Where variables are read and written outside of a step."""
        return self._strategy.program()

    def bounds(self, size: int) -> Iterator[tuple[int, int]]:
        """Of each replica here, the first element, or row, of its share, and the end.

        Args:
            size: Of a share.
        """
        first = self._strategy.first_replica
        for k in range(first, first + len(self._strategy.devices)):
            yield k * size, (k + 1) * size

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """What each replica here has of a variable."""
        return variables.copies(variable)

    def alone(self, index: int) -> AbstractContextManager:
        """Where writing the copy of a replica, by its index here, writes no other."""
        return contextlib.nullcontext()

    def beside(self, weight: keras.Variable) -> AbstractContextManager:
        """Where the shares of a weight are joined."""
        return contextlib.nullcontext()


class Shared:
    """Extends a variable that has a share of a weight, or of a slot, in each replica."""

    def _serialize_to_tensors(self):
        raise ValueError(
            "`tf.train.Checkpoint` would write one replica's share. Whole slots are required. "
            f"Received: '{self.path}', under shard_optimizer=True. Take `tfparallel.callbacks."
            "Checkpoint`, or `model.save`, which write all of it."
        )


def _mark(variable: keras.Variable, weight: keras.Variable) -> None:
    """Has a share, or a slot of it, know the weight, and what the weight may be a part of."""
    extend(variable, Shared, _sharded=weight, _shown=getattr(weight, "_whole", weight))


class WithWholeFiles:
    """Extends an optimizer that holds shares, or others that do."""

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
        """Saves the optimizer, with whole slots; every worker must call it."""
        in_shares = [group for group in self._grouped if hasattr(group[0], "_sharded")]
        wholes = iter(_wholes([v for group in in_shares for v in group], self._holders))
        for index, group in enumerate(self._grouped):
            if hasattr(group[0], "_sharded"):
                parts = [next(wholes).numpy() for _ in group]
                whole = group[0]._shown
                store[str(index)] = np.concatenate(parts, whole.axis) if parts[1:] else parts[0]
            else:
                store[str(index)] = tf.convert_to_tensor(group[0].value).numpy()

    def load_own_variables(self, store):
        """Loads the optimizer; each replica takes its share of whole slots."""
        groups = self._grouped
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

    def _share_out(self, slot, value):
        """Gives each replica here its share of a slot."""
        holders = self._holders
        shape = shape_shared_out(value.shape, holders.number)
        of_copies = zip(holders.copies(slot), holders.bounds(slot.shape[0]), strict=True)
        for index, (copy, bounds) in enumerate(of_copies):
            with holders.alone(index):
                copy.assign(_cut_out(tf.constant(value, copy.dtype), shape, *bounds))


class ShardedOptimizer(WithWholeFiles):
    """Extends an optimizer whose update treats each element by itself; behind `prepare`."""

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
        if original_class(self) is keras.optimizers.ScheduleFreeAdamW:
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
        _mark(share, weight)
        return share

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Makes a slot; that of a share knows its weight."""
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        weight = getattr(reference_variable, "_sharded", None)
        if weight is not None:
            _mark(slot, weight)
            attach(slot, _slot_of=(id(slot._shown), name))
        return slot

    def apply(self, grads, trainable_variables=None):
        """Applies gradients of whole weights, the same on all workers."""
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
        pairs = zip(super()._clip_gradients(grads), trainable_variables, strict=True)
        super()._backend_apply_gradients(
            [self._cut(gradient, share) for gradient, share in pairs], trainable_variables
        )

    def _clip_gradients(self, grads):
        return grads  # Which is done: see above.

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
                    own.assign(_cut_out(tf.convert_to_tensor(whole), shape, *bounds))

    def _join(self, weights) -> None:
        """Gives every copy of the weights what all shares hold."""
        shares = [self._share_of[id(weight)] for weight in weights]
        wholes = _wholes(shares, self._holders)
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


def _wholes(found, holders: Holders) -> list[tf.Tensor]:
    """Joins what all replicas hold of shares, or of slots, to the shapes of the weights."""
    if not found:
        return []
    rows = []
    for variable in found:
        own = [tf.convert_to_tensor(copy) for copy in holders.copies(variable)]
        with holders.beside(variable._sharded):
            rows.append(tf.concat(own, 0)[None])
    workers = holders.workers
    if workers is not None:
        rows = workers.all_gather(rows, [1] * workers.num_workers)
    wholes = []
    for row, variable in zip(rows, found, strict=True):
        shape = shape_shared_out(variable._sharded.shape, holders.number)
        with holders.beside(variable._sharded):
            joined = tf.reshape(row, [-1, *shape[1:]])[: shape[0]]
            wholes.append(tf.reshape(joined, variable._sharded.shape))
    return wholes


def shape_shared_out(shape: Sequence[int], num_shares: int) -> list[int]:
    """In which shape a weight is cut along axis 0: a matrix as it is, all else flat."""
    shape = [int(size) for size in shape]
    return shape if len(shape) == 2 and shape[0] >= num_shares else [int(np.prod(shape))]


def cut_share(gradient, shape: list[int], bounds: tuple[int, int]):
    """What a replica's share has of a gradient, dense or sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return _rows_read(gradient, shape, *bounds)
    return _cut_out(gradient, shape, *bounds)


def _cut_out(tensor: tf.Tensor, shape: list[int], start: int, end: int) -> tf.Tensor:
    """A share of a tensor that is brought into a shape before; zeros behind its end."""
    number = shape[0]
    found = tf.reshape(tensor, shape)[min(start, number) : min(end, number)]
    missing = (end - start) - max(min(end, number) - start, 0)
    return tf.pad(found, [[0, missing]] + [[0, 0]] * len(shape[1:])) if missing else found


def _rows_read(gradient: tf.IndexedSlices, shape: list[int], start: int, end: int):
    """The rows of a sparse gradient that a share has; others stand in its first row, as zeros."""
    if len(shape) < 2:  # Flat.
        raise ValueError(
            "Under shard_optimizer=True an embedding is shared out by rows. A matrix of at least "
            f"as many rows as there are replicas is required. Received: shape {gradient.shape}. "
            "Leave shard_optimizer out."
        )
    indices = gradient.indices
    inside = (indices >= start) & (indices < end)
    values = tf.where(inside[:, None], gradient.values, tf.zeros_like(gradient.values))
    own = tf.where(inside, indices - start, tf.zeros_like(indices))
    return tf.IndexedSlices(values, own, tf.constant([end - start, shape[1]], indices.dtype))


def shard(optimizer: keras.Optimizer) -> None:
    """Makes each replica update its share, in place; of one that wraps others, them.

    Raises:
        ValueError: If the update looks at more than one element at a time, or is not known; or if
            the optimizer accumulates gradients.
    """
    if isinstance(optimizer, ShardedOptimizer | WithWholeFiles):
        return
    cls = original_class(optimizer)
    if cls in (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer):
        extend(optimizer, WithWholeFiles)
        return
    check_shardable(optimizer)
    extend(optimizer, ShardedOptimizer)


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
            "Under shard_optimizer=True each replica updates its share of a weight, and the update "
            f"must treat each element by itself, as that of {elementwise.NAMES} does. Received: "
            f"{cls.__name__}, which looks at whole weights, or is not known. Take one of these, or "
            "leave shard_optimizer out."
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "Under shard_optimizer=True gradients are accumulated by the step, and an update in "
            "each call of the optimizer is required. Received: gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}. Take "
            f"sync='accumulate:{optimizer.gradient_accumulation_steps}' in its place."
        )
    if optimizer.built:
        raise ValueError(
            "Under shard_optimizer=True an optimizer makes its slots in shares. One that is not "
            f"built is required. Received: a {cls.__name__} with slots of whole weights. Compile "
            "the model with a new optimizer, or pass the compiled model to the builder."
        )
