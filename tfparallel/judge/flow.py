"""Judges operations that hold graphs, lists or variables: functions, branches, loops, lists."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.judge.lists import LISTS, OF_ROW_NUMBER
from tfparallel.judge.placements import Listed, Mixed, Replicate, Row, Shard, Sum
from tfparallel.judge.rules import first_mixed, joined, numbers_a_row
from tfparallel.judge.size import ROWS, depends_on_rows, is_row_number, row_number, size_named
from tfparallel.seams.tensorflow import gradient_function_of, graph_of

_HANDED_ON = "carries a value from one row to the next"

Flow = Callable[[Any, tf.Operation, Sequence], list[tuple]]


def _fields(judged) -> tuple:
    return judged.placement, judged.dims, judged.value


def _inner(op, name):
    return graph_of(op.graph, op.get_attr(name).name)


def _called(judge, op, graph, inputs) -> list:
    """Judges a function's outputs, given the judgements of its arguments."""
    inner = judge.inner(op, graph, inputs)
    # TensorFlow's gradient appends outputs that it needs to a graph that others call.
    return [inner.of(out) for out in graph.outputs[: len(op.outputs)]]


def _function(judge, op, inputs):
    if _inner(op, "f") is None:
        mixed = Mixed(op, "calls an unknown function")
        return [(mixed, None, None)] * len(op.outputs)
    return list(map(_fields, _called(judge, op, _inner(op, "f"), inputs)))


def _branches(judge, op, inputs):
    condition, *arguments = inputs
    if condition.placement != Replicate():
        mixed = first_mixed([condition.placement])
        why = "chooses a branch by the examples or their number"
        return [(mixed or Mixed(op, why), None, None)] * len(op.outputs)
    names = ["then_branch", "else_branch"]
    if op.type.endswith("Case"):
        graphs = [graph_of(op.graph, each.name) for each in op.get_attr("branches")]
    else:
        graphs = [_inner(op, name) for name in names]
    results = [_called(judge, op, graph, arguments) for graph in graphs]
    return [_joined_branches(judge, op, outputs) for outputs in zip(*results, strict=True)]


def _joined_branches(judge, op, outputs) -> tuple:
    """Judges an output that one of several branches computes."""
    if any(map(numbers_a_row, outputs)):
        return Mixed(op, OF_ROW_NUMBER), None, None
    first, *others = outputs
    placement, dims = first.placement, first.dims
    for other in others:
        placement = joined(op, placement, other.placement)
        dims = _joined_dims(dims, other.dims, (*judge.names, op.name, "branch"))
    return placement, dims, None


def _loop(judge, op, inputs):
    """Judges a loop; if it holds a list of rows, first as a loop over the rows."""
    has_rows = any(_is_by_row(each.placement) for each in inputs)
    result = _loop_over_rows(judge, op, inputs) if has_rows else None
    return result or _loop_of_turns(judge, op, inputs)


def _loop_of_turns(judge, op, inputs):
    """Judges a loop whose number of iterations does not depend on the rows."""
    state = [
        each if is_fixed else _in_any_turn(judge, op, place, tensor, each)
        for place, (each, tensor, is_fixed) in enumerate(_states(op, inputs))
    ]
    state, _ = _fixed_point(judge, op, state)
    decided = _inner_judge(judge, op, "cond", state).of(_inner(op, "cond").outputs[0])
    if decided.placement != Replicate() or numbers_a_row(decided):
        mixed = first_mixed([decided.placement])
        why = "runs a number of iterations that depends on the examples or their number"
        return [(mixed or Mixed(op, why), None, None)] * len(op.outputs)
    return [
        (each.placement, each.dims, each.value if is_fixed else None)
        for each, (_, _, is_fixed) in zip(state, _states(op, inputs), strict=True)
    ]


