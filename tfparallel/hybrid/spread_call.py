"""A call of a model without training, spread over its replicas: what `evaluate` and `predict` make.

Each replica takes its share of the rows through its own stages, and the outputs are joined where
the loss is, in order, with their masks and the logits behind them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data import shard as shards
from tfparallel.data.partition import row_ranges
from tfparallel.data.shard import Shard
from tfparallel.extend import attach
from tfparallel.logits import logits_of, output_of, sources_of
from tfparallel.pipeline.pass_scope import PassScope, writable
from tfparallel.placement.copies import at_work, replicas_of
from tfparallel.replication.check_rows import check_rows
from tfparallel.replication.inputs import BatchInputs
from tfparallel.replication.replicated_call import checked_output

__all__ = ["SpreadCall"]


class SpreadCall:
    """Extends a model with several replicas."""

    _is_spread = False  # Whether the call that follows is.

    def __call__(self, *args, **kwargs):
        """Calls the model; within a step of `evaluate` or `predict`, on all replicas."""
        if not self._is_spread:
            return super().__call__(*args, **kwargs)
        attach(self, _is_spread=False)
        call = super().__call__
        if self.check_rows:
            num_rows = 2 * len(replicas_of(self.layout)) + 1
            check_rows(self, call, self._on_replicas, num_rows, args, kwargs)
        outputs, losses = self._on_replicas(self, call, args, kwargs)
        self._clear_losses()
        if losses:
            keras.Layer.add_loss(self, losses)  # A functional model refuses its own.
        return outputs

    def test_step(self, data):
        """One step of evaluation, as Keras's own."""
        with self._spreading():
            return super().test_step(data)

    def predict_step(self, data):
        """One step of prediction, as Keras's own."""
        with self._spreading():
            return super().predict_step(data)

    @contextlib.contextmanager
    def _spreading(self) -> Iterator[None]:
        attach(self, _is_spread=len(replicas_of(self.layout)) > 1)
        try:
            yield
        finally:
            attach(self, _is_spread=False)

    def _on_replicas(
        self, layer: keras.Layer, call: Callable, args: tuple, kwargs: dict
    ) -> tuple[Any, list[tf.Tensor]]:
        """Computes a call of the model, or of what is a part of it.

        Returns:
            The outputs of the whole batch, and the losses that layers added.
        """
        inputs = BatchInputs(args, kwargs)
        replicas = replicas_of(self.layout)  # Each worker computes all rows.
        ranges = row_ranges(inputs.num_rows, len(replicas))
        own_shards = [
            Shard(k, len(replicas), start, size, inputs.num_rows)
            for k, (start, size) in enumerate(ranges)
        ]
        found, losses = [], []
        for replica, shard, rows in zip(
            replicas, own_shards, inputs.split(own_shards), strict=True
        ):
            own_args, own_kwargs = inputs.pack(rows)
            scope = PassScope(writable(layer, "never"), False)
            with at_work(replica), shards.working_on(shard), scope:
                structure = call(*own_args, **own_kwargs)
            found.append([checked_output(layer, o) for o in keras.tree.flatten(structure)])
            losses.append([loss * shard.weight(loss.dtype) for loss in scope.losses])
        with tf.device(self._last_device):
            joined = [_joined(parts, own_shards) for parts in zip(*found, strict=True)]
            added = [tf.add_n(list(terms)) for terms in zip(*losses, strict=True)]
        return keras.tree.pack_sequence_as(structure, joined), added


def _joined(parts: tuple, own_shards: list[Shard]) -> tf.Tensor:
    """An output of the whole batch, of those of the replicas."""

    def rows(tensors):
        own = zip(own_shards, tensors, strict=True)
        return tf.concat([shard.without_dummy_row(tensor) for shard, tensor in own], 0)

    logits = [logits_of(part) for part in parts]
    pairs = zip(parts, logits, strict=True)
    sources = zip(*(sources_of(part, own) for part, own in pairs), strict=True)
    output = output_of([rows(tensors) for tensors in sources], logits[0])
    masks = [getattr(part, "_keras_mask", None) for part in parts]
    if masks[0] is not None:
        output._keras_mask = rows(masks)
    return output
