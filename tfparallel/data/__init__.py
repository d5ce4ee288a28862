"""How data is divided: by batch, by sample, by order; what `tfparallel.data` offers is below.

* batch partition, the default: every worker and replica sees the global batch, and computes the
  rows of it that are its own (`partition.row_ranges`);
* sample partition: each worker reads examples of its own (`by_sample`).
"""

import importlib

_FACE = {"by_sample": "tfparallel.replication.sample_partition"}
__all__ = ["by_sample"]


def __getattr__(name):
    # Lazy, because the order and the partition are plain Python, and this is not.
    if name not in _FACE:
        raise AttributeError(f"Module 'tfparallel.data' has no attribute {name!r}.")
    return getattr(importlib.import_module(_FACE[name]), name)