def _loop_over_rows(judge, op, inputs):
    """Judges a loop with one iteration per row, from the first; None for another loop."""
    state, counters = [], {}
    for place, (each, tensor, is_fixed) in enumerate(_states(op, inputs)):
        starts = None if each.value is None or each.value.size != 1 else each.value.item()
        if not is_fixed and tensor.dtype.is_integer and tensor.shape.rank == 0 and starts == 0:
            counters[place] = row_number((*judge.names, op.name, place))
            each = each._replace(value=np.asarray(counters[place], object))
        elif not is_fixed and not _is_by_row(each.placement):
            mixed = first_mixed([each.placement])
            each = each._replace(placement=mixed or Mixed(op, _HANDED_ON), value=None)
        state.append(each)
    state, after = _fixed_point(judge, op, state, counters)
    steps = [after[place].value for place in counters]
    if not all(step is not None and step.size == 1 and step.item() == number + 1
               for step, number in zip(steps, counters.values(), strict=True)):  # fmt: skip
        return None
    if not _ends_with_rows(_inner_judge(judge, op, "cond", state), _inner(op, "cond").outputs[0]):
        return None
    rows = (Replicate(1), (), np.asarray(ROWS, object))
    return [
        rows if place in counters else (each.placement, each.dims, each.value if is_fixed else None)
        for place, (each, (_, _, is_fixed)) in enumerate(
            zip(state, _states(op, inputs), strict=True)
        )
    ]


def _states(op, inputs) -> list[tuple]:
    """Returns each variable of a loop: its judgement, its tensor, and whether it is invariant."""
    body = _inner(op, "body")
    return [
        (each, tensor, _before_identities(out) is tensor)
        for each, tensor, out in zip(inputs, body.inputs, body.outputs, strict=True)
    ]


def _before_identities(tensor) -> tf.Tensor:
    """Returns the input of `Identity` operations."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _is_by_row(placement) -> bool:
    return isinstance(placement, Listed) and placement.by_row


def _inner_judge(judge, op, name, state):
    return judge.inner(op, _inner(op, name), state)


def _fixed_point(judge, op, state, counters=()):
    """Judges a loop's variables for all iterations, and at the end of one.

    Args:
        judge: The judge of the graph that contains the loop.
        op: The loop.
        state: The judgements of its variables at first.
        counters: The indices of those that are the row number in each iteration.
    """
    for _ in range(len(state) + 2):
        inner = _inner_judge(judge, op, "body", state)
        after = [inner.of(out) for out in _inner(op, "body").outputs]
        new = []
        for before, out in zip(state, after, strict=True):
            placement = joined(op, before.placement, out.placement)
            if isinstance(placement, Row):
                placement = Mixed(op, _HANDED_ON)
            dims = _dims_after_turn((*judge.names, op.name, len(new)), before, out)
            # A number keeps its name while each iteration leaves its placement unchanged.
            is_named = placement == before.placement or len(new) in counters
            value = before.value if is_named else None
            new.append(before._replace(placement=placement, dims=dims, value=value))
        is_same = all(
            (one.placement, one.dims, one.value is None)
            == (other.placement, other.dims, other.value is None)
            for one, other in zip(state, new, strict=True)
        )
        state = new
        if is_same:
            return state, after
    mixed = Mixed(op, "changes the placement of its variables in each iteration")
    return [each._replace(placement=mixed) for each in state], after


def _in_any_turn(judge, op, place, tensor, judged):
    """Judges a variable in any iteration; an integer gets a name."""
    if numbers_a_row(judged):
        return judged._replace(placement=Mixed(op, OF_ROW_NUMBER), value=None)
    is_counter = tensor.dtype.is_integer and tensor.shape.rank == 0
    if is_counter and judged.placement == Replicate():
        return judged._replace(
            value=np.asarray(size_named(("turn", *judge.names, op.name, place)), object)
        )
    return judged._replace(value=None)


def _ends_with_rows(judge, condition) -> bool:
    """Returns whether a condition is that a row number is less than the number of rows."""
    op = condition.op
    if op.type in ("Identity", "LogicalAnd"):
        return all(_ends_with_rows(judge, each) for each in op.inputs)
    if op.type != "Less":
        return False
    number, bound = (judge.of(each).value for each in op.inputs)
    if number is None or bound is None or number.size != 1 or bound.size != 1:
        return False
    return is_row_number(number.item()) and bound.item() == ROWS


def _dims_after_turn(name, before, after):
    """Returns the sizes of axes; a size that an iteration changes gets a name."""
    if before.dims is None or after.dims is None:
        return before.dims if isinstance(after.placement, Listed) and before.dims else after.dims
    return _joined_dims(before.dims, after.dims, name)


def _joined_dims(one, other, name):
    """Returns the sizes of a tensor that has one shape or the other."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(
        _joined_size(*pair, (*name, axis)) for axis, pair in enumerate(zip(one, other, strict=True))
    )


