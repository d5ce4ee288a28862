"""The layers of a judged call that draw random numbers."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.extend import attach
from tfparallel.judge.propagation import Judge
from tfparallel.judge.rules.draws import axis_of_rows, draws
from tfparallel.judge.where import place_in
from tfparallel.seams.keras import layers_in, seed_generators_of
from tfparallel.tracing.graphs import is_in_function, with_inner

__all__ = ["drawing_layers", "draws_in"]


def drawing_layers(layer: keras.Layer, judge: Judge) -> list[keras.Layer]:
    """Returns the layers that draw other random values in pieces than on one device.

    Tells their seed generators how to draw.
    """
    layers, axes, is_eager = {}, {}, tf.executing_eagerly()
    for op, drawn, innermost in draws_in(layer, judge.graph):
        rows = axis_of_rows(drawn)
        if op is drawn:
            is_by_row = rows == judge.of(op.outputs[0]).placement
        else:  # The trace of a function may be used again, for other rows.
            is_by_row = rows is not None and not is_in_function(drawn.graph, judge.graph)
        row_axes = {getattr(rows, "axis", None)}
        is_model = isinstance(innermost, keras.Model)  # Its layers draw for themselves.
        parts = [innermost] if is_model else layers_in(innermost)  # A recurrent layer has a cell.
        generators = [generator for part in parts for generator in seed_generators_of(part)]
        for generator in generators:
            row_axes |= axes.get(id(generator), set())
            axes[id(generator)] = row_axes
            attach(generator, _row_axes=frozenset(row_axes))
            if not is_by_row:
                attach(generator, _draws_by_row=False)
        # The shape of an eager draw does not tell where its rows are.
        if not is_by_row or (is_eager and not (generators and len(row_axes) == 1)):
            part, _ = place_in(layer, op, of_models=True)
            layers[id(part)] = part
    return list(layers.values())


def draws_in(
    layer: keras.Layer, graph: tf.Graph
) -> Iterator[tuple[tf.Operation, tf.Operation, keras.Layer]]:
    """Yields operations of the graph, the draws in them, and the layers of these."""
    for op in graph.get_operations():
        for drawn in filter(draws, with_inner([op])):
            # In a function, name scopes start anew.
            innermost, _ = place_in(place_in(layer, op)[0], drawn)
            yield op, drawn, innermost
