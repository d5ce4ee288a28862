"""Sizes that are known when a graph is traced, or are products of names: 8, B, B·T, 3·B·T, 1/B.

`ROWS` is B, the number of rows of the piece. What is neither a number nor such a product has a name
of its own, made of what it was computed from, so that equal computations are equal sizes.
"""

from collections.abc import Hashable
from fractions import Fraction
from typing import Any

__all__ = [
    "ROWS",
    "Size",
    "depends_on_row_number",
    "depends_on_rows",
    "is_row_number",
    "is_whole",
    "power_of_rows",
    "row_number",
    "size_named",
]

_ROWS = "B"
_ROW = "row"


class Size:
    """A product of a number and of powers of names; immutable. One without names is an `int`."""

    __slots__ = ("_powers", "factor")

    def __init__(self, factor: Fraction, powers: frozenset[tuple[Hashable, int]]):
        self.factor = factor
        self._powers = powers

    @property
    def powers(self) -> dict[Hashable, int]:
        """Of each name, which power it has."""
        return dict(self._powers)

    def __eq__(self, other):
        if not isinstance(other, Size):
            return False
        return (self.factor, self._powers) == (other.factor, other._powers)

    def __hash__(self):
        return hash((self.factor, self._powers))

    def __mul__(self, other):
        one, another = _parts(self), _parts(other)
        powers = dict(one[1])
        for name, power in another[1].items():
            powers[name] = powers.get(name, 0) + power
        return _made(one[0] * another[0], powers)

    def __truediv__(self, other):
        factor, powers = _parts(other)
        if factor == 0:
            return _composed("/", self, other)
        return self * _made(1 / factor, {name: -power for name, power in powers.items()})

    def __rtruediv__(self, other):
        return _size(other) / self

    def __floordiv__(self, other):
        exact = self / other
        return exact if is_whole(exact) else _composed("//", self, other)

    def __rfloordiv__(self, other):
        return 0 if other == 0 else _composed("//", other, self)

    def __mod__(self, other):
        return 0 if is_whole(self / other) else _composed("%", self, other)

    def __rmod__(self, other):
        return _composed("%", other, self)

    def __add__(self, other):
        one, another = _parts(self), _parts(other)
        if another[0] == 0:
            return self
        if one[1] == another[1]:
            return _made(one[0] + another[0], one[1])
        return _composed("+", *sorted((self, other), key=repr))

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    def __neg__(self):
        return self * -1

    def __pow__(self, exponent):
        if not isinstance(exponent, int):
            return _composed("**", self, exponent)
        return _made(self.factor**exponent, {n: p * exponent for n, p in self._powers})

    __rmul__, __radd__ = __mul__, __add__

    def __repr__(self):
        names = [f"{name}^{power}" if power != 1 else f"{name}" for name, power in self._powers]
        return "·".join([*([] if self.factor == 1 else [str(self.factor)]), *sorted(names)])


def size_named(name: Hashable) -> Size:
    """A size of which nothing is known but its name."""
    return Size(Fraction(1), frozenset({(name, 1)}))


ROWS = size_named(_ROWS)


def is_whole(size: Any) -> bool:
    """Whether a size is a whole number, whatever whole numbers its names stand for."""
    factor, powers = _parts(size)
    return factor.denominator == 1 and all(power > 0 for power in powers.values())


def depends_on_rows(size: Any) -> bool:
    """Whether B is in a size, or in what it was computed from."""
    return isinstance(size, Size) and any(map(_has_rows, size.powers))


def power_of_rows(size: Any) -> int | None:
    """K of a size that is c·B^k, c independent of B; None of one that is no such product."""
    _, powers = _parts(size)
    power = powers.pop(_ROWS, 0)
    return None if any(map(_has_rows, powers)) else power


def row_number(name: Hashable) -> Size:
    """The number of the row that a turn of a loop over the rows is for."""
    return size_named((_ROW, name))


def is_row_number(size: Any) -> bool:
    """Whether a size is the number of a row, and nothing made of that."""
    if not isinstance(size, Size) or size.factor != 1 or len(size.powers) != 1:
        return False
    ((name, power),) = size.powers.items()
    return power == 1 and isinstance(name, tuple) and name[0] == _ROW


def depends_on_row_number(size: Any) -> bool:
    """Whether the number of a row is in a size, or in what it was computed from."""
    return isinstance(size, Size) and any(_mentions(name, _ROW) for name in size.powers)


def _has_rows(name) -> bool:
    return _mentions(name, _ROWS)


def _mentions(name, one) -> bool:
    if name == one:
        return True
    parts = name.powers if isinstance(name, Size) else name if isinstance(name, tuple) else ()
    return any(_mentions(part, one) for part in parts)


def _parts(size) -> tuple[Fraction, dict[Hashable, int]]:
    if isinstance(size, Size):
        return size.factor, size.powers
    return Fraction(size), {}


def _size(number) -> Size:
    return Size(Fraction(number), frozenset())


def _made(factor, powers):
    powers = {name: power for name, power in powers.items() if power}
    if not powers or factor == 0:
        return int(factor) if factor.denominator == 1 else factor
    return Size(factor, frozenset(powers.items()))


def _composed(operation, *operands) -> Size:
    return size_named((operation, *operands))
