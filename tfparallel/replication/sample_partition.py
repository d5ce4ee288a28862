"""Sample partition: each worker reads different examples.

    worker 0   x₀ x₁ x₂ │ x₃ x₄ x₅ │ x₆            three steps
    worker 1   x₇ x₈    │ x₉       │ (nothing)     two, and an empty batch
               ─────────┼──────────┼──────────
    the step     5 rows │   4 rows │   1 row       the batch of all workers

Use it if the data does not fit, or is not readable, on every worker: each opens its own files. The
workers only exchange their row counts; each row is trained on where it was read. No example is
dropped or counted twice. A worker whose examples have run out takes part without rows: it borrows a
row of another worker, and drops the results. Batches padded to different lengths are padded to the
longest. If losses or metrics need the outputs of all rows (`step/where_rows_meet.py`), and in a
user's own step, the workers gather the batches before the step sees them.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import ROWS
from tfparallel.data import rows_of_worker
from tfparallel.data.partition import rows_of_workers
from tfparallel.seams.compiled import class_weighting
from tfparallel.texts import short

_KEY = "__rows_of_this_worker__"


def by_sample(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a data set of batches as this worker's share of the examples.

    Call it on all workers, with shares of any size; batches may differ in size, too. Pass the
    result to `fit`, `evaluate` or `predict`, whose batch then joins the batches of all workers.

    Args:
        dataset: Batches `(x, y[, sample_weight])` of this worker, of known cardinality; or
            infinite, on all workers. Axes after the first may be padded to different lengths on
            the workers; they are filled with zeros.

    Returns:
        A data set with as many batches on each worker as the longest share has.

    Raises:
        ValueError: If the length of the data set is unknown, it ends only on some workers, or
            its tensors are ragged or sparse.

    Example:
        >>> own = slice(tfparallel.worker_index(), None, tfparallel.num_workers())
        >>> rows = tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(32)
        >>> model.fit(tfparallel.data.by_sample(rows), epochs=3)
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "`by_sample` takes a tf.data.Dataset of this worker's own batches. Received: "
            f"{short(dataset)}. Create one: `tf.data.Dataset.from_tensor_slices((x, y)).batch(32)`."
        )
    num_batches = int(dataset.cardinality())
    if num_batches == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError(
            "Each worker must know how many batches it has, so that all take the same number of "
            "steps. A data set of known cardinality is required. Received: cardinality "
            f"{num_batches} (unknown). Count the batches once and declare the number: "
            "`.apply(tf.data.experimental.assert_cardinality(n))`."
        )
    workers = ProcessGroup.of_process
    if workers is None:
        return dataset
    odd = [
        spec
        for spec in tf.nest.flatten(dataset.element_spec)
        if not isinstance(spec, tf.TensorSpec)
    ]
    if odd:
        raise ValueError(
            "Only dense rows can be padded and joined across workers. Dense tensors are required. "
            f"Received: {odd[0]}. Pad them (`.map(lambda x, y: (x.to_tensor(), y))`), or pass the "
            "whole batches on all workers, without `by_sample`."
        )
    cardinalities = workers.exchange(num_batches, "`by_sample`")
    num_steps = max(cardinalities)
    dataset = dataset.map(lambda *batch: tf.nest.map_structure(_of_any_length, batch))
    if tf.data.INFINITE_CARDINALITY in cardinalities:
        if num_steps != tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "The data sets of all workers must be finite, or all infinite. Received: batches "
                f"of each worker: {cardinalities}, where {num_batches} is this worker's and -1 "
                "means infinite. Add `.repeat()` on all workers, or on none."
            )
        dataset._tfparallel_by_sample = True
        return dataset
    nothing = tf.nest.map_structure(_no_rows, dataset.element_spec)
    empty = tf.data.Dataset.from_tensors(nothing).map(
        lambda *batch: tf.nest.map_structure(_of_any_length, batch)
    )
    padded = dataset.concatenate(empty.repeat(num_steps - num_batches))
    padded = padded.apply(tf.data.experimental.assert_cardinality(num_steps))
    padded._tfparallel_by_sample = True
    return padded


def weighted(dataset: Any, class_weight: dict[int, float] | None) -> Any:
    """Applies class weights to a sample partition, which would lose its mark if Keras mapped it."""
    if class_weight is None or not getattr(dataset, "_tfparallel_by_sample", False):
        return dataset
    dataset = dataset.map(class_weighting(class_weight))
    dataset._tfparallel_by_sample = True
    return dataset


def marked(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Wraps the batches of a data set from `by_sample`, so a step can recognize them."""
    if not getattr(dataset, "_tfparallel_by_sample", False):
        return dataset
    # The key records which axes have an unknown length: `predict` passes its steps batches of
    # known shapes, which differ by worker, and all workers must treat them alike.
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = ["x".join("?" if n is None else str(n) for n in spec.shape[1:]) for spec in specs]
    key = ":".join([_KEY, *shapes])
    return dataset.map(lambda *batch: {key: batch})


