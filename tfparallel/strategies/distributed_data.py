"""Recovers the data set behind a distributed one for `fit`, which trains on global batches.

```
   experimental_distribute_dataset       B rows ──► B/N on each replica       fit takes the B rows
   distribute_datasets_from_function     b rows, b rows, … ──► one replica each
                                         fit takes the rows of a worker's replicas as one batch
```
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfparallel.seams.distribute import DistributedValues

_MADE_OF = "_tfparallel_made_of"
_ALL_ROWS = 2**31


def made_of(distributed: Any, dataset: tf.data.Dataset) -> Any:
    """Records the data set of global batches on the distributed one."""
    setattr(distributed, _MADE_OF, (dataset, False))
    return distributed


def made_by_function(
    distribute: Callable[[Callable], Any], dataset_fn: Callable, num_replicas: int
) -> Any:
    """Distributes the data set that a function returns, and records it.

    Args:
        distribute: Called with a function like `dataset_fn`; returns the distributed data set.
        dataset_fn: Returns the data set of this worker, with batches for one replica each.
        num_replicas: The number of this worker's replicas, each of which takes a batch per step.
    """
    datasets = []

    def remembering(context):
        datasets.append(dataset_fn(context))
        return datasets[-1]

    distributed = distribute(remembering)
    if len(datasets) == 1 and isinstance(datasets[0], tf.data.Dataset):
        setattr(distributed, _MADE_OF, (_in_groups(datasets[0], num_replicas), True))
    return distributed


def whole_batches(data: Any, strategy: Any) -> tuple[Any, bool]:
    """Returns the data set behind a distributed one; other data unchanged.

    Args:
        data: The data of `fit`, `evaluate` or `predict`.
        strategy: The strategy that trains on it; None on one device.

    Returns:
        The data, and whether its batches are only this worker's rows.

    Raises:
        ValueError: If another strategy distributed it.
    """
    if not isinstance(data, tf.distribute.DistributedDataset):
        return data, False
    owner, source = getattr(data, "_strategy", None), getattr(data, _MADE_OF, None)
    if source is None or owner is not strategy:
        raise ValueError(
            "The data set is already distributed, and its source is unknown. A `tf.data.Dataset` "
            "of global batches is required, or a data set that the model's own strategy has "
            f"distributed, with one input pipeline per worker. Received: a {type(data).__name__} "
            f"of a {type(owner).__name__}. Pass the data set itself to `fit`, or distribute it "
            "with `model.distribute_strategy`."
        )
    return source


def joined(structure: Any) -> Any:
    """Joins the rows of all replicas to one batch in a step."""

    def whole(leaf):
        if not isinstance(leaf, DistributedValues):
            return leaf
        rows = list(leaf.values)
        if isinstance(rows[0], tf.SparseTensor):
            return tf.sparse.concat(0, rows)
        return tf.concat(rows, 0)

    return tf.nest.map_structure(whole, structure)


def _in_groups(dataset, size):
    """Joins the rows of every `size` consecutive batches."""
    if size == 1:
        return dataset
    cardinality = int(dataset.cardinality())

    def one_batch(*parts):
        window = parts if len(parts) > 1 else parts[0]
        return tf.data.Dataset.zip(window).unbatch().batch(_ALL_ROWS)

    groups = dataset.window(size).flat_map(one_batch)
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return groups
    if cardinality != tf.data.INFINITE_CARDINALITY:
        cardinality = -(-cardinality // size)
    return groups.apply(tf.data.experimental.assert_cardinality(cardinality))
