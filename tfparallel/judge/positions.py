"""Whether a layer treats each position of a sequence by itself: judged as rows are, on axis 1."""

import warnings
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from absl import logging

from tfparallel.judge.kept_attributes import attributes_kept, kept_tensors, plain_attributes
from tfparallel.judge.placements import Shard
from tfparallel.judge.propagation import Judge, judged_graph
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import ROWS, depends_on_rows
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.tracing.apart import traced_apart
from tfparallel.tracing.graphs import with_inner, writes_state

__all__ = ["AXIS", "keeps_positions_apart"]

AXIS = 1  # Where a sequence has its positions; axis 0 holds the examples.


def keeps_positions_apart(
    layer: keras.Layer,
    call: Callable,
    leaves: Sequence,
    cut: Sequence[bool],
    masked: Sequence[bool],
) -> bool:
    """Judges a call of a layer, of sequences of any length.

    Args:
        layer: The built layer.
        call: Takes the leaves, with other tensors, and calls it.
        leaves: The arguments, flat.
        cut: Which of them have an axis of positions that is divided.
        masked: Which of those have a mask of Keras's.

    Returns:
        Whether each output at a position is made of the inputs there, and nothing else is: no
        loss, no state, no random value.
    """
    graph, before = judged_graph(layer.name), plain_attributes(layer)
    with attributes_kept(layer), graph.as_default(), traced_apart(), warnings.catch_warnings():
        # Its weights, which it may not have yet.
        states = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in layer.variables]
        given = [_placeholder(leaf, own) for leaf, own in zip(leaves, cut, strict=True)]
        masks = [_mask_of(each) for each, own in zip(given, masked, strict=True) if own]
        warnings.simplefilter("ignore")  # That a layer would lose a mask, which it may never get.
        with keras.StatelessScope(states, collect_losses=True) as scope:
            try:
                outputs = call(given)
            except Exception as error:  # Whatever a `call` raises; a step will say it again.
                logging.info("Layer '%s' cannot be called apart: %s", layer.name, error)
                return False
        # What it keeps would be what the last device keeps.
        if any(kept_tensors(layer)) or plain_attributes(layer) != before:
            return False
    divided = [tensor for tensor, own in zip(given, cut, strict=True) if own]
    judge = Judge.of_rows(graph, [*divided, *masks], AXIS)
    flat = [each for each in keras.tree.flatten(outputs) if each is not None]
    flat += [mask for each in flat if (mask := mask_of(each)) is not None]
    operations = graph.get_operations()
    return (
        bool(flat)
        and all(tf.is_symbolic_tensor(each) and _is_apart(judge.of(each)) for each in flat)
        and not scope.losses
        and not any(draws(op) or writes_state(op) for op in with_inner(operations))
        and len(scope.state_mapping) == len(states)  # It writes none that it does not own.
        and all(scope.get_current_value(variable) is value for variable, value in states)
    )


def _is_apart(judged) -> bool:
    is_along = judged.placement == Shard(AXIS) and judged.dims is not None
    if not is_along or judged.dims[AXIS] != ROWS:
        return False
    others = [*judged.dims[:AXIS], *judged.dims[AXIS + 1 :]]
    return not any(map(depends_on_rows, others))


def _placeholder(leaf, is_cut):
    if not keras.backend.is_keras_tensor(leaf) and not tf.is_tensor(leaf):
        return leaf
    shape = list(leaf.shape)
    if is_cut:
        shape[0] = shape[AXIS] = None
    return tf.compat.v1.placeholder(leaf.dtype, shape)


def _mask_of(tensor) -> tf.Tensor:
    mask = tf.compat.v1.placeholder(tf.bool, [None, None])
    set_mask(tensor, mask)
    return mask
