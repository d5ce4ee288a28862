"""The replicas of a mesh, each on several devices, and the one that is at work.

```
   mesh: data=2, pipeline=2        kernel of a layer in stage 1
     replica 0   CPU:0  CPU:1      copy 0 on CPU:1
     replica 1   CPU:2  CPU:3      copy 1 on CPU:3
```

A layer, an optimizer, a schedule are written for one replica, and name its devices. Within
`at_work(replica)` they compute on that replica's: a device is the one in its place there (`here`),
a variable is its own copy (`strategies/variables.py`). Outside of it a variable is read where it
was made, and written everywhere. So all copies are equal between steps, and a file, a callback, a
user sees one variable.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.device_names import canonical
from tfparallel.layout.layout import Layout

__all__ = ["Replica", "at_work", "here", "is_in_replica", "replicas_of"]


class Replica(NamedTuple):
    """One of the equal parts of a mesh, along its axis of data.

    Attributes:
        index: From 0.
        number: How many there are in this process.
        devices: By the name of a device of the first replica, that in the same place in this one.
    """

    index: int
    number: int
    devices: Mapping[str, str]

    def device(self, name: str | None) -> str:
        """What stands in the place of a device; the first device for one that is none of these."""
        return self.in_place_of(name) or next(iter(self.devices.values()))

    def in_place_of(self, name: str | None) -> str | None:
        """What stands in the place of a device; None for one that is none of the first's."""
        asked = canonical(name) if name else ""
        here = asked.rpartition("/device:")[2]  # As a process names its own, in a job of several.
        return self.devices.get(asked) or self.devices.get(here)


def replicas_of(layout: Layout) -> list[Replica]:
    """The replicas of a layout that one process has, in order."""
    size, number = layout.mesh.pipeline * layout.mesh.parts, layout.mesh.data // layout.workers
    first = [canonical(name) for name in layout.devices[:size]]
    own = [layout.devices[k * size : (k + 1) * size] for k in range(number)]
    return [Replica(k, number, dict(zip(first, own[k], strict=True))) for k in range(number)]


def at_work(replica: Replica | None) -> AbstractContextManager[None]:
    """Has this thread work for a replica; for none, it reads the first and writes all."""
    return within(replica=replica)


def here(device: str) -> str:
    """Returns the device of the replica at work that is in the place of one of the first's."""
    replica = context().replica
    return device if replica is None or replica.index == 0 else replica.device(device)

def is_in_replica() -> bool:
    """Whether a replica computes by itself, as in a custom loop: TensorFlow updates the copies."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
