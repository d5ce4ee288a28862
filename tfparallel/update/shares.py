"""Shares of weights: how they are cut, and how they are joined.

    gradient of a weight, over all rows   g₀ g₁ │ g₂ g₃ │ g₄ ·        in N equal shares
                                            │       │       │
    slots (momentum, …), 1/N per place     m₀ m₁   m₂ m₃   m₄ ·
                                            ▼       ▼       ▼
    updated share of the weight           θ₀ θ₁ │ θ₂ θ₃ │ θ₄ ·        joined, at each place

For the optimizer, the shares are its variables: one per weight, whose copy at each place holds that
place's share. It is filled from the weight before an update, and the weight from all shares
afterwards, so other code may write the weight without knowing. Files hold the whole state.

A matrix is sharded by rows, so a sparse gradient of an embedding's rows stays sparse: Keras's
optimizers treat a row that a batch reads twice as two rows. Other weights are flattened. All shares
have the same size; the last one is padded with zeros.

This is stage 1 of ZeRO: Samyam Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, arXiv:1910.02054.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.extend import extend
from tfparallel.seams.optimizers import accumulators_of
from tfparallel.tracing.static_shapes import split
from tfparallel.update.clipping import norm_factors
from tfparallel.update.pending_sums import PendingSums, is_left_out
from tfparallel.update.places import Places
from tfparallel.variables.sharded import (
    ShardedGradient,
    ShardedVariable,
    apart,
    cut_out,
    joined,
    rows_of_share,
    shape_shared_out,
    shard_variable,
)


class Shares:
    """The shares of weights, or of parts of weights; each place keeps and updates its own.

    Args:
        parts: The weights, or parts of weights.
        places: The places.

    Attributes:
        parts: The weights, or parts of weights.
        variables: The share of each.

    Raises:
        ValueError: For a weight with `overwrite_with_gradient`.
    """

    def __init__(self, parts: Sequence[keras.Variable], places: Places):
        written = [p.path for p in parts if getattr(p, "overwrite_with_gradient", False)]
        if written:
            raise ValueError(
                f"Under `shard`, weights must be updated by the optimizer. Received: {written}, "
                "whose gradients overwrite their values. Remove `shard`."
            )
        self._places, self.parts = places, list(parts)
        self.variables = [_share_of(part, places) for part in self.parts]
        self._by_id = {id(p): share for p, share in zip(self.parts, self.variables, strict=True)}
        places.copy(self.variables)
        with tf.init_scope(), places.all():
            self.fill(self.parts)

    def of(self, part: keras.Variable) -> keras.Variable:
        """The share of a weight; the weight itself if it has none."""
        return self._by_id.get(id(part), part)

    def fill(self, parts: Sequence[keras.Variable]) -> None:
        """Fills each share from the weight's copy at the same place."""
        for index in range(len(self._places)):
            with self._places.at(index):
                for part in filter(_is_whole, parts):
                    share = self.of(part)
                    copy, whole = (self._places.copies(each)[index] for each in (share, part))
                    with tf.device(copy.device):
                        whole = tf.convert_to_tensor(whole)
                        copy.assign(apart(_cut(whole, part, self._places, index)))

    def expanded(
        self,
        gradients: Sequence[Any],
        parts: Sequence[keras.Variable],
        pending: PendingSums,
        optimizer: keras.Optimizer,
    ) -> tuple[list[list[Any]], dict[int, tf.Tensor] | None]:
        """The gradients of the shares.

        Args:
            gradients: As for `summed`.
            parts: The weights.
            pending: Terms of gradients.
            optimizer: The optimizer that updates the shares.

        Returns:
            The gradients at each local place; and, if clipping by a norm, the clipping factors by
            the `id` of a share. Keras clips accumulated gradients.
        """
        places, units = self._places, list(map(self.of, parts))
        gradients = summed(pending, gradients, parts, places)
        scale, steps = optimizer.loss_scale_factor, optimizer.gradient_accumulation_steps
        if not steps:
            factors = norm_factors(optimizer, gradients, parts, places.workers, scale)
        gradients = in_shares(gradients, parts, places)
        if steps:
            gradients = list(map(_dense, gradients))
            sums = self._accumulated(gradients, units, optimizer)
            factors = norm_factors(optimizer, sums, parts, places.workers)
        by_id = factors and dict(zip(map(id, units), factors, strict=True))
        at_places = zip(*(g.terms if g else [None] * len(places) for g in gradients), strict=True)
        return list(map(list, at_places)), by_id

    def _accumulated(self, gradients, units, optimizer) -> list[ShardedGradient | None]:
        """The gradients that Keras would apply if it updated now."""
        steps, scale = optimizer.gradient_accumulation_steps, optimizer.loss_scale_factor or 1.0
        results: list[ShardedGradient | None] = []
        for accumulator, gradient in zip(accumulators_of(optimizer, units), gradients, strict=True):
            copies, means = self._places.copies(accumulator), []
            for copy, term in zip(copies, gradient.terms if gradient else (), strict=False):
                with tf.device(copy.device):
                    means.append((term / scale + copy) / steps)
            results.append(ShardedGradient(means) if means else None)
        return results

    def join(self, parts: Sequence[keras.Variable], is_due: tf.Tensor | bool = True) -> None:
        """Fills every copy of the weights from all shares, if `is_due`."""
        if tf.is_tensor(is_due):
            tf.cond(is_due, lambda: self.join(parts), lambda: None)
            return
        parts = list(filter(_is_whole, parts))
        wholes = joined(list(map(self.of, parts)), self._places)
        for index in range(len(self._places)):
            with self._places.at(index):
                for part, whole in zip(parts, wholes, strict=True):
                    copy = self._places.copies(part)[index]
                    with tf.device(copy.device):
                        copy.assign(whole)


