"""The loss of the whole batch: added up of the micro-batches' parts, or of the joined outputs.

With the losses that layers add, weighted with the micro-batches' shares of the batch, and each
weight's regularization, which is computed where the weight is.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.pipeline.gradient_sums import OF_LOSS, GradientSums, read_by
from tfparallel.pipeline.micro_batches import Batch, Joined
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.seams.compiled import loss_of_batch, with_losses
from tfparallel.seams.keras import storage_of
from tfparallel.step.terms import whole_loss
from tfparallel.step.where_rows_meet import of_the_batch

__all__ = ["ExtraLosses", "WholeLoss", "added_up", "scale_of"]


_BESIDE = -1  # Who reads a weight to regularize it: no stage.


class Regularized(NamedTuple):
    """A weight's regularization loss, on the weight's device."""

    loss: tf.Tensor
    tape: tf.GradientTape
    parts: Sequence[keras.Variable]  # Of the weight: itself, unless it lies in several.


class ExtraLosses:
    """What comes to the compiled loss: losses that layers add, and weights' regularization.

    Args:
        model: The model.
        batch: The whole batch.
        added: What layers added, by micro-batch here.
        others: The replicas in other processes.

    Attributes:
        losses: For the whole batch, scalars.
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
        averages = others.summed(_average(batch, added))
        self.losses = [*averages, *(own.loss for own in self._regularized)]

    def add_gradients(
        self, sums: GradientSums, seed_of: Callable[[tf.Tensor], tf.Tensor | None]
    ) -> None:
        """Adds the regularizers' gradients to those of the weights, once a step.

        On one worker; the others add zeros, so that all send the same tensors.

        Args:
            sums: The gradients of the weights.
            seed_of: The gradient that a regularizer's loss has; None if nothing reaches it.
        """
        for own in self._regularized:
            with tf.device(storage_of(own.parts[0]).device):
                seed = seed_of(own.loss)
                if seed is None:
                    continue
                seed = tf.cast(seed, own.loss.dtype)
                values = list(map(storage_of, own.parts))
                found = own.tape.gradient(own.loss, values, output_gradients=seed)
            for part, gradient in zip(own.parts, found, strict=True):
                own_gradient = gradient if self._others.is_first else _zeros_of(gradient)
                sums.add(part, own_gradient, _BESIDE)


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
    """The loss, of what all micro-batches have of each compiled loss; tells the losses' trackers.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        shares: Σ_m N_m / D by compiled loss.
        outputs: Of any micro-batch, flat; their types count.
        extra: What comes to it.
    """
    sums, types = [[share] for share in shares], batch.packed(of_the_batch(outputs, batch.num_rows))
    return whole_loss(model, sums, batch.y, types, batch.sample_weight, extra.losses)


class WholeLoss:
    """The loss of the joined outputs, and its gradients in what it was computed of.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        joined: The outputs, flat.
        extra: What comes to it.
        differentiate: Whether the gradients are wanted.

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
        sources = itertools.chain(*(own.sources.values() for own in joined))
        watched = [t for t in (*sources, *extra.losses) if is_differentiable(t)]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            self.predictions = batch.packed([own.output() for own in joined])
            self.loss = _loss_of(model, batch, self.predictions, extra.losses)
            scaled = model.optimizer.scale_loss(self.loss)
        self._found: dict[int, Any] = {}
        self._of_weights: list[tuple[keras.Variable, Any]] = []
        if differentiate:
            read = read_by(tape, model._trained())
            gradients = tape.gradient(scaled, [*watched, *(copy for _, copy in read)])
            self._found = dict(zip(map(id, watched), gradients, strict=False))
            of_weights = gradients[len(watched) :]
            self._of_weights = [
                (own, found) for (own, _), found in zip(read, of_weights, strict=True)
            ]

    def add_gradients(self, sums: GradientSums, others: Others) -> None:
        """Adds those of the weights that the loss itself reads, on one worker."""
        for variable, gradient in self._of_weights:
            sums.add(variable, gradient if others.is_first else _zeros_of(gradient), OF_LOSS)

    def gradient(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """∂ scaled loss / ∂ an output, the logits behind it, or an extra loss."""
        found = self._found.get(id(tensor))
        return None if found is None else tf.convert_to_tensor(found)


def _average(batch: Batch, added: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Each loss that layers added: Σ_m n_m/B of the micro-batches' here."""
    return [
        tf.add_n([
            loss * shard.weight(loss.dtype)
            for shard, loss in zip(batch.own, terms, strict=True)
        ])
        for terms in zip(*added, strict=True)
    ]  # fmt: skip


def _loss_of(model: keras.Model, batch: Batch, predictions, extra) -> tf.Tensor:
    """Keras's own loss of the whole batch, which also updates the losses' trackers."""
    with with_losses(model, extra):
        return loss_of_batch(model, batch.x, batch.y, predictions, batch.sample_weight)


def scale_of(model: keras.Model) -> tf.Tensor:
    """By how much the optimizer scales the loss, for half precision."""
    return model.optimizer.scale_loss(tf.ones([], keras.backend.floatx()))


def _regularized(model):
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            parts = model._parts([variable])
            with tf.device(storage_of(parts[0]).device), tf.GradientTape() as tape:
                tape.watch(list(map(storage_of, parts)))
                loss = variable.regularizer(variable)
            yield Regularized(loss, tape, parts)
