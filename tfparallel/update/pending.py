"""Gradients that a step leaves to its optimizer unsummed, which sums them when it needs the sum."""

from collections.abc import Sequence

import keras
import tensorflow as tf

__all__ = ["PendingSums"]


class PendingSums(dict[int, list[tf.Tensor]]):
    """By the id of a weight, a term of each place here; who applies them takes them out.

    Args:
        takes_sparse: Whether terms may be those of an embedding's rows; else the step sums such.
    """

    def __init__(self, *, takes_sparse: bool):
        super().__init__()
        self._takes_sparse = takes_sparse

    def takes(self, terms: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> bool:
        """Whether the gradients of a weight are left unsummed."""
        if terms[0] is None:
            return False
        return self._takes_sparse or all(isinstance(term, tf.Tensor) for term in terms)

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
