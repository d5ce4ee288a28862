"""What the replicas of a mesh do, traced once; they do not meet before it is done.

A replica has several devices, and a copy of each variable on one of them. In an eager step each
does its work in turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.device_names import to_tensorflow_name
from tfparallel.strategies import variables
from tfparallel.tracing.one_trace import OneTrace
from tfparallel.tracing.replay import Again
from tfparallel.variables.replica import Replica, at_work

__all__ = ["MeshTrace"]


class MeshTrace(OneTrace):
    """Runs functions for each replica of this process.

    Args:
        replicas: They.
        index: Of the first, among those of all processes.
    """

    def __init__(self, replicas: Sequence[Replica], index: int = 0):
        super().__init__(list(map(_other, replicas[1:])), index)
        self._replicas = replicas

    def run(self, function: Callable[..., Any], *by_replica: Sequence[Any]) -> list[Any]:
        """Runs a function for each replica, as `OneTrace` does; an eager step calls it for each."""
        if not tf.executing_eagerly():
            with at_work(self._replicas[0]):
                return super().run(function, *by_replica)
        found = []
        for replica, *given in zip(self._replicas, *by_replica, strict=True):
            with at_work(replica):
                found.append(function(*given))
        return found


def _other(replica: Replica) -> Again:
    def device_of(device):
        own = replica.in_place_of(device)
        return device if own is None else to_tensorflow_name(own)

    return Again(
        replica.index,
        device_of,
        lambda handle: variables.copy_of(handle, replica.index, replica.number),
    )
