"""Gradients that a step leaves unsummed, for the optimizer to sum when it needs them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.update.places import Places

__all__ = ["PendingSums"]


class PendingSums(dict[int, list[tf.Tensor]]):
    """By the id of a weight, a term of each place here; who applies them takes them out.

    Attributes:
        takes_sparse: Whether terms may be those of an embedding's rows; else the step sums such.
    """

    takes_sparse = True

    def takes(self, terms: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> bool:
        """Whether the gradients of a weight are left unsummed."""
        if terms[0] is None:
            return False
        return self.takes_sparse or all(isinstance(term, tf.Tensor) for term in terms)

    def add(self, variable: keras.Variable, terms: Sequence[tf.Tensor | tf.IndexedSlices]) -> None:
        """Adds terms to those of other calls of the model in the same step, as a tape would."""
        known = self.get(id(variable))
        if known is None:
            self[id(variable)] = list(terms)
            return
        for k, term in enumerate(terms):
            with tf.device(term.device):
                known[k] = tf.convert_to_tensor(known[k]) + tf.convert_to_tensor(term)

    def take(self, variable: keras.Variable, whole: tf.Tensor | None) -> list[tf.Tensor] | None:
        """Takes out the terms of a weight; None if there are none.

        Args:
            variable: The weight.
            whole: What is added to the first term: a gradient that each worker has the whole of, as
                that of a regularizer. None on all workers but the first.
        """
        terms = self.pop(id(variable), None)
        if terms is None:
            return None
        terms = [tf.convert_to_tensor(term) for term in terms]
        if whole is not None:
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
        """Has Keras accumulate a term at each place, and the sum of all when it updates.

        Then the accumulators are given that sum, and Keras nothing to add to it.

        Args:
            gradients: What is added to the terms, the same on all workers; or all of a gradient.
            parts: The weights.
            accumulators: Keras's, of each weight.
            is_update: Whether Keras updates in this step.
            scale: By what Keras divides a gradient before it accumulates it.
            places: The places.

        Returns:
            At each place here what Keras is to accumulate.
        """
        is_first = places.workers is None or places.workers.worker_index == 0
        known = [i for i, gradient in enumerate(gradients) if gradient is not None]
        terms = [self._terms(parts[i], gradients[i], is_first, places) for i in known]
        copies = [places.copies(accumulators[i]) for i in known]

        def sum_all():
            sums = []
            for own, held in zip(terms, copies, strict=True):
                sums.append([])
                for term, accumulator in zip(own, held, strict=True):
                    with tf.device(accumulator.device):
                        sums[-1].append((term if scale is None else term / scale) + accumulator)
            reducer = Reducer(places.all_reduce_ops, places.workers)
            totals, _ = reducer.totals(sums, list, variables=[parts[i] for i in known])
            for index in range(len(places)):
                with places.at(index):
                    for i, total, held in zip(known, totals, copies, strict=True):
                        held[index].assign(places.gradient(total, parts[i], index))

        tf.cond(is_update, sum_all, lambda: None)
        expanded: list[list[Any]] = [[None] * len(gradients) for _ in range(len(places))]
        for index, own in enumerate(expanded):
            with places.at(index):
                for i, of_all in zip(known, terms, strict=True):
                    own[i] = tf.where(is_update, tf.zeros_like(of_all[index]), of_all[index])
        return expanded

    def _terms(self, part, gradient, is_first, places) -> list[tf.Tensor]:
        """At each place a term of the gradient of a weight, all of which make up the whole."""
        # What the program itself differentiated, a regularizer say, is whole on every worker.
        terms = self.take(part, gradient if is_first else None)
        if terms is not None:
            return terms
        whole = tf.convert_to_tensor(gradient)
        zeros = tf.zeros_like(whole)
        return [whole if is_first else zeros, *[zeros] * (len(places) - 1)]
