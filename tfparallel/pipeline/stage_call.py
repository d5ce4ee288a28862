"""What the graph of a step calls for a micro-batch: a stage's layers, and behind the last the loss.

Both are traced with the first micro-batch, and called for all (`traced_once.py`).
"""

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.data.rows_of_replica import Shard, of_any_number, where_it_is
from tfparallel.pipeline.micro_batch_loss import MicroBatchLoss, Part
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.pass_context import Pass, StepMemory, computing
from tfparallel.pipeline.pass_writes import PassScope
from tfparallel.pipeline.stages import Key, LogitsOf, Stage, Values, with_mask_of
from tfparallel.pipeline.traced_once import MustTraceEach, TracedOnce
from tfparallel.seams.compiled import compiled_loss
from tfparallel.seams.keras import mask_of, storage_of
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.terms import growth
from tfparallel.step.where_rows_meet import as_many_rows
from tfparallel.tracing.apart import traced_apart

__all__ = ["LossCall", "Made", "StageCall"]


class Made(NamedTuple):
    """What a stage makes of a micro-batch.

    Attributes:
        values: Tensors, and the logits behind them.
        losses: What its layers add to the loss.
        moments: What batch normalization has seen: `(n, mean, M)` by layer and call.
    """

    values: Values
    losses: list[tf.Tensor]
    moments: dict[Any, tuple]


class StageCall:
    """The layers of a stage, in training.

    Args:
        stage: The stage.
        batch: The whole batch.
        memory: What the step's passes share.
        scope: Returns what looks at the layers' writes.
        weights: The stage's, that are trained.
        each: Whether each micro-batch is traced.
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
        values = list(map(storage_of, weights))
        self._call = TracedOnce(self._run, batch.shards, values, each=each)
        self._given: list[Key] = []
        # What `_run` returns: values by these keys, losses, and the moments of batch norms.
        self._made: list[Key] = []
        self._num_losses = 0
        self._moments: dict[Any, int] = {}  # How many tensors each layer keeps.

    def __call__(self, taken: Values, shard: Shard) -> Made:
        """Makes the calls on the tensors of the stage's `inputs`."""
        self._given = [*taken]
        found = iter(self._call([*taken.values()], shard))
        values = {key: next(found) for key in self._made}
        losses = [next(found) for _ in range(self._num_losses)]
        moments = {
            key: tuple(itertools.islice(found, number)) for key, number in self._moments.items()
        }
        return Made(values, losses, moments)

    def _run(self, tensors: list[Any], shard: Shard) -> tuple[list[Any], list[int]]:
        taken = dict(zip(self._given, tensors, strict=True))
        self._batch.attach_logits(taken)
        own, scope = Pass(self._memory, self._stage.index, shard), self._scope()
        with computing(own), scope, scope.refusing_operations():
            made = self._stage.run(taken, self._batch.masks)
        self._batch.note_logits(made)
        made = _each_by_itself(made, taken)
        self._made = [key for key in made if key not in taken]
        self._num_losses = len(scope.losses)
        self._moments = {key: len(moments) for key, moments in own.moments.items()}
        found = [*(made[key] for key in self._made), *scope.losses]
        # What is made again of its logits wherever it is read has no gradient of its own.
        remade = {key for key, logits in self._batch.behind.items() if logits.operation is not None}
        targets = [place for place, key in enumerate(self._made) if key not in remade]
        targets += range(len(self._made), len(found))
        return [*found, *(each for moments in own.moments.values() for each in moments)], targets

    def check_seeded(self, keys: Collection[Key]) -> None:
        """Raises unless a gradient comes for each target that it made.

        Args:
            keys: The tensors for which one has come back.

        Raises:
            MustTraceEach: If there is none for another, which no loss depends on. Of a stage whose
                micro-batches are traced one by one nothing is asked.
        """
        targets = {key for place, key in enumerate(self._made) if place in self._call.targets}
        if targets - {*keys}:
            raise MustTraceEach


def _each_by_itself(made: Values, taken: Values) -> Values:
    """Gives each key a tensor of its own: one under two keys would count its gradient twice.

    A layer may return its input, and the logits behind one output may be another output.
    """
    seen, found = {id(tensor) for tensor in taken.values()}, dict(made)
    for key, tensor in made.items():
        if key in taken or tensor is None:
            continue
        if id(tensor) in seen and is_differentiable(tensor):
            found[key] = with_mask_of(tf.identity(tensor), tensor)
        seen.add(id(found[key]))
    return found


class LossCall:
    """The compiled loss and metrics, of a micro-batch's outputs.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        metrics: Those of which it is wanted what they grow by; None for none, in a step whose
            outputs all meet.
        each: Whether each micro-batch is traced.
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
        weights = list(map(storage_of, model._trained()))  # Of which a loss may read some.
        self._call = TracedOnce(self._run, batch.shards, weights, each=each)
        self._loss: MicroBatchLoss | None = None
        self._given: list[Key] = []
        self._num_shares: int | None = None

    def __call__(
        self, values: Values, targets: Any, shard: Shard
    ) -> tuple[Part | None, list[tf.Tensor]]:
        """Returns a micro-batch's part of the loss, and what its rows add to metrics' states."""
        if self._loss is None:
            self._loss = self._prepared(self._batch.outputs_of(shard, values))
        outputs = {*self._batch.output_keys}
        outputs |= {*map(LogitsOf, outputs)}
        self._given = [key for key in values if key in outputs]
        # Micro-batches may differ by a row, which is known of targets, as they are cut here.
        targets = map(of_any_number, keras.tree.flatten(targets))
        found = self._call([*(values[key] for key in self._given), *targets], shard)
        if self._num_shares is None:
            return None, found
        loss, *others = found
        return Part(loss, others[: self._num_shares]), others[self._num_shares :]

    def divisor(self):
        """By what the loss of the whole batch is divided, as `MicroBatchLoss.divisor` has it."""
        return None if self._loss is None else self._loss.divisor(self._batch.num_rows)

    def _run(self, tensors: list[Any], shard: Shard) -> tuple[list[Any], list[int]]:
        values = dict(zip(self._given, tensors, strict=False))
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
        """Finds the loss's divisors, from shapes and masks of the whole batch's outputs."""
        batch, flat = self._batch, keras.tree.flatten(predictions)
        with tf.control_dependencies(None), where_it_is(None):  # The host, which has the batch.
            whole = [_zeros(batch.num_rows, part) for part in flat]
            if any(mask_of(part) is not None for part in flat):
                # Masks come from the inputs; of this call nothing else is used, or computed. It is
                # one in training: in inference a dropout hands on the tensor that it is given, and
                # what takes the mask off the one takes it off the other.
                with keras.StatelessScope(), traced_apart():
                    shown = keras.tree.flatten(self._model(batch.x, training=True))
                for tensor, like in zip(whole, shown, strict=True):
                    with_mask_of(tensor, like)
            compiled = compiled_loss(self._model)
            predicted = batch.packed(whole)
            return MicroBatchLoss(compiled, batch.y, batch.sample_weight, predicted)


def _zeros(num_rows, part: tf.Tensor) -> tf.Tensor:
    """An output of the whole batch, of which only the shape counts, like that of a piece."""
    with where_it_is(part):
        shape = tf.shape(part)[1:]
    whole = tf.zeros(tf.concat([[num_rows], shape], 0), part.dtype)
    return tf.ensure_shape(whole, [whole.shape[0], *part.shape[1:]])
