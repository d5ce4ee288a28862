"""What a judged call may write: to a metric sums over the rows, elsewhere means or the same value.

A replica writes to its own copy of a variable; the copies are averaged, or summed for a metric. A
variable that was created outside of the strategy has one copy, which only the first replica writes.
"""

from collections.abc import Iterator, Mapping

import keras
import tensorflow as tf

from tfparallel.judge.metric_sums import SUMS, growth_of
from tfparallel.judge.placements import Mixed, Placement, Replicate, Sum
from tfparallel.judge.propagation import Judge
from tfparallel.seams.keras import layers_in, seed_generators_of, storage_of
from tfparallel.tracing.graphs import (
    called_by,
    is_in_function,
    is_within,
    with_inner,
    writes_state,
)

MEANS = (Replicate(), Sum(-1))
IN_FUNCTION = (
    "inside a `tf.function` of the layer, whose trace TensorFlow reuses for the other pieces "
    "(remove the decorator: Keras compiles the whole step)"
)
_ONE_COPY = (
    "computes a sum or a mean over the rows for a variable of which the replicas have no copies "
    "(create it in the function that builds the model, or as a layer's weight)"
)
_IN_BODY = "writes a variable in a function, a branch or a loop"


class Writes(keras.StatelessScope):
    """Collects the losses that a call adds, and the variables that it writes.

    Args:
        before: Variables and their values before the call.

    Attributes:
        written: The variables, by id; also those that no layer holds.
    """

    def __init__(self, before: list[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(before, collect_losses=True)
        self.written: dict[int, keras.Variable] = {}

    def add_update(self, update) -> None:
        """Keeps the value, and notes the variable."""
        super().add_update(update)
        self.written[id(update[0])] = update[0]


def forbidden_writes(
    judge: Judge, scope: Writes, layer: keras.Layer, sums: Mapping[int, tf.Tensor]
) -> Iterator[tuple[str, Placement, tf.Tensor]]:
    """Yields forbidden writes of a call to variables: what is written, and the value.

    Args:
        judge: The judge of its graph.
        scope: The scope in which it was traced.
        layer: The layer that was called.
        sums: The values before the call of variables that add up rows, by variable id.
    """
    parts, strategy = layers_in(layer), getattr(layer, "_strategy", None)
    seeds = {id(seed.state) for part in parts for seed in seed_generators_of(part)}
    of_layers = {id(v) for part in parts for v in part.variables} | set(sums)
    for key, variable in scope.written.items():
        value, what = scope.get_current_value(variable), f"variable '{variable.path}'"
        if not tf.is_symbolic_tensor(value):
            continue
        is_float = variable.dtype.startswith(("float", "bfloat"))
        if value.graph is not judge.graph:
            # An integer that no layer holds is the state of a seed generator.
            if not is_within(value.graph, judge.graph) or not (key in of_layers or is_float):
                continue
            if key not in seeds:
                yield what, Mixed(value.op, _IN_BODY), value
            elif is_in_function(value.graph, judge.graph):
                yield what, Mixed(value.op, f"draws {IN_FUNCTION}"), value
            continue
        if key in sums:
            placement, allowed = growth_of(judge, value, sums[key], sums.values()), SUMS
        else:
            placement, allowed = judge.of(value).placement, MEANS if is_float else (Replicate(),)
        has_copies = strategy in (None, getattr(storage_of(variable), "distribute_strategy", None))
        if placement in allowed and placement != Replicate() and not has_copies:
            placement = Mixed(value.op, _ONE_COPY)
        if placement not in allowed:
            yield what, placement, value


def raw_writes(judge: Judge) -> Iterator[tuple[tf.Operation, Placement]]:
    """Yields writes to variables unknown to Keras, unless the value is replicated."""
    for op in judge.graph.get_operations():
        if writes_state(op):
            for each in op.inputs[1:]:
                if judge.of(each).placement != Replicate():
                    yield op, judge.of(each).placement
        for graph in called_by(op):
            inner = next(filter(writes_state, with_inner(graph.get_operations())), None)
            if inner is not None:
                yield op, Mixed(inner, _IN_BODY)
