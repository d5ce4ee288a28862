"""The loss of the whole batch: what Keras computes of the joined outputs, once a step.

With the losses that layers add, weighted with the micro-batches' shares of the batch, and each
weight's regularization, which is computed where the weight is.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.pipeline.batch import Batch, Joined
from tfparallel.pipeline.gradient_sums import GradientSums

__all__ = ["WholeLoss", "average_of_added", "loss_of", "scale_of"]


class Regularized(NamedTuple):
    """A weight's regularization loss, on the weight's device."""

    loss: tf.Tensor
    tape: tf.GradientTape
    variable: keras.Variable


class WholeLoss:
    """The loss, and its gradients in what it was computed of.

    Args:
        model: The model, compiled.
        batch: The whole batch.
        joined: The outputs, flat.
        added: What layers added, for the whole batch.
        differentiate: Whether the gradients are wanted.

    Attributes:
        loss: A scalar, not scaled.
        extra: The part of it that comes from added losses and regularizers.
        predictions: The outputs in the model's own structure.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Batch,
        joined: list[Joined],
        added: list[tf.Tensor],
        *,
        differentiate: bool,
    ):
        self._model = model
        self._regularized = list(_regularized(model))
        self.extra = [*added, *(own.loss for own in self._regularized)]
        sources = itertools.chain(*(own.sources.values() for own in joined))
        watched = [tensor for tensor in (*sources, *self.extra) if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            self.predictions = batch.packed([own.output() for own in joined])
            self.loss = loss_of(model, batch, self.predictions, self.extra)
            scaled = model.optimizer.scale_loss(self.loss)
        self._found: dict[int, Any] | None = None
        if differentiate:
            gradients = tape.gradient(scaled, watched)
            self._found = dict(zip(map(id, watched), gradients, strict=True))

    def gradient(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """∂ scaled loss / ∂ an output, or the logits behind it."""
        found = self._found.get(id(tensor))
        return None if found is None else tf.convert_to_tensor(found)

    def add_regularizers(self, sums: GradientSums) -> None:
        """Adds the regularizers' gradients to those of the weights, once a step."""
        for own in self._regularized:
            with tf.device(own.variable._value.device):
                seed = scale_of(self._model)
                if self._found is not None:
                    seed = self._found.get(id(own.loss))
                if seed is not None:
                    seed = tf.cast(seed, own.loss.dtype)
                    found = own.tape.gradient(own.loss, own.variable._value, output_gradients=seed)
                    sums.add(own.variable, found)


def average_of_added(batch: Batch, added: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Each loss that layers added, of the whole batch: Σ_m n_m/B of the micro-batches'."""
    return [
        tf.add_n([
            loss * shard.weight(loss.dtype)
            for shard, loss in zip(batch.shards, terms, strict=True)
        ])
        for terms in zip(*added, strict=True)
    ]  # fmt: skip


def loss_of(model: keras.Model, batch: Batch, predictions, extra: list[tf.Tensor]) -> tf.Tensor:
    """Keras's own loss of the whole batch, which also updates the losses' trackers."""
    object.__setattr__(model, "_losses_override", extra)
    try:
        return model._compute_loss(
            x=batch.x,
            y=batch.y,
            y_pred=predictions,
            sample_weight=batch.sample_weight,
            training=True,
        )
    finally:
        object.__setattr__(model, "_losses_override", [])


def scale_of(model: keras.Model) -> tf.Tensor:
    """By how much the optimizer scales the loss, for half precision."""
    return model.optimizer.scale_loss(tf.ones([], keras.backend.floatx()))


def _regularized(model):
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            with tf.device(variable._value.device), tf.GradientTape() as tape:
                tape.watch(variable._value)
                loss = variable.regularizer(variable)
            yield Regularized(loss, tape, variable)
