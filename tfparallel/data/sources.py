"""Indexable sources: data with random access to its examples.

Indexable data gets the order of `example_order.py`: it is the same for any number of workers and
new in each epoch, and a run that resumes in the middle of an epoch reads nothing twice.

    source       an index is      in memory                      read by
    Arrays       a row            all of it                      one gather per batch
    TFRecords    a record         8 bytes per record             one read per record, verified
    NPZShards    a row            all, or two windows of files   one file at a time, then gathers
    Batches      a whole batch    what the `PyDataset` holds     its `__getitem__`
"""

import abc
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.data.example_order import epoch_order
from tfparallel.texts import short

__all__ = ["Arrays", "Batches", "Source", "as_source", "cast"]


class Source(abc.ABC):
    """Examples that can be read in any order.

    Attributes:
        num_indices: Number of examples, or of batches if `whole_batches`.
        whole_batches: Whether an index refers to a whole batch, of any size.
    """

    num_indices: int
    whole_batches = False

    @abc.abstractmethod
    def read(self, indices: tf.Tensor) -> tuple[Any, ...]:
        """Returns the batch of the given examples, in a graph or eagerly.

        Args:
            indices: int64, shape `(n,)`; n may be 0.

        Returns:
            `(x, y[, sample_weight])`, of n rows.
        """

    @staticmethod
    def _by_python(function, indices: tf.Tensor, specs) -> list[tf.Tensor]:
        """Calls a Python function on indices; `specs` are the shapes and dtypes of its rows."""
        types = [tf.as_dtype(dtype) for _, dtype in specs]
        arrays = tf.numpy_function(function, [indices], types)
        return [
            cast(tf.ensure_shape(array, (None, *shape)))
            for array, (shape, _) in zip(arrays, specs, strict=True)
        ]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the order of one pass: a permutation, int64, shape `(num_indices,)`."""
        return epoch_order(self.num_indices, seed, epoch)

    @abc.abstractmethod
    def __str__(self) -> str:
        """Describes the source, for the report."""


class Arrays(Source):
    """Arrays in memory, whose first axis is the example.

    Args:
        data: `(x, y[, sample_weight])`, each an array or a nested structure of them.

    Raises:
        ValueError: If it is something else, or the arrays are empty or differ in length.
    """

    def __init__(self, data: tuple[Any, ...]):
        if not isinstance(data, tuple | list) or not 1 <= len(data) <= 3:
            hint = (
                f"To read files, use tfparallel.data.NPZShards([{data!r}]) or TFRecords."
                if isinstance(data, str | os.PathLike)
                else "Put arrays into a tuple: (x, y)."
            )
            raise ValueError(
                "Data must be (x, y), (x, y, sample_weight), tfparallel.data.TFRecords or "
                "NPZShards, a PyDataset, or a tf.data.Dataset of single examples. Received: "
                f"{short(data)}. {hint}"
            )
        # On the host: batches are gathered there, and only a batch is copied to a device.
        with tf.device("CPU:0"):
            self.tensors = tf.nest.map_structure(
                lambda array: cast(tf.convert_to_tensor(array)), tuple(data)
            )
        shapes = [tuple(tensor.shape) for tensor in tf.nest.flatten(self.tensors)]
        sizes = {shape[0] if shape else None for shape in shapes}
        if len(sizes) != 1 or not all(sizes):
            raise ValueError(
                "All arrays of the data must have the same number of examples (their first axis), "
                f"at least one. Received: arrays of shapes {', '.join(map(str, shapes))}. Check "
                "how the data is loaded and filtered."
            )
        self.num_indices = int(sizes.pop())

    def read(self, indices):
        return tf.nest.map_structure(lambda array: tf.gather(array, indices), self.tensors)

    def __str__(self):
        return f"arrays of {self.num_indices} examples"


class Batches(Source):
    """The batches of a `keras.utils.PyDataset`, in an order of our own.

    Only the order of the batches changes; their examples stay together. The dataset's
    `on_epoch_end` is not called, since it could not be repeated for a resumed epoch.

    Args:
        dataset: A dataset with a known number of batches.

    Raises:
        ValueError: If the number of batches is unknown or 0.
    """

    whole_batches = True

    def __init__(self, dataset: keras.utils.PyDataset):
        if not dataset.num_batches:
            raise ValueError(
                "A PyDataset must have a known number of batches (its `__len__`), at least one. "
                f"Received: {type(dataset).__name__} with num_batches={dataset.num_batches}."
            )
        self.num_indices = int(dataset.num_batches)
        self._dataset = dataset
        first = tf.nest.map_structure(np.asarray, self._batch(0))
        self._structure = first
        self._specs = [(leaf.shape[1:], leaf.dtype) for leaf in tf.nest.flatten(first)]

    def _batch(self, index):
        batch = self._dataset[index]
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise ValueError(
                "A PyDataset must yield (x, y) or (x, y, sample_weight). Received: "
                f"{type(batch).__name__} from {type(self._dataset).__name__}."
            )
        return tuple(part for part in batch if part is not None)

    def read(self, indices):
        leaves = self._by_python(self._leaves, indices, self._specs)
        return tf.nest.pack_sequence_as(self._structure, leaves)

    def _leaves(self, indices):
        if not len(indices):
            return [np.empty((0, *shape), dtype) for shape, dtype in self._specs]
        leaves = tf.nest.flatten(self._batch(int(indices[0])))
        return [
            np.asarray(leaf, dtype) for leaf, (_, dtype) in zip(leaves, self._specs, strict=True)
        ]

    def __str__(self):
        return f"{type(self._dataset).__name__} of {self.num_indices} batches"


def as_source(data: Any) -> Source:
    """Returns `data` if it is a source, or a source that reads the arrays or `PyDataset`."""
    if isinstance(data, Source):
        return data
    return Batches(data) if isinstance(data, keras.utils.PyDataset) else Arrays(data)


def cast(tensor: tf.Tensor) -> tf.Tensor:
    """Casts floating-point data to floatx, as Keras does with arrays passed to `fit`."""
    if tensor.dtype.is_floating and tensor.dtype != keras.config.floatx():
        return tf.cast(tensor, keras.config.floatx())
    return tensor
