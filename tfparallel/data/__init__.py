"""Training data: its order, and its partition over devices and workers.

`EpochBatches` provides a dataset for `fit` whose order is a function of seed, epoch and step. It
reads arrays, a `keras.utils.PyDataset`, files that do not fit in memory (`TFRecords`,
`NPZShards`), and any object with random access (`Examples`), such as a `grain.MapDataset`.

There are three ways to partition the data:
* *batch partition*, the default: every worker and replica sees the global batch, and computes its
  own rows of it (see `rows_by_replica`);
* *sample partition*: each worker reads its own examples (`by_sample`);
* *feature partition*: each device reads its own features of every example (`by_feature`).
"""

import importlib

_FACE = {
    "EpochBatches": "tfparallel.data.batches",
    "Examples": "tfparallel.data.sources",
    "NPZShards": "tfparallel.data.files",
    "TFRecords": "tfparallel.data.files",
    "by_feature": "tfparallel.data.feature_partition",
    "by_sample": "tfparallel.replication.sample_partition",
    "rows_by_replica": "tfparallel.data.partition",
}
__all__ = sorted(_FACE)


def __getattr__(name):
    # Lazy, so that the order and the partition can be imported without TensorFlow.
    if name not in _FACE:
        raise AttributeError(
            f"Module 'tfparallel.data' has no attribute {name!r}. It offers: {', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_FACE[name]), name)


def __dir__():
    return __all__
