"""Determines the size of a full batch from the data passed to `fit` or `evaluate`."""

from typing import Any

import keras
import tensorflow as tf

from tfparallel.data.rows_of_worker import readings_of
from tfparallel.seams.tensorflow import batch_size_of, made_of

KERAS_BATCH_SIZE = 32  # Keras's default for arrays.
# Dataset transformations that do not change the elements.
_KEEP_ELEMENTS = {
    *("AssertCardinality", "Cache", "Options", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip"),
    "Take",
}


def full_batch_size(
    x: Any, batch_size: int | None = None, validation_split: float = 0.0
) -> int | None:
    """Returns the number of rows in a full batch, or None if unknown before reading the data."""
    readings = readings_of(x)
    if readings is not None:
        return readings.batch_size
    if isinstance(x, tf.data.Dataset):
        return _dataset_batch_size(x)
    num_rows = _first_size(keras.tree.flatten(x))
    if num_rows is None:  # Such as a generator or a ragged tensor.
        return None
    num_trained = int(num_rows * (1 - validation_split))
    return min(num_trained, batch_size or KERAS_BATCH_SIZE)


def _dataset_batch_size(dataset: tf.data.Dataset) -> int | None:
    size = _first_size(tf.nest.flatten(dataset.element_spec))
    if size is not None:
        return size
    # If the last batch may be short, the spec has no size, but the batching dataset does.
    while type(dataset).__name__.strip("_").removesuffix("Dataset") in _KEEP_ELEMENTS:
        (dataset,) = made_of(dataset)
    size = batch_size_of(dataset)
    return None if size is None else int(size)


def _first_size(leaves) -> int | None:
    """Returns the rows of the first non-scalar leaf; None if unknown."""
    shapes = (tf.TensorShape(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))
    return next((shape[0] for shape in shapes if shape.rank), None)
