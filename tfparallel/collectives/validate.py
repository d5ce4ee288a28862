"""Converts and validates the values that users pass to collectives, consistently on all workers."""

import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.collectives import group
from tfparallel.collectives.packing import SENT_AS
from tfparallel.seams.tensorflow import leaves_with_paths

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_DTYPES = {*_FLOATS, tf.int32, tf.int64, *SENT_AS}


def agreed(name: str, value: Any, **options) -> tuple[Any, list[tf.Tensor]]:
    """Validates a collective call; raises on all workers or on none.

    Returns:
        The participating ranks, and the value's tensors in the order of `tf.nest.flatten`.
    """
    ranks = group.find()
    problems, tensors, notes = _option_problems(ranks, **options), [], []
    joins = name in ("all_gather", "gather")
    for path, leaf in leaves_with_paths(value):
        try:
            tensor = _tensor(leaf, min_ndim=int(joins))
            problem = _problem(tensor, ranks, name, **options)
            note = f"{tensor.dtype.name} {_shape(tensor, joins)}"
            tensors.append(tensor)
        except (TypeError, ValueError, OverflowError):
            received = f"{type(leaf).__name__} {str(leaf)[:40]}"
            problem = f"Dense tensors of at most 64 bits are required. Received: {received}."
            note = type(leaf).__name__
        where = f"{path}: " if path else ""
        notes.append(where + note)
        problems += [where + problem] if problem else []
    if isinstance(ranks, group.Workers) and tf.executing_eagerly():
        # Even a worker with an invalid value must take part here, or the others would hang.
        arguments = ", ".join(f"{key}={option!r}" for key, option in options.items())
        ranks.compare_notes(f"{name}({arguments}) of {', '.join(notes) or 'nothing'}")
    if problems:
        raise ValueError(f"`tfparallel.{name}` cannot send this. {' '.join(problems)}")
    return ranks, tensors


def _option_problems(ranks, op="sum", root=0) -> list[str]:
    problems = []
    if op not in ("sum", "mean", "max", "min"):
        problems.append(f"`op` must be 'sum', 'mean', 'max' or 'min'. Received: op={op!r}.")
    is_index = isinstance(root, numbers.Integral) and not isinstance(root, bool)
    if not is_index or not 0 <= root < ranks.num_ranks:
        problems.append(
            f"`root` must be an integer from 0 to {ranks.num_ranks - 1}: the index of a "
            f"participant. Received: root={root!r}."
        )
    return problems


def _problem(tensor, ranks, name, op="sum", root=0) -> str:
    """Returns the problem with a tensor; "" if there is none."""
    dtype = tensor.dtype
    if dtype not in _DTYPES:
        return f"A numeric or boolean tensor is required. Received: a tensor of type {dtype.name}."
    if name in ("all_reduce", "reduce_scatter"):
        if dtype.is_bool and op in ("sum", "mean"):
            return (
                "Boolean tensors support only 'max' (is any true?) and 'min' (are all?). Received: "
                f"op={op!r}. Cast them to int32 to count."
            )
        if dtype == tf.uint64 and op in ("max", "min"):
            return f"uint64 does not support {op!r}. Received: op={op!r}. Cast it to int64."
    if name == "reduce_scatter":
        if tensor.shape.rank == 0:
            return "At least one axis is required, which is split. Received: a scalar."
        if tensor.shape.rank is not None and (tensor.shape[0] or 0) % ranks.num_ranks:
            return (
                f"The number of rows must be a multiple of {ranks.num_ranks}, one equal share for "
                f"each participant. Received: shape {tuple(tensor.shape)}. Pad axis 0, or use "
                "`tfparallel.all_reduce`."
            )
    return ""


def _tensor(leaf, min_ndim: int) -> tf.Tensor:
    if isinstance(leaf, bool | int | float):
        leaf = np.asarray(leaf)  # Keeps Python's 64 bits.
    tensor = tf.convert_to_tensor(leaf)
    return tensor[None] if min_ndim and tensor.shape.rank == 0 else tensor


def _shape(tensor, joins: bool) -> str:
    lengths = ["?" if length is None else str(length) for length in tensor.shape]
    if joins:
        lengths[0] = "rows"
    return f"({', '.join(lengths)}{',' * (len(lengths) == 1)})"
