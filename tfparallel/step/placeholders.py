"""Placeholders for targets, outputs and weights, in whose place a loss or a metric is judged."""

from typing import Any

import keras
import tensorflow as tf

from tfparallel.judge.placements import Replicate
from tfparallel.judge.positions import AXIS
from tfparallel.judge.propagation import Judge, Judged, judged_graph
from tfparallel.judge.size import size_named
from tfparallel.seams.keras import set_mask

_EXAMPLES = size_named("examples")


def has_positions(leaf: Any, length: int | None) -> bool:
    """Returns whether axis 1 of a tensor holds positions, as in outputs of this length."""
    if leaf is None or isinstance(leaf, tf.__internal__.CompositeTensor):
        return False
    shape = tf.TensorShape(leaf.shape)
    return shape.rank is not None and shape.rank > AXIS and shape[AXIS] == length


def placeholders(
    name, types, lengths=None, static_rows=None
) -> tuple[tf.Graph, dict[str, Judged], Any]:
    """Creates a graph with targets, masked outputs and weights of any number of rows.

    Args:
        name: The name of the graph.
        types: The targets, outputs, weights and masks, or their types.
        lengths: To judge positions: the length of the outputs, and of the placeholders in their
            place. By default, rows are judged.
        static_rows: The number of rows that Python is told; by default, none.
    """
    graph, rows, fixed = judged_graph(name), [], {}
    with graph.as_default():

        def placeholder(leaf):
            if leaf is None:
                return None
            shape = tf.TensorShape(leaf.shape)
            if shape.rank == 0:
                tensor = tf.compat.v1.placeholder(leaf.dtype, [])
                fixed[tensor.name] = Judged(Replicate(), ())
                return tensor
            sizes, is_divided = [static_rows, *shape[1:]], True
            if lengths is not None and (is_divided := has_positions(leaf, lengths[0])):
                sizes[AXIS] = lengths[1]
            tensor = tf.compat.v1.placeholder(leaf.dtype, sizes)
            if is_divided:
                rows.append(tensor)
            return tensor

        y, outputs, sample_weight, masks = keras.tree.map_structure(placeholder, types)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=False):
            if mask is not None:
                set_mask(output, mask)
    if lengths is None:
        return graph, fixed | Judge.of_rows(graph, rows).judged, (y, outputs, sample_weight)
    judged = Judge.of_rows(graph, rows, AXIS).judged
    judged = {k: each._replace(dims=(_EXAMPLES, *each.dims[1:])) for k, each in judged.items()}
    return graph, fixed | judged, (y, outputs, sample_weight)
