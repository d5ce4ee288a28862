"""Whether a state grows by a sum over the rows, whatever it was before: as a metric's does."""

import tensorflow as tf

from tfparallel.engine.judge import Judge
from tfparallel.engine.placements import Mixed, Placement, Replicate, Sum

__all__ = ["SUMS", "growth_of"]

SUMS = (Replicate(1), Sum())  # c·B is a sum over the rows, too.
_HANDS_ON = ("Identity", "Cast", "EnsureShape")


def growth_of(judge: Judge, new: tf.Tensor, old: tf.Tensor) -> Placement:
    """The placement of what is added to a state: `Sum`, or what is wrong.

    Args:
        judge: Of the graph of both.
        new: The state behind an update.
        old: The state before it, an input of the graph.
    """
    while new is not old:
        op = new.op
        if op.type in _HANDS_ON:
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
        new = behind[0]
    return Sum()


def _leads_to(tensor: tf.Tensor, old: tf.Tensor) -> bool:
    """Whether a tensor is a state before an update, or that and what was added to it."""
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor is old:
            return True
        if tensor.op.type in (*_HANDS_ON, "Add", "AddV2"):
            waiting.extend(tensor.op.inputs)
    return False
