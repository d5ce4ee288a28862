"""The terms of a loss over pieces, with their divisors over the whole batch.

A piece is some rows of the batch: those of a replica or of a micro-batch. A term of the loss is

    J = Σ_p N_p / D,    N_p = Σ_{i in p} w_i ℓ_i

and its divisor D does not depend on predictions:

| reduction | D |
| --- | --- |
| `sum` | 1 |
| `sum_over_batch_size`, `mean` | the number of losses ℓ; with a mask, of the valid ones |
| `mean_with_sample_weight` | Σ w, including the mask |

Except for `sum`, the divisor of the batch is the sum of the pieces' divisors.

Relies on how `keras.losses.Loss.__call__` and `CompileLoss` reduce (`docs/upstream.md`).
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.seams.compiled import (
    CompileLoss,
    apply_mask,
    loss_terms,
    mask_epsilon,
    reduce_weighted_values,
    squeeze_or_expand_to_same_rank,
)
from tfparallel.seams.keras import mask_of

REDUCTIONS = ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")


class NotByPieces(ValueError):
    """Raised if a loss has no numerators and divisors."""


class ExampleLosses(NamedTuple):
    """The unreduced losses of some examples.

    Attributes:
        values: The losses, shape `(rows, …)`.
        weight: Sample weights, or None.
        mask: Which losses are valid, or None.
        reduction: One of `REDUCTIONS`.
    """

    values: tf.Tensor
    weight: tf.Tensor | None
    mask: tf.Tensor | None
    reduction: str

    def numerator(self) -> tf.Tensor:
        """Σ w ℓ, a scalar."""
        dtype = self.values.dtype
        # Without rows, Keras returns unsummed values.
        return tf.reduce_sum(
            reduce_weighted_values(self.values, self.weight, self.mask, "sum", dtype)
        )

    def share(self, num_rows) -> tf.Tensor | None:
        """N_p / D if D follows from sizes; None if it depends on a mask or on weights.

        Args:
            num_rows: The number of rows of the whole batch.
        """
        if self.reduction == "sum":
            return self.numerator()
        if not self.follows_from_sizes:
            return None
        values = self._weighted(self.weight)
        divisor = tf.cast(num_rows * _size_of_a_row(values), values.dtype)
        return tf.math.divide_no_nan(self.numerator(), divisor)  # As in Keras for an empty batch.

    @property
    def follows_from_sizes(self) -> bool:
        """Whether the divisor follows from sizes, and not from a mask or weights."""
        by_weight = self.reduction == "mean_with_sample_weight" and self.weight is not None
        return self.reduction == "sum" or not (self.mask is not None or by_weight)

    def _weighted(self, weight) -> tf.Tensor:
        if weight is None:
            return self.values
        values, weight = squeeze_or_expand_to_same_rank(self.values, weight)
        return values * weight

    def divisor(self, num_rows=None) -> tf.Tensor:
        """The divisor of the reduction over these examples.

        Args:
            num_rows: The number of rows of the whole batch, over which divisors are summed; None
                if these are all.
        """
        dtype, mask = self.values.dtype, self.mask
        if self.reduction == "sum":
            return tf.ones([], dtype)
        # "sum" keeps the mask unscaled, whatever the reduction.
        valid = None if mask is None else tf.cast(mask, dtype)
        merged = apply_mask(self.weight, valid, dtype, "sum")
        if merged is not None and self.reduction == "mean_with_sample_weight":
            _, merged = squeeze_or_expand_to_same_rank(self.values, merged)
            return tf.reduce_sum(merged)
        number = tf.cast(_size(self._weighted(merged)), dtype)
        if mask is None:
            return number
        num_valid = tf.reduce_sum(valid)
        if epsilon := mask_epsilon():
            of_batch = 1.0 if num_rows is None else self._num_rows(dtype) / tf.cast(num_rows, dtype)
            num_valid += epsilon * of_batch
        return number * tf.math.divide_no_nan(num_valid, tf.cast(_size(mask), dtype))

    def _num_rows(self, dtype) -> tf.Tensor:
        return tf.cast(tf.shape(self.values)[0], dtype)


def values_of(loss: keras.losses.Loss, y_true, y_pred, weight) -> ExampleLosses:
    """Computes the losses of the examples, as `Loss.__call__` does before it reduces them.

    Raises:
        NotByPieces: If the loss has its own reduction.
    """
    has_own_call = type(loss).__call__ is not keras.losses.Loss.__call__
    if has_own_call or loss.reduction not in REDUCTIONS:
        received = f"reduction={getattr(loss, 'reduction', None)!r}"
        raise NotByPieces(
            "A Keras loss, or a `keras.losses.Loss` whose `call` returns one value per example, "
            f"with a reduction of 'sum' or a mean, is required. Received: {loss!r} with "
            f"{'a custom `__call__`' if has_own_call else received}."
        )
    masks = [mask_of(y_pred)]
    y_pred = keras.tree.map_structure(lambda t: tf.cast(t, loss.dtype), y_pred)
    y_true = keras.tree.map_structure(lambda t: tf.cast(t, loss.dtype), y_true)
    values = loss.call(y_true, y_pred)
    if values.shape.rank == 0:
        raise NotByPieces(
            f"Loss '{loss.name}' returns one value for the whole batch, so it cannot be computed "
            "per micro-batch. One value per example is required. Received: shape (). A loss "
            "reduces the last axis: an output of shape (batch,) needs one more axis, (batch, 1)."
        )
    masks = [mask for mask in (*masks, mask_of(values)) if mask is not None]
    mask = None if not masks else tf.cast(masks[0], tf.bool)
    if len(masks) > 1:
        mask = mask & tf.cast(masks[1], tf.bool)
    if weight is not None:
        weight = tf.cast(weight, values.dtype)
    return ExampleLosses(values, weight, mask, loss.reduction)


def call_with(instead: Callable, compiled: CompileLoss, y, predictions, sample_weight, metrics=()):
    """Calls Keras's compiled loss, which finds each output's targets, with replaced losses.

    Args:
        instead: Takes a loss, and returns a replacement that takes `(y_true, y_pred, weight)`.
        compiled: The model's loss, built.
        y: The targets.
        predictions: The predictions, in the structure of the outputs.
        sample_weight: Weights in the structure of the outputs, or one for all, or None.
        metrics: The trackers of each output's loss; none by default.

    Raises:
        NotByPieces: If `instead` or a replacement raises it.
    """
    if keras.tree.is_nested(predictions) and not (y is None or keras.tree.is_nested(y)):
        y = [y]  # Of an eager tensor, Keras would take as many rows as outputs for their targets.
    replaced = object.__new__(CompileLoss)  # It cannot be copied.
    terms = [term._replace(loss=instead(term.loss)) for term in loss_terms(compiled)]
    # Bypasses Keras's tracking.
    metrics = list(metrics) or [None] * len(terms)
    vars(replaced).update(vars(compiled) | {"_flat_losses": terms, "_metrics": metrics})
    try:
        return CompileLoss.call(replaced, y, predictions, sample_weight)
    except ValueError as error:
        # Keras 3.16 chains another error, which names the output.
        if isinstance(error.__cause__, NotByPieces):
            raise error.__cause__ from None
        raise


def _size_of_a_row(tensor):
    sizes = tensor.shape[1:]
    if sizes.is_fully_defined():
        return sizes.num_elements()
    return tf.reduce_prod(tf.shape(tensor)[1:])


def _size(tensor):
    """The number of elements, computed without the values if only the batch size is unknown."""
    if tensor.shape[1:].is_fully_defined() and tensor.shape[0] is None:
        return tf.shape(tensor)[0] * tensor.shape[1:].num_elements()
    return tf.size(tensor)
