"""Calls a stage's layers on a micro-batch, and after the last stage the loss.

Both are traced with the first micro-batch and called for all (`traced_once.py`).
"""

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.data.rows_of_replica import Shard, of_any_number, where_it_is
from tfparallel.pipeline.allowed_writes import PassScope
from tfparallel.pipeline.micro_batch_loss import MicroBatchLoss, Part
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.pass_context import Pass, StepMemory, computing
from tfparallel.pipeline.stages import Key, LogitsOf, Stage, Values, with_mask_of
from tfparallel.pipeline.traced_once import MustTraceEach, TracedOnce
from tfparallel.seams.compiled import compiled_loss
from tfparallel.seams.keras import mask_of, storage_of
from tfparallel.step.loss_placement import as_many_rows
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.piece_sums import growth
from tfparallel.tracing.trial_trace import traced_apart

__all__ = ["LossCall", "StageCall", "StageOutputs"]


class StageOutputs(NamedTuple):
    """The results of a stage for a micro-batch.

    Attributes:
        values: Tensors, and the logits behind them.
        losses: The losses that its layers add.
        moments: The moments of batch normalization: `(n, mean, M)` by layer and call.
    """

    values: Values
    losses: list[tf.Tensor]
    moments: dict[Any, tuple]


class StageCall:
    """The layers of a stage, in training.

    Args:
        stage: The stage.
        batch: The whole batch.
        memory: The state that the step's passes share.
        scope: Returns the scope that checks the layers' writes.
        weights: The stage's trainable weights.
        each: Whether to trace each micro-batch.
    """

    def __init__(
        self,
        stage: Stage,
        batch: Batch,
        memory: StepMemory,
        scope: Callable[[], PassScope],
        weights: Iterable[keras.Variable],
        *,
        each: bool,
    ):
        self._stage = stage
        self._batch = batch
        self._memory = memory
        self._scope = scope
        self._call = TracedOnce(self._run, batch.shards, map(storage_of, weights), each=each)
        self._input_keys: list[Key] = []
        # The results of `_run`: values by these keys, losses, and the moments of batch norms.
        self._output_keys: list[Key] = []
        self._num_losses = 0
        self._moments: dict[Any, int] = {}  # The number of tensors of each layer.

    def __call__(self, inputs: Values, shard: Shard) -> StageOutputs:
        """Calls the layers on the tensors of the stage's `inputs`."""
        self._input_keys = [*inputs]
        results = iter(self._call([*inputs.values()], shard))
        values = {key: next(results) for key in self._output_keys}
        losses = [next(results) for _ in range(self._num_losses)]
        moments = {
            key: tuple(itertools.islice(results, number)) for key, number in self._moments.items()
        }
        return StageOutputs(values, losses, moments)

    def _run(self, tensors: list[Any], shard: Shard) -> tuple[list[Any], list[int]]:
        inputs = dict(zip(self._input_keys, tensors, strict=True))
        self._batch.attach_logits(inputs)
        stage_pass, scope = Pass(self._memory, self._stage.index, shard), self._scope()
        with computing(stage_pass), scope, scope.refusing_operations():
            outputs = self._stage.run(inputs, self._batch.masks)
        self._batch.note_logits(outputs)
        outputs = _distinct(outputs, inputs)
        self._output_keys = [key for key in outputs if key not in inputs]
        self._num_losses = len(scope.losses)
        self._moments = {key: len(moments) for key, moments in stage_pass.moments.items()}
        results = [*(outputs[key] for key in self._output_keys), *scope.losses]
        # A tensor that its readers recompute from logits has no gradient of its own.
        remade = {key for key, logits in self._batch.behind.items() if logits.operation is not None}
        targets = [place for place, key in enumerate(self._output_keys) if key not in remade]
        targets += range(len(self._output_keys), len(results))
        moments = itertools.chain.from_iterable(stage_pass.moments.values())
        return [*results, *moments], targets

    def check_seeded(self, keys: Collection[Key]) -> None:
        """Raises unless each target of the stage has a gradient.

        Args:
            keys: The tensors that have one.

        Raises:
            MustTraceEach: If another target has none, since no loss depends on it. If each
                micro-batch is traced, nothing is required.
        """
        targets = {key for k, key in enumerate(self._output_keys) if k in self._call.targets}
        if targets - {*keys}:
            raise MustTraceEach


