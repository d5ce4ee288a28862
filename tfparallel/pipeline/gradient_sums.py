"""Σ_m g_m for each weight, added up on its device, micro-batch by micro-batch.

Of several replicas each adds up its own, and what they have come to is summed once.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.reducer import Reducer

__all__ = ["GradientSums"]


class GradientSums:
    """The sums so far.

    Dense gradients are added as they come, so that two are held at once and not M. Sparse ones are
    joined, not added: Keras squares them as they come.

    Args:
        variables: The weights.
        kinds: Returns, by the weight's id, the kinds of its readings, where no graph is traced.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        kinds: Callable[[], dict[int, Any]] = dict,
    ):
        self._kinds = kinds
        self._dense: dict[int, dict[str, tf.Tensor]] = {id(v): {} for v in variables}
        # By weight, then by stage: of each micro-batch the same readings, in the same order.
        self._sparse: dict[int, dict[int, list[tf.IndexedSlices]]] = {id(v): {} for v in variables}

    def add(self, variable: keras.Variable, gradient: Any, stage: int = 0) -> list[Any]:
        """Adds a gradient, which a stage has found; returns what tells that it has been added."""
        key = id(variable)
        if gradient is None:
            return []
        with tf.device(variable._value.device):
            if isinstance(gradient, tf.IndexedSlices):
                # An identity, so that the values lie where the weight does.
                kept = tf.IndexedSlices(
                    tf.identity(gradient.values),
                    tf.identity(gradient.indices),
                    gradient.dense_shape,
                )
                self._sparse[key].setdefault(stage, []).append(kept)
                return [kept.values]
            own, device = self._dense[key], variable._value.device
            own[device] = own[device] + gradient if device in own else gradient
        return [own[device]]

    def of(self, variables: Sequence[keras.Variable]) -> list[Any]:
        """The sum of each weight, on its device; None where no loss depends on it."""
        return [self._total(variable) for variable in variables]

    def _total(self, variable):
        dense, sparse = self._of_all_replicas(variable), self._sparse[id(variable)]
        if not sparse:
            return dense
        with tf.device(variable._value.device):
            kinds = self._kinds().get(id(variable))
            of_all = [indexed_slices.joined(found, kinds) for found in sparse.values()]
            (first, *_), *_ = sparse.values()
            joined = indexed_slices.together([*itertools.chain(*of_all)], first.dense_shape)
            return joined if dense is None else dense + tf.convert_to_tensor(joined)

    def _of_all_replicas(self, variable):
        own = self._dense[id(variable)]
        if len(own) < 2:
            return next(iter(own.values()), None)
        with tf.device(variable._value.device):
            (total,), _ = Reducer(None, None).totals([list(own.values())], list)
        return total
