"""The form of the elements of a Python object: their structure, shapes and dtypes.

A traced step takes elements of one form, so each must have that of the first ones, and a cast must
not change its values.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_PARTS = ("x", "y", "sample_weight")


class ElementForm:
    """The form of the first examples or batches of an object, which all others must have.

    Args:
        name: Returns the name of an element, such as "batch 3 of Pairs", from its index.
        elements: Its first elements, structures of arrays.
        whole_batches: Whether they are batches, whose first axis may have any length.

    Attributes:
        first: The first element.
        shapes: The shapes of its arrays; None for an axis of any length.

    Raises:
        ValueError: If the elements do not have one form.
    """

    def __init__(
        self,
        name: Callable[[int], str],
        elements: Sequence[Any],
        *,
        whole_batches: bool = False,
    ):
        self._name, self._whole_batches = name, whole_batches
        self.first = elements[0]
        columns = zip(*map(tf.nest.flatten, elements), strict=False)
        self.shapes = [common_shape(column, any_rows=whole_batches) for column in columns]
        self._dtypes = [array.dtype for array in tf.nest.flatten(self.first)]
        for index, element in enumerate(elements):
            self.leaves(index, element)

    def leaves(self, index: int, element: Any) -> list[np.ndarray]:
        """Returns the arrays of an element, in the dtypes of the first one.

        Args:
            index: Its index.
            element: A structure of arrays.

        Raises:
            ValueError: If its structure or a shape differs, or a cast would change its values.
        """
        try:
            tf.nest.assert_same_structure(self.first, element)
        except (TypeError, ValueError):
            received, expected = (
                tf.nest.map_structure(lambda array: array.dtype.name, each)
                for each in (element, self.first)
            )
            raise ValueError(
                f"All {self._elements} must have the same structure. Received: {received} as "
                f"{self._name(index)}, and {expected} as the first one. Return the same parts, "
                "with the same keys, for every index."
            ) from None
        arrays = tf.nest.flatten(element)
        for n, (array, shape, dtype) in enumerate(
            zip(arrays, self.shapes, self._dtypes, strict=True)
        ):
            if not _fits(array.shape, shape):
                raise ValueError(self._other_shape(index, n, array.shape))
            arrays[n] = _cast_exactly(array, dtype)
            if arrays[n] is None:
                raise ValueError(self._other_dtype(index, n, array.dtype, dtype))
        return arrays

    @property
    def _elements(self):
        return "batches" if self._whole_batches else "examples"

    def _array(self, number):
        path, _ = keras.tree.flatten_with_path(self.first)[number]
        return _PARTS[path[0]] + "".join(f"[{key!r}]" for key in path[1:])

    def _other_shape(self, index, number, shape):
        required, first, fix = "the same shapes", "the first example", "Pad or cut them."
        if self._whole_batches:
            required += ", except for their rows and for axes that differ between the first two"
            first = "the first two batches"
            fix = "Pad or cut them to one length, or let the first two batches differ in that axis."
        return (
            f"All {self._elements} must have {required}. Received: {self._array(number)} of shape "
            f"{shape} in {self._name(index)}, and one of shape {self.shapes[number]} in {first}. "
            f"{fix}"
        )

    def _other_dtype(self, index, number, dtype, of_first):
        array, fix = self._array(number), ""
        with contextlib.suppress(TypeError):  # Some dtypes, such as bfloat16 and int64, have none.
            common = np.result_type(dtype, of_first)
            fix = f": numpy.asarray({array}, {common.name!r})" if common.kind != "O" else ""
        return (
            f"All {self._elements} must have the dtypes of the first one, or values that these can "
            f"hold. Received: {array} of dtype {dtype.name} in {self._name(index)}, and "
            f"{of_first.name} in the first one, which cannot hold its values. Convert {array} to "
            f"the same dtype in all {self._elements}{fix}."
        )


def in_array(value: Any) -> np.ndarray:
    """Returns a value in an array; texts as objects, of any length."""
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "US" else array


def without_none(parts: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Returns `(x[, y[, sample_weight]])` without a None at its end.

    Raises:
        ValueError: If another part is None: the next one would take its place.
    """
    present = tuple(parts)
    while present and present[-1] is None:
        present = present[:-1]
    missing = [n for n, part in zip(_PARTS, present, strict=False) if part is None]
    if missing or not present:
        raise ValueError(
            "Only the last parts of (x, y, sample_weight) may be None. Received: "
            f"{'=None, '.join(missing) or 'x'}=None in {name}. Pass an array, or leave out the "
            "parts behind it."
        )
    return present


def common_shape(arrays: Sequence[np.ndarray], *, any_rows: bool) -> tuple[int | None, ...]:
    """Returns the shape of all arrays: None for axes whose lengths differ.

    Args:
        arrays: Arrays of the same number of axes.
        any_rows: Whether the first axis is None in any case.
    """
    axes = zip(*(array.shape for array in arrays), strict=False)
    shape = [lengths[0] if len(set(lengths)) == 1 else None for lengths in axes]
    return (None, *shape[1:]) if any_rows else tuple(shape)


def _fits(shape, form):
    if shape == form:
        return True
    return len(shape) == len(form) and all(
        n in (None, m) for m, n in zip(shape, form, strict=True)
    )


def _cast_exactly(array, dtype):
    """Returns the array in a dtype, or None if values change. Floats may be rounded to floats."""
    if array.dtype == dtype:
        return array
    if object in (array.dtype, dtype):  # A text and a number.
        return None
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if tf.as_dtype(array.dtype).is_floating and tf.as_dtype(dtype).is_floating:
            return cast
        # Both ways: a comparison of an integer with a float rounds the integer.
        is_exact = np.array_equal(cast, array) and np.array_equal(cast.astype(array.dtype), array)
    return cast if is_exact else None
