"""The loss, micro-batch by micro-batch, with the divisor that it has over the whole batch.

Under 1F1B the first micro-batch goes back before the last has come forward, so its gradient must be
known without the others' outputs. A term of the loss is

    J = Σ_m N_m / D,    N_m = Σ_{i in m} w_i ℓ_i

and its divisor D is known beforehand, for it holds no prediction:

| reduction | D |
| --- | --- |
| `sum` | 1 |
| `sum_over_batch_size`, `mean` | the number of losses ℓ; under a mask, of those that are valid |
| `mean_with_sample_weight` | Σ w, a mask included |

A loss that compares examples has no such form. Its values show: Σ_m N_m / D is held against the
loss of the joined outputs in every step.

Rests on how `keras.losses.Loss.__call__` and `CompileLoss` reduce (`docs/upstream.md`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import (
    apply_mask,
    reduce_weighted_values,
    squeeze_or_expand_to_same_rank,
)
from keras.src.trainers.compile_utils import CompileLoss

from tfparallel.extend import original_class
from tfparallel.placement.stages import PlacementError

__all__ = ["COMPARES", "MicroBatchLoss", "check_decomposes", "check_equal"]

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# By how much sums in another order may differ, relative; what compares examples differs more.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_FLOOR = 1e-2  # Of the terms' size: within a part they may cancel, too.
_WAY_OUT = (
    "Take schedule='gpipe', which computes the loss of the whole batch, once, between the forward "
    "and the backward passes."
)


class MicroBatchLoss:
    """The compiled loss of a model, in terms of the micro-batches.

    Args:
        compiled: The model's `CompileLoss`, built; None for a model without.
        y: The targets of the whole batch.
        sample_weight: Its weights, or None.
        predictions: Of the whole batch: tensors whose shapes and masks count, and no values.
    """

    def __init__(self, compiled: CompileLoss | None, y, sample_weight, predictions):
        self._compiled = compiled
        if compiled is None:
            return
        self._divisors: list[tf.Tensor] = []

        def divisor(loss) -> Callable:
            def find(y_true, y_pred, weight):
                self._divisors.append(_divisor(*_values(loss, y_true, y_pred, weight)))
                return tf.zeros([], self._divisors[-1].dtype)

            return find

        self._call(divisor, y, predictions, sample_weight)

    def __call__(self, y, sample_weight, predictions) -> tf.Tensor | None:
        """Returns a micro-batch's part of the loss, a scalar."""
        if self._compiled is None:
            return None
        divisors = iter(self._divisors)

        def numerator(loss) -> Callable:
            def find(y_true, y_pred, weight):
                values, weight, mask, _ = _values(loss, y_true, y_pred, weight)
                terms = reduce_weighted_values(values, weight, mask, "sum", values.dtype)
                # Of a micro-batch without rows they are not summed yet.
                return tf.math.divide_no_nan(tf.reduce_sum(terms), next(divisors))

            return find

        return self._call(numerator, y, predictions, sample_weight)

    def _call(self, instead: Callable, y, predictions, sample_weight):
        """Calls Keras's own, which finds each loss's targets, with others in the losses' place."""
        own = object.__new__(CompileLoss)  # It refuses to be copied.
        terms = [term._replace(loss=instead(term.loss)) for term in self._compiled._flat_losses]
        # Past Keras's tracking. Without metrics: those see the joined outputs.
        nothing = [None] * len(terms)
        vars(own).update(vars(self._compiled) | {"_flat_losses": terms, "_metrics": nothing})
        return CompileLoss.call(own, y, predictions, sample_weight)


def check_decomposes(model: keras.Model, schedule: str) -> None:
    """Raises if the loss of a compiled model cannot be computed micro-batch by micro-batch.

    Raises:
        ValueError: For a `compute_loss` or a loss that reduces in its own way.
    """
    if original_class(model).compute_loss is not keras.Model.compute_loss:
        raise PlacementError(
            f"schedule={schedule!r} computes the loss of each micro-batch, and a `compute_loss` of "
            f"the user's own may do anything. Received: {original_class(model).__name__}."
            f"compute_loss. {_WAY_OUT}"
        )


