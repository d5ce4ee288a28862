"""The argument of a rule, and helpers that several rules share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.judge.placements import Listed, Mixed, Placement, Replicate, Shard
from tfparallel.judge.size import depends_on_row_number, power_of_rows
from tfparallel.judge.values import constant, only


class Call(NamedTuple):
    """An operation, and the judgements of its inputs.

    Attributes:
        op: The operation.
        inputs: The judgements of its inputs.
        judged: The judgements of tensors before it, by name.
    """

    op: tf.Operation
    inputs: Sequence[Any]
    judged: Mapping[str, Any]

    def placement(self, i: int = 0) -> Placement:
        """Returns the placement of an input."""
        return self.inputs[i].placement

    def dims(self, i: int = 0) -> tuple | None:
        """Returns the sizes of an input's axes."""
        return self.inputs[i].dims

    def rank(self, i: int = 0) -> int | None:
        """Returns the number of an input's axes."""
        return None if self.dims(i) is None else len(self.dims(i))

    def ints(self, i: int) -> list[int] | None:
        """Returns the elements of an input, if they are known integers."""
        return constant(self.inputs[i].value)

    def axes(self, i: int) -> list[int] | None:
        """Returns the axes of the first input that input `i` names, counted from 0."""
        named, rank = self.ints(i), self.rank()
        return None if named is None or rank is None else [axis % rank for axis in named]

    def mixed(self, why: str) -> Mixed:
        """Returns the placement of an operation that mixes examples."""
        return Mixed(self.op, why)


Rule = Callable[[Call], Any]


def first_mixed(placements: Iterable[Placement]) -> Mixed | None:
    """Returns the first of these placements that is `Mixed`."""
    return next((p for p in placements if isinstance(p, Mixed)), None)


def joined(op, one: Placement | None, other: Placement | None) -> Placement | None:
    """Returns the placement of a tensor that has one or the other, as after a branch."""
    if one is None or one == other:
        return other
    if other is None:
        return one
    if isinstance(one, Listed) and isinstance(other, Listed):
        return Listed(joined(op, one.item, other.item), one.by_row or other.by_row)
    mixed = first_mixed([one, other])
    return mixed or Mixed(op, f"may return {one} or {other}")


def numbers_a_row(judged) -> bool:
    """Returns whether a row number of a loop over the rows is among the known elements."""
    value = judged.value
    return value is not None and any(map(depends_on_row_number, value.ravel().tolist()))


def power_of(placement) -> int:
    """Returns the power of B in a placement."""
    return getattr(placement, "power", 0)


def without_numbers(placement):
    """Returns a placement without the mark that its elements are row numbers."""
    if isinstance(placement, Shard):
        return Shard(placement.axis, placement.power, placement.folded)
    return placement


def are_numbers(placement) -> bool:
    """Returns whether elements are row numbers."""
    return isinstance(placement, Shard) and bool(placement.numbers)


def are_numbered(call, i) -> bool:
    """Returns whether the first element of each last axis of an input, alone, is a row number."""
    numbers = getattr(call.placement(i), "numbers", "")
    return numbers == "first" or (numbers == "all" and bool(call.dims(i)) and call.dims(i)[-1] == 1)


def is_uniform(call, i) -> bool:
    """Returns whether all elements of an input are known and equal."""
    value = call.inputs[i].value
    return value is not None and only(value) is not None


def folded_by(placement, views) -> Shard:
    """Returns the placement of several copies of the rows, one after the other."""
    return Shard(0, placement.power, (*placement.folded, f"{views} views"))


def spread(call, rows, sizes, is_one):
    """Returns the placement of a replicated value that is spread to a row for each example."""
    if not rows:
        return Replicate(), sizes
    if len(rows) > 1:
        return call.mixed("has the rows on several axes")
    if not is_one(rows[0]) or power_of_rows(sizes[rows[0]]) != 1:
        return call.mixed("numbers or repeats the rows")
    return Shard(rows[0]), sizes
