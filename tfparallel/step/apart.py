"""Whether losses and metrics are the same of rows together and apart: tried on made-up rows.

A loss that is known by name to give a value for each example (`by_rows.py`) may look at several all
the same, by the shapes that it is given: labels of shape (B,) beside outputs of shape (B, 1) are
broadcast to (B, B) by some, and of outputs of shape (B,) the last axis is that of the examples.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfparallel.step.terms import growth, states, terms

__all__ = ["Apart", "apart"]

_NUM_ROWS, _FIRST_OF_SECOND = 11, 5
_PIECES = (slice(0, _FIRST_OF_SECOND), slice(_FIRST_OF_SECOND, _NUM_ROWS))
_SEEDS = range(3)  # A metric that counts hits may be the same by accident, of one set of rows.
_LENGTH = 4  # Of axes of no known size.
_LONG = 32  # Axes at least so long are tried with fewer places.
_TOLERANCE = 1e-4  # Metrics are float32; what meets other rows differs more.


class Apart(NamedTuple):
    """What differs of rows apart.

    Attributes:
        why_not: Why the loss differs, or cannot be computed; None where it is the same.
        metrics: The metrics that differ, by id, with the reason.
    """

    why_not: str | None
    metrics: dict[int, str]


def apart(
    model: keras.Model, metrics: keras.metrics.Metric | None, y, outputs, sample_weight, masks=()
) -> Apart:
    """Tries a loss and metrics of rows together and apart.

    Args:
        model: A compiled model, its loss built.
        metrics: Those of its metrics that are tried, built; None for none.
        y: The targets of a batch, or their types.
        outputs: The types of the outputs, in their structure.
        sample_weight: The weights of a batch, or their types, or None.
        masks: The types of the masks that the outputs carry, flat, None for an output without.
    """
    if any(output.shape.rank == 1 for output in keras.tree.flatten(outputs) if output is not None):
        return Apart("of an output of shape (batch,) the last axis is that of the examples", {})
    types = (y, outputs, sample_weight, list(masks))
    with tf.init_scope():
        try:
            return _tried(model, metrics, _shortened(types))
        except Exception:  # A metric, say, has a state for each of 1000 classes.
            pass
        try:
            return _tried(model, metrics, types)
        except Exception as error:  # Keras's own error follows, if it is one of the program.
            error = str(error)[:200]
            return Apart(f"rows apart from each other have no loss or metrics: {error}", {})


def _tried(model, metrics, types) -> Apart:
    differing: dict[Any, str] = {}
    for seed in _SEEDS:
        made = _made_up(types, seed)
        whole = list(_of(model, metrics, *_rows(made, slice(None))))
        parts = [list(_of(model, metrics, *_rows(made, rows))) for rows in _PIECES]
        for (whose, name, value), *pieces in zip(whole, *parts, strict=True):
            total = sum(np.asarray(piece, "float64") for *_, piece in pieces)
            value = np.asarray(value, "float64")
            if not np.allclose(total, value, _TOLERANCE, 1e-6, equal_nan=True):
                reason = f"{name} looks at several examples where shapes are these"
                differing.setdefault(whose, reason)
    return Apart(differing.pop(None, None), differing)


def _of(model, metrics, y, outputs, sample_weight) -> Iterator[tuple[int | None, str, Any]]:
    """What is added up over the pieces: the metric's id or None, its name or the loss's, a term."""
    compiled = model._compile_loss
    of_losses = terms(compiled, y, outputs, sample_weight, _NUM_ROWS)
    for loss, of_loss in zip(compiled._flat_losses, of_losses, strict=True):
        for term in of_loss:
            yield None, f"loss '{loss.loss.name}'", term
    tried = () if metrics is None else metrics.metrics
    owners = {id(variable): id(metric) for metric in tried for variable in metric.variables}
    grown = growth(metrics, y, outputs, sample_weight)
    for variable, term in zip(states(metrics), grown, strict=True):
        yield owners[id(variable)], f"metric '{variable.path.rpartition('/')[0]}'", term


def _rows(structure, rows):
    """Targets, outputs with their masks, and weights, of these rows."""
    y, outputs, sample_weight, masks = keras.tree.map_structure(
        lambda array: None if array is None else tf.constant(array[rows]), structure
    )
    for output, mask in zip(keras.tree.flatten(outputs), masks, strict=False):
        if mask is not None:
            output._keras_mask = mask
    return y, outputs, sample_weight


def _shortened(types):
    """These types with short axes for long ones; what is equal stays so, and in the same order.

    What shapes do depends on which of them are equal and which are 1. Of 32,768 words, the rows
    that are made up would be the largest arrays of the program.
    """
    leaves = [leaf for leaf in keras.tree.flatten(types) if leaf is not None]
    sizes = {size for leaf in leaves for size in leaf.shape[1:] if size is not None}
    first = 1 + max({_NUM_ROWS} | {size for size in sizes if size < _LONG})
    long = sorted(size for size in sizes if size >= _LONG)
    short = {size: first + index for index, size in enumerate(long)}

    def shorten(leaf):
        if leaf is None:
            return None
        rows, *sizes = leaf.shape
        return tf.TensorSpec([rows, *(short.get(size, size) for size in sizes)], leaf.dtype)

    return keras.tree.map_structure(shorten, types)


def _made_up(types, seed):
    """Rows of these types; axes of no known size are as long as a target's, if that is known."""
    lengths: dict[int, int] = {}
    for leaf in keras.tree.flatten(types):
        for axis, size in enumerate(() if leaf is None else leaf.shape):
            if size is not None:
                lengths.setdefault(axis, size)
    random = np.random.default_rng(seed)

    def made(leaf, draw):
        if leaf is None:
            return None
        sizes = [n or lengths.get(axis, _LENGTH) for axis, n in enumerate(leaf.shape)]
        drawn, dtype = draw([_NUM_ROWS, *sizes[1:]]), tf.as_dtype(leaf.dtype)
        return (drawn if dtype.is_floating else drawn > 0.5).astype(dtype.as_numpy_dtype)

    def labels(shape):
        """Both classes, since with one alone no metric of classes is wrong; rows that differ."""
        drawn = random.integers(0, 2, shape).astype("float64")
        drawn[_FIRST_OF_SECOND] = 1.0 - drawn[0]
        return drawn

    def numbers(shape):
        return random.uniform(0.1, 1.0, shape)

    draws = (labels, numbers, numbers, numbers)
    return tuple(
        keras.tree.map_structure(lambda leaf, draw=draw: made(leaf, draw), each)
        for each, draw in zip(types, draws, strict=True)
    )
