"""The data of a training: read in which order, divided how.

An order that is a function of seed, epoch and step, and a data set for `fit`: `EpochBatches`, of
arrays, a `keras.utils.PyDataset`, and files too many for memory (`TFRecords`, `NPZShards`).

Divided by one of
* *batch partition*, the default: every worker and replica sees the global batch, and computes the
  rows of it that are its own (`rows_by_replica` tells which);
* *sample partition*: each worker reads examples of its own (`by_sample`);
* *feature partition*: each device reads features of its own, of every example (`by_feature`).
"""

import importlib

_FACE = {
    "EpochBatches": "tfparallel.data.batches",
    "NPZShards": "tfparallel.data.files",
    "TFRecords": "tfparallel.data.files",
    "by_feature": "tfparallel.data.feature_partition",
    "by_sample": "tfparallel.replication.sample_partition",
    "rows_by_replica": "tfparallel.data.partition",
}
__all__ = sorted(_FACE)


def __getattr__(name):
    # Lazy, because the order and the partition are plain Python, and this is not.
    if name not in _FACE:
        raise AttributeError(f"Module 'tfparallel.data' has no attribute {name!r}.")
    return getattr(importlib.import_module(_FACE[name]), name)


def __dir__():
    return __all__
