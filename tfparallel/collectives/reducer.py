"""Σ_k g_k: gradients summed over the replicas of this worker, then over the workers.

    dense     by the algorithm that was asked for, or on the first device; then over the workers,
              in buckets if that was asked for (`packing.py`)
    beside    what else is summed, and nobody waits for: losses, metrics; with the dense ones
    sparse    reading by reading, laid end to end or added place by place, by what their indices
              were made of (`indexed_slices.py`)

What computes gradients knows neither devices nor wires; what carries them (`cross_device.py`,
`process_group.py`) knows no variables. Between the two is this.

A program (see `strategies/program.py`) goes on with one tensor, the first device's. The sums of the
other devices are kept with it, so that each device updates its own copy of a variable with its own
sum: an all-reduce is then one from end to end, and not a reduction whose result is sent once more.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.collectives import cross_device, indexed_slices
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import SLICES
from tfparallel.flight.marks import mark
from tfparallel.seams.distribute import PerReplica
from tfparallel.tracing.graphs import is_of_programs

_COPIES = "_replica_copies"

# Of a variable: a gradient of each replica, or None of each.
Terms = Sequence[tf.Tensor | tf.IndexedSlices | None]


class Reducer:
    """Sums the gradients of a step.

    Args:
        ops: The algorithm between the devices of this process; None sums on the first of them.
        workers: The workers, or None for one.
    """

    def __init__(self, ops: tf.distribute.CrossDeviceOps | None, workers: ProcessGroup | None):
        self._ops = ops
        self._workers = workers

    def totals(
        self,
        by_variable: Sequence[Terms],
        kinds_of_readings: Callable[[], Sequence],
        beside: Sequence[tf.Tensor] = (),
        variables: Sequence[keras.Variable] | None = None,
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices | None], list[tf.Tensor]]:
        """Sums the gradients of all variables.

        Args:
            by_variable: Their terms, in the order of the layers.
            kinds_of_readings: Called if there are sparse ones: by variable how each of its readings
                is joined; None where the gradient itself tells (`indexed_slices.kinds_of`).
            beside: Sums of this worker, of types that `is_summable` takes, to be summed over the
                workers in the same collective, or in the first of several buckets.
            variables: The variables, by which workers know a gradient again that they compress;
                None leaves the gradients as they are.

        Returns:
            For each variable, equal on all workers; None where nothing reaches it. And what was
            summed beside.
        """
        results: list = [None] * len(by_variable)
        sparse = [i for i, terms in enumerate(by_variable) if _are_all(tf.IndexedSlices, terms)]
        dense = [i for i, terms in enumerate(by_variable) if terms[0] is not None]
        dense = [i for i in dense if i not in sparse]
        own = self._dense([by_variable[i] for i in dense])
        mark("backward", own)
        summed = [*own, *beside]  # Buckets are filled from the last to the first.
        if self._workers is not None:
            known = variables or [None] * len(by_variable)
            weights = [*(known[i] for i in dense), *[None] * len(beside)]
            summed = self._workers.all_reduce_gradients(summed, weights)
        for i, total in zip(dense, summed[: len(dense)], strict=True):
            results[i] = total
        kinds = kinds_of_readings() if sparse else ()
        for i in sparse:
            results[i] = self.slices([by_variable[i]], kinds[i])
        return results, summed[len(dense) :]

    def _dense(self, by_variable):
        """Summed over the replicas of this worker."""
        listed = list(enumerate(by_variable))
        mirrored = [i for i, own in listed if self._ops is not None and _are_all(tf.Tensor, own)]
        terms = [by_variable[i] for i in mirrored]
        found = cross_device.all_reduce(self._ops, terms) if terms else []
        by_index = dict(zip(mirrored, map(_first, found), strict=True))
        return [by_index[i] if i in by_index else added(own) for i, own in listed]

    def slices(
        self, by_reader: Sequence[Sequence[tf.IndexedSlices]], kinds: Sequence | None
    ) -> tf.IndexedSlices:
        """Sums the sparse gradients of one variable.

        Args:
            by_reader: Of each who reads it, a stage say, its terms, alike in each.
            kinds: How each reading is joined, as of `totals`.
        """
        found = [each for terms in by_reader for each in indexed_slices.joined(terms, kinds)]
        if self._workers is not None:
            found = [self._over_workers(reading) for reading in found]
        return indexed_slices.together(found, by_reader[0][0].dense_shape)

    def _over_workers(self, reading: indexed_slices.Reading) -> indexed_slices.Reading:
        if reading.kind == indexed_slices.ONCE:
            return reading._replace(values=self._workers.all_reduce([reading.values])[0])
        values, indices = self._workers.all_gather_uneven([reading.values, reading.indices], SLICES)
        return indexed_slices.merged(reading._replace(values=values, indices=indices))


def _are_all(cls: type, terms: Terms) -> bool:
    return all(isinstance(term, cls) for term in terms)


def added(terms: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Sums one tensor over the replicas, a term on each one's device, on the first one's.

    Where XLA compiles what each device does, all devices add all terms: else the others would wait
    for the first, until it has done all that it can.
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
    """Returns each device's own sum of a total of `Reducer`; anything else as it is."""
    copies = getattr(value, _COPIES, None)
    return value if copies is None else PerReplica(copies)


def _first(copies):
    with tf.device(copies[0].device):
        first = tf.identity(copies[0])  # A tensor of its own, to hang the others on.
    setattr(first, _COPIES, (first, *copies[1:]))
    return first
