"""Measures the distance of two runs, for comparison with rounding errors."""

import dataclasses
import math

import numpy as np

# Relative to the largest magnitude of the same variable, after 20 steps. Reordered sums differ by a
# few units in the last place; 20 steps of training rarely amplify that more than a thousandfold.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}

# The unit in the last place of a number from 1 to 2.
UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclasses.dataclass(frozen=True)
class Distance:
    """Distance of one variable or value from its counterpart on one device.

    Attributes:
        absolute: The largest absolute difference of an element; infinite if the shapes differ, NaN
            if an element is not finite.
        magnitude: The largest magnitude of an element on one device.
        other_magnitude: The same in the other training.
    """

    absolute: float
    magnitude: float
    other_magnitude: float

    @property
    def relative(self) -> float:
        """`absolute / magnitude`.

        The reference is the largest element of the variable, not the element itself: an element
        near zero is a difference of larger numbers, and carries their rounding error.
        """
        if self.absolute == 0:
            return 0.0
        return self.absolute / self.magnitude if self.magnitude else math.inf

    def is_within(self, tolerance: float) -> bool:
        """Whether every difference is within a tolerance, relative to the magnitude."""
        return self.absolute <= tolerance * self.magnitude


def distance_between(expected: np.ndarray, received: np.ndarray) -> Distance:
    """Compares one variable of two runs: on one device, and in parallel."""
    largest = _largest_difference(expected, received)
    return Distance(largest, largest_magnitude(expected), largest_magnitude(received))


def largest_magnitude(value: np.ndarray) -> float:
    """Returns the largest magnitude of an element; 0 for an empty or non-numeric array."""
    if not value.size or not (is_float(value) or np.issubdtype(value.dtype, np.number)):
        return 0.0
    return float(np.max(np.abs(_wide(value))))


def _wide(value: np.ndarray) -> np.ndarray:
    """Converts to float64 or complex128: NumPy cannot subtract bfloat16 and others exactly."""
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)


def _largest_difference(expected: np.ndarray, received: np.ndarray) -> float:
    if expected.shape != received.shape:
        return math.inf
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind in "bOSU":  # Booleans and strings are equal or not.
        return float(not np.array_equal(expected, received))
    expected, received = _wide(expected), _wide(received)
    if not (np.isfinite(expected).all() and np.isfinite(received).all()):
        return math.nan
    return float(np.max(np.abs(expected - received)))


def digits_that_agree(relative: float, dtype: str) -> int:
    """Returns the number of decimal digits to which two values agree.

    Args:
        relative: Their relative difference.
        dtype: The dtype of the computation, whose precision limits the result.

    Example:
        >>> digits_that_agree(3e-7, "float32"), digits_that_agree(0.0, "float64")
        (6, 15)
    """
    most = int(-math.log10(UNITS[dtype]))
    if not relative:
        return most
    return max(0, min(most, math.floor(-math.log10(relative)))) if math.isfinite(relative) else 0


def is_float(value: np.ndarray) -> bool:
    """Whether an array holds real numbers; NumPy does not classify bfloat16 as a float."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


def owner_of_slot(slot_path: str, variable_paths: list[str]) -> int | None:
    """Returns the index of the variable that an optimizer's slot belongs to.

    Keras names Adam's slot of `dense/kernel` `adam/dense_kernel_momentum`; the longest matching
    name wins.
    """
    name = slot_path.rpartition("/")[2]
    fits = [
        (len(path), index)
        for index, path in enumerate(variable_paths)
        if name.startswith(path.replace("/", "_") + "_")
    ]
    return max(fits)[1] if fits else None
