"""The sum of what the replicas of one process computed, on each of their devices.

A program (see `strategies/program.py`) goes on with one tensor, the first device's. The others are
kept with it, so that each device updates its own copy of a variable with its own sum: an
all-reduce is then one from end to end, and not a reduction whose result is sent once more.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives import cross_device
from tfparallel.seams.distribute import PerReplica
from tfparallel.tracing.graphs import is_of_programs

_COPIES = "_replica_copies"


def sums(
    ops: tf.distribute.CrossDeviceOps, terms: Sequence[Sequence[tf.Tensor]]
) -> list[tf.Tensor]:
    """Sums each tensor over the replicas.

    Args:
        ops: The algorithm.
        terms: For each tensor, one term on each replica's device.

    Returns:
        The sums on the first device; `on_each_device` finds the others.
    """
    results = cross_device.all_reduce(ops, terms) if terms else []
    return [_first(copies) for copies in results]


def added(terms: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Sums one tensor over the replicas, on the first one's device.

    Where XLA compiles what each device does, all devices add all terms: else the others would wait
    for the first, until it has done all that it can.

    Args:
        terms: One term on each replica's device.
    """
    terms = [tf.convert_to_tensor(term) for term in terms]
    if len(terms) == 1 or not is_of_programs(tf.compat.v1.get_default_graph()):
        with tf.device(terms[0].device):
            return tf.add_n(terms)
    copies = []
    for term in terms:
        with tf.device(term.device):
            copies.append(tf.add_n(terms))
    return _first(copies)


def on_each_device(value):
    """Returns each device's own copy of what `sums` returned.

    Anything else is returned as it is.
    """
    copies = getattr(value, _COPIES, None)
    return value if copies is None else PerReplica(copies)


def _first(copies):
    with tf.device(copies[0].device):
        first = tf.identity(copies[0])  # A tensor of its own, to hang the others on.
    setattr(first, _COPIES, (first, *copies[1:]))
    return first
