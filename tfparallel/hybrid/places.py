"""The places of an optimizer on a mesh: the replicas, each on several devices."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.device_names import canonical
from tfparallel.seams.keras import storage_of
from tfparallel.strategies import variables
from tfparallel.strategies.replica_trace import MeshTrace
from tfparallel.update.places import Places
from tfparallel.variables.mesh_replica import Replica, at_work
from tfparallel.variables.sharded import ShardedVariable


class MeshPlaces(Places):
    """The replicas of a mesh; each has a copy, or a share, of every variable.

    Args:
        replicas: The replicas of this process.
        workers: The workers, with as many replicas each; None for one process.
    """

    def __init__(self, replicas: Sequence[Replica], workers: ProcessGroup | None = None):
        self._replicas = replicas
        self.workers = workers

    @property
    def _key(self) -> Any:
        return [dict(replica.devices) for replica in self._replicas], id(self.workers)

    def __len__(self) -> int:
        return len(self._replicas)

    def copy(self, variables_: Iterable[keras.Variable]) -> None:
        """Copies variables to each replica, with their values in the first."""
        for variable in variables_:
            device = getattr(storage_of(variable), "device", None)
            variables.mirror(variable, [replica.device(device) for replica in self._replicas[1:]])

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        return variables.copies(variable)

    def beside(self, variable: keras.Variable) -> AbstractContextManager:
        is_sharded = isinstance(variable, ShardedVariable)
        return super().beside(variable.share if is_sharded else variable)

    def at(self, index: int) -> AbstractContextManager:
        return at_work(self._replicas[index])

    def each(self, update: Callable[[int, Any], None], arguments: Sequence[Any]) -> None:
        """Runs an update in each replica; a graph traces it once and replays it."""
        if len(arguments) < len(self):
            super().each(update, arguments)
            return
        MeshTrace(self._replicas).run(update, range(len(self)), arguments)

    def gradient(self, gradient: Any, unit: keras.Variable, index: int) -> Any:
        """Moves a dense gradient to the unit's device in a replica."""
        copies = variables.copies(unit)
        if not isinstance(gradient, tf.Tensor) or index >= len(copies):
            return gradient
        with tf.device(copies[index].device):
            return tf.identity(gradient)

    def may_differ(self, gradients: Sequence[Any]) -> bool:
        """Returns whether updates may round differently: mixed device kinds, or rows on a GPU."""
        names = [canonical(name) for each in self._replicas for name in each.devices.values()]
        kinds = {name.rpartition("/device:")[2].partition(":")[0] for name in names}
        is_sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        return len(kinds) > 1 or (is_sparse and kinds != {"CPU"})
