"""Gradients that a step leaves to its optimizer unsummed, which sums them in its own way."""

from collections.abc import Sequence

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
