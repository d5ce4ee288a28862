"""What the graph of a step calls for a micro-batch: a stage's layers, and behind the last the loss.

Both are traced with the first micro-batch, and called for all (`traced_once.py`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.data.shard import Shard
from tfparallel.pipeline.batch import Batch
from tfparallel.pipeline.cut import Key, LogitsOf, Stage, Values, with_mask_of
from tfparallel.pipeline.loss import MicroBatchLoss, Part
from tfparallel.pipeline.micro_batch import Pass, StepMemory, computing
from tfparallel.pipeline.pass_scope import PassScope
from tfparallel.pipeline.traced_once import TracedOnce
from tfparallel.step.terms import growth
from tfparallel.step.where_rows_meet import as_many_rows

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
    """

    def __init__(
        self, stage: Stage, batch: Batch, memory: StepMemory, scope: Callable[[], PassScope]
    ):
        self._stage = stage
        self._batch = batch
        self._memory = memory
        self._scope = scope
        self._call = TracedOnce(self._run, batch.shards)
        self._given: list[Key] = []
        self._made: list[Key] = []  # Of what `_run` returns, the first.
        self._num_losses = 0  # The next.
        self._moments: list[Any] = []  # The last, three tensors each.

    def __call__(self, taken: Values, shard: Shard) -> Made:
        """Makes the calls on the tensors of the stage's `inputs`."""
        self._given = [*taken]
        found = iter(self._call([*taken.values()], shard))
        values = {key: next(found) for key in self._made}
        losses = [next(found) for _ in range(self._num_losses)]
        moments = {key: (next(found), next(found), next(found)) for key in self._moments}
        return Made(values, losses, moments)

    def _run(self, tensors: list[Any], shard: Shard) -> list[Any]:
        taken = dict(zip(self._given, tensors, strict=True))
        self._batch.attach_logits(taken)
        own, scope = Pass(self._memory, self._stage.index, shard), self._scope()
        with computing(own), scope, scope.refusing_stateful_draws():
            made = self._stage.run(taken)
        self._batch.note_logits(made)
        self._made = [key for key in made if key not in taken]
        self._num_losses, self._moments = len(scope.losses), [*own.moments]
        values = [made[key] for key in self._made]
        return [*values, *scope.losses, *(each for of in own.moments.values() for each in of)]

    def is_reached(self, targets: Iterable[Key], source: Key | keras.Variable) -> bool:
        """Whether a gradient of tensors that it made, or of its losses, may reach a source."""
        num_made = len(self._made)
        places = [self._made.index(key) for key in targets if key in self._made]
        places += range(num_made, num_made + self._num_losses)
        if isinstance(source, keras.Variable):
            return self._call.reaches(places, source._value)
        return self._call.reaches(places, self._given.index(source))


class LossCall:
    """The compiled loss and metrics, of a micro-batch's outputs.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        with_metrics: Whether what the metrics grow by is wanted.
    """

    def __init__(self, model: keras.Model, batch: Batch, *, with_metrics: bool):
        self._model = model
        self._batch = batch
        self._with_metrics = with_metrics
        self._call = TracedOnce(self._run, batch.shards)
        self._loss: MicroBatchLoss | None = None
        self._given: list[Key] = []
        self._num_shares: int | None = None

    def __call__(self, values: Values, shard: Shard) -> tuple[Part | None, list[tf.Tensor]]:
        """Returns a micro-batch's part of the loss, and what its rows add to metrics' states."""
        if self._loss is None:
            self._loss = self._prepared(self._batch.outputs_of(shard, values))
        outputs = {*self._batch.output_keys}
        outputs |= {*map(LogitsOf, outputs)}
        self._given = [key for key in values if key in outputs]
        targets = keras.tree.flatten(self._batch.targets_of(shard))
        found = self._call([*(values[key] for key in self._given), *targets], shard)
        if self._num_shares is None:
            return None, found
        loss, *others = found
        return Part(loss, others[: self._num_shares]), others[self._num_shares :]

    def _run(self, tensors: list[Any], shard: Shard) -> list[Any]:
        values = dict(zip(self._given, tensors, strict=False))
        like = (self._batch.y, self._batch.sample_weight)
        y, sample_weight = keras.tree.pack_sequence_as(like, tensors[len(values) :])
        outputs = self._batch.outputs_of(shard, values)
        flat = keras.tree.flatten(outputs)
        with tf.control_dependencies(as_many_rows(self._model, flat, shard.num_rows)):
            part, grown = self._loss(y, sample_weight, outputs), []
            if self._with_metrics:
                grown = growth(self._model._compile_metrics, y, outputs, sample_weight)
        if part is None:
            return grown
        self._num_shares = len(part.shares)
        return [part.loss, *part.shares, *grown]

    def targets(self, values: Values) -> list[Key]:
        """Of what it was given, that which the loss depends on."""
        return [key for key in values if key in self._given and self._reads(key)]

    def _reads(self, key: Key) -> bool:
        return self._num_shares is not None and self._call.reaches([0], self._given.index(key))

    def _prepared(self, predictions) -> MicroBatchLoss:
        """Finds the loss's divisors, from shapes and masks of the whole batch's outputs."""
        batch, flat = self._batch, keras.tree.flatten(predictions)
        with tf.control_dependencies(None):
            whole = [
                tf.zeros(tf.concat([[batch.num_rows], tf.shape(t)[1:]], 0), t.dtype) for t in flat
            ]
            for tensor, part in zip(whole, flat, strict=True):
                tensor.set_shape([tensor.shape[0], *part.shape[1:]])
            if any(getattr(part, "_keras_mask", None) is not None for part in flat):
                # Masks come from the inputs; of this call nothing else is used, or computed.
                shown = keras.tree.flatten(self._model(batch.x, training=False))
                self._model._clear_losses()
                for tensor, like in zip(whole, shown, strict=True):
                    with_mask_of(tensor, like)
            compiled = self._model._compile_loss
            predicted = batch.packed(whole)
            return MicroBatchLoss(compiled, batch.y, batch.sample_weight, predicted)
