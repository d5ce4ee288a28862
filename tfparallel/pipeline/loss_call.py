"""Calls the loss and the metrics after the last stage, on the outputs of a micro-batch.

They are traced with the first micro-batch and called for all (`traced_once.py`). If the judge
proves that they add up over positions, those of divided sequences are computed on each device, from
its positions alone (`divided_outputs.py`).
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfparallel.judge.positions import AXIS
from tfparallel.piece import Piece, of_any_number, times, where_it_is
from tfparallel.pipeline.divided_outputs import (
    SequencePart,
    length_of,
    on_each,
    outputs_by_device,
    pieces_of,
)
from tfparallel.pipeline.micro_batch_loss import MicroBatchLoss, Part
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.stages import Key, Values, values_of, with_mask_of
from tfparallel.pipeline.traced_once import TracedOnce
from tfparallel.seams.compiled import compiled_loss
from tfparallel.seams.keras import mask_of, storage_of
from tfparallel.step.additivity import OverPositions, adds_up_over_positions
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.piece_sums import growth, of_whole_sequences
from tfparallel.step.row_counts import as_many_rows
from tfparallel.tracing.trial_trace import traced_apart


class LossCall:
    """The compiled loss and metrics of a micro-batch's outputs.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        metrics: The metrics whose increments to compute; None for none, in a step that joins all
            outputs.
        each: Whether to trace each micro-batch.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Batch,
        *,
        metrics: StepMetrics | None,
        each: bool,
    ):
        self._model = model
        self._batch = batch
        self._metrics = metrics
        weights = list(map(storage_of, model._trained()))  # A loss may read some of them.
        self._call = TracedOnce(self._run, batch.pieces, weights, each=each)
        self._loss: MicroBatchLoss | None = None
        self._judged = OverPositions("the outputs are whole", False, None)
        self._input_keys: list[Key] = []
        self._num_shares: int | None = None

    def __call__(
        self, values: Values, targets: Any, piece: Piece
    ) -> tuple[Part | None, list[tf.Tensor]]:
        """Returns a micro-batch's part of the loss, and the increments of the metrics' states."""
        if self._loss is None:
            whole = SequencePart(*targets, self._batch.outputs_of(piece, values))
            self._prepare(whole, values, piece)
        self._input_keys = [*values_of(values, self._batch.output_keys)]
        # Micro-batches may differ by a row; targets are cut here, so their size would be constant.
        targets = map(_of_any_number, keras.tree.flatten(targets))
        results = self._call([*(values[key] for key in self._input_keys), *targets], piece)
        if self._num_shares is None:
            return None, results
        loss, *others = results
        return Part(loss, others[: self._num_shares]), others[self._num_shares :]

    def divisor(self):
        """Returns the divisor of the whole batch's loss, as `MicroBatchLoss.divisor`."""
        return None if self._loss is None else self._loss.divisor(self._batch.num_rows)

    def _run(self, tensors: list[Any], piece: Piece) -> tuple[list[Any], list[int]]:
        values = dict(zip(self._input_keys, tensors, strict=False))
        like = (self._batch.y, self._batch.sample_weight)
        y, sample_weight = keras.tree.pack_sequence_as(like, tensors[len(values) :])
        whole = SequencePart(y, sample_weight, self._batch.outputs_of(piece, values))
        pieces = pieces_of(whole, outputs_by_device(self._batch, piece, values))
        why_not, _, placements = self._judged
        checks, grown = [], []
        if self._metrics is not None:
            seen = [each.outputs for each in ([whole] if why_not else pieces)]
            checks = as_many_rows(self._model, keras.tree.flatten(seen), piece.num_rows)
        with tf.control_dependencies(checks):
            part = self._part(whole) if why_not else _added(on_each(pieces, self._part))
            if self._metrics is not None and placements is None:
                grown = self._growth(whole)
            elif self._metrics is not None:
                lengths = [each.length for each in pieces]
                grown = of_whole_sequences(on_each(pieces, self._growth), placements, lengths)
        if part is None:
            return grown, []
        self._num_shares = len(part.shares)
        return [part.loss, *part.shares, *grown], [0]

    def _part(self, piece: SequencePart) -> Part | None:
        return self._loss(piece.y, piece.sample_weight, piece.outputs)

    def _growth(self, piece: SequencePart) -> list[tf.Tensor]:
        return growth(self._metrics.summed, piece.y, piece.outputs, piece.sample_weight)

    def _prepare(self, whole: SequencePart, values: Values, piece: Piece) -> None:
        """Judges the loss over positions, and prepares its divisors, for the whole batch.

        Args:
            whole: The first micro-batch.
            values: Its outputs, by key.
            piece: Its rows.
        """
        by_device = outputs_by_device(self._batch, piece, values)
        # Rows are judged in a step that does not join outputs.
        sizes = [] if self._metrics is None else [self._batch.num_rows]
        if by_device:
            pieces = pieces_of(whole, by_device)
            self._judged = self._judgement(whole, [each.length for each in pieces])
            if self._judged.by_position:
                sizes.append(sum(each.length for each in pieces))
        numbers = self._batch.rows_of_examples(piece, values)
        self._loss = self._prepared(by_device or [whole.outputs], sizes, numbers)

    def _judgement(self, whole: SequencePart, lengths: Sequence) -> OverPositions:
        flat = keras.tree.flatten(whole.outputs)
        length = flat[0].shape[AXIS]
        judgement = adds_up_over_positions(
            self._model,
            self._metrics.summed,
            whole.y,
            whole.outputs,
            whole.sample_weight,
            list(map(mask_of, flat)),
            [] if length is None else [length, *lengths],
        )
        if judgement.why_not is not None:
            logging.info(
                "The loss of model '%s' reads whole sequences on the first device: %s.",
                self._model.name,
                judgement.why_not,
            )
        return judgement

    def _prepared(
        self, predictions: Sequence[Any], sizes: Sequence, numbers: Sequence
    ) -> MicroBatchLoss:
        """Prepares the loss's divisors, from shapes and masks of the whole batch's outputs.

        Args:
            predictions: The outputs of a micro-batch, whole or by device.
            sizes: The sizes of the first axes of the losses, as far as they are proved.
            numbers: How many rows of each output an example has; None for a single piece.
        """
        batch, flat = self._batch, [keras.tree.flatten(each) for each in predictions]
        with tf.control_dependencies(None), where_it_is(None):  # The host, which has the batch.
            whole = [
                _zeros(times(batch.num_rows, number), parts)
                for *parts, number in zip(*flat, numbers, strict=True)
            ]
            if any(mask_of(part) is not None for part in flat[0]):
                # Masks come from the inputs; nothing else of this call is used, or computed. It is
                # a training call: in inference, dropout returns its input itself, and removing the
                # mask from one would remove it from the other.
                with keras.StatelessScope(), traced_apart():
                    masked = keras.tree.flatten(self._model(batch.x, training=True))
                for tensor, like in zip(whole, masked, strict=True):
                    with_mask_of(tensor, like)
            compiled = compiled_loss(self._model)
            predicted = batch.packed(whole)
            return MicroBatchLoss(compiled, batch.y, batch.sample_weight, predicted, sizes)


def _added(parts: Sequence[Part]) -> Part:
    """Adds up the parts of the loss that the devices computed."""
    shares = zip(*(part.shares for part in parts), strict=True)
    return Part(tf.add_n([part.loss for part in parts]), [tf.add_n(list(each)) for each in shares])


def _of_any_number(rows):
    with where_it_is(rows):
        return of_any_number(rows)


def _zeros(num_rows, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a stand-in for an output of the whole batch, with the right shape and dtype.

    Args:
        num_rows: The rows of the whole batch's output.
        parts: The output of a micro-batch, whole or by device.
    """
    first, static = parts[0], [*parts[0].shape[1:]]
    with where_it_is(first):
        shape = tf.shape(first)[1:]
    if len(parts) > 1:
        length = sum(map(length_of, parts))
        shape = tf.concat([[length], shape[1:]], 0)
        static[0] = length if isinstance(length, int) else None
    whole = tf.zeros(tf.concat([[num_rows], shape], 0), first.dtype)
    return tf.ensure_shape(whole, [whole.shape[0], *static])
