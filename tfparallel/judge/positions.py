"""Whether a layer treats each position of a sequence by itself: judged as rows are, on axis 1."""

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfparallel.judge.kept_attributes import attributes_kept, kept_tensors, plain_attributes
from tfparallel.judge.placements import Shard
from tfparallel.judge.propagation import Judge, judged_graph
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import ROWS, depends_on_rows
from tfparallel.seams.keras import layers_in, mask_of, set_mask
from tfparallel.tracing.apart import traced_apart
from tfparallel.tracing.graphs import with_inner, writes_state

__all__ = ["AXIS", "Arguments", "keeps_positions_apart"]

AXIS = 1  # Where a sequence has its positions; axis 0 holds the examples.
_CHECKS = {"Assert", "EnsureShape"}  # What would raise for a part.


class Arguments(NamedTuple):
    """What a layer is called with, flat.

    Attributes:
        leaves: The arguments; of tensors rank, type and sizes matter.
        cut: Which of them have an axis of positions that is divided.
        masked: Which of those have a mask of Keras's.
    """

    leaves: Sequence[Any]
    cut: Sequence[bool]
    masked: Sequence[bool]


def keeps_positions_apart(
    layer: keras.Layer, call: Callable, given: Arguments, lengths: Sequence[int] = ()
) -> bool:
    """Judges a call of a layer, of sequences of any length.

    Args:
        layer: The built layer.
        call: Takes the leaves, with other tensors, and calls it.
        given: The arguments.
        lengths: Of the whole and of its parts, if they are known when the step is traced.

    Returns:
        Whether each output at a position is made of the inputs there, and nothing else is: no
        loss, no state, no random value; and a layer of the user's does the same for all lengths.
    """
    trace = _traced(layer, call, given, None)
    if trace is None or not _is_proved(layer, trace):
        return False
    if all(type(part).__module__.startswith("keras.") for part in layers_in(layer)):
        return True
    # Python may branch on a length, and compute with it.
    others = [_traced(layer, call, given, length) for length in dict.fromkeys(lengths)]
    return all(other is not None and _computed(other) == _computed(trace) for other in others)


class _Trace(NamedTuple):
    """A call, traced.

    Attributes:
        graph: Its graph.
        divided: Inputs and masks that are divided.
        outputs: What it returned, and its masks.
        scope: What it wrote, and added to the loss.
        states: The layer's variables, with what stands for them.
    """

    graph: tf.Graph
    divided: list[tf.Tensor]
    outputs: list
    scope: keras.StatelessScope
    states: list


def _traced(layer, call, given, length) -> _Trace | None:
    """A call of sequences of a length, None for any; nothing if Python keeps or draws something."""
    graph, before = judged_graph(layer.name), plain_attributes(layer)
    drawn = random.getstate(), np.random.get_state()
    with attributes_kept(layer), graph.as_default(), traced_apart(), warnings.catch_warnings():
        # Its weights, which it may not have yet.
        states = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in layer.variables]
        leaves = [_placeholder(*own, length) for own in zip(given.leaves, given.cut, strict=True)]
        masks = [_mask_of(leaf) for leaf, own in zip(leaves, given.masked, strict=True) if own]
        warnings.simplefilter("ignore")  # That a layer would lose a mask, which it may never get.
        with keras.StatelessScope(states, collect_losses=True) as scope:
            try:
                outputs = call(leaves)
            except Exception as error:  # Whatever a `call` raises; a step will say it again.
                logging.info("Layer '%s' cannot be called apart: %s", layer.name, error)
                return None
            finally:
                has_drawn = repr(drawn) != repr((random.getstate(), np.random.get_state()))
                random.setstate(drawn[0])
                np.random.set_state(drawn[1])
        # What it keeps would be what the last device keeps.
        if has_drawn or any(kept_tensors(layer)) or plain_attributes(layer) != before:
            return None
    flat = [each for each in keras.tree.flatten(outputs) if each is not None]
    flat += [mask for each in flat if (mask := mask_of(each)) is not None]
    divided = [leaf for leaf, own in zip(leaves, given.cut, strict=True) if own]
    return _Trace(graph, [*divided, *masks], flat, scope, states)


def _is_proved(layer, trace) -> bool:
    judge = Judge.of_rows(trace.graph, trace.divided, AXIS)
    operations = with_inner(trace.graph.get_operations())
    scope, states = trace.scope, trace.states
    return (
        bool(trace.outputs)
        and all(tf.is_symbolic_tensor(each) and _is_apart(judge.of(each)) for each in trace.outputs)
        and not scope.losses
        and not any(draws(op) or writes_state(op) or op.type in _CHECKS for op in operations)
        and len(scope.state_mapping) == len(states)  # It writes none that it does not own.
        and all(scope.get_current_value(variable) is value for variable, value in states)
    )


def _is_apart(judged) -> bool:
    is_along = judged.placement == Shard(AXIS) and judged.dims is not None
    if not is_along or judged.dims[AXIS] != ROWS:
        return False
    others = [*judged.dims[:AXIS], *judged.dims[AXIS + 1 :]]
    return not any(map(depends_on_rows, others))


def _computed(trace) -> list:
    """What a call computes with numbers, without its handling of sizes."""
    found = []
    for op in with_inner(trace.graph.get_operations()):
        if op.type == "Const" and op.outputs[0].dtype.is_floating:
            found.append((op.type, op.get_attr("value").SerializeToString()))
        elif op.type not in ("Const", "Reshape") and any(
            out.dtype.is_floating or out.dtype.is_bool for out in op.outputs
        ):
            found.append((op.type, b""))
    return sorted(found)


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
