"""Private names of `tf.distribute`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
    cross_device_utils,
    distribute_utils,
    values_util,
)
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.distribute_lib import UpdateContext
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import (
    DistributedValues,
    DistributedVariable,
    Mirrored,
    MirroredVariable,
    PerReplica,
    SyncOnReadVariable,
)

__all__ = [
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "DistributedValues",
    "DistributedVariable",
    "Mirrored",
    "MirroredExtended",
    "MirroredVariable",
    "PerReplica",
    "SyncOnReadVariable",
    "collective_keys",
    "create_mirrored_variable",
    "devices_match",
    "distribute",
    "of_replica",
    "reduction_of",
    "regroup",
    "replica_index",
    "strategy_of",
    "updating_replica",
    "worker_of",
]


def replica_index() -> int | None:
    """Returns the index of the replica that is running or being updated; None outside of any."""
    return values_util.get_current_replica_id_as_int()


def updating_replica(index: int) -> AbstractContextManager[None]:
    """Makes a strategy's variable its copy on one device of this process, within the block."""
    return UpdateContext(index)


def create_mirrored_variable(
    strategy: tf.distribute.Strategy,
    create_copies: Callable[..., Sequence[tf.Variable]],
    replacements: dict[type, type],
    **kwargs: Any,
) -> DistributedVariable:
    """Makes a strategy's variable from its copies.

    Args:
        strategy: The strategy.
        create_copies: Function of `kwargs` that returns one `tf.Variable` per device.
        replacements: TensorFlow classes, and the classes to use instead.
        **kwargs: The arguments of `tf.Variable`.
    """
    classes = {
        key: replacements.get(cls, cls)
        for key, cls in distribute_utils.VARIABLE_CLASS_MAPPING.items()
    }
    return distribute_utils.create_mirrored_variable(
        strategy, create_copies, classes, distribute_utils.VARIABLE_POLICY_MAPPING, **kwargs
    )


def strategy_of(extended: tf.distribute.StrategyExtended) -> tf.distribute.Strategy:
    """Returns the strategy of an extended object."""
    return extended._container_strategy()


def regroup(copies: Sequence[Any], wrap_class: type) -> Any:
    """Makes one distributed value from each replica's value."""
    return distribute_utils.regroup(tuple(copies), wrap_class=wrap_class, always_wrap=True)


def distribute(by_replica: Sequence[Any]) -> Any:
    """Makes distributed values from nested values of replicas, for `merge_call`."""
    return distribute_utils.regroup(tuple(by_replica))


def of_replica(index: int, value: Any) -> Any:
    """Returns a replica's part of the result of `merge_call`."""
    return distribute_utils.select_replica(index, value)


def reduction_of(extended: MirroredExtended) -> Any:
    """Returns the object that sums between the devices of a strategy."""
    return extended._cross_device_ops


def worker_of(extended: CollectiveAllReduceExtended) -> tuple[int, int]:
    """Returns the index of a strategy's worker, and the number of workers."""
    return extended._id_in_cluster, extended._num_workers


def devices_match(value: Any, destinations: Any) -> bool:
    """Returns whether a distributed value is on the destinations of a reduction."""
    return cross_device_ops._devices_match(value, destinations)


def collective_keys(first_group: int) -> cross_device_utils.CollectiveKeys:
    """Makes keys for collectives, counting from `first_group`."""
    return cross_device_utils.CollectiveKeys(group_key_start=first_group)
