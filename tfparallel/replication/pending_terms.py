"""Gradients that a step leaves to its optimizer unsummed, which sums them in its own way."""

from collections.abc import Sequence

import keras
import tensorflow as tf

__all__ = ["PendingTerms"]


class PendingTerms(dict[int, list[tf.Tensor]]):
    """By the id of a weight, a term of each replica here; who applies them takes them out.

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
