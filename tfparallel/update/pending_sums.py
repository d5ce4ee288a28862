"""Gradients that a step leaves unsummed, for the optimizer to sum when it needs them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.update.places import Places

_LEFT_OUT = "_is_left_out"


class PendingSums(dict[int, list[tf.Tensor]]):
    """One term per local place for each weight, by its id; the optimizer takes them out.

    Attributes:
        takes_sparse: Whether terms may be sparse, of an embedding's rows; if not, the step sums
            these.
    """

    takes_sparse = True

    def takes(self, terms: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> bool:
        """Whether the gradients of a weight stay unsummed."""
        if terms[0] is None:
            return False
        return self.takes_sparse or all(isinstance(term, tf.Tensor) for term in terms)

    def add(
        self, variable: keras.Variable, terms: Sequence[tf.Tensor | tf.IndexedSlices]
    ) -> tf.Tensor:
        """Adds terms to those of other calls of the model in the same step, like a tape.

        Returns:
            Zeros: the gradient that the step's tape sees instead.
        """
        sums = self.get(id(variable))
        if sums is None:
            self[id(variable)] = list(terms)
        else:
            for k, term in enumerate(terms):
                with tf.device(term.device):
                    sums[k] = tf.convert_to_tensor(sums[k]) + tf.convert_to_tensor(term)
        zeros = tf.zeros_like(variable.value)
        setattr(zeros, _LEFT_OUT, True)
        return zeros

    def take(self, variable: keras.Variable, whole: tf.Tensor | None) -> list[tf.Tensor] | None:
        """Takes out the terms of a weight; None if there are none.

        Args:
            variable: The weight.
            whole: A gradient to add to the first term, such as that of a regularizer, which each
                worker computes whole. None on all workers but the first.
        """
        terms = self.pop(id(variable), None)
        if terms is None:
            return None
        terms = [tf.convert_to_tensor(term) for term in terms]
        if whole is not None and not is_left_out(whole):
            with tf.device(terms[0].device):
                terms[0] += tf.convert_to_tensor(whole)
        return terms

    def accumulated(
        self,
        gradients: Sequence[Any],
        parts: Sequence[keras.Variable],
        accumulators: Sequence[keras.Variable],
        is_update: tf.Tensor,
        scale: float | None,
        places: Places,
    ) -> list[list[Any]]:
        """Lets Keras accumulate a term at each place, and the sum of all terms at an update.

        At an update, the accumulators are set to that sum, and Keras adds zeros to it.

        Args:
            gradients: Gradients to add to the terms, the same on all workers; or whole gradients.
            parts: The weights.
            accumulators: Keras's accumulator of each weight.
            is_update: Whether Keras updates in this step.
            scale: The divisor that Keras applies to a gradient before it accumulates it.
            places: The places.

        Returns:
            The values for Keras to accumulate at each local place.
        """
        is_first = places.workers is None or places.workers.worker_index == 0
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        terms = [self._terms(parts[i], gradients[i], is_first, places) for i in present]
        copies = [places.copies(accumulators[i]) for i in present]

        def sum_all():
            sums = []
            for terms_of_part, accumulators_of_part in zip(terms, copies, strict=True):
                sums.append([])
                for term, accumulator in zip(terms_of_part, accumulators_of_part, strict=True):
                    with tf.device(accumulator.device):
                        sums[-1].append((term if scale is None else term / scale) + accumulator)
            reducer = Reducer(places.all_reduce_ops, places.workers)
            totals, _ = reducer.totals(sums, list, variables=[parts[i] for i in present])
            for index in range(len(places)):
                with places.at(index):
                    for i, total, copies_of_part in zip(present, totals, copies, strict=True):
                        copies_of_part[index].assign(places.gradient(total, parts[i], index))

        tf.cond(is_update, sum_all, lambda: None)
        expanded: list[list[Any]] = [[None] * len(gradients) for _ in range(len(places))]
        for index, at_place in enumerate(expanded):
            with places.at(index):
                for i, values in zip(present, terms, strict=True):
                    at_place[i] = tf.where(is_update, tf.zeros_like(values[index]), values[index])
        return expanded

    def _terms(self, part, gradient, is_first, places) -> list[tf.Tensor]:
        """One term per place of a weight's gradient, which add up to the whole."""
        # A gradient outside of replicas, such as a regularizer's, is whole on every worker.
        terms = self.take(part, gradient if is_first else None)
        if terms is not None:
            return terms
        whole = tf.convert_to_tensor(gradient)
        zeros = tf.zeros_like(whole)
        return [whole if is_first else zeros, *[zeros] * (len(places) - 1)]


def is_left_out(gradient: Any) -> bool:
    """Whether a gradient is nothing but the zeros that `PendingSums.add` returned."""
    return getattr(gradient, _LEFT_OUT, False)
