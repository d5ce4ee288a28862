"""The loss of the whole batch: the sum of the micro-batches' parts, or that of the joined outputs.

It includes the losses that layers add, weighted by the micro-batches' shares of the batch, and each
weight's regularization, computed on the weight's device.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.pipeline.gradient_sums import OF_LOSS, GradientSums, read_by
from tfparallel.pipeline.micro_batches import Batch, Joined
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.seams.compiled import compiled_loss, loss_of_batch, with_losses
from tfparallel.seams.keras import storage_of
from tfparallel.step.piece_sums import whole_loss
from tfparallel.step.where_rows_meet import of_the_batch
from tfparallel.tracing.custom_gradient import is_differentiable
from tfparallel.variables.sharded import ShardedVariable

_BESIDE = -1  # The reader of a weight that is regularized: no stage.


class Regularized(NamedTuple):
    """A weight's regularization loss, on the weight's device.

    Attributes:
        loss: A scalar.
        tape: Its tape.
        parts: The weight itself, or its parts.
        others: Other weights that the regularizer reads, with their memory.
    """

    loss: tf.Tensor
    tape: tf.GradientTape
    parts: Sequence[keras.Variable]
    others: list[tuple[keras.Variable, tf.Variable]]


class ExtraLosses:
    """Additions to the compiled loss: losses that layers add, and regularization of weights.

    Args:
        model: The model.
        batch: The whole batch.
        added: The losses that layers added, by micro-batch of this process.
        others: The replicas in other processes.

    Attributes:
        losses: The losses of the whole batch, scalars.
        averages: Those among them that layers added.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Batch,
        added: Sequence[Sequence[tf.Tensor]],
        others: Others,
    ):
        self._regularized = list(_regularized(model))
        self._others = others
        self.averages = others.summed(_average(batch, added))
        self.losses = [*self.averages, *(term.loss for term in self._regularized)]

    def add_gradients(
        self, sums: GradientSums, seed_of: Callable[[tf.Tensor], tf.Tensor | None]
    ) -> None:
        """Adds the gradients of regularization to those of the weights, once per step.

        Only one worker adds them; the others add zeros, so all workers send the same tensors.

        Args:
            sums: The gradients of the weights.
            seed_of: Returns the upstream gradient of a regularization loss; None if it has none.
        """
        for term in self._regularized:
            with tf.device(_device_of(term.parts[0])):
                seed = seed_of(term.loss)
                if seed is None:
                    continue
                seed = tf.cast(seed, term.loss.dtype)
                in_memory = [*_storage_in(term.parts), *term.others]
                values = [value for _, value in in_memory]
                gradients = term.tape.gradient(term.loss, values, output_gradients=seed)
            for (part, value), gradient in zip(in_memory, gradients, strict=True):
                _add(sums, part, value, gradient, self._others, _BESIDE)


def _zeros_of(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        zeros = tf.zeros_like(gradient.values)
        return tf.IndexedSlices(zeros, gradient.indices, gradient.dense_shape)
    return None if gradient is None else tf.zeros_like(gradient)


def added_up(
    model: keras.Model,
    batch: Batch,
    shares: Sequence[tf.Tensor],
    outputs: list[tf.Tensor],
    extra: ExtraLosses,
) -> tf.Tensor:
    """Returns the loss from the shares of all micro-batches; updates the loss trackers.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        shares: Σ_m N_m / D by compiled loss.
        outputs: The flat outputs of any micro-batch, for their types.
        extra: The additions to the loss.
    """
    sums, types = [[share] for share in shares], batch.packed(of_the_batch(outputs, batch.num_rows))
    trackers = compiled_loss(model).metrics
    return whole_loss(model, sums, batch.y, types, batch.sample_weight, extra.losses, trackers)


class WholeLoss:
    """The loss of the joined outputs, and its gradients.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        joined: The outputs, flat.
        extra: The additions to the loss.
        differentiate: Whether to compute the gradients.

    Attributes:
        loss: A scalar, not scaled.
        predictions: The outputs in the model's own structure.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Batch,
        joined: list[Joined],
        extra: ExtraLosses,
        *,
        differentiate: bool,
    ):
        sources = itertools.chain(*(output.sources.values() for output in joined))
        watched = [t for t in (*sources, *extra.losses) if is_differentiable(t)]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            self.predictions = batch.packed([output.output() for output in joined])
            self.loss = _loss_of(model, batch, self.predictions, extra.losses)
            scaled = model.optimizer.scale_loss(self.loss)
        self._gradients: dict[int, Any] = {}
        self._of_weights: list[tuple[keras.Variable, tf.Variable, Any]] = []
        if differentiate:
            read = read_by(tape, model._trained())
            gradients = tape.gradient(scaled, [*watched, *(copy for _, copy in read)])
            self._gradients = dict(zip(map(id, watched), gradients, strict=False))
            of_weights = gradients[len(watched) :]
            self._of_weights = [
                (variable, copy, each)
                for (variable, copy), each in zip(read, of_weights, strict=True)
            ]

    def add_gradients(self, sums: GradientSums, others: Others) -> None:
        """Adds the gradients of the weights that the loss itself reads, on one worker."""
        for variable, copy, gradient in self._of_weights:
            _add(sums, variable, copy, gradient, others, OF_LOSS)

    def gradient(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns ∂ scaled loss / ∂ an output, the logits behind it, or an extra loss."""
        gradient = self._gradients.get(id(tensor))
        return None if gradient is None else tf.convert_to_tensor(gradient)


def _storage_in(parts: Sequence[keras.Variable]) -> list[tuple[keras.Variable, tf.Variable]]:
    """The memory of weights or parts; of sharded weights, all shares."""
    return [
        (part, value)
        for part in parts
        for value in (part.pieces if isinstance(part, ShardedVariable) else [storage_of(part)])
    ]


def _device_of(part: keras.Variable) -> str:
    return _storage_in([part])[0][1].device


def _add(sums: GradientSums, variable, value, gradient, others: Others, reader: int) -> None:
    """Adds a gradient of the whole batch on one worker, or on each worker those of its shares."""
    if isinstance(variable, ShardedVariable):
        sums.add(value, gradient, reader)
    else:
        sums.add(variable, gradient if others.is_first else _zeros_of(gradient), reader)


def _average(batch: Batch, added: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the batch's average Σ_m n_m/B of each loss that layers added."""
    return [
        tf.add_n([
            loss * piece.weight(loss.dtype)
            for piece, loss in zip(batch.local_pieces, terms, strict=True)
        ])
        for terms in zip(*added, strict=True)
    ]  # fmt: skip


def _loss_of(model: keras.Model, batch: Batch, predictions, extra) -> tf.Tensor:
    """Returns Keras's loss of the whole batch; Keras also updates the loss trackers."""
    with with_losses(model, extra):
        return loss_of_batch(model, batch.x, batch.y, predictions, batch.sample_weight)


def scale_of(model: keras.Model) -> tf.Tensor:
    """Returns the factor by which the optimizer scales the loss, for half precision."""
    return model.optimizer.scale_loss(tf.ones([], keras.backend.floatx()))


def _regularized(model):
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            parts = model._parts([variable])
            values = [value for _, value in _storage_in(parts)]
            with tf.device(_device_of(parts[0])), tf.GradientTape() as tape:
                tape.watch([value for value in values if value.trainable])
                loss = variable.regularizer(variable)
            watched, read = set(map(id, values)), read_by(tape, model._trained())
            others = [pair for pair in read if id(pair[1]) not in watched]
            yield Regularized(loss, tape, parts, others)
