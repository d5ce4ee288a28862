"""A call of a whole model on two micro-batches, joined again: for a probe of its rows."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.data.shard import Shard, count_rows
from tfparallel.pipeline.micro_batch import Pass, StepMemory, computing
from tfparallel.pipeline.pass_scope import PassScope, writable

__all__ = ["in_two"]


def in_two(
    layer: keras.Layer, call: Callable, args: tuple, kwargs: dict
) -> tuple[Any, list[tf.Tensor]]:
    """Computes a call micro-batch by micro-batch, on no device in particular.

    Args:
        layer: The layer, its parts extended for micro-batches.
        call: Its own `__call__`.
        args: Tensors of shape `(batch, …)` among them.
        kwargs: Likewise.

    Returns:
        The outputs of the whole batch, and the losses that layers added.
    """
    leaves = keras.tree.flatten((args, kwargs))
    rows = [tf.is_tensor(leaf) and leaf.shape.rank != 0 for leaf in leaves]
    num_rows = count_rows(leaves[rows.index(True)])
    memory, outputs, losses = StepMemory(), [], []
    for index, (start, size) in enumerate(row_ranges(num_rows, 2)):
        shard = Shard(index, 2, start, size, num_rows)
        own = [
            shard.rows_used(leaf) if has_rows else leaf
            for leaf, has_rows in zip(leaves, rows, strict=True)
        ]
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), own)
        scope = PassScope(writable(layer, "never"), False)
        with computing(Pass(memory, 0, shard)), scope:
            structure = call(*own_args, **own_kwargs)
        outputs.append([shard.without_dummy_row(each) for each in keras.tree.flatten(structure)])
        losses.append([loss * shard.weight(loss.dtype) for loss in scope.losses])
    joined = [tf.concat(parts, 0) for parts in zip(*outputs, strict=True)]
    return joined, [tf.add_n(terms) for terms in zip(*losses, strict=True)]