def unmarked(data):
    """The batch, or its spec, without the wrapper."""
    rows_and_number = rows_of_worker.unmarked(data)
    if rows_and_number is not None:
        return rows_and_number[0]
    return next(iter(data.values())) if _is_marked(data) else data


def rows_and_counts(
    data: Any, strategy: Any, read: Callable[[Any], Any]
) -> tuple[Any, list[tf.Tensor] | None]:
    """Returns this worker's rows of the batch, and the row counts of all workers, in a step.

    Args:
        data: The data of the step: a batch, or the rows of this worker, from a data set that
            `by_sample` returned or that is read in shares (`tfparallel.data.rows_of_worker`).
        strategy: The strategy that trains on it.
        read: Drops the inputs that the model does not read, which may have other rows.

    Returns:
        This worker's rows, padded like those of the others, and the number of rows of each worker;
        a worker without rows gets one of another worker. Or the global batch and None.
    """
    rows_and_number = rows_of_worker.unmarked(data)
    if rows_and_number is not None:
        rows, number = rows_and_number
        return read(rows), rows_of_workers(strategy, tf.cast(number, tf.int32))
    if not _is_marked(data):
        return read(data), None
    workers = strategy.workers
    ((key, batch),) = data.items()
    shapes = [
        [None if n == "?" else int(n) for n in text.split("x") if n] for text in key.split(":")[1:]
    ]
    leaves = [
        tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *shape])
        for leaf, shape in zip(tf.nest.flatten(batch), shapes, strict=True)
    ]
    batch = read(tf.nest.pack_sequence_as(batch, leaves))
    leaves = [_padded(leaf, workers) for leaf in tf.nest.flatten(batch)]
    num_rows = tf.reshape(tf.shape(leaves[0])[0], [1])
    (counts,) = workers.all_gather([num_rows], [1] * workers.num_workers)
    counts = tf.unstack(counts, num=workers.num_workers)
    leaves = _with_a_row(leaves, counts, workers)
    return tf.nest.pack_sequence_as(batch, leaves), counts


def _with_a_row(leaves, counts, workers):
    """Gives a worker without rows one of another's (see `rows_of_worker.rows_to_read`).

    Strings are not sent; an empty one takes their place.
    """
    num_firsts = [tf.minimum(count, 1) for count in counts]
    missing = 1 - num_firsts[workers.worker_index]
    kinds = [leaf.dtype for leaf in leaves]
    sent = [kind.is_floating or kind.is_integer or kind.is_bool for kind in kinds]

    def of_another():
        first_rows = [leaf[:1] for leaf, is_sent in zip(leaves, sent, strict=True) if is_sent]
        firsts = iter(workers.all_gather(first_rows, num_firsts, ROWS) if first_rows else [])
        padded = []
        for leaf, is_sent in zip(leaves, sent, strict=True):
            shape = tf.concat([[missing], tf.shape(leaf)[1:]], 0)
            row = next(firsts)[:missing] if is_sent else tf.zeros(shape, leaf.dtype)
            padded.append(tf.concat([leaf, row], 0))
        return padded

    padded = tf.cond(tf.reduce_min(num_firsts) > 0, lambda: list(leaves), of_another)
    return [tf.ensure_shape(*pair) for pair in zip(padded, [x.shape for x in leaves], strict=True)]


def joined(data, counts, workers):
    """Gathers the rows of all workers in a step.

    Args:
        data: The rows that `rows_and_counts` returned.
        counts: The counts that it returned.
        workers: The strategy's `ProcessGroup`, or None.
    """
    if counts is None:
        return data
    num_rows = counts[workers.worker_index]
    rows = workers.all_gather([leaf[:num_rows] for leaf in tf.nest.flatten(data)], counts, ROWS)
    return tf.nest.pack_sequence_as(data, rows)


def _is_marked(data) -> bool:
    return isinstance(data, dict) and len(data) == 1 and str(next(iter(data))).startswith(_KEY)


def _padded(leaf, workers):
    """Pads the axes of unknown length, except the first, to the longest of all workers."""
    if None not in leaf.shape[1:]:
        return leaf
    lengths = tf.shape(leaf)[1:]
    (gathered,) = workers.all_gather([lengths[None]], [1] * workers.num_workers)
    missing = tf.reduce_max(gathered, 0) - lengths
    return tf.pad(leaf, tf.concat([[[0, 0]], tf.stack([tf.zeros_like(lengths), missing], 1)], 0))


def _of_any_length(tensor):
    """The tensor with an unknown static number of rows."""
    return tensor[: tf.shape(tensor)[0]]


def _no_rows(spec):
    return tf.zeros([0, *[size or 0 for size in spec.shape[1:]]], spec.dtype)