def _distinct(outputs: Values, inputs: Values) -> Values:
    """Gives each key its own tensor: one under two keys would count its gradient twice.

    A layer may return its input, and the logits behind one output may be another output.
    """
    seen, distinct = {id(tensor) for tensor in inputs.values()}, dict(outputs)
    for key, tensor in outputs.items():
        if key in inputs or tensor is None:
            continue
        if id(tensor) in seen and is_differentiable(tensor):
            distinct[key] = with_mask_of(tf.identity(tensor), tensor)
        seen.add(id(distinct[key]))
    return distinct


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
        weights = map(storage_of, model._trained())  # A loss may read some of them.
        self._call = TracedOnce(self._run, batch.shards, weights, each=each)
        self._loss: MicroBatchLoss | None = None
        self._input_keys: list[Key] = []
        self._num_shares: int | None = None

    def __call__(
        self, values: Values, targets: Any, shard: Shard
    ) -> tuple[Part | None, list[tf.Tensor]]:
        """Returns a micro-batch's part of the loss, and the increments of the metrics' states."""
        if self._loss is None:
            self._loss = self._prepared(self._batch.outputs_of(shard, values))
        outputs = {*self._batch.output_keys}
        outputs |= {*map(LogitsOf, outputs)}
        self._input_keys = [key for key in values if key in outputs]
        # Micro-batches may differ by a row; targets are cut here, so their size would be constant.
        targets = map(of_any_number, keras.tree.flatten(targets))
        results = self._call([*(values[key] for key in self._input_keys), *targets], shard)
        if self._num_shares is None:
            return None, results
        loss, *others = results
        return Part(loss, others[: self._num_shares]), others[self._num_shares :]

    def divisor(self):
        """Returns the divisor of the whole batch's loss, as `MicroBatchLoss.divisor`."""
        return None if self._loss is None else self._loss.divisor(self._batch.num_rows)

    def _run(self, tensors: list[Any], shard: Shard) -> tuple[list[Any], list[int]]:
        values = dict(zip(self._input_keys, tensors, strict=False))
        like = (self._batch.y, self._batch.sample_weight)
        y, sample_weight = keras.tree.pack_sequence_as(like, tensors[len(values) :])
        outputs = self._batch.outputs_of(shard, values)
        flat, checks, grown = keras.tree.flatten(outputs), [], []
        if self._metrics is not None:
            checks = as_many_rows(self._model, flat, shard.num_rows)
        with tf.control_dependencies(checks):
            part = self._loss(y, sample_weight, outputs)
            if self._metrics is not None:
                grown = growth(self._metrics.summed, y, outputs, sample_weight)
        if part is None:
            return grown, []
        self._num_shares = len(part.shares)
        return [part.loss, *part.shares, *grown], [0]

    def _prepared(self, predictions) -> MicroBatchLoss:
        """Prepares the loss's divisors, from shapes and masks of the whole batch's outputs."""
        batch, flat = self._batch, keras.tree.flatten(predictions)
        with tf.control_dependencies(None), where_it_is(None):  # The host, which has the batch.
            whole = [_zeros(batch.num_rows, part) for part in flat]
            if any(mask_of(part) is not None for part in flat):
                # Masks come from the inputs; nothing else of this call is used, or computed. It is
                # a training call: in inference, dropout returns its input itself, and removing the
                # mask from one would remove it from the other.
                with keras.StatelessScope(), traced_apart():
                    masked = keras.tree.flatten(self._model(batch.x, training=True))
                for tensor, like in zip(whole, masked, strict=True):
                    with_mask_of(tensor, like)
            compiled = compiled_loss(self._model)
            predicted = batch.packed(whole)
            return MicroBatchLoss(compiled, batch.y, batch.sample_weight, predicted)


def _zeros(num_rows, part: tf.Tensor) -> tf.Tensor:
    """Returns a stand-in for an output of the whole batch, with the right shape and dtype."""
    with where_it_is(part):
        shape = tf.shape(part)[1:]
    whole = tf.zeros(tf.concat([[num_rows], shape], 0), part.dtype)
    return tf.ensure_shape(whole, [whole.shape[0], *part.shape[1:]])