COMPARES = "The loss compares examples of different micro-batches"


def check_equal(
    terms: Sequence[tf.Tensor], whole: tf.Tensor, compute_dtype: str
) -> tf.Operation | None:
    """An operation that fails the step if the parts of a loss do not add up to the whole.

    Rounding is relative to what is summed, not to the sum: a loss may pass through zero.
    """
    tolerance = tf.cast(_TOLERANCE.get(compute_dtype, 1e-2), whole.dtype)
    terms = tf.stack([tf.cast(tf.reduce_sum(term), whole.dtype) for term in terms])
    parts, scale = tf.reduce_sum(terms), tf.reduce_sum(tf.abs(terms)) + tf.abs(whole)
    close = tf.abs(parts - whole) <= tolerance * (scale + _FLOOR)
    return tf.debugging.Assert(
        close | tf.math.is_nan(whole) | tf.math.is_inf(whole),
        [
            f"{COMPARES}: the parts do not add up to the whole. A sum or a mean over "
            "the examples is required. " + _WAY_OUT + " Received: of "
            "the parts, and of the whole batch:",
            parts,
            whole,
        ],
    )


def _values(loss, y_true, y_pred, weight) -> tuple[tf.Tensor, Any, Any, str]:
    """The losses of the examples, not reduced, as `Loss.__call__` has them."""
    if type(loss).__call__ is not keras.losses.Loss.__call__ or loss.reduction not in (
        "sum",
        *_MEANS,
    ):
        raise PlacementError(
            "A loss of Keras's, or a `keras.losses.Loss` whose `call` returns a value an example, "
            f"with a reduction of 'sum' or a mean, is required. Received: {loss!r} with "
            f"reduction={getattr(loss, 'reduction', None)!r}. {_WAY_OUT}"
        )
    if getattr(loss, "fn", None) is keras.losses.ctc:
        raise PlacementError(
            "The CTC loss fails of a micro-batch without examples, which the last batch of an "
            "epoch may have. A loss that is computed of no rows is required. Received: "
            f"{loss!r}. {_WAY_OUT}"
        )
    masks = [getattr(y_pred, "_keras_mask", None)]
    y_pred = keras.tree.map_structure(lambda t: tf.cast(t, loss.dtype), y_pred)
    y_true = keras.tree.map_structure(lambda t: tf.cast(t, loss.dtype), y_true)
    values = loss.call(y_true, y_pred)
    if values.shape.rank == 0:
        raise PlacementError(
            f"Loss '{loss.name}' puts out one number for a batch, which is no sum of those of its "
            f"parts. A value for each example is required. Received: shape (). {_WAY_OUT}"
        )
    masks = [mask for mask in (*masks, getattr(values, "_keras_mask", None)) if mask is not None]
    mask = None if not masks else tf.cast(masks[0], tf.bool)
    if len(masks) > 1:
        mask = mask & tf.cast(masks[1], tf.bool)
    if weight is not None:
        weight = tf.cast(weight, values.dtype)
    return values, weight, mask, loss.reduction


def _divisor(values, weight, mask, reduction) -> tf.Tensor:
    dtype = values.dtype
    if reduction == "sum":
        return tf.ones([], dtype)
    # The mask is not scaled yet, whatever the reduction: as under "sum".
    merged = apply_mask(weight, None if mask is None else tf.cast(mask, dtype), dtype, "sum")
    if merged is not None:
        values, merged = squeeze_or_expand_to_same_rank(values, merged)
        if reduction == "mean_with_sample_weight":
            return tf.reduce_sum(merged)
        values = values * merged
    number = tf.cast(_size(values), dtype)
    if mask is None:
        return number
    return number * tf.reduce_sum(tf.cast(mask, dtype)) / tf.cast(_size(mask), dtype)


def _size(tensor):
    """Without the values, where the shape is known but for the batch."""
    if tensor.shape[1:].is_fully_defined() and tensor.shape[0] is None:
        return tf.shape(tensor)[0] * tensor.shape[1:].num_elements()
    return tf.size(tensor)
