"""The replicas of a mesh, each on several devices, and the replica at work.

```
   mesh: data=2, pipeline=2        kernel of a layer in stage 1
     replica 0   CPU:0  CPU:1      copy 0 on CPU:1
     replica 1   CPU:2  CPU:3      copy 1 on CPU:3
```

Layers, optimizers and schedules are written for one replica, and name its devices. Within
`at_work(replica)` they run on that replica: a device name means the corresponding device
(`device_at_work`), and a variable means the replica's copy (`strategies/variables.py`). Outside, a
variable is read where it was created, and written everywhere. So all copies are equal between
steps, and files, callbacks and users see one variable.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.device_names import canonical
from tfparallel.layout.layout import Layout


class Replica(NamedTuple):
    """One replica of a mesh, an index along its data axis.

    Attributes:
        index: The index, from 0.
        number: The number of replicas in this process.
        devices: Maps the name of a device of the first replica to the corresponding device.
    """

    index: int
    number: int
    devices: Mapping[str, str]

    def device(self, name: str | None) -> str:
        """The device that corresponds to one of the first replica's; by default the first one."""
        return self.in_place_of(name) or next(iter(self.devices.values()))

    def in_place_of(self, name: str | None) -> str | None:
        """The device that corresponds to one of the first replica's; None for other devices."""
        full = canonical(name) if name else ""
        local = full.rpartition("/device:")[2]  # A process may name its own devices so.
        return self.devices.get(full) or self.devices.get(local)


def replicas_of(layout: Layout) -> list[Replica]:
    """The replicas of a layout in this process, in order."""
    size, number = layout.mesh.pipeline * layout.mesh.parts, layout.mesh.data // layout.workers
    first = [canonical(name) for name in layout.devices[:size]]
    devices = [layout.devices[k * size : (k + 1) * size] for k in range(number)]
    return [Replica(k, number, dict(zip(first, devices[k], strict=True))) for k in range(number)]


def at_work(replica: Replica | None) -> AbstractContextManager[None]:
    """Makes this thread work for a replica; with None, it reads the first copy and writes all."""
    return within(replica=replica)


def device_at_work(device: str) -> str:
    """Returns the device of the replica at work that corresponds to one of the first replica."""
    replica = context().replica
    return device if replica is None or replica.index == 0 else replica.device(device)

def is_in_replica() -> bool:
    """Whether a replica runs on its own, as in a custom loop, where TensorFlow updates copies."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
