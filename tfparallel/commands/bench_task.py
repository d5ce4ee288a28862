"""What `tfparallel bench all_reduce TASK.py` says about a model."""

from collections.abc import Sequence

import keras

from tfparallel.bench.row import Row
from tfparallel.collectives.algorithm_selection import MIN_GAIN
from tfparallel.task import Task, TaskError

__all__ = ["advice", "gradient_counts"]

# What TensorFlow takes by itself, between devices and between workers.
_DEFAULTS = ("tf_reduce_to_one", "reduce_to_one", "ring")


def gradient_counts(task: Task) -> list[int]:
    """Returns the elements of each gradient of a task's model.

    Raises:
        TaskError: If nothing in it is trained.
    """
    model = task.build_model()
    if not model.built:
        data, _ = task.load_data()
        if not isinstance(data, tuple):
            raise TaskError(
                f"The model of {task.name} is built by its first batch, and the sizes of its "
                "gradients are needed before. A built model is required. Received: a model "
                "without variables. Begin it with a `keras.Input`."
            )
        model(keras.tree.map_structure(lambda leaf: leaf[:1], data[0]))
    counts = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    if not counts:
        raise TaskError(
            f"The model of {task.name} has no gradients to reduce. At least one trainable "
            "variable is required. Received: none."
        )
    return counts


def advice(rows: Sequence[Row], num_tensors: int) -> str:
    """Returns one line: which algorithm to take for a model, and what it saves."""
    default = next((row for name in _DEFAULTS for row in rows if row.algorithm == name), None)
    best = min(rows, key=lambda row: row.median_seconds)
    size = f"{rows[0].size_bytes / 1e6:.3g} MB in {num_tensors} tensors"
    if default is None:
        return (
            f"for this model, {size}: {best.algorithm} is the fastest of those measured "
            f"({_milliseconds(best.median_seconds)} a step)"
        )
    saved = default.median_seconds - best.median_seconds
    if saved < MIN_GAIN * default.median_seconds:
        return (
            f"for this model, {size}: keep TensorFlow's default "
            f"({_milliseconds(default.median_seconds)} a step); nothing saves {MIN_GAIN:.0%} of it"
        )
    return (
        f"for this model, {size}: take --all_reduce={best.algorithm}; it saves "
        f"{_milliseconds(saved)} a step ({_milliseconds(best.median_seconds)} instead of "
        f"{_milliseconds(default.median_seconds)})"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
