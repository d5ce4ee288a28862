"""The global batches of one `fit`, in an order that a resumed run repeats.

Keras fetches one batch before training starts, to learn the shapes, and creates iterators that it
discards. So the order must not depend on how often the dataset was iterated: it is a function of
the epoch, which a callback sets.
"""

import functools
import hashlib
import numbers
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.data import rows_of_worker
from tfparallel.data.element_form import common_shape
from tfparallel.data.example_order import batch_indices, num_batches_per_pass
from tfparallel.data.sources import Source, as_source, cast

_EXAMPLES = {"global_batch_size": 64, "seed": 0, "steps_per_epoch": 100}
_NUM_COMPARED = 64  # Rows of the first batch that workers compare.

Data = Any
"""`(x, y[, sample_weight])`, a `Source`, a `PyDataset`, or a `tf.data.Dataset` of examples."""


class EpochBatches(keras.callbacks.Callback):
    """The dataset for `fit`, and the callback that sets its epoch.

    Indexable data is reshuffled in each pass, by `tfparallel.data.example_order`; a
    `tf.data.Dataset` keeps its own order. The short last batch of a pass is not dropped. With
    `steps_per_epoch`, an epoch has that many batches: indexable data continues where the last epoch
    stopped, over several passes, while a dataset starts again.

    Args:
        data: `(x, y[, sample_weight])`, each an array or a nested structure of arrays whose first
            axis is the example; `tfparallel.data.TFRecords` or `NPZShards`; an object whose
            `__getitem__` returns such an example, or `tfparallel.data.Examples` of one; a
            `keras.utils.PyDataset`, whose batches stay as they are; or a `tf.data.Dataset` of
            single examples.
        global_batch_size: Examples per step.
        seed: Seed for the order of indexable data.
        steps_per_epoch: Batches per epoch, or None for one pass.

    Attributes:
        dataset: The dataset to pass to `fit`.
        starts_anywhere: Whether an epoch can start in the middle without reading earlier batches.

    Raises:
        ValueError: If the data is none of these, a number is out of range, or a dataset is infinite
            and `steps_per_epoch` is None.

    Pass `shuffle=False` to `fit`, or Keras warns that it does not shuffle a dataset. Do not pass
    `steps_per_epoch` to `fit` as well.

    Example:
        >>> batches = tfparallel.data.EpochBatches((x, y), global_batch_size=64, seed=7)
        >>> model.fit(batches.dataset, epochs=3, shuffle=False, callbacks=[batches])
    """

    def __init__(
        self,
        data: Data,
        *,
        global_batch_size: int,
        seed: int = 0,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        _check_count("global_batch_size", global_batch_size, 1)
        _check_count("seed", seed, 0)
        if steps_per_epoch is not None:
            _check_count("steps_per_epoch", steps_per_epoch, 1)
        self._epoch = 0
        self._start, self._is_counted = (0, 0), True
        self._global_batch_size, self._goes_on = global_batch_size, True
        self.starts_anywhere = not isinstance(data, tf.data.Dataset)
        if not self.starts_anywhere:
            self.dataset = _dataset_batches(data, global_batch_size, steps_per_epoch)
            self._order = _order_of(data)
            # Each epoch restarts it. An infinite dataset, or one of unknown size, is assumed to
            # consist of full batches.
            size = int(data.cardinality())
            self._num_in_pass, self._goes_on = size if size > 0 else None, False
            return
        self._source = source = as_source(data)
        self._order = {
            "source": str(source),
            "order": f"a function of seed {seed}, epoch and step",
            "resumes": "immediately, with any number of workers",
        }
        self._seed, self._num_indices = seed, 1 if source.whole_batches else global_batch_size
        self._num_steps = steps_per_epoch or num_batches_per_pass(
            source.num_indices, self._num_indices
        )
        self._num_in_pass = None if source.whole_batches else source.num_indices
        self._is_counted = not source.whole_batches
        self.dataset = self._read()
        if not source.whole_batches:
            rows_of_worker.offer(
                self.dataset, rows_of_worker.Readings(self._read, self._facts, global_batch_size)
            )

    def _read(
        self,
        bounds: rows_of_worker.Bounds | None = None,
        change: rows_of_worker.Change | None = None,
    ) -> tf.data.Dataset:
        """Returns the dataset of the batches, or of the rows of each batch within `bounds`."""

        def indices_of_epoch() -> tuple[np.ndarray, ...]:
            steps = self._steps_of_epoch(self._epoch)
            epoch, skipped = self._start
            if epoch == self._epoch:
                steps[:skipped] = [np.empty(0, np.int64)] * skipped
            sizes = np.array([len(step) for step in steps], np.int64)
            if bounds is not None:
                ranges = [
                    rows_of_worker.rows_to_read(bounds(len(step)), len(step), min, max)
                    for step in steps
                ]
                steps = [step[a : a + n] for step, (a, n) in zip(steps, ranges, strict=True)]
            ends = np.cumsum([len(step) for step in steps])
            return np.concatenate(steps), ends.astype(np.int64), sizes

        def epoch_dataset(_: tf.Tensor) -> tf.data.Dataset:
            arrays = tf.numpy_function(indices_of_epoch, [], (tf.int64,) * 3)
            flat, ends, sizes = [tf.ensure_shape(array, [None]) for array in arrays]
            starts = tf.concat([tf.zeros([1], tf.int64), ends[:-1]], 0)
            steps = tf.data.Dataset.from_tensor_slices((starts, ends, sizes))
            return steps.map(lambda start, end, size: (flat[start:end], size))

        def read(indices: tf.Tensor, size: tf.Tensor) -> Any:
            return _element(self._source.read(indices), size, bounds, change)

        # Evaluated at the first batch of an iterator: after `on_epoch_begin` for every iterator
        # that trains.
        indices = tf.data.Dataset.range(1).flat_map(epoch_dataset)
        batches = indices.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        batches = batches.apply(tf.data.experimental.assert_cardinality(self._num_steps))
        return batches.prefetch(tf.data.AUTOTUNE)

    def _steps_of_epoch(self, epoch: int) -> list[np.ndarray]:
        source, first = self._source, epoch * self._num_steps
        return batch_indices(
            source.num_indices, self._num_indices, self._seed, first, self._num_steps, source.order
        )

    def _facts(self) -> dict[str, str]:
        return _facts_of(self._source, self._order["order"], self._steps_of_epoch(0)[0])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._start = (0, 0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def start_at(self, epoch: int, step: int) -> None:
        """Makes one epoch start in the middle: the first `step` batches of a source are empty.

        Keras cannot start an epoch in the middle, and counts its batches. So the batches are still
        yielded, at no cost, and `tfparallel.callbacks.Checkpoint` skips them. A `tf.data.Dataset`
        yields them in full.
        """
        self._start = (epoch, step)

    def num_examples(self, epoch: int, first: int, last: int) -> int | None:
        """Returns the number of examples in steps `first` to `last` (exclusive) of an epoch.

        Returns:
            The number; None for a `PyDataset`, which determines its own batches.
        """
        if not self._is_counted:
            return None
        size, most = self._global_batch_size, self._num_in_pass
        if most is None:
            return size * (last - first)
        before = epoch * self._num_steps if self._goes_on else 0

        def up_to(step: int) -> int:
            passes, steps = divmod(before + step, num_batches_per_pass(most, size))
            return passes * most + min(steps * size, most)

        return up_to(last) - up_to(first)

    def num_passed(self, epoch: int) -> int:
        """Returns the number of completed steps in an epoch, which are empty."""
        return self._start[1] if self._start[0] == epoch else 0

    def report(self) -> dict[str, str]:
        """Describes the data, its order, and how a run resumes with it.

        Returns:
            Texts by name: `source`, `order` and `resumes`.
        """
        return dict(self._order)


def _check_count(name: str, value: Any, least: int) -> None:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise ValueError(
            f"`{name}` must be a whole number of at least {least}. Received: {name}={value!r}. "
            f"Pass, for example, {name}={_EXAMPLES[name]}."
        )


def evaluation_batches(data: Data, global_batch_size: int) -> tf.data.Dataset:
    """Returns the batches of one pass in the data's own order; the last one may be short.

    Raises:
        ValueError: If a dataset is infinite.
    """
    if isinstance(data, tf.data.Dataset):
        return _dataset_batches(data, global_batch_size, None)
    source = as_source(data)

    def read_batches(
        bounds: rows_of_worker.Bounds | None = None, change: rows_of_worker.Change | None = None
    ) -> tf.data.Dataset:
        def read(indices: tf.Tensor) -> Any:
            size = tf.size(indices, tf.int64)
            if bounds is not None:
                start, num_rows = rows_of_worker.rows_to_read(
                    bounds(size), size, tf.minimum, tf.maximum
                )
                indices = indices[start : start + num_rows]
            return _element(source.read(indices), size, bounds, change)

        indices = tf.data.Dataset.range(source.num_indices)
        indices = indices.batch(1 if source.whole_batches else global_batch_size)
        return indices.map(read, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)

    batches = read_batches()
    if source.whole_batches:
        return batches
    first = np.arange(min(global_batch_size, source.num_indices))
    facts = functools.partial(_facts_of, source, "its own", first)
    return rows_of_worker.offer(
        batches, rows_of_worker.Readings(read_batches, facts, global_batch_size)
    )


def first_batches(
    data: Data, *, global_batch_size: int, seed: int, num_batches: int
) -> list[tuple[Any, ...]]:
    """Returns the first batches of a run as NumPy arrays, one of which is short.

    A parity check needs an uneven batch. If all `num_batches` would be full, the last one is cut in
    half; otherwise the short last batch of a pass serves. Passes repeat as needed.

    Args:
        data: As for `EpochBatches`.
        global_batch_size: Examples in a full batch.
        seed: Seed for the order of indexable data.
        num_batches: Number of batches.
    """
    if isinstance(data, tf.data.Dataset):
        examples = data.map(_cast_tuple).take(num_batches * global_batch_size)
        passes = examples.batch(global_batch_size).repeat().take(num_batches)
        batches = [_to_numpy(batch) for batch in passes]
    else:
        source = as_source(data)
        num_indices = 1 if source.whole_batches else global_batch_size
        steps = batch_indices(source.num_indices, num_indices, seed, 0, num_batches, source.order)
        batches = [_to_numpy(source.read(tf.constant(indices))) for indices in steps]
        if source.whole_batches:
            global_batch_size = _num_examples(batches[-1])
    if all(_num_examples(batch) == global_batch_size for batch in batches):
        keep = (global_batch_size + 1) // 2
        batches[-1] = tf.nest.map_structure(lambda array: array[:keep], batches[-1])
    return batches


def batches_dataset(batches: list[tuple[Any, ...]]) -> tf.data.Dataset:
    """Returns a dataset that yields the given batches of NumPy arrays in order."""

    def any_length(*arrays: np.ndarray) -> tf.TensorSpec:
        return tf.TensorSpec(common_shape(arrays, any_rows=True), arrays[0].dtype)

    def generate() -> Iterator[tuple[Any, ...]]:
        yield from batches

    signature = tf.nest.map_structure(any_length, *batches)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _dataset_batches(
    dataset: tf.data.Dataset, global_batch_size: int, steps_per_epoch: int | None
) -> tf.data.Dataset:
    cardinality = int(dataset.cardinality())
    infinite = cardinality == tf.data.INFINITE_CARDINALITY
    if infinite and steps_per_epoch is None:
        raise ValueError(
            "The dataset is infinite, so an epoch needs a length. Received: a tf.data.Dataset of "
            "infinite cardinality, no steps_per_epoch. Set the number of batches per epoch: "
            "--steps_per_epoch=100."
        )
    batches = dataset.map(_cast_tuple).batch(global_batch_size)
    if steps_per_epoch is not None:
        batches = (batches if infinite else batches.repeat()).take(steps_per_epoch)
        if cardinality:
            batches = batches.apply(tf.data.experimental.assert_cardinality(steps_per_epoch))
    return batches.prefetch(tf.data.AUTOTUNE)


def _element(
    batch: tuple[Any, ...],
    size: tf.Tensor,
    bounds: rows_of_worker.Bounds | None,
    change: rows_of_worker.Change | None,
) -> Any:
    """Returns an element of the dataset: a batch, or marked rows of a batch of that size."""
    if change is not None:
        batch = change(*batch)
    return batch if bounds is None else rows_of_worker.mark(batch, size)


def _facts_of(source: Source, order: str, first_batch: np.ndarray) -> dict[str, str]:
    """Returns facts on which workers that read only their own rows must agree."""
    rows = source.read(tf.constant(first_batch[:_NUM_COMPARED], tf.int64))
    digest = hashlib.sha256()
    for leaf in tf.nest.flatten(_to_numpy(rows)):
        digest.update(leaf.tobytes() if leaf.dtype != object else repr(leaf.tolist()).encode())
    return {"source": str(source), "order": order, "first rows": digest.hexdigest()[:16]}


def _order_of(dataset: tf.data.Dataset) -> dict[str, str]:
    deterministic = dataset.options().deterministic is not False
    return {
        "source": f"tf.data.Dataset of {int(dataset.cardinality())} examples"
        if int(dataset.cardinality()) >= 0
        else "tf.data.Dataset of unknown size",
        "order": "its own" if deterministic else "its own, not deterministic",
        "resumes": (
            "by reading and skipping what was seen, with any number of workers; exact if each "
            "iteration yields the same examples"
        )
        if deterministic
        else "not exactly: the dataset sets `deterministic=False`",
    }


def _cast_tuple(*example: Any) -> tuple[Any, ...]:
    return tf.nest.map_structure(cast, example)


def _to_numpy(structure: Any) -> Any:
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), structure)


def _num_examples(arrays: Any) -> int:
    return int(tf.nest.flatten(arrays)[0].shape[0])
