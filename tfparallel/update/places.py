"""The places of an optimizer's update; at each place, it reads and writes only that place's copies.

| | a place | copies of a variable |
| --- | --- | --- |
| `Places` | the only one; each variable has its own device | one |
| `ReplicaPlaces` (`replication/places.py`) | a device of a strategy | those of `tf.distribute` |
| `MeshPlaces` (`hybrid/places.py`) | a replica of a mesh | as above, on the replica's devices |
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.tracing.audit import device_of, device_outside, noting
from tfparallel.update.one_at_a_time import one_large_update_at_a_time


class Places:
    """A single place, for layers that lie on several devices.

    Each operation of an update runs on the device of its first input: the gradient, the variable or
    its slot. Keras's loops over variables for clipping, decay and averages follow, too.
    """

    workers: ProcessGroup | None = None  # The workers with the other places.
    all_reduce_ops: tf.distribute.CrossDeviceOps | None = None  # None: on the first device.
    strategy: tf.distribute.Strategy | None = None  # The strategy of the devices.
    sums_late = False  # Whether terms of gradients may be summed only at an update.

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._key == self._key

    __hash__ = None

    @property
    def _key(self) -> Any:
        return None

    def __len__(self) -> int:
        """The number of places in this process."""
        return 1

    @property
    def number(self) -> int:
        """The number of places of all workers."""
        return len(self) * (1 if self.workers is None else self.workers.num_workers)

    @property
    def first(self) -> int:
        """The index of the first local place among all."""
        return 0 if self.workers is None else len(self) * self.workers.worker_index

    def before_build(self, weights: Sequence[keras.Variable]) -> None:
        """Prepares the weights of an optimizer before it is built; raises for foreign weights."""

    def hold(self, slots: Sequence[keras.Variable]) -> bool:
        """Whether slots that plain Keras created already lie in the right place."""
        return False

    def make(self) -> AbstractContextManager:
        """The context that creates variables."""
        return contextlib.nullcontext()

    def copy(self, variables: Iterable[keras.Variable]) -> None:
        """Copies variables to each place, if they have no copies yet."""

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """The copies of a variable, one per local place."""
        return (getattr(variable, "_value", variable),)

    def all(self) -> AbstractContextManager:
        """A context in which variables are read at the first place and written at all places."""
        return following_inputs()

    def at(self, index: int) -> AbstractContextManager:
        """A context, within `all`, in which a variable is its copy at one local place."""
        return contextlib.nullcontext()

    def each(self, update: Callable[[int, Any], None], arguments: Sequence[Any]) -> None:
        """Runs the same update at each place, with different arguments.

        Args:
            update: Takes the index of the place and its argument.
            arguments: Nested gradients for each of the first places.
        """
        for index, argument in enumerate(arguments):
            with self.at(index):
                update(index, argument)

    def gradient(self, gradient: Any, unit: keras.Variable, index: int) -> Any:
        """A gradient over all rows, on the device of its unit's copy at one local place."""
        return gradient

    def beside(self, variable: keras.Variable) -> AbstractContextManager:
        """The device for slots and joined shares, so that stages do not wait for each other."""
        stored = getattr(variable, "_value", variable)
        return contextlib.nullcontext() if stored is None else tf.device(stored.device)

    @contextlib.contextmanager
    def updating(self, gradient: Any, variable: tf.Variable) -> Iterator[None]:
        """The context that updates one variable, including constants."""
        with (
            tf.device(variable.device),
            noting("update", variable.name, variable.device),
            one_large_update_at_a_time(gradient, variable),
        ):
            yield

    def may_differ(self, gradients: Sequence[Any]) -> bool:
        """Whether the same update may give different results at two places."""
        return False

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """The first element or row, and the end, of each local place's share of `size`."""
        return [(k * size, (k + 1) * size) for k in range(self.first, self.first + len(self))]


@contextlib.contextmanager
def following_inputs() -> Iterator[None]:
    """Places each operation on the device of its first input that has one."""
    if tf.executing_eagerly():
        yield
        return
    with tf.compat.v1.device(_device_of_inputs):
        yield


def _device_of_inputs(op: tf.Operation) -> str:
    if op.device:
        return op.device
    for tensor in op.inputs:
        device = device_of(tensor.op) or device_outside(tensor)
        if device:
            return device
    return ""
