"""The compiled loss and metrics of a model, of the rows of one piece.

    terms     of each loss the piece's share N_p / D; where data decide the divisor, N_p and D_p
    growth    what the state of each metric becomes, from zero

Both are added up over the pieces. `whole_loss` makes the loss of the sums, and `grow` tells the
metrics theirs.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.seams.compiled import CompileLoss, CompileMetrics, added_loss, compiled_loss
from tfparallel.step.loss_terms import ExampleLosses, call_with, values_of

__all__ = ["example_losses", "grow", "growth", "states", "terms", "terms_of", "whole_loss"]


def terms(compiled: CompileLoss, y, outputs, sample_weight, num_rows) -> list[list[tf.Tensor]]:
    """Of each loss the piece's share, or its numerator and divisor.

    Args:
        compiled: The model's loss, built.
        y: The piece's targets.
        outputs: The model's outputs for it.
        sample_weight: Its weights, or None.
        num_rows: Of the whole batch.

    Raises:
        NotByPieces: If a loss has no such terms.
    """
    return [terms_of(own, num_rows) for own in example_losses(compiled, y, outputs, sample_weight)]


def example_losses(compiled: CompileLoss, y, outputs, sample_weight) -> list[ExampleLosses]:
    """Of each loss those of the piece's examples; arguments and errors as of `terms`."""
    found: list[ExampleLosses] = []

    def instead(loss):
        def find(y_true, y_pred, weight):
            found.append(values_of(loss, y_true, y_pred, weight))
            return tf.zeros([], found[-1].values.dtype)

        return find

    call_with(instead, compiled, y, outputs, sample_weight)
    return found


def terms_of(losses: ExampleLosses, num_rows) -> list[tf.Tensor]:
    """The share of a piece's losses, or their numerator and divisor.

    Args:
        losses: Of its examples.
        num_rows: Of the whole batch.
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
    *,
    tells_trackers: bool = True,
) -> tf.Tensor:
    """The loss of the terms' sums and of what is added.

    Args:
        model: A compiled model, its loss built.
        sums: Of `terms`, over the pieces.
        y: The targets of the whole batch.
        outputs: Tensors or their types, in the structure of the outputs; their values do not count.
        sample_weight: The weights of the whole batch, or None.
        added: What layers and regularizers add to the loss, of the whole batch.
        tells_trackers: Whether what tracks each output's loss is told.
    """
    remaining = iter(sums)

    def instead(loss):
        return lambda *_: _value(*next(remaining))

    compiled = compiled_loss(model)
    trackers = compiled.metrics if tells_trackers else ()
    losses = [call_with(instead, compiled, y, outputs, sample_weight, trackers)]
    losses += [added_loss(model, loss) for loss in added]
    return losses[0] if len(losses) == 1 else keras.ops.sum(losses)


def _value(numerator, divisor=None) -> tf.Tensor:
    return numerator if divisor is None else tf.math.divide_no_nan(numerator, divisor)


def states(compiled: CompileMetrics | None) -> list[keras.Variable]:
    """The variables of the compiled metrics, each once: two outputs may share a metric."""
    found = () if compiled is None else compiled.variables
    return list({id(variable): variable for variable in found}.values())


def growth(compiled: CompileMetrics | None, y, outputs, sample_weight) -> list[tf.Tensor]:
    """What a piece's rows add to each of `states`."""
    if not states(compiled):
        return []
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in compiled.variables]
    grown = compiled.stateless_update_state(zeros, y, outputs, sample_weight=sample_weight)
    by_id = dict(zip(map(id, compiled.variables), grown, strict=True))
    return [tf.stop_gradient(tf.convert_to_tensor(value)) for value in by_id.values()]


def grow(compiled: CompileMetrics | None, sums: Sequence[tf.Tensor]) -> None:
    """Adds to the states of the metrics the sums of `growth`."""
    for variable, grown in zip(states(compiled), sums, strict=True):
        variable.assign_add(grown)
