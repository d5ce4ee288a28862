"""The elements of small tensors that are known in a traced graph: sizes, axes, divisors."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.judge.size import ROWS, Size, is_whole, size_named

_MOST = 64  # Elements.


def value_of(op: tf.Operation, inputs) -> np.ndarray | None:
    """Returns the elements of an operation's output; None if they are unknown.

    Args:
        op: The operation.
        inputs: The judgements of its inputs.
    """
    if op.type == "Const":
        return _of_constant(op)
    if op.type in ("Shape", "Size", "Rank"):
        return _of_shape(op.type, inputs[0].dims)
    if op.type == "Equal" and op.inputs[0] is op.inputs[1] and not op.inputs[0].dtype.is_floating:
        return np.asarray(True, object) if op.outputs[0].shape.rank == 0 else None
    if op.type == "Minimum" and (least := _clamped(op, inputs)) is not None:
        return least
    rule = _RULES.get(op.type)
    if rule is None or any(each.value is None or each.value.size > _MOST for each in inputs):
        return None
    try:
        value = np.asarray(rule(op, *(each.value for each in inputs)), object)
    except (ArithmeticError, TypeError, ValueError, IndexError):
        return None
    return value if value.size <= _MOST or not any(value.strides) else None


def values_of(op: tf.Operation, inputs) -> list[np.ndarray] | None:
    """Returns the elements of each output of an operation; None if they are unknown.

    Args:
        op: The operation.
        inputs: The judgements of its inputs.
    """
    if op.type == "BroadcastGradientArgs":
        return _summed_axes(*(each.value for each in inputs))
    if op.type in ("Unpack", "Split", "SplitV"):
        return _parts_of(op, [each.value for each in inputs])
    value = value_of(op, inputs)
    return None if value is None else [value]


def _summed_axes(one, other) -> list[np.ndarray] | None:
    """Returns the axes that the gradients of two factors are summed over, for a product's shape.

    An axis of size 1 may be left out, or in: its sum is itself.
    """
    if one is None or other is None:
        return None
    rank = max(len(one), len(other))
    pairs = zip(*([1] * (rank - len(each)) + each.tolist() for each in (one, other)), strict=True)
    axes: tuple[list[int], list[int]] = [], []
    for axis, sizes in enumerate(pairs):
        if sizes[0] != sizes[1] and 1 not in sizes:
            return None  # It is not known which of the two is 1.
        for size, summed in zip(sizes, axes, strict=True):
            if size == 1:
                summed.append(axis)
    return [np.asarray(each, object) for each in axes]


def _parts_of(op, values) -> list[np.ndarray] | None:
    """Returns the parts of a small tensor, such as the sizes of a shape."""
    if any(each is None or each.size > _MOST for each in values):
        return None
    if op.type == "Unpack":
        parts = np.moveaxis(values[0], op.get_attr("axis"), 0)
    elif op.type == "Split":
        parts = np.split(values[1], len(op.outputs), int(values[0].item()))
    else:
        whole, sizes, axis = values[0], values[1].tolist(), int(values[2].item())
        ends = list(itertools.accumulate(sizes[:-1]))
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            return None
        parts = np.split(whole, ends, axis)
    return [np.asarray(each, object) for each in parts]


def _clamped(op, inputs):
    """Returns c for min(c, max(c, …)), with which Keras bounds a number of classes."""
    for place, other in ((0, 1), (1, 0)):
        inner, value = op.inputs[other].op, inputs[place].value
        if value is None or value.size != 1 or inner.type != "Maximum":
            continue
        bounds = [tf.get_static_value(each) for each in inner.inputs]
        if any(bound is not None and np.ndim(bound) == 0 and bound >= value.item()
               for bound in bounds if not isinstance(value.item(), Size)):  # fmt: skip
            return value
    return None


def only(value: np.ndarray) -> Any:
    """Returns the value of all elements; None if they differ, or there are none."""
    if value.size and not any(value.strides):
        return value.flat[0]  # A large constant.
    elements = set(value.ravel().tolist()) if value.size <= _MOST else set()
    return elements.pop() if len(elements) == 1 else None


def constant(value: np.ndarray | None) -> list[int] | None:
    """Returns the elements of a known tensor, flat, if they are integers; else None."""
    if value is None:
        return None
    flat = value.ravel().tolist()
    return [int(each) for each in flat] if all(isinstance(each, int) for each in flat) else None


def _of_constant(op):
    tensor = op.get_attr("value")
    if tensor.dtype == tf.string.as_datatype_enum:
        return None
    array = tf.make_ndarray(tensor)
    if array.size > _MOST:
        first = array.flat[0]
        is_one = array.dtype.kind in "biuf" and bool((array == first).all())
        return np.broadcast_to(np.asarray(first.item(), object), array.shape) if is_one else None
    if array.dtype.kind not in "biuf":
        array = array.astype("float64") if array.dtype.name in ("bfloat16",) else None
    return None if array is None else _objects(array)


def _objects(array) -> np.ndarray:
    elements = np.empty(array.shape, object)
    for place, element in np.ndenumerate(array):
        elements[place] = element.item() if hasattr(element, "item") else element
    return elements


def _of_shape(kind, dims):
    if dims is None:
        return None
    if kind == "Rank":
        return np.asarray(len(dims), object)
    sizes = np.empty(len(dims), object)
    sizes[:] = dims
    return sizes if kind == "Shape" else np.asarray(np.prod(sizes), object)


def slices_of(op, begin, end, strides, rank: int | None) -> list:
    """Returns the slices of a `StridedSlice`, by input axis: slices, ints, and None for new axes.

    Args:
        op: The operation.
        begin: The elements of `begin`.
        end: The elements of `end`.
        strides: The elements of `strides`.
        rank: The rank of the input, in case an ellipsis covers several axes.
    """
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    slices, has_ellipsis = [], False
    num_sliced = sum(
        not (masks["new_axis"] >> i & 1 or masks["ellipsis"] >> i & 1) for i in range(len(begin))
    )
    for i, bounds in enumerate(zip(begin, end, strides, strict=True)):
        if masks["ellipsis"] >> i & 1:
            slices += [slice(None)] * (rank - num_sliced)
            has_ellipsis = True
        elif masks["new_axis"] >> i & 1:
            slices.append(None)
        elif masks["shrink_axis"] >> i & 1:
            slices.append(bounds[0])
        else:
            first = None if masks["begin"] >> i & 1 else bounds[0]
            last = None if masks["end"] >> i & 1 else bounds[1]
            slices.append(slice(first, last, None if bounds[2] == 1 else bounds[2]))
    if not has_ellipsis and rank is not None:
        slices += [slice(None)] * (rank - num_sliced)
    return slices


def _sliced(op, array, begin, end, strides):
    return array[tuple(slices_of(op, begin, end, strides, array.ndim))]


def _greatest(op, one, other):
    return _pairwise(one, other, lambda a, b: _chosen(a, b, max, "max"))


def _least(op, one, other):
    return _pairwise(one, other, lambda a, b: _chosen(a, b, min, "min"))


def _pairwise(one, other, function):
    one, other = np.broadcast_arrays(one, other)
    result = np.empty(one.shape, object)
    for place in np.ndindex(one.shape):
        result[place] = function(one[place], other[place])
    return result


def _chosen(one, other, function, name):
    if one == other:
        return one
    if isinstance(one, Size) or isinstance(other, Size):
        # A piece has at least 1 row, so max(B, 1) is B.
        for size, number in ((one, other), (other, one)):
            is_rows = size == ROWS and not isinstance(number, Size)
            if is_rows and number <= 1 and name == "max":
                return size
        raise TypeError("It is not known which of the two is larger.")
    return function(one, other)


def _cast(op, array):
    dtype = op.get_attr("DstT")
    if dtype.is_bool:
        raise TypeError("A size is no condition.")
    if dtype.is_floating:
        return array
    if dtype.size < 4 and any(isinstance(each, Size) for each in array.ravel().tolist()):
        raise TypeError("A size may be larger than what such a number can be.")
    return _pairwise(array, array, lambda a, _: _truncated(a))


def _truncated(number):
    if not isinstance(number, Size):
        return int(number)
    return number if is_whole(number) else size_named(("truncated", number))


def _compared(function) -> Callable:
    def compare(op, one, other):
        def pair(a, b):
            if a == b:
                return function(0, 0)
            if (a, b, op.type) == (ROWS, 1, "Greater"):
                return SEVERAL_ROWS
            if isinstance(a, Size) or isinstance(b, Size):
                return _sign(a, b, function)
            return function(a, b)

        return _pairwise(one, other, pair)

    return compare


# Whether there are several rows, as the element of a tensor.
SEVERAL_ROWS = size_named(("B > 1", ROWS))


def _sign(one, other, function):
    """Compares B, or a multiple of it, with 0; nothing else is known of it."""
    for size, number, sign in ((one, other, 1), (other, one, -1)):
        is_rows = isinstance(size, Size) and size == ROWS * size.factor and size.factor > 0
        if number == 0 and is_rows:
            return function(sign, 0)
    raise TypeError("It is not known which of the two is larger.")


def _true(element) -> bool:
    if isinstance(element, Size):
        raise TypeError("It is not known whether it is true.")
    return bool(element)


def _equal(op, one, other):
    def pair(a, b):
        if a != b and (isinstance(a, Size) or isinstance(b, Size)):
            raise TypeError("It is not known whether they are equal.")
        return a == b

    return _pairwise(one, other, pair)


def _only(array, axis):
    """Returns the maximum or minimum of a single element."""
    if array.size != 1:
        raise TypeError("It is not known which of them is the largest.")
    return array.reshape([1] * (array.ndim - axis.size))


def _axis(value) -> int | tuple[int, ...]:
    return tuple(value.ravel().tolist()) if value.ndim else int(value.item())


def _range(op, start, limit, delta):
    return np.arange(start.item(), limit.item(), delta.item()).astype(object)


def _chosen_by(op, condition, one, other):
    return _pairwise(
        condition, _pairwise(one, other, lambda a, b: (a, b)), lambda c, pair: pair[not _true(c)]
    )


_RULES: dict[str, Callable] = {
    **dict.fromkeys(
        ("Identity", "StopGradient", "EnsureShape", "PlaceholderWithDefault", "Snapshot",
         "PreventGradient"),
        lambda op, x, *_: x,
    ),
    "Cast": _cast,
    "Pack": lambda op, *xs: np.stack(xs, op.get_attr("axis")),
    "ConcatV2": lambda op, *xs: np.concatenate(xs[:-1], int(xs[-1].item())),
    "StridedSlice": _sliced,
    "Slice": lambda op, x, begin, size: x[
        tuple(slice(b, None if s == -1 else b + s) for b, s in zip(begin, size, strict=True))
    ],
    "GatherV2": lambda op, x, indices, axis: np.take(x, indices.astype(int), int(axis.item())),
    "ExpandDims": lambda op, x, axis: np.expand_dims(x, int(axis.item())),
    "Squeeze": lambda op, x: np.squeeze(x, tuple(op.get_attr("squeeze_dims")) or None),
    "Reshape": lambda op, x, shape: x.reshape([int(size) for size in shape]),
    "Prod": lambda op, x, axis: np.prod(x, _axis(axis), keepdims=op.get_attr("keep_dims")),
    "Sum": lambda op, x, axis: np.sum(x, _axis(axis), keepdims=op.get_attr("keep_dims")),
    "Max": lambda op, x, axis: _only(x, axis),
    "Min": lambda op, x, axis: _only(x, axis),
    "Mul": lambda op, x, y: x * y,
    "Add": lambda op, x, y: x + y,
    "AddV2": lambda op, x, y: x + y,
    "AddN": lambda op, *xs: sum(xs),
    "Sub": lambda op, x, y: x - y,
    "Neg": lambda op, x: -x,
    "FloorDiv": lambda op, x, y: x // y,
    "FloorMod": lambda op, x, y: x % y,
    "RealDiv": lambda op, x, y: x / y,
    "DivNoNan": lambda op, x, y: x / y,
    "Maximum": _greatest,
    "Minimum": _least,
    "Greater": _compared(lambda a, b: a > b),
    "GreaterEqual": _compared(lambda a, b: a >= b),
    "Less": _compared(lambda a, b: a < b),
    "LessEqual": _compared(lambda a, b: a <= b),
    "Equal": _equal,
    "NotEqual": lambda op, x, y: ~_equal(op, x, y).astype(bool),
    "LogicalAnd": lambda op, x, y: _pairwise(x, y, lambda a, b: _true(a) and _true(b)),
    "LogicalOr": lambda op, x, y: _pairwise(x, y, lambda a, b: _true(a) or _true(b)),
    "LogicalNot": lambda op, x: _pairwise(x, x, lambda a, _: not _true(a)),
    "Range": _range,
    "Fill": lambda op, sizes, x: np.broadcast_to(x, tuple(int(n) for n in sizes)),
    "SelectV2": _chosen_by,
    "Select": _chosen_by,
    "BroadcastArgs": lambda op, x, y: _broadcast_shapes(x, y),
    "InvertPermutation": lambda op, x: np.argsort(x.astype(int)).astype(object),
    "DynamicStitch": lambda op, *xs: _stitched(xs[: len(xs) // 2], xs[len(xs) // 2 :]),
}  # fmt: skip


def _stitched(places, parts):
    """Returns numbers at their places in a vector; a later one replaces an earlier one."""
    pairs = [
        (int(place), number)
        for of_part, part in zip(places, parts, strict=True)
        for place, number in zip(of_part.ravel(), part.ravel(), strict=True)
    ]
    result = np.empty(max(place for place, _ in pairs) + 1, object)
    for place, number in pairs:
        result[place] = number
    return result


def _broadcast_shapes(one, other):
    length = max(len(one), len(other))
    pads = [np.concatenate([np.ones(length - len(each), object), each]) for each in (one, other)]
    return _pairwise(*pads, lambda a, b: b if a == 1 else a)
