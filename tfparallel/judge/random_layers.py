"""The layers of a judged call that draw random numbers."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.extend import attach
from tfparallel.judge.placements import Shard
from tfparallel.judge.propagation import Judge
from tfparallel.judge.rules.draws import GLOBAL_SEED, draws, is_seed_as_number, row_draw_of
from tfparallel.judge.source_line import place_in
from tfparallel.seams.keras import layers_in, seed_generators_of
from tfparallel.tracing.graphs import is_in_function, with_inner


def drawing_layers(layer: keras.Layer, judge: Judge) -> list[keras.Layer]:
    """Returns the layers that draw other random values in pieces than on one device.

    Tells their seed generators how to draw.
    """
    layers: dict[int, keras.Layer] = {}
    axes: dict[int, set] = {}
    known = {str(id(each)): each for each in _generators_of(layers_in(layer))}
    for op, drawn, innermost in draws_in(layer, judge.graph):
        # The layers of a model draw for themselves; a recurrent layer has a cell.
        is_model = isinstance(innermost, keras.Model)
        generators = _generators_of([innermost] if is_model else layers_in(innermost))
        draw = row_draw_of(drawn)
        generator = None if draw is None else known.get(draw.source)
        if generator is not None:
            generators = [*generators, generator]
            axes.setdefault(id(generator), set()).add(getattr(draw.rows, "axis", None))
            attach(generator, _row_axes=frozenset(axes[id(generator)]))
            # The shape of an eager draw does not tell where its rows are.
            is_by_row = not tf.executing_eagerly() or len(axes[id(generator)]) == 1
            # What a layer does not draw in a call, it draws in a backward pass.
            is_by_row &= draw.is_in_call or (is_model and generator in generators[:-1])
        else:
            is_global = draw is not None and draw.source == GLOBAL_SEED
            is_by_row = is_global and not tf.executing_eagerly()
        if not is_by_row or not _is_right(judge, op, drawn, draw.rows):
            part, _ = place_in(layer, op, of_models=True)
            layers[id(part)] = part
            for each in generators:
                attach(each, _draws_by_row=False)
    return list(layers.values())


def _generators_of(parts) -> list[keras.random.SeedGenerator]:
    return [generator for part in parts for generator in seed_generators_of(part)]


def _is_right(judge, op, drawn, rows) -> bool:
    """Whether the judge sees the rows where the draw has them."""
    if op is drawn:
        return rows == judge.of(op.outputs[0]).placement
    # A loop may run once for each row, and the trace of a function be used for other rows.
    if not isinstance(rows, Shard) or is_in_function(drawn.graph, judge.graph):
        return False
    for out in op.outputs:
        judge.of(out)
    calls = judge.in_all_calls(drawn.outputs[0])
    return bool(calls) and all(each.placement == rows for each in calls)


def draws_in(
    layer: keras.Layer, graph: tf.Graph
) -> Iterator[tuple[tf.Operation, tf.Operation, keras.Layer]]:
    """Yields operations of the graph, the draws in them, and the layers of these."""
    for op in graph.get_operations():
        for drawn in with_inner([op]):
            if not (draws(drawn) or is_seed_as_number(drawn)):
                continue
            # In a function, name scopes start anew.
            innermost, _ = place_in(place_in(layer, op)[0], drawn)
            yield op, drawn, innermost
