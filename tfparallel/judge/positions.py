"""Whether a layer treats each position of a sequence independently: judged like rows, on axis 1."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfparallel.extend import classes_of
from tfparallel.judge.host_random import HostRandom
from tfparallel.judge.kept_attributes import attributes_kept, kept_tensors, plain_attributes
from tfparallel.judge.placements import Shard
from tfparallel.judge.propagation import Judge, Judged, judged_graph
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import ROWS, depends_on_rows
from tfparallel.seams.keras import layers_in, mask_of, set_mask
from tfparallel.tracing.graphs import with_inner, writes_state
from tfparallel.tracing.trial_trace import traced_apart

AXIS = 1  # The positions of a sequence; axis 0 holds the examples.
_CHECKS = {"Assert", "EnsureShape"}  # Operations that may raise for a part.
_INDEXED = {"GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd"}


class Arguments(NamedTuple):
    """The arguments of a layer's call, flat.

    Attributes:
        leaves: The arguments; for tensors, only rank, dtype and sizes matter.
        cut: Whether each has a divided axis of positions.
        masked: Whether each has a Keras mask.
    """

    leaves: Sequence[Any]
    cut: Sequence[bool]
    masked: Sequence[bool]


def keeps_positions_apart(
    layer: keras.Layer, call: Callable, arguments: Arguments, lengths: Sequence[int] = ()
) -> bool:
    """Judges a call of a layer, for sequences of any length.

    Args:
        layer: The built layer.
        call: Takes leaves, with other tensors, and calls the layer.
        arguments: The arguments.
        lengths: The lengths of the whole and its parts, if known when the step is traced.

    Returns:
        Whether each output at a position depends only on the inputs there, and the call has no
        loss, state or random values; a user's layer must also compute the same for all lengths.
    """
    trace = _traced(layer, call, arguments, None)
    if trace is None or not _is_proved(layer, trace):
        return False
    if not classes_of(layer):
        return True
    others = [_traced(layer, call, arguments, length) for length in dict.fromkeys(lengths)]
    computed = computed_in(trace.graph)
    return all(other is not None and computed_in(other.graph) == computed for other in others)


class _Trace(NamedTuple):
    """A traced call.

    Attributes:
        graph: Its graph.
        divided: Inputs and masks that are divided.
        outputs: Its outputs and their masks.
        scope: The scope with its writes and added losses.
        states: The layer's variables, with their placeholders.
    """

    graph: tf.Graph
    divided: list[tf.Tensor]
    outputs: list
    scope: keras.StatelessScope
    states: list


def _traced(layer, call, arguments, length) -> _Trace | None:
    """Traces a call for a length, or any (None); returns None if Python keeps or draws values."""
    graph, before = judged_graph(layer.name), plain_attributes(layer)
    with attributes_kept(layer), graph.as_default(), traced_apart(), warnings.catch_warnings():
        # Placeholders, since the weights may not exist yet.
        states = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in layer.variables]
        pairs = zip(arguments.leaves, arguments.cut, strict=True)
        leaves = [_placeholder(leaf, is_cut, length) for leaf, is_cut in pairs]
        masks = [_mask_of(leaf) for leaf, has in zip(leaves, arguments.masked, strict=True) if has]
        warnings.simplefilter("ignore")  # Of a mask that a layer would lose but may never get.
        with keras.StatelessScope(states, collect_losses=True) as scope, HostRandom() as host:
            try:
                outputs = call(leaves)
            except Exception as error:  # A `call` may raise anything; a step will raise it again.
                logging.info("Layer '%s' cannot be traced on its own: %s", layer.name, error)
                return None
        # A kept value would be that of the last device.
        if (
            host.has_drawn
            or any(kept_tensors(layers_in(layer)))
            or plain_attributes(layer) != before
        ):
            return None
    flat = [each for each in keras.tree.flatten(outputs) if each is not None]
    flat += [mask for each in flat if (mask := mask_of(each)) is not None]
    divided = [leaf for leaf, is_cut in zip(leaves, arguments.cut, strict=True) if is_cut]
    return _Trace(graph, [*divided, *masks], flat, scope, states)


def _is_proved(layer, trace) -> bool:
    judge = Judge.of_rows(trace.graph, trace.divided, AXIS)
    operations = with_inner(trace.graph.get_operations())
    scope, states = trace.scope, trace.states
    return (
        bool(trace.outputs)
        and all(
            tf.is_symbolic_tensor(each) and is_divided(judge.of(each)) for each in trace.outputs
        )
        and not scope.losses
        and not any(draws(op) or writes_state(op) or op.type in _CHECKS for op in operations)
        and len(scope.state_mapping) == len(states)  # It writes only its own variables.
        and all(scope.get_current_value(variable) is value for variable, value in states)
    )


def is_divided(judged: Judged) -> bool:
    """Returns whether axis 1 of a tensor holds the positions, and no other axis depends on them."""
    is_along = judged.placement == Shard(AXIS) and judged.dims is not None
    if not is_along or judged.dims[AXIS] != ROWS:
        return False
    others = [*judged.dims[:AXIS], *judged.dims[AXIS + 1 :]]
    return not any(map(depends_on_rows, others))


def computed_in(graph: tf.Graph) -> list[int]:
    """Returns what a trace computes with numbers, as hashes, without what it does with sizes.

    If Python code branches on a length, or computes with it, they differ for another length.
    """
    hashes: dict[tuple[int, str], int] = {}
    computed = []
    for op in with_inner(graph.get_operations()):
        hashes[id(op.graph), op.name] = of = _computed_by(op, op.graph is graph, hashes)
        if op.type != "Reshape" and any(map(_is_number, op.outputs)):
            computed.append(of)
    return sorted(computed)


def _computed_by(op, is_outermost, hashes) -> int:
    """Returns a hash of an operation: its type, its numbers, and what computed its inputs."""

    def hash_of(tensor):
        return hashes.get((id(tensor.op.graph), tensor.op.name)), tensor.value_index

    if op.type == "Reshape":
        return hash_of(op.inputs[0])[0]
    if op.type == "Const":
        return hash(("Const", op.get_attr("value").SerializeToString()))
    if op.type == "Placeholder" and is_outermost:
        return hash(("Placeholder", op.name))
    # An index is read like a number, a length may become one, and sizes are left out.
    reads_all = op.type in _INDEXED or not any(map(_is_number, op.outputs))
    inputs = [
        hash_of(each)
        for each in op.inputs
        if reads_all or _is_number(each) or (op.type == "Cast" and each.op.type == "Const")
    ]
    attributes = op.node_def.attr.items()
    numbers = sorted((name, each.f) for name, each in attributes if each.WhichOneof("value") == "f")
    return hash((op.type, *numbers, *inputs))


def _is_number(tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_bool


def _placeholder(leaf, is_cut, length):
    if not keras.backend.is_keras_tensor(leaf) and not tf.is_tensor(leaf):
        return leaf
    shape = list(leaf.shape)
    if is_cut:
        shape[0], shape[AXIS] = None, length
    return tf.compat.v1.placeholder(leaf.dtype, shape)


def _mask_of(tensor) -> tf.Tensor:
    mask = tf.compat.v1.placeholder(tf.bool, [None, None])
    set_mask(tensor, mask)
    return mask
