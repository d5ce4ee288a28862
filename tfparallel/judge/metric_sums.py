"""Whether a state grows by a sum over the rows, whatever its value before: as a metric's does."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfparallel.judge.placements import Mixed, Placement, Replicate, Sum
from tfparallel.judge.propagation import Judge

SUMS = (Replicate(1), Sum())  # c·B is also a sum over the rows.
_HANDS_ON = ("Identity", "EnsureShape")


def growth_of(
    judge: Judge,
    new: tf.Tensor,
    old: tf.Tensor,
    states: Iterable[tf.Tensor],
    allowed: Sequence[Placement] = SUMS,
) -> Placement:
    """Returns the placement of the increment of a state: the last allowed one, or the fault.

    In a piece, a state begins at zero, so the increment must not depend on a state.

    Args:
        judge: The judge of the graph of both.
        new: The state after an update.
        old: The state before it, an input of the graph.
        states: This state and others before the update, inputs of the graph.
        allowed: The placements that an increment may have; by default, those of sums over the rows.
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
            why = "computes a state that is not the previous state plus a sum over the rows"
            return judged if isinstance(judged, Mixed) else Mixed(op, why)
        (added,) = (each for each in op.inputs if each is not behind[0])
        judged = judge.of(added)
        if judged.placement not in allowed and not judged.is_zero:
            return judged.placement
        if _reads(added, states):
            return Mixed(op, "adds to a state a value that depends on the previous state")
        new = behind[0]
    return allowed[-1]


def _leads_to(tensor: tf.Tensor, old: tf.Tensor) -> bool:
    """Returns whether a tensor is a state before an update, or that plus increments."""
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor is old:
            return True
        if _hands_on(tensor.op) or tensor.op.type in ("Add", "AddV2"):
            waiting.extend(tensor.op.inputs)
    return False


def _hands_on(op: tf.Operation) -> bool:
    """Returns whether an operation passes on its input; a cast that rounds does not."""
    if op.type == "Cast":
        source, target = op.inputs[0].dtype, op.outputs[0].dtype
        return source.is_floating == target.is_floating and source.size <= target.size
    return op.type in _HANDS_ON


def _reads(tensor: tf.Tensor, states: set[int]) -> bool:
    """Returns whether a tensor is computed from one of the given inputs of its graph."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in states:
            return True
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            waiting.extend(tensor.op.inputs)
    return False
