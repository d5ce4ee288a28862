"""The loss, micro-batch by micro-batch, with the divisor that it has over the whole batch.

Under 1F1B the first micro-batch goes back before the last has come forward, so its gradient must be
known without the others' outputs. Its part of the loss is N_m / D (`step/loss_terms.py`), and D is
known beforehand, of shapes, masks and weights of the whole batch.

A loss that compares examples has no such form. Where it is not proved that a loss is a sum over the
rows (`step/additivity.py`), values show it: Σ_m N_m / D is held against the loss of the joined
outputs in every step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import is_own, original_class
from tfparallel.placement.layer_devices import PlacementError
from tfparallel.seams.compiled import CompileLoss
from tfparallel.step.loss_terms import ExampleLosses, NotByPieces, call_with, values_of

__all__ = ["COMPARES", "MicroBatchLoss", "Part", "check_decomposes", "check_equal"]

# By how much sums in another order may differ, relative; what compares examples differs more.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_FLOOR = 1e-2  # Of the terms' size: within a part they may cancel, too.
_WAY_OUT = (
    "Take schedule='gpipe', which computes the loss of the whole batch, once, between the forward "
    "and the backward passes."
)


class Part(NamedTuple):
    """A micro-batch's part of the loss.

    Attributes:
        loss: A scalar.
        shares: Of each compiled loss, N_m / D, in their order.
    """

    loss: tf.Tensor
    shares: list[tf.Tensor]


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
        self._divisors: list[tf.Tensor] = []
        self._follow_from_sizes = True
        if compiled is None:
            return

        def divisor(loss) -> Callable:
            def find(y_true, y_pred, weight):
                values = _values(loss, y_true, y_pred, weight)
                self._divisors.append(values.divisor())
                self._follow_from_sizes &= values.follows_from_sizes
                return tf.zeros([], self._divisors[-1].dtype)

            return find

        # Without metrics: what tracks each output's loss is told once, of the sums.
        _called(divisor, compiled, y, predictions, sample_weight)

    def divisor(self, num_rows):
        """By what all of the loss is divided, but for a factor; None where that is not one number.

        Args:
            num_rows: Of the whole batch.
        """
        if self._follow_from_sizes:
            return num_rows
        return self._divisors[0] if len(self._divisors) == 1 else None

    def __call__(self, y, sample_weight, predictions) -> Part | None:
        """Returns a micro-batch's part of the loss; None of a model without."""
        if self._compiled is None:
            return None
        divisors, shares = iter(self._divisors), []

        def numerator(loss) -> Callable:
            def find(y_true, y_pred, weight):
                own = _values(loss, y_true, y_pred, weight)
                shares.append(tf.math.divide_no_nan(own.numerator(), next(divisors)))
                return shares[-1]

            return find

        loss = _called(numerator, self._compiled, y, predictions, sample_weight)
        return Part(loss, shares)


def check_decomposes(model: keras.Model, schedule: str) -> None:
    """Raises if the loss of a compiled model cannot be computed micro-batch by micro-batch.

    Raises:
        ValueError: For a `compute_loss` or a loss that reduces in its own way.
    """
    if is_own(model, "compute_loss"):
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


def _called(*args) -> tf.Tensor:
    try:
        return call_with(*args)
    except NotByPieces as error:
        raise PlacementError(f"{error} {_WAY_OUT}") from error


def _values(loss, y_true, y_pred, weight) -> ExampleLosses:
    if getattr(loss, "fn", None) is keras.losses.ctc:
        raise NotByPieces(
            "The CTC loss fails on an empty micro-batch. The last batch of an epoch may have one, "
            "so a loss that can be computed for no rows is required. Received: "
            f"{loss!r}."
        )
    return values_of(loss, y_true, y_pred, weight)
