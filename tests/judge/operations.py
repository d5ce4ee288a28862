"""Operations that rules are held against: what they are given, and where the rows are then."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfparallel.judge.placements import Mixed, Placement, Replicate, Shard, Sum

B = 5  # The number of rows; no other axis is as long.
MIXED = "mixed"


class Input(NamedTuple):
    """An input.

    Attributes:
        placement: Where the rows are.
        shape: Of the whole.
        dtype: Of its elements.
        low: The least of its numbers.
        high: What is above all of them.
    """

    placement: Placement
    shape: tuple
    dtype: str = "float64"
    low: float = 0.1
    high: float = 0.9


class Case(NamedTuple):
    """An operation on inputs.

    Attributes:
        kind: Its type, as `tf.Operation` names it.
        function: Of tensors.
        inputs: Where their rows are, and what they hold.
        right: The placement of each output, or `MIXED`.
    """

    kind: str
    function: Callable
    inputs: tuple[Input, ...]
    right: tuple | str


CASES: list[Case] = []


def rows(*shape, axis=0, power=0, **more) -> Input:
    """Rows along an axis."""
    return Input(Shard(axis, power), shape, **more)


def same(*shape, power=0, **more) -> Input:
    """What is the same of all pieces, but for a power of B."""
    return Input(Replicate(power), shape, **more)


def total(*shape, power=0, **more) -> Input:
    """A sum over the rows; a mean with `power=-1`."""
    return Input(Sum(power), shape, **more)


def mean(*shape, **more) -> Input:
    return total(*shape, power=-1, **more)


def case(kind: str, function, inputs, *right) -> None:
    """Adds a case; without a placement it is `MIXED`."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    CASES.append(Case(kind, function, tuple(inputs), right or MIXED))


def raw(kind: str, **attributes) -> Callable:
    """An operation as a function of its inputs."""
    operation = getattr(tf.raw_ops, kind)
    names = list(inspect.signature(operation).parameters)

    def function(*tensors):
        return operation(**dict(zip(names, tensors, strict=False)), **attributes)

    return function


def beside(kind: str, other: Callable, **attributes) -> Callable:
    """An operation as a function of one input, and of what is made of that."""
    return lambda x: raw(kind, **attributes)(x, other(x))


def whole_and_pieces(tensor: Input, seed: int, cut: int = 2) -> list[np.ndarray]:
    """An input, whole and in two."""
    random = np.random.default_rng(seed)
    placement, power = tensor.placement, getattr(tensor.placement, "power", 0)
    sizes = (B, cut, B - cut)
    if isinstance(placement, Shard):
        whole = _drawn(random, tensor)
        before = (slice(None),) * placement.axis
        parts = [whole, whole[(*before, slice(cut))], whole[(*before, slice(cut, None))]]
    elif isinstance(placement, Sum):
        one, other = _drawn(random, tensor), _drawn(random, tensor)
        parts = [one + other, one, other]
    else:
        parts = [_drawn(random, tensor)] * 3
    if not power:
        return parts
    factors = [size**power if power > 0 else 1 / size**-power for size in sizes]
    return [
        np.asarray(part * factor, part.dtype) for part, factor in zip(parts, factors, strict=True)
    ]


def _drawn(random, tensor) -> Any:
    if tensor.dtype == "string":
        return random.choice(["1", "2.5", "33"], tensor.shape).astype(object)
    if tensor.dtype == "bool":
        return random.uniform(size=tensor.shape) > 0.5
    if tensor.dtype.startswith("complex"):
        pair = random.normal(size=(2, *tensor.shape))
        return (pair[0] + 1j * pair[1]).astype(tensor.dtype)
    if "int" in tensor.dtype:
        high = 3 if tensor.high == 0.9 else tensor.high
        return random.integers(int(tensor.low), int(high), tensor.shape).astype(tensor.dtype)
    return random.uniform(tensor.low, tensor.high, tensor.shape).astype(tensor.dtype)


def holds(placement: Placement, whole, one, other, cut: int = 2) -> bool:
    """Whether that is where the rows are, by the numbers."""
    power = getattr(placement, "power", 0)
    parts = [
        part if not power else part / np.asarray(float(size) ** power)
        for part, size in zip((whole, one, other), (B, cut, B - cut), strict=True)
    ]
    whole, one, other = parts
    if isinstance(placement, Shard):
        return _equal(whole, np.concatenate([one, other], placement.axis))
    if isinstance(placement, Sum):
        return _equal(whole, one + other)
    return not isinstance(placement, Mixed) and _equal(whole, one) and _equal(whole, other)


def _equal(one, other) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind in "OSUb":
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, 1e-5, 1e-6, equal_nan=True))
