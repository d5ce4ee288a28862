"""The compiled loss and metrics of a model, over the rows of one piece.

    terms     the piece's share N_p / D of each loss; N_p and D_p if the data decide the divisor
    growth    the state of each metric after an update from zero

Both are summed over the pieces. `whole_loss` computes the loss from the sums, and `grow` adds the
others to the metrics.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.judge.placements import Placement, Replicate, Sum
from tfparallel.seams.compiled import CompileLoss, CompileMetrics, added_loss, compiled_loss
from tfparallel.step.loss_terms import ExampleLosses, call_with, values_of


def terms(compiled: CompileLoss, y, outputs, sample_weight, num_rows) -> list[list[tf.Tensor]]:
    """The piece's share of each loss, or its numerator and divisor.

    Args:
        compiled: The model's loss, built.
        y: The targets of the piece.
        outputs: The model's outputs for the piece.
        sample_weight: The weights of the piece, or None.
        num_rows: The number of rows of the whole batch.

    Raises:
        NotByPieces: If a loss has no such terms.
    """
    return [
        terms_of(each, num_rows) for each in example_losses(compiled, y, outputs, sample_weight)
    ]


def example_losses(compiled: CompileLoss, y, outputs, sample_weight) -> list[ExampleLosses]:
    """The losses of the piece's examples, for each loss; arguments and errors as for `terms`."""
    of_losses: list[ExampleLosses] = []

    def instead(loss):
        def find(y_true, y_pred, weight):
            of_losses.append(values_of(loss, y_true, y_pred, weight))
            return tf.zeros([], of_losses[-1].values.dtype)

        return find

    call_with(instead, compiled, y, outputs, sample_weight)
    return of_losses


def terms_of(losses: ExampleLosses, num_rows) -> list[tf.Tensor]:
    """The share of a piece's losses, or their numerator and divisor.

    Args:
        losses: The losses of its examples.
        num_rows: The number of rows of the whole batch.
    """
    share = losses.share(num_rows)
    if share is not None:
        return [share]
    return [losses.numerator(), tf.stop_gradient(losses.divisor(num_rows))]


def whole_loss(
    model: keras.Model,
    sums: Sequence[Sequence[tf.Tensor]],
    y,
    outputs,
    sample_weight,
    added: Sequence[tf.Tensor],
    trackers: Sequence[Any],
) -> tf.Tensor:
    """The total loss, from the sums of the terms and the added losses.

    Args:
        model: A compiled model with a built loss.
        sums: The sums of `terms` over the pieces.
        y: The targets of the whole batch.
        outputs: Tensors or their types, in the structure of the outputs; their values do not count.
        sample_weight: The weights of the whole batch, or None.
        added: The losses that layers and regularizers add for the whole batch.
        trackers: The trackers of each output's loss; none if they are not to be updated.
    """
    remaining = iter(sums)

    def instead(loss):
        return lambda *_: _value(*next(remaining))

    losses = [call_with(instead, compiled_loss(model), y, outputs, sample_weight, trackers)]
    losses += [added_loss(model, loss) for loss in added]
    return losses[0] if len(losses) == 1 else keras.ops.sum(losses)


def _value(numerator, divisor=None) -> tf.Tensor:
    return numerator if divisor is None else tf.math.divide_no_nan(numerator, divisor)


def states(compiled: CompileMetrics | None) -> list[keras.Variable]:
    """The distinct variables of the compiled metrics; two outputs may share a metric."""
    variables = () if compiled is None else compiled.variables
    return list({id(variable): variable for variable in variables}.values())


def growth(compiled: CompileMetrics | None, y, outputs, sample_weight) -> list[tf.Tensor]:
    """The increments of `states` by the rows of a piece."""
    if not states(compiled):
        return []
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in compiled.variables]
    grown = compiled.stateless_update_state(zeros, y, outputs, sample_weight=sample_weight)
    by_id = dict(zip(map(id, compiled.variables), grown, strict=True))
    return [tf.stop_gradient(tf.convert_to_tensor(value)) for value in by_id.values()]


def of_whole_sequences(
    parts: Sequence[Sequence[tf.Tensor]], placements: Sequence[Placement], lengths: Sequence
) -> list[tf.Tensor]:
    """The increments of `states` by whole sequences, from those by their parts.

    Args:
        parts: For each part, the increment of each state.
        placements: For each state, `Sum()`, `Replicate()` or `Sum(-1)`, a mean over the positions.
        lengths: The length of each part; may be 0 if only the step knows it.
    """
    length = sum(lengths)
    wholes = []
    for placement, *terms_of_parts in zip(placements, *parts, strict=True):
        if placement == Replicate():
            wholes.append(terms_of_parts[0])
            continue
        if placement == Sum(-1):
            dtype = terms_of_parts[0].dtype
            shares = [tf.cast(n, dtype) / tf.cast(length, dtype) for n in lengths]
            # A mean over no positions is NaN.
            terms_of_parts = list(map(tf.math.multiply_no_nan, terms_of_parts, shares))
        wholes.append(tf.add_n(terms_of_parts))
    return wholes


def grow(compiled: CompileMetrics | None, sums: Sequence[tf.Tensor]) -> None:
    """Adds the sums of `growth` to the states of the metrics."""
    for variable, grown in zip(states(compiled), sums, strict=True):
        variable.assign_add(grown)
