"""Σ_k g_k: gradients summed over the replicas of this worker, then over the workers.

    dense     by the chosen algorithm, or on the first device; then over the workers, optionally
              in buckets (`packing.py`)
    beside    other sums that nothing waits for (losses, metrics), together with the dense ones
    sparse    lookup by lookup, concatenated or added row by row, depending on how their indices
              were computed (`indexed_slices.py`)

Code that computes gradients does not deal with devices or transports, and transports
(`cross_device.py`, `process_group.py`) do not deal with variables. This module connects the two.

A program (see `strategies/program.py`) continues with one tensor, on the first device. The sums of
the other devices are attached to it, and each device updates its copy of a variable with its own
sum: the reduction stays a true all-reduce, with no broadcast of the result after it.
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

# The gradients of one variable, one per replica, or all None.
Terms = Sequence[tf.Tensor | tf.IndexedSlices | None]


class Reducer:
    """Sums the gradients of a step.

    Args:
        ops: The algorithm between the devices of this process; None sums on the first device.
        workers: The workers; None if there is only one.
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
            by_variable: The terms of each variable, in layer order.
            kinds_of_readings: Called if there are sparse gradients. Returns, by variable, how to
                join each of its lookups; None if the gradient itself determines it
                (`indexed_slices.kinds_of`).
            beside: Other sums of this worker, of types that `is_summable` accepts, to sum over the
                workers in the same collective, or in the first of several buckets.
            variables: The variables, which identify compressed gradients from step to step; None
                disables compression.

        Returns:
            The total for each variable, equal on all workers; None if it has no gradient. Then the
            totals of `beside`.
        """
        results: list = [None] * len(by_variable)
        sparse = [i for i, terms in enumerate(by_variable) if _are_all(tf.IndexedSlices, terms)]
        dense = [i for i, terms in enumerate(by_variable) if terms[0] is not None]
        dense = [i for i in dense if i not in sparse]
        local_sums = self._dense([by_variable[i] for i in dense])
        mark("backward", local_sums)
        summed = [*local_sums, *beside]  # Buckets are filled from the last to the first.
        if self._workers is not None:
            all_weights = variables or [None] * len(by_variable)
            weights = [*(all_weights[i] for i in dense), *[None] * len(beside)]
            summed = self._workers.all_reduce_gradients(summed, weights)
        for i, total in zip(dense, summed[: len(dense)], strict=True):
            results[i] = total
        kinds = kinds_of_readings() if sparse else ()
        for i in sparse:
            results[i] = self.slices([by_variable[i]], kinds[i])
        return results, summed[len(dense) :]

    def _dense(self, by_variable):
        """Sums dense gradients over the replicas of this worker."""
        listed = list(enumerate(by_variable))
        mirrored = [
            i for i, terms in listed if self._ops is not None and _are_all(tf.Tensor, terms)
        ]
        mirrored_terms = [by_variable[i] for i in mirrored]
        totals = cross_device.all_reduce(self._ops, mirrored_terms) if mirrored_terms else []
        by_index = dict(zip(mirrored, map(_first, totals), strict=True))
        return [by_index[i] if i in by_index else added(terms) for i, terms in listed]

    def slices(
        self, by_reader: Sequence[Sequence[tf.IndexedSlices]], kinds: Sequence | None
    ) -> tf.IndexedSlices:
        """Sums the sparse gradients of one variable.

        Args:
            by_reader: The terms of each reader of the variable, such as a stage.
            kinds: How to join each lookup, as in `totals`.
        """
        readings = [each for terms in by_reader for each in indexed_slices.joined(terms, kinds)]
        if self._workers is not None:
            readings = [self._over_workers(reading) for reading in readings]
        return indexed_slices.together(readings, by_reader[0][0].dense_shape)

    def _over_workers(self, reading: indexed_slices.Reading) -> indexed_slices.Reading:
        if reading.kind == indexed_slices.ONCE:
            return reading._replace(values=self._workers.all_reduce([reading.values])[0])
        values, indices = self._workers.all_gather_uneven([reading.values, reading.indices], SLICES)
        return indexed_slices.merged(reading._replace(values=values, indices=indices))


def _are_all(cls: type, terms: Terms) -> bool:
    return all(isinstance(term, cls) for term in terms)


def added(terms: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Sums one tensor, a term on each replica's device, on the first replica's device.

    If XLA compiles each device's work, every device adds all the terms: otherwise the other devices
    would wait until the first has finished its program.
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
    """Returns the per-device copies of a total from `Reducer`; any other value unchanged."""
    copies = getattr(value, _COPIES, None)
    return value if copies is None else PerReplica(copies)


def _first(copies):
    with tf.device(copies[0].device):
        first = tf.identity(copies[0])  # A new tensor, to attach the other copies to.
    setattr(first, _COPIES, (first, *copies[1:]))
    return first
