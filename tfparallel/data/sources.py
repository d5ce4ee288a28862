"""Indexable sources: data with random access to its examples.

Indexable data gets the order of `example_order.py`: it is the same for any number of workers and
new in each epoch, and a run that resumes in the middle of an epoch reads nothing twice.

    source       an index is      in memory                      read by
    Arrays       a row            all of it                      one gather per batch
    TFRecords    a record         8 bytes per record             one read per record, verified
    NPZShards    a row            all, or two windows of files   one file at a time, then gathers
    Examples     an example       what the object holds          its `__getitems__` or `__getitem__`
    Batches      a whole batch    what the `PyDataset` holds     its `__getitem__`
"""

import abc
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.data.element_form import ElementForm, in_array, without_none
from tfparallel.data.example_order import epoch_order
from tfparallel.texts import short

_MOST_EXAMPLES = 2**40  # An endless dataset reports `sys.maxsize`.


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
                else "Put arrays into a tuple: (x, y). Pass an iterator of batches to `fit` itself."
            )
            raise ValueError(
                "Data must be (x, y), (x, y, sample_weight), tfparallel.data.TFRecords or "
                "NPZShards, an object with `__len__` and `__getitem__`, a PyDataset, or a "
                "tf.data.Dataset of single examples. Received: "
                f"{short(data)}. {hint}"
            )
        # On the host: batches are gathered there, and only a batch is copied to a device.
        with tf.device("CPU:0"):
            self.tensors = tf.nest.map_structure(
                lambda array: cast(tf.convert_to_tensor(array)), without_none(data, "the data")
            )
        shapes = [tuple(tensor.shape) for tensor in tf.nest.flatten(self.tensors)]
        sizes = {shape[0] if shape else None for shape in shapes}
        if len(sizes) != 1 or not all(sizes):
            fix = "Check how the data is loaded and filtered."
            if None in sizes:
                fix = "Make arrays of lists: numpy.asarray(x)."
            raise ValueError(
                "All arrays of the data must have the same number of examples (their first axis), "
                f"at least one. Received: arrays of shapes {', '.join(map(str, shapes))}. {fix}"
            )
        self.num_indices = int(sizes.pop())

    def read(self, indices):
        return tf.nest.map_structure(lambda array: tf.gather(array, indices), self.tensors)

    def __str__(self):
        return f"arrays of {self.num_indices} examples"


