"""Σ_m g_m for each weight, added up on its device, micro-batch by micro-batch.

Of several replicas each adds up its own, and what they have come to is summed once, over those of
other processes too, unless an update of several batches sums it later.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.pipeline.others import Others

__all__ = ["GradientSums"]


class GradientSums:
    """The sums so far.

    Dense gradients are added as they come, so that two are held at once and not M. Sparse ones are
    joined, not added: Keras squares them as they come.

    Args:
        variables: The weights.
        kinds: Returns, by the weight's id, the kinds of its readings, where no graph is traced.
        others: The replicas in other processes.
        stay: Whether gradients are summed over the replicas of this process alone.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        kinds: Callable[[], dict[int, Any]],
        others: Others,
        *,
        stay: bool = False,
    ):
        self._kinds = kinds
        self._others = others
        self._workers = None if stay else others.workers
        self._reducer = Reducer(None, self._workers)
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

    def of(
        self, variables: Sequence[keras.Variable], beside: Sequence[tf.Tensor] = ()
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Sums what was added.

        Args:
            variables: The weights.
            beside: What else is summed over the workers, in the same collective.

        Returns:
            The sum of each weight, on its device; None where no loss depends on it. And what was
            summed beside.
        """
        terms = [[*self._dense[id(variable)].values()] or [None] for variable in variables]
        with_them = () if self._workers is None else beside
        dense, summed = self._reducer.totals(terms, list, with_them, variables)
        beside = self._others.summed(beside) if self._workers is None else summed
        return [self._total(*pair) for pair in zip(variables, dense, strict=True)], list(beside)

    def _total(self, variable, dense):
        sparse = self._sparse[id(variable)]
        with tf.device(variable._value.device):
            if dense is not None and self._workers is not None:
                dense = tf.identity(dense)
            if not sparse:
                return dense
            kinds = self._kinds().get(id(variable))
            slices = self._reducer.slices([*sparse.values()], kinds)
            return slices if dense is None else dense + tf.convert_to_tensor(slices)
