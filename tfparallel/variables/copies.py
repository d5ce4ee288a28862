"""Variables with an equal copy in each replica of a mesh, and the replica that is at work.

```
   mesh: data=2, pipeline=2        kernel of a layer in stage 1
     replica 0   CPU:0  CPU:1      copy 0 on CPU:1
     replica 1   CPU:2  CPU:3      copy 1 on CPU:3
```

A layer, an optimizer, a schedule are written for one replica, and name its devices. Within
`at_work(replica)` they compute on that replica's: a device is the one in its place there (`here`),
a variable is its own copy. Outside of it a variable is read where it was made, and written
everywhere. So all copies are equal between steps, and a file, a callback, a user sees one variable.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.device_names import canonical
from tfparallel.extend import extend
from tfparallel.layout.layout import Layout

__all__ = [
    "Replica",
    "at_work",
    "copies_of",
    "copy_to",
    "first_copy",
    "here",
    "replicas_of",
]


class Replica(NamedTuple):
    """One of the equal parts of a mesh, along its axis of data.

    Attributes:
        index: From 0.
        devices: By the name of a device of the first replica, that in the same place in this one.
    """

    index: int
    devices: Mapping[str, str]

    def device(self, name: str | None) -> str:
        """What stands in the place of a device; the first device for one that is none of these."""
        own, asked = self.devices, canonical(name) if name else ""
        here = asked.rpartition("/device:")[2]  # As a process names its own, in a job of several.
        return own.get(asked) or own.get(here) or next(iter(own.values()))


_WRITING = (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update", "scatter_add", "scatter_div"),
    *("scatter_max", "scatter_min", "scatter_mul", "scatter_nd_add", "scatter_nd_max"),
    *("scatter_nd_min", "scatter_nd_sub", "scatter_nd_update", "scatter_sub", "scatter_update"),
    "_strided_slice_assign",  # What `variable[2:].assign` calls.
)


def replicas_of(layout: Layout) -> list[Replica]:
    """The replicas of a layout that one process has, in order."""
    size = layout.mesh.pipeline * layout.mesh.tensor
    first = [canonical(name) for name in layout.devices[:size]]
    return [
        Replica(k, dict(zip(first, layout.devices[k * size : (k + 1) * size], strict=True)))
        for k in range(layout.mesh.data // layout.workers)
    ]


def replica_at_work() -> Replica | None:
    """Returns the replica that this thread works for, or None outside of any."""
    return context().replica


def at_work(replica: Replica | None) -> AbstractContextManager[None]:
    """Has this thread work for a replica; for none, it reads the first and writes all."""
    return within(replica=replica)


def here(device: str) -> str:
    """Returns the device of the replica at work that is in the place of one of the first's."""
    replica = replica_at_work()
    return device if replica is None or replica.index == 0 else replica.device(device)


class CopiedVariable:
    """Extends a variable of Keras that has several copies."""

    @property
    def _value(self) -> tf.Variable:
        replica = replica_at_work()
        return self._copies[0 if replica is None else replica.index]

    def _restore_from_tensors(self, restored_tensors):
        # `tf.train.Checkpoint` would write what it knows, the first copy.
        self.assign(restored_tensors["VARIABLE_VALUE"])
        return self.value


def copy_to(replicas: Sequence[Replica], variables: Iterable[keras.Variable]) -> None:
    """Gives variables a copy in each replica, with the value that they have in the first.

    Those that have copies already, or no memory of their own, are left as they are.
    """
    for variable in variables:
        first = variable._value
        if isinstance(variable, CopiedVariable) or not isinstance(first, tf.Variable):
            continue
        copies = [first]
        for replica in replicas[1:]:
            with tf.init_scope(), tf.device(replica.device(first.device)):
                # By its name an optimizer may leave it out of weight decay.
                name = first.name.partition(":")[0]
                copy = tf.Variable(first, trainable=first.trainable, dtype=first.dtype, name=name)
            copy._tfparallel_first_copy = first
            copies.append(copy)
        for method in _WRITING:
            # Whoever asks a variable for its `value`, and writes that, has the first copy.
            setattr(first, method, _writing_all(getattr(first, method), copies[1:]))
        extend(variable, CopiedVariable, _copies=tuple(copies))


def _writing_all(write: Callable, others: Sequence[tf.Variable]) -> Callable:
    """A method of the first copy that writes the others, too, unless a replica is at work."""

    @functools.wraps(write)
    def write_all(*args, **kwargs):
        for other in others if replica_at_work() is None else ():
            getattr(other, write.__name__)(*args, **kwargs)
        return write(*args, **kwargs)

    return write_all


def copies_of(variable: keras.Variable) -> tuple[tf.Variable, ...]:
    """Returns the copies of a variable, in the order of the replicas; of most it is one."""
    return variable._copies if isinstance(variable, CopiedVariable) else (variable._value,)


def first_copy(variable: keras.Variable | tf.Variable) -> keras.Variable | tf.Variable:
    """Returns the copy in the first replica, of a variable or of one of its copies."""
    if isinstance(variable, CopiedVariable):
        return variable._copies[0]
    return getattr(variable, "_tfparallel_first_copy", variable)