def _joined_size(one, other, name):
    if one == other or other is None:
        return one
    if one is None:
        return other
    rows = ROWS if depends_on_rows(one) or depends_on_rows(other) else 1
    return size_named(name) * rows


def _argument(judge, op, inputs):
    """Judges inputs from outside, without rows: weights, states, tables, captured tensors."""
    return [(Replicate(), None, None) for _ in op.outputs]


def _variable(judge, op, inputs):
    return [(inputs[0].placement, None, None)]


def _several(judge, op, inputs):
    """Judges `IdentityN`, and its gradient if the program defines one."""
    outputs = [_fields(each) for each in inputs]
    custom = gradient_function_of(op)
    if custom is None or not judge.asks_gradients or first_mixed(p for p, *_ in outputs):
        return outputs
    mixed = _gradient_mixes(judge, op, inputs, custom)
    return outputs if mixed is None else [(mixed, dims, value) for _, dims, value in outputs]


def _gradient_mixes(judge, op, inputs, custom):
    """Returns why a program's own gradient mixes rows, or is no sum over the rows; None if not.

    Gradients of rows must belong to the rows; gradients of replicated values must be sums.
    """
    with op.graph.as_default():
        upstream = [tf.compat.v1.placeholder(out.dtype, out.shape) for out in op.outputs]
        try:
            results = custom(op, *upstream)
        except Exception as error:
            return Mixed(op, f"has a custom gradient that cannot be traced: {error}"[:200])
    results = results if isinstance(results, list | tuple) else [results]
    judgements = dict(judge.judged)
    for tensor, each in zip(upstream, inputs, strict=True):
        judgements[tensor.name] = each._replace(placement=_of_gradient(each.placement), value=None)
    inner = type(judge)(op.graph, judgements, judge.path, asks_gradients=False)
    for result, each in zip(results, inputs, strict=False):
        if isinstance(result, tf.IndexedSlices):
            with op.graph.as_default():
                result = tf.convert_to_tensor(result)
        if not isinstance(result, tf.Tensor) or not result.dtype.is_floating:
            continue
        judged = inner.of(result)
        if isinstance(judged.placement, Mixed):
            return judged.placement
        is_right = (
            judged.placement in (each.placement, Replicate())
            if isinstance(each.placement, Shard)
            else judged.placement == _of_gradient(each.placement)
        )
        if not is_right and not judged.is_zero:
            return Mixed(op, "has a custom gradient that does not treat each example independently")
    return None


def _of_gradient(placement):
    """Returns the placement of a gradient: a sum for a replicated value, replicated for a sum."""
    if isinstance(placement, Replicate):
        return Sum()
    return Replicate() if isinstance(placement, Sum) else placement


def _nothing(judge, op, inputs):
    return []


FLOWS: dict[str, Flow] = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), _function),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), _branches),
    **dict.fromkeys(("While", "StatelessWhile"), _loop),
    **dict.fromkeys(
        ("Placeholder", "VarHandleOp", "HashTableV2", "Const", "IteratorGetNext"), _argument
    ),
    "ReadVariableOp": _variable,
    **LISTS,
    "IdentityN": _several,
    "Assert": _nothing,
    "NoOp": _nothing,
}
