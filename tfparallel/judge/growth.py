"""Whether a state grows by a sum over the rows, whatever it was before: as a metric's does."""

from collections.abc import Iterable

import tensorflow as tf

from tfparallel.judge.placements import Mixed, Placement, Replicate, Sum
from tfparallel.judge.propagation import Judge

__all__ = ["SUMS", "growth_of"]

SUMS = (Replicate(1), Sum())  # c·B is a sum over the rows, too.
_HANDS_ON = ("Identity", "EnsureShape")


def growth_of(
    judge: Judge, new: tf.Tensor, old: tf.Tensor, states: Iterable[tf.Tensor]
) -> Placement:
    """The placement of what is added to a state: `Sum`, or what is wrong.

    A piece adds to a state that begins at zero, so nothing that is added may depend on a state.

    Args:
        judge: Of the graph of both.
        new: The state behind an update.
        old: The state before it, an input of the graph.
        states: This one and others, likewise; None among them for one that is made.
    """
    states = {id(state) for state in states}
    while new is not old:
        op = new.op
        if _hands_on(op):
            new = op.inputs[0]
            continue
        behind = [each for each in op.inputs if _leads_to(each, old)]
        if op.type not in ("Add", "AddV2") or len(behind) != 1:
            judged = judge.of(new).placement
            why = "makes a state that is not the one before and a sum over the rows"
            return judged if isinstance(judged, Mixed) else Mixed(op, why)
        (added,) = (each for each in op.inputs if each is not behind[0])
        judged = judge.of(added)
        if judged.placement not in SUMS and not judged.is_zero:
            return judged.placement
        if _reads(added, states):
            return Mixed(op, "adds to a state what depends on the state before")
        new = behind[0]
    return Sum()


def _leads_to(tensor: tf.Tensor, old: tf.Tensor) -> bool:
    """Whether a tensor is a state before an update, or that and what was added to it."""
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor is old:
            return True
        if _hands_on(tensor.op) or tensor.op.type in ("Add", "AddV2"):
            waiting.extend(tensor.op.inputs)
    return False


def _hands_on(op: tf.Operation) -> bool:
    """Whether it hands on what it is given; a cast that rounds does not."""
    if op.type == "Cast":
        given, made = op.inputs[0].dtype, op.outputs[0].dtype
        return given.is_floating == made.is_floating and given.size <= made.size
    return op.type in _HANDS_ON


def _reads(tensor: tf.Tensor, states: set[int]) -> bool:
    """Whether a tensor is computed of one of some inputs of its graph."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in states:
            return True
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            waiting.extend(tensor.op.inputs)
    return False
