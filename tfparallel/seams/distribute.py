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
    """The index of the replica that is running, or updated; None outside of any."""
    return values_util.get_current_replica_id_as_int()


def updating_replica(index: int) -> AbstractContextManager[None]:
    """Within it a strategy's variable is its copy on one device of this process."""
    return UpdateContext(index)


def create_mirrored_variable(
    strategy: tf.distribute.Strategy,
    create_copies: Callable[..., Sequence[tf.Variable]],
    replacements: dict[type, type],
    **kwargs: Any,
) -> DistributedVariable:
    """Makes a strategy's variable of its copies.

    Args:
        strategy: The strategy.
        create_copies: Function of `kwargs` that returns one `tf.Variable` for each device.
        replacements: Classes of TensorFlow's, and what is made in their place.
        **kwargs: The arguments of `tf.Variable`.
    """
    classes = {
        key: replacements.get(found, found)
        for key, found in distribute_utils.VARIABLE_CLASS_MAPPING.items()
    }
    return distribute_utils.create_mirrored_variable(
        strategy, create_copies, classes, distribute_utils.VARIABLE_POLICY_MAPPING, **kwargs
    )


def strategy_of(extended: tf.distribute.StrategyExtended) -> tf.distribute.Strategy:
    """The strategy whose extended object it is."""
    return extended._container_strategy()


def regroup(copies: Sequence[Any], wrap_class: type) -> Any:
    """Makes one distributed value of what each replica has."""
    return distribute_utils.regroup(tuple(copies), wrap_class=wrap_class, always_wrap=True)


def distribute(by_replica: Sequence[Any]) -> Any:
    """What replicas hand to `merge_call`, nested: one distributed value where they differ."""
    return distribute_utils.regroup(tuple(by_replica))


def of_replica(index: int, found: Any) -> Any:
    """What a replica of this process gets of what `merge_call` returns."""
    return distribute_utils.select_replica(index, found)


def reduction_of(extended: MirroredExtended) -> Any:
    """What sums between the devices of a strategy."""
    return extended._cross_device_ops


def worker_of(extended: CollectiveAllReduceExtended) -> tuple[int, int]:
    """Which worker a strategy is of, and of how many."""
    return extended._id_in_cluster, extended._num_workers


def devices_match(value: Any, destinations: Any) -> bool:
    """Whether a distributed value lies where a reduction is to leave its result."""
    return cross_device_ops._devices_match(value, destinations)


def collective_keys(first_group: int) -> cross_device_utils.CollectiveKeys:
    """Makes keys of collectives, counted from `first_group` on."""
    return cross_device_utils.CollectiveKeys(group_key_start=first_group)
