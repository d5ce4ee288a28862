"""Symbolic sizes of a traced graph, as products of names: 8, B, B·T, 3·B·T, 1/B.

`ROWS` is B, the number of rows of the piece. A size that is neither a number nor such a product has
its own name, built from the computation, so equal computations give equal sizes.
"""

from collections.abc import Hashable
from fractions import Fraction
from typing import Any

_ROWS = "B"
_ROW = "row"


class Size:
    """A product of a number and powers of names; immutable. Without names, it is an `int`."""

    __slots__ = ("_powers", "factor")

    def __init__(self, factor: Fraction, powers: frozenset[tuple[Hashable, int]]):
        self.factor = factor
        self._powers = powers

    @property
    def powers(self) -> dict[Hashable, int]:
        """The power of each name."""
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
        return _simplified(one[0] * another[0], powers)

    def __truediv__(self, other):
        factor, powers = _parts(other)
        if factor == 0:
            return _composed("/", self, other)
        return self * _simplified(1 / factor, {name: -power for name, power in powers.items()})

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
            return _simplified(one[0] + another[0], one[1])
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
        return _simplified(self.factor**exponent, {n: p * exponent for n, p in self._powers})

    __rmul__, __radd__ = __mul__, __add__

    def __repr__(self):
        names = [f"{name}^{power}" if power != 1 else f"{name}" for name, power in self._powers]
        return "·".join([*([] if self.factor == 1 else [str(self.factor)]), *sorted(names)])


def size_named(name: Hashable) -> Size:
    """Returns a size of which only the name is known."""
    return Size(Fraction(1), frozenset({(name, 1)}))


ROWS = size_named(_ROWS)


def is_whole(size: Any) -> bool:
    """Returns whether a size is an integer for all integer values of its names."""
    factor, powers = _parts(size)
    return factor.denominator == 1 and all(power > 0 for power in powers.values())


def depends_on_rows(size: Any) -> bool:
    """Returns whether B is in a size, or in the computation behind it."""
    return isinstance(size, Size) and any(map(_has_rows, size.powers))


def power_of_rows(size: Any) -> int | None:
    """Returns k of a size c·B^k, with c independent of B; None if it is no such product."""
    _, powers = _parts(size)
    power = powers.pop(_ROWS, 0)
    return None if any(map(_has_rows, powers)) else power


def per_row(size: Any) -> int | Size | None:
    """Returns k of a size k·B, with k whole and independent of B; None if it is no such product."""
    if power_of_rows(size) != 1:
        return None
    number = size / ROWS
    return number if is_whole(number) else None


def row_number(name: Hashable) -> Size:
    """Returns the row number of an iteration of a loop over the rows."""
    return size_named((_ROW, name))


def is_row_number(size: Any) -> bool:
    """Returns whether a size is exactly a row number."""
    if not isinstance(size, Size) or size.factor != 1 or len(size.powers) != 1:
        return False
    ((name, power),) = size.powers.items()
    return power == 1 and isinstance(name, tuple) and name[0] == _ROW


def depends_on_row_number(size: Any) -> bool:
    """Returns whether a row number is in a size, or in the computation behind it."""
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


def _simplified(factor, powers):
    powers = {name: power for name, power in powers.items() if power}
    if not powers or factor == 0:
        return int(factor) if factor.denominator == 1 else factor
    return Size(factor, frozenset(powers.items()))


def _composed(operation, *operands) -> Size:
    return size_named((operation, *operands))
