"""Where an optimizer updates: at each place, all that it reads and writes is of that place.

| | a place | copies of a variable |
| --- | --- | --- |
| `Places` | the only one; each variable has its own device | one |
| `ReplicaPlaces` (`replication/places.py`) | a device of a strategy | those of `tf.distribute` |
| `MeshPlaces` (`hybrid/places.py`) | a replica of a mesh | likewise, on devices of its own |
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

__all__ = ["Places", "following_inputs"]


class Places:
    """The one place of layers that stand on several devices.

    Each operation of an update goes to the device of its first input: the gradient, the variable or
    its slot. So clipping, decay and averages follow too, whose loops over variables are Keras's.
    """

    workers: ProcessGroup | None = None  # Who have the other places.
    all_reduce_ops: tf.distribute.CrossDeviceOps | None = None  # None: on the first device.
    strategy: tf.distribute.Strategy | None = None  # Whose devices they are.
    sums_late = False  # Whether terms of gradients may be summed at an update alone.

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._key == self._key

    __hash__ = None

    @property
    def _key(self) -> Any:
        return None

    def __len__(self) -> int:
        """How many are in this process."""
        return 1

    @property
    def number(self) -> int:
        """How many all workers have."""
        return len(self) * (1 if self.workers is None else self.workers.num_workers)

    @property
    def first(self) -> int:
        """The index, among all, of the first one here."""
        return 0 if self.workers is None else len(self) * self.workers.worker_index

    def before_build(self, weights: Sequence[keras.Variable]) -> None:
        """Prepares weights that an optimizer is built for; raises for those of elsewhere."""

    def hold(self, slots: Sequence[keras.Variable]) -> bool:
        """Whether slots that plain Keras made lie where they would be made here."""
        return False

    def make(self) -> AbstractContextManager:
        """Where variables are made."""
        return contextlib.nullcontext()

    def copy(self, variables: Iterable[keras.Variable]) -> None:
        """Gives those variables a copy at each place that have none there."""

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """What each place here has of a variable."""
        return (getattr(variable, "_value", variable),)

    def all(self) -> AbstractContextManager:
        """Where a variable is read at the first place, and written at all."""
        return following_inputs()

    def at(self, index: int) -> AbstractContextManager:
        """Within `all`, where a variable is its copy at one place here."""
        return contextlib.nullcontext()

    def each(self, update: Callable[[int, Any], None], given: Sequence[Any]) -> None:
        """Makes an update at each place; it does the same there, but for what it is given.

        Args:
            update: Takes the index of the place, and what is given there.
            given: At each of the first places, nested gradients.
        """
        for index, own in enumerate(given):
            with self.at(index):
                update(index, own)

    def gradient(self, gradient: Any, unit: keras.Variable, index: int) -> Any:
        """A gradient of all rows, where the copy of its unit is at one place here."""
        return gradient

    def beside(self, variable: keras.Variable) -> AbstractContextManager:
        """Where slots are made, and shares joined: stages need not wait for each other."""
        return tf.device(getattr(variable, "_value", variable).device)

    @contextlib.contextmanager
    def updating(self, gradient: Any, held: tf.Variable) -> Iterator[None]:
        """Where one variable is updated, constants and all."""
        with (
            tf.device(held.device),
            noting("update", held.name, held.device),
            one_large_update_at_a_time(gradient, held),
        ):
            yield

    def may_differ(self, gradients: Sequence[Any]) -> bool:
        """Whether two places may come to different results of the same update."""
        return False

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """Of each place here the first element, or row, of its share of `size`, and the end."""
        return [(k * size, (k + 1) * size) for k in range(self.first, self.first + len(self))]


@contextlib.contextmanager
def following_inputs() -> Iterator[None]:
    """Has each operation stand on the device of its first input that has one."""
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
