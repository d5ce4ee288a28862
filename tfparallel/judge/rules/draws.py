"""Rules for operations that draw random numbers."""

import contextlib
import re
from typing import NamedTuple

import tensorflow as tf

from tfparallel.judge.placements import OF_REPLICA, Mixed, Replicate, Shard
from tfparallel.judge.rules.call import Call, first_mixed, spread
from tfparallel.judge.size import depends_on_rows
from tfparallel.tracing.provenance import DRAW_OF_BATCH

GLOBAL_SEED = "global"  # The name of Keras's global generator.

_AS_NUMBER = "seed_as_number"

_DRAWS = re.compile("Random|Multinomial|TruncatedNormal|StandardNormal|StatefulUniform|Binomial")
_COUNTS = re.compile("GetKeyCounter|GetAlg|GetKey")


_SEEDS = ("seed", "key", "counter")  # Inputs that may depend on the replica.

# The first input that is a parameter of the distribution: one per element, broadcast, ...
_PARAMETERS = {
    "StatelessRandomGammaV2": 2,
    "StatelessRandomGammaV3": 4,
    "StatelessRandomPoisson": 2,
}
_PARAMETERS |= {"StatelessRandomBinomial": 2, "RandomGamma": 1, "RandomPoissonV2": 1}
# ... or several elements per parameter.
_APPENDS = ("RandomGamma", "RandomPoissonV2")


def draws(op) -> bool:
    """Returns whether an operation draws random numbers."""
    return bool(_DRAWS.search(op.type)) and not _COUNTS.search(op.type)


def by_row(axis: int | None, source: str, is_in_call: bool) -> contextlib.AbstractContextManager:
    """Marks a draw, for the judge, of which each piece keeps its rows, on an axis of its shape.

    Args:
        axis: The axis; None for a draw without rows, which is the same in all pieces.
        source: The name of the generator.
        is_in_call: Whether it is drawn in a layer's call, or as if it were.
    """
    when = "in" if is_in_call else "after"
    return tf.name_scope(f"{DRAW_OF_BATCH}_{'all' if axis is None else axis}_{when}_by_{source}_")


def as_number() -> contextlib.AbstractContextManager:
    """Marks, for the judge, the use of a seed as a number."""
    return tf.name_scope(_AS_NUMBER)


def is_seed_as_number(op) -> bool:
    """Returns whether an operation is marked with `as_number`."""
    return op.type == "Identity" and bool(re.search(rf"(?:^|/){_AS_NUMBER}(?:_\d+)?/", op.name))


class RowDraw(NamedTuple):
    """How a draw is marked: where its rows are, its generator's name, and whether a call drew."""

    rows: Replicate | Shard
    source: str
    is_in_call: bool


def row_draw_of(op) -> RowDraw | None:
    """Returns the mark of `by_row` on a draw; None if it has none."""
    mark = rf"(?:^|/){DRAW_OF_BATCH}_(all|\d+)_(in|after)_by_(\w+?)_(?:_\d+)?/"
    marked = re.search(mark, op.name)
    if marked is None:
        return None
    axis, when, source = marked.groups()
    return RowDraw(Replicate() if axis == "all" else Shard(int(axis)), source, when == "in")


def shape_argument(op) -> int | None:
    """Returns the index of the input that is the shape of the draw; None if there is none."""
    names = [argument.name for argument in op.op_def.input_arg]
    return names.index("shape") if "shape" in names else None


def drawn(call: Call):
    """Judges a draw: each piece draws a row for each row, or one for all its rows."""
    kind, place = call.op.type, shape_argument(call.op)
    sizes = None if place is None else call.inputs[place].value
    names = [argument.name for argument in call.op.op_def.input_arg]
    others = {
        i: each.placement
        for i, each in enumerate(call.inputs)
        if i != place and not (names[i] in _SEEDS and _is_of_replica(each.placement))
    }
    if (mixed := first_mixed(others.values())) is not None:
        return mixed
    if kind in ("Multinomial", "StatelessMultinomial"):
        logits, *rest = others.values()
        if logits in (Replicate(), Shard(0)) and all(p == Replicate() for p in rest):
            return logits
        return call.mixed("draws with arguments that combine the rows")
    if sizes is None:
        if all(each.placement == Replicate() for each in call.inputs):
            return Replicate()
        return call.mixed("draws with a shape that depends on the data")
    sizes = tuple(sizes.ravel().tolist())
    rows = {axis for axis, size in enumerate(sizes) if depends_on_rows(size)}
    for number, placement in others.items():
        if placement == Replicate():
            continue
        axis = _axis_of_parameter(call, number, len(sizes))
        if axis is None or not isinstance(placement, Shard) or placement.power:
            return call.mixed("draws with parameters that depend on the rows")
        rows.add(axis)
    if kind in _APPENDS:
        sizes = (*sizes, *(call.dims(1) or ()))
    return spread(call, sorted(rows), sizes, is_one=lambda axis: True)


def _is_of_replica(placement) -> bool:
    return isinstance(placement, Mixed) and placement.why == OF_REPLICA


def _axis_of_parameter(call, place, rank) -> int | None:
    """Returns the axis of the draw that holds the rows of a parameter."""
    parameter_rank, first = call.rank(place), _PARAMETERS.get(call.op.type)
    if parameter_rank is None or first is None or place < first:
        return None
    if call.op.type in _APPENDS:
        return rank + call.placement(place).axis
    return rank - parameter_rank + call.placement(place).axis
