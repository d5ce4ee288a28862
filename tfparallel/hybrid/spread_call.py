"""A call of a model without training, spread over its replicas: what `evaluate` and `predict` make.

Each replica, of all workers, takes its share of the rows through its own stages. The outputs are
joined where the loss is, in order, with their masks and the logits behind them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data import shard as shards
from tfparallel.data.partition import row_ranges
from tfparallel.data.shard import Shard
from tfparallel.extend import attach
from tfparallel.logits import logits_of, output_of, sources_of
from tfparallel.pipeline.others import Others
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
        others = Others(self.layout.mesh.data, self._workers)
        outputs, losses = self._on_replicas(self, call, args, kwargs, others)
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
        attach(self, _is_spread=self.layout.mesh.data > 1)
        try:
            yield
        finally:
            attach(self, _is_spread=False)

    def _on_replicas(
        self,
        layer: keras.Layer,
        call: Callable,
        args: tuple,
        kwargs: dict,
        others: Others | None = None,
    ) -> tuple[Any, list[tf.Tensor]]:
        """Computes a call of the model, or of what is a part of it.

        Args:
            layer: The model, or the part.
            call: Its own `__call__`.
            args: Tensors of shape `(batch, …)` among them.
            kwargs: Likewise.
            others: The replicas of all workers; those of this process alone by default, as a probe
                wants it.

        Returns:
            The outputs of the whole batch, and the losses that layers added.
        """
        inputs = BatchInputs(args, kwargs)
        replicas = replicas_of(self.layout)
        others = others or Others(len(replicas))
        number = others.num_replicas
        all_shards = [
            Shard(k, number, start, size, inputs.num_rows)
            for k, (start, size) in enumerate(row_ranges(inputs.num_rows, number))
        ]
        own_shards = others.own(all_shards)
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

            def joined(parts):
                rows = zip(own_shards, parts, strict=True)
                own = tf.concat([shard.without_dummy_row(part) for shard, part in rows], 0)
                return others.joined(own, all_shards)

            flat = [_output(parts, joined) for parts in zip(*found, strict=True)]
            added = [tf.add_n(list(terms)) for terms in zip(*losses, strict=True)]
            added = others.summed(added)
        return keras.tree.pack_sequence_as(structure, flat), added


def _output(parts: tuple, joined: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> tf.Tensor:
    """An output of the whole batch, of those of the replicas; `joined` joins the rows."""
    logits = [logits_of(part) for part in parts]
    pairs = zip(parts, logits, strict=True)
    sources = zip(*(sources_of(part, own) for part, own in pairs), strict=True)
    output = output_of([joined(tensors) for tensors in sources], logits[0])
    masks = [getattr(part, "_keras_mask", None) for part in parts]
    if masks[0] is not None:
        output._keras_mask = joined(masks)
    return output