class Batches(Source):
    """The batches of a `keras.utils.PyDataset`, in an order of our own.

    Only the order of the batches changes; their examples stay together. The dataset's
    `on_epoch_end` is not called, since it could not be repeated for a resumed epoch. As in Keras,
    an axis whose length differs between the first two batches may have any length in the others.

    Args:
        dataset: A dataset with a known number of batches.

    Raises:
        ValueError: If the number of batches is unknown or 0, or the first two batches do not have
            the same structure and dtypes.
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
        # As many as Keras reads to learn the shapes.
        first = [self._batch(index) for index in range(min(2, self.num_indices))]
        self._form = ElementForm(self._name, first, whole_batches=True)
        self._nothing = [
            np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in tf.nest.flatten(first[0])
        ]
        self._specs = [
            (shape[1:], leaf.dtype)
            for shape, leaf in zip(self._form.shapes, self._nothing, strict=True)
        ]

    def _batch(self, index):
        batch = self._dataset[index]
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise ValueError(
                "A PyDataset must yield (x, y) or (x, y, sample_weight). Received: "
                f"{type(batch).__name__} from {type(self._dataset).__name__}."
            )
        return tf.nest.map_structure(in_array, without_none(batch, self._name(index)))

    def _name(self, index):
        return f"batch {index} of {type(self._dataset).__name__}"

    def read(self, indices):
        leaves = self._by_python(self._leaves, indices, self._specs)
        return tf.nest.pack_sequence_as(self._form.first, leaves)

    def _leaves(self, indices):
        if not len(indices):
            return self._nothing
        index = int(indices[0])
        return self._form.leaves(index, self._batch(index))

    def __str__(self):
        return f"{type(self._dataset).__name__} of {self.num_indices} batches"


class Examples(Source):
    """The examples of an object with `__len__` and `__getitem__`.

    Such as a `grain.MapDataset`, a `datasets.Dataset` of Hugging Face, a dataset of PyTorch, or one
    of your own. `EpochBatches` reads single examples, in its own order: do not batch, shuffle or
    repeat them before. Random transformations of a `grain.MapDataset` draw anew in each epoch, and
    the same again in a run that resumes.

    Args:
        data: The object. If it has `__getitems__`, which takes a list of indices, that is used.
        to_example: Maps an element to `(x, y[, sample_weight])`, each an array, a number, a text,
            or a tuple or dict of them. None if the elements are such.

    Raises:
        ValueError: If the object has no such methods or no finite length, or if its elements are
            something else.

    Example:
        >>> rows = [{"image": np.zeros(8), "label": 0.0}, {"image": np.ones(8), "label": 1.0}]
        >>> data = tfparallel.data.Examples(rows, lambda row: (row["image"], row["label"]))
        >>> batches = tfparallel.data.EpochBatches(data, global_batch_size=2)
    """

    def __init__(self, data: Any, to_example: Callable[[Any], tuple[Any, ...]] | None = None):
        if not _is_indexable(data) or not 1 <= len(data) < _MOST_EXAMPLES:
            raise ValueError(
                "Examples needs an object with `__getitem__` and `__len__`, and a length from 1 to "
                f"2^40. Received: {short(data)}. Drop `repeat` from it; pass an iterator of "
                "batches, such as a grain.DataLoader, to `fit` itself."
            )
        self.num_indices = len(data)
        self._data, self._to_example = data, to_example
        # The index of a grain.MapDataset counts through all epochs, and seeds what it draws.
        self._counts_epochs = hasattr(data, "to_iter_dataset")
        first = self._read_one(0, self._elements([0])[0])
        self._form = ElementForm(self._name, [first])
        self._specs = [(leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(first)]

    def order(self, seed, epoch):
        return super().order(seed, epoch) + self._counts_epochs * epoch * self.num_indices

    def _elements(self, indices):
        if hasattr(self._data, "__getitems__"):
            return self._data.__getitems__(indices)
        return [self._data[index] for index in indices]

    def _read_one(self, index, element):
        example = element if self._to_example is None else self._to_example(element)
        if not isinstance(example, tuple | list) or not 1 <= len(example) <= 3:
            raise ValueError(
                "An example must be (x, y) or (x, y, sample_weight). Received: "
                f"{short(example)} as element {index} of {type(self._data).__name__}. Map the "
                "elements: `tfparallel.data.Examples(data, lambda row: (row['x'], row['y']))`; "
                "after a filter, leave out the elements that are missing."
            )
        return _in_arrays(without_none(example, self._name(index)))

    def _name(self, index):
        return f"example {index} of {type(self._data).__name__}"

    def read(self, indices):
        leaves = self._by_python(self._leaves, indices, self._specs)
        return tf.nest.pack_sequence_as(self._form.first, leaves)

    def _leaves(self, indices):
        indices = indices.tolist()
        if not indices:
            return [np.empty((0, *shape), dtype) for shape, dtype in self._specs]
        examples = [
            self._form.leaves(index, self._read_one(index, element))
            for index, element in zip(indices, self._elements(indices), strict=True)
        ]
        return list(map(np.stack, zip(*examples, strict=True)))

    def __str__(self):
        return f"{type(self._data).__name__} of {self.num_indices} examples"


def _in_arrays(value):
    """Returns arrays in the tuples and dicts of a value."""
    if isinstance(value, dict):
        return {name: _in_arrays(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_in_arrays, value))
    return in_array(value)


def _is_indexable(data) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def as_source(data: Any) -> Source:
    """Returns `data` if it is a source, or a source that reads it."""
    if isinstance(data, Source):
        return data
    if isinstance(data, keras.utils.PyDataset):
        return Batches(data)
    is_array = isinstance(data, tuple | list | dict | str) or hasattr(data, "dtype")
    is_array |= hasattr(data, "dtypes")  # A table of pandas.
    return Arrays(data) if is_array or not _is_indexable(data) else Examples(data)


def cast(tensor: tf.Tensor) -> tf.Tensor:
    """Casts floating-point data to floatx, as Keras does with arrays passed to `fit`."""
    if tensor.dtype.is_floating and tensor.dtype != keras.config.floatx():
        return tf.cast(tensor, keras.config.floatx())
    return tensor
