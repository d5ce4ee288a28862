"""The loss of each micro-batch, with the divisor of the whole batch.

Under 1F1B, the first micro-batch goes back before the last has gone forward, so its gradient must
not depend on the others' outputs. Its part of the loss is N_m / D (`step/loss_terms.py`); D follows
beforehand from the shapes, masks and weights of the whole batch.

A loss that compares examples has no such form. If the judge cannot prove that a loss is a sum over
the rows (`step/additivity.py`), each step compares values: Σ_m N_m / D must equal the loss of the
joined outputs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import is_own, original_class
from tfparallel.problems import PlacementError
from tfparallel.seams.compiled import CompileLoss
from tfparallel.step.loss_terms import ExampleLosses, NotByPieces, call_with, values_of

# The relative difference allowed for reordered sums; a loss that compares examples differs more.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_FLOOR = 1e-2  # A share of the terms' size: they may also cancel within a part.
_WAY_OUT = (
    "Use schedule='gpipe', which computes the loss of the whole batch once, between the forward "
    "and the backward passes."
)


class Part(NamedTuple):
    """A micro-batch's part of the loss.

    Attributes:
        loss: A scalar.
        shares: N_m / D of each compiled loss, in order.
    """

    loss: tf.Tensor
    shares: list[tf.Tensor]


class MicroBatchLoss:
    """The compiled loss of a model, as a sum over micro-batches.

    Args:
        compiled: The model's `CompileLoss`, built; None for a model without loss.
        y: The targets of the whole batch.
        sample_weight: The weights of the whole batch, or None.
        predictions: Outputs of the whole batch; only their shapes and masks matter.
        sizes: The sizes of the first axes of the losses of examples, as far as they are proved;
            losses of the predictions are then not computed.
    """

    def __init__(
        self, compiled: CompileLoss | None, y, sample_weight, predictions, sizes: Sequence = ()
    ):
        self._compiled = compiled
        self._divisors: list[tf.Tensor] = []
        self._follow_from_sizes = True
        if compiled is None:
            return

        def divisor(loss) -> Callable:
            def find(y_true, y_pred, weight):
                values = _of_sizes(_values(loss, y_true, y_pred, weight), sizes)
                self._divisors.append(values.divisor())
                self._follow_from_sizes &= values.follows_from_sizes
                return tf.zeros([], self._divisors[-1].dtype)

            return find

        # Without metrics: the trackers of each output's loss are updated once, from the sums.
        _called(divisor, compiled, y, predictions, sample_weight)

    def divisor(self, num_rows):
        """Returns the divisor of the whole loss, up to a factor; None if it is not one number.

        Args:
            num_rows: The rows of the whole batch.
        """
        if self._follow_from_sizes:
            return num_rows
        return self._divisors[0] if len(self._divisors) == 1 else None

    def __call__(self, y, sample_weight, predictions) -> Part | None:
        """Returns a micro-batch's part of the loss; None for a model without loss."""
        if self._compiled is None:
            return None
        divisors, shares = iter(self._divisors), []

        def numerator(loss) -> Callable:
            def find(y_true, y_pred, weight):
                values = _values(loss, y_true, y_pred, weight)
                shares.append(tf.math.divide_no_nan(values.numerator(), next(divisors)))
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
            f"schedule={schedule!r} computes the loss of each micro-batch, but a custom "
            "`compute_loss` may need the whole batch. Received: "
            f"{original_class(model).__name__}.compute_loss. {_WAY_OUT}"
        )


COMPARES = "The loss compares examples of different micro-batches"


def check_equal(
    terms: Sequence[tf.Tensor], whole: tf.Tensor, compute_dtype: str
) -> tf.Operation | None:
    """Returns an operation that fails the step if the parts do not add up to the whole loss.

    Rounding is relative to the terms, not to the sum: a loss may pass through zero.
    """
    tolerance = tf.cast(_TOLERANCE.get(compute_dtype, 1e-2), whole.dtype)
    terms = tf.stack([tf.cast(tf.reduce_sum(term), whole.dtype) for term in terms])
    parts, scale = tf.reduce_sum(terms), tf.reduce_sum(tf.abs(terms)) + tf.abs(whole)
    close = tf.abs(parts - whole) <= tolerance * (scale + _FLOOR)
    return tf.debugging.Assert(
        close | tf.math.is_nan(whole) | tf.math.is_inf(whole),
        [
            f"{COMPARES}: the parts do not add up to the whole. The loss must be a sum or a mean "
            "over the examples. " + _WAY_OUT + " Received: for "
            "the parts, and for the whole batch:",
            parts,
            whole,
        ],
    )


def _called(*args) -> tf.Tensor:
    try:
        return call_with(*args)
    except NotByPieces as error:
        raise PlacementError(f"{error} {_WAY_OUT}") from error


def _of_sizes(losses: ExampleLosses, sizes: Sequence) -> ExampleLosses:
    """Replaces the values of losses by zeros, if all sizes are known."""
    shape = losses.values.shape.as_list()
    for axis, size in enumerate(sizes[: len(shape)]):
        shape[axis] = size if shape[axis] is None else shape[axis]
    if not sizes or None in shape:
        return losses
    return losses._replace(values=tf.zeros(shape, losses.values.dtype))


def _values(loss, y_true, y_pred, weight) -> ExampleLosses:
    if getattr(loss, "fn", None) is keras.losses.ctc:
        raise NotByPieces(
            "The CTC loss fails on an empty micro-batch. The last batch of an epoch may have one, "
            "so the loss must accept zero rows. Received: "
            f"{loss!r}."
        )
    return values_of(loss, y_true, y_pred, weight)