def summed(
    pending: PendingSums, gradients: Sequence[Any], parts: Sequence[keras.Variable], places: Places
) -> list[Any]:
    """Sums terms of gradients in shares: each worker receives only its own rows.

        worker 0   g⁰ = g⁰₀ │ g⁰₁              g⁰₀ + g¹₀
        worker 1   g¹ = g¹₀ │ g¹₁      ──►                   g⁰₁ + g¹₁

    Args:
        pending: The terms; they are taken out.
        gradients: Gradients to add to the terms, the same on all workers; or whole gradients; or
            a `ShardedGradient`.
        parts: The weights.
        places: The places.

    Returns:
        The gradients; each one that had terms is a `ShardedGradient`.
    """
    results, wholes, rest = list(gradients), {}, {}
    for i, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
        terms = None if isinstance(gradient, ShardedGradient) else pending.take(part, None)
        if terms is not None:
            size, shape = _size_of_share(part, places), shape_shared_out(part.shape)
            wholes[i] = [cut_out(term, shape, 0, places.number * size) for term in terms]
            rows = places.first * size, (places.first + len(places)) * size
            rest[i] = None
            if not is_left_out(gradient):
                rest[i] = cut_out(tf.convert_to_tensor(gradient), shape, *rows)
    pending.clear()
    if wholes:
        totals, _ = Reducer(places.all_reduce_ops, None).totals(list(wholes.values()), list)
        sums = places.workers.reduce_scatter(totals)
        for (i, gradient), total in zip(rest.items(), sums, strict=True):
            rows = total if gradient is None else total + gradient
            results[i] = ShardedGradient(split(rows, len(places)))
    return results


def in_shares(
    gradients: Sequence[Any], parts: Sequence[keras.Variable], places: Places
) -> list[ShardedGradient | None]:
    """Cuts whole gradients into shares; gradients in shares stay as they are."""
    local_terms: list[list[Any]] = [[] for _ in gradients]
    for index in range(len(places)):
        with places.at(index):
            for terms, gradient, part in zip(local_terms, gradients, parts, strict=True):
                if not (gradient is None or isinstance(gradient, ShardedGradient)):
                    terms.append(_cut(places.gradient(gradient, part, index), part, places, index))
    pairs = zip(gradients, local_terms, strict=True)
    return [ShardedGradient(terms) if terms else gradient for gradient, terms in pairs]


def _dense(gradient: ShardedGradient | None) -> ShardedGradient | None:
    """Makes a gradient dense, as Keras accumulates it: it sums rows that are read twice."""
    terms = []
    for term in gradient.terms if gradient else ():
        with tf.device(term.device):
            terms.append(tf.convert_to_tensor(term))
    return gradient and ShardedGradient(terms)


def _cut(gradient: Any, part: keras.Variable, places: Places, index: int) -> Any:
    """The part of a dense or sparse gradient that belongs to one local place's share."""
    shape = shape_shared_out(part.shape)
    bounds = places.bounds(_size_of_share(part, places))[index]
    if isinstance(gradient, tf.IndexedSlices):
        return rows_of_share(gradient, shape, *bounds)
    return cut_out(tf.convert_to_tensor(gradient), shape, *bounds)


def _size_of_share(part: keras.Variable, places: Places) -> int:
    """The number of rows, or elements, per place."""
    return -(-shape_shared_out(part.shape)[0] // places.number)


def shard(variable: keras.Variable, places: Places, value: tf.Tensor) -> None:
    """Shards a weight over the places, instead of copying it; changes it in place.

    Args:
        variable: The weight.
        places: The places.
        value: The whole value of the weight.
    """
    share = _share_of(variable, places)
    places.copy([share])
    shard_variable(variable, share, places)
    variable.assign(value)


def _share_of(part: keras.Variable, places: Places) -> keras.Variable:
    """The variable whose copies hold the places' shares of a weight, or of a part of one."""
    if isinstance(part, ShardedVariable):
        return part.share
    shape = (_size_of_share(part, places), *shape_shared_out(part.shape)[1:])
    with places.make(), places.beside(part):
        share = keras.Variable("zeros", shape, part.dtype, trainable=True, name=part.name)
    share._path = part.path  # Slots are named by it.
    mark(share, part)
    return share


def _is_whole(part: keras.Variable) -> bool:
    """Whether a weight has whole copies, from which shares are filled."""
    return not isinstance(part, ShardedVariable)


class Shared:
    """Extends a variable whose copies are shares of a weight or slot."""

    def _serialize_to_tensors(self):
        raise ValueError(
            "`tf.train.Checkpoint` would save only one replica's shard. The whole state is "
            f"required. Received: '{self.path}', under `shard`. Use "
            "`tfparallel.callbacks.Checkpoint` or `model.save`, which save all of it."
        )


def mark(variable: keras.Variable, weight: keras.Variable) -> None:
    """Marks a share, or its slot, with its weight, and with the whole that this is a part of."""
    extend(variable, Shared, _sharded=weight, _shown=getattr(weight, "_whole", weight))
