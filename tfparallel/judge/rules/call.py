"""What a rule is given, and helpers that several rules share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.judge.placements import Listed, Mixed, Placement, Replicate, Shard
from tfparallel.judge.size import depends_on_row_number, power_of_rows
from tfparallel.judge.values import constant, only

__all__ = [
    "Call",
    "Rule",
    "are_numbers",
    "first_mixed",
    "folded_by",
    "is_uniform",
    "numbers_a_row",
    "power_of",
    "spread",
    "without_numbers",
]


class Call(NamedTuple):
    """An operation and what is known.

    Attributes:
        op: The operation.
        given: What is known of its inputs, `Judged`.
        known: What is known of tensors before them, by name.
    """

    op: tf.Operation
    given: Sequence[Any]
    known: Mapping[str, Any]

    def placement(self, i: int = 0) -> Placement:
        """Of an input."""
        return self.given[i].placement

    def dims(self, i: int = 0) -> tuple | None:
        """The sizes of an input's axes."""
        return self.given[i].dims

    def rank(self, i: int = 0) -> int | None:
        """How many axes an input has."""
        return None if self.dims(i) is None else len(self.dims(i))

    def ints(self, i: int) -> list[int] | None:
        """The elements of an input, if they are known whole numbers."""
        return constant(self.given[i].value)

    def axes(self, i: int) -> list[int] | None:
        """The axes of the first input that input `i` names, counted from 0."""
        found, rank = self.ints(i), self.rank()
        return None if found is None or rank is None else [axis % rank for axis in found]

    def mixed(self, why: str) -> Mixed:
        """That it mixes examples."""
        return Mixed(self.op, why)


Rule = Callable[[Call], Any]


def first_mixed(placements: Iterable[Placement]) -> Mixed | None:
    """The first of these placements that is `Mixed`."""
    return next((p for p in placements if isinstance(p, Mixed)), None)


def joined(op, one: Placement | None, other: Placement | None) -> Placement | None:
    """The placement of what has one or the other, as after a branch."""
    if one is None or one == other:
        return other
    if other is None:
        return one
    if isinstance(one, Listed) and isinstance(other, Listed):
        return Listed(joined(op, one.item, other.item), one.by_row or other.by_row)
    mixed = first_mixed([one, other])
    return mixed or Mixed(op, f"makes now {one}, now {other}")


def numbers_a_row(judged) -> bool:
    """Whether the number of a row, in a loop over the rows, is among known elements."""
    value = judged.value
    return value is not None and any(map(depends_on_row_number, value.ravel().tolist()))


def power_of(placement) -> int:
    """The power of B that a placement has."""
    return getattr(placement, "power", 0)


def without_numbers(placement):
    """A placement, but for whether its elements are the rows' numbers."""
    if isinstance(placement, Shard):
        return Shard(placement.axis, placement.power, placement.folded)
    return placement


def are_numbers(placement) -> bool:
    """Whether the elements are the rows' numbers."""
    return isinstance(placement, Shard) and placement.numbers


def is_uniform(call, i) -> bool:
    """Whether all elements of an input are known, and equal."""
    value = call.given[i].value
    return value is not None and only(value) is not None


def folded_by(own, views) -> Shard:
    """Of copies of the rows, one behind the other."""
    return Shard(0, own.power, (*own.folded, f"{views} views"))


def spread(call, rows, sizes, is_one):
    """What is the same of all rows, but has a row for each."""
    if not rows:
        return Replicate(), sizes
    if len(rows) > 1:
        return call.mixed("has the rows on several axes")
    if not is_one(rows[0]) or power_of_rows(sizes[rows[0]]) != 1:
        return call.mixed("numbers or repeats the rows")
    return Shard(rows[0]), sizes
