"""How far two runs lie apart, and whether that is more than rounding."""

import dataclasses
import math

import numpy as np

__all__ = [
    "TOLERANCES",
    "UNITS",
    "Difference",
    "difference",
    "digits_that_agree",
    "is_float",
    "owner_of_slot",
]

# Relative to the largest magnitude of the same variable, after 20 steps.
# Reordered sums differ by a few units in the last place; training amplifies
# that, by a factor that seldom passes a thousand in 20 steps.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}

# The unit in the last place of a number from 1 to 2.
UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The distance between one variable in two runs.

    Attributes:
        absolute: The largest absolute difference of two elements.
        relative: `absolute` divided by the largest magnitude in the variable.
        within: Whether `absolute <= tolerance * scale`.
    """

    absolute: float
    relative: float
    within: bool


def difference(
    expected: np.ndarray, received: np.ndarray, tolerance: float, scale: float = 0.0
) -> Difference:
    """Compares one variable of two runs.

    Elements are held against the largest magnitude of their variable, not
    against themselves: an element near zero is a difference of larger numbers,
    and carries their rounding.

    Args:
        expected: The value on one device.
        received: The value in parallel, of the same shape.
        tolerance: The largest relative difference; integers must be equal.
        scale: A magnitude to measure against if the variable's own is smaller.

    Returns:
        The difference; not `within` if a value is NaN or infinite, or the
        shapes differ.
    """
    if expected.shape != received.shape:
        return Difference(float("inf"), float("inf"), False)
    if expected.size == 0:
        return Difference(0.0, 0.0, True)
    if not is_float(expected) and not np.iscomplexobj(expected):
        # Integers, booleans and strings: equal or not.
        equal = bool(np.array_equal(expected, received))
        if not np.issubdtype(expected.dtype, np.integer):
            return Difference(float(not equal), float(not equal), equal)
        tolerance = scale = 0.0
    # Extended types such as bfloat16 have no exact subtraction in NumPy.
    expected, received = expected.astype(np.float64), received.astype(np.float64)
    if not (np.isfinite(expected).all() and np.isfinite(received).all()):
        return Difference(float("nan"), float("nan"), False)
    absolute = float(np.max(np.abs(expected - received)))
    magnitude = float(np.max(np.abs(expected)))
    relative = absolute / magnitude if magnitude else (0.0 if absolute == 0 else float("inf"))
    return Difference(absolute, relative, absolute <= tolerance * max(magnitude, scale))


def digits_that_agree(relative: float, dtype: str) -> int:
    """Returns to how many decimal digits two values are the same.

    Args:
        relative: Their difference, over the magnitude of the larger.
        dtype: The type that they were computed in, which has no more digits than it has.

    Example:
        >>> digits_that_agree(3e-7, "float32"), digits_that_agree(0.0, "float64")
        (6, 15)
    """
    most = int(-math.log10(UNITS[dtype]))
    if not relative:
        return most
    return max(0, min(most, math.floor(-math.log10(relative)))) if math.isfinite(relative) else 0


def is_float(value: np.ndarray) -> bool:
    """Whether an array holds real numbers; NumPy does not know bfloat16 as such."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


def owner_of_slot(slot_path: str, variable_paths: list[str]) -> int | None:
    """Returns the index of the variable that an optimizer's slot belongs to.

    Keras names the slot of `dense/kernel` in Adam
    `adam/dense_kernel_momentum`; the longest name that fits is taken.

    Args:
        slot_path: The path of the optimizer's variable.
        variable_paths: The paths of the model's trainable variables.
    """
    name = slot_path.rpartition("/")[2]
    fits = [
        (len(path), index)
        for index, path in enumerate(variable_paths)
        if name.startswith(path.replace("/", "_") + "_")
    ]
    return max(fits)[1] if fits else None
