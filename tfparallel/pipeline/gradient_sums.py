"""Σ_m g_m for each weight, added up on its device, micro-batch by micro-batch.

Of several replicas each adds up its own, and what they have come to is summed once, over those of
other processes too, unless an update of several batches sums it later.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.seams.keras import storage_of
from tfparallel.strategies.variables import copies

__all__ = ["OF_LOSS", "Added", "GradientSums", "read_by", "totals"]


OF_LOSS = -2  # Who reads a weight in the loss: no stage.


class Added(NamedTuple):
    """What the gradients of a weight have come to.

    Attributes:
        dense: The sum of the dense ones; None without.
        sparse: The sparse ones, by who reads the weight.
    """

    dense: tf.Tensor | None
    sparse: dict[int, list[tf.IndexedSlices]]


class GradientSums:
    """The sums so far.

    Dense gradients are added as they come, so that two are held at once and not M. Sparse ones are
    joined, not added: Keras squares them as they come.
    """

    def __init__(self):
        self._dense: dict[int, tf.Tensor] = {}  # By the weight's id.
        # By weight, then by reader: of each micro-batch the same readings, in the same order.
        self._sparse: dict[int, dict[int, list[tf.IndexedSlices]]] = {}

    def add(self, variable: keras.Variable, gradient: Any, reader: int) -> list[Any]:
        """Adds a gradient; returns what tells that it has been added.

        Args:
            variable: The weight.
            gradient: Dense, sparse, or None.
            reader: Who has found it: a stage, or another number.
        """
        key = id(variable)
        if gradient is None:
            return []
        with tf.device(storage_of(variable).device):
            if isinstance(gradient, tf.IndexedSlices):
                # An identity, so that the values lie where the weight does.
                kept = tf.IndexedSlices(
                    tf.identity(gradient.values),
                    tf.identity(gradient.indices),
                    gradient.dense_shape,
                )
                self._sparse.setdefault(key, {}).setdefault(reader, []).append(kept)
                return [kept.values]
            own = self._dense
            own[key] = own[key] + gradient if key in own else gradient
            return [own[key]]

    def of(self, variables: Sequence[keras.Variable]) -> list[Added]:
        """What those of each weight have come to."""
        keys = map(id, variables)
        return [Added(self._dense.get(key), self._sparse.get(key, {})) for key in keys]


def read_by(
    tape: tf.GradientTape, variables: Sequence[keras.Variable]
) -> list[tuple[keras.Variable, tf.Variable]]:
    """Which variables were read under a tape, and which copies of them."""
    seen = {id(each) for each in tape.watched_variables()}
    return [(own, copy) for own in variables for copy in copies(own) if id(copy) in seen]


def totals(
    found: Sequence[Sequence[Added]],
    variables: Sequence[keras.Variable],
    kinds: Callable[[], dict[int, Any]],
    others: Others,
    beside: Sequence[tf.Tensor] = (),
    *,
    stay: bool = False,
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums what was added, by the replicas and beside them.

    Args:
        found: What each has of each weight.
        variables: The weights.
        kinds: Returns, by the weight's id, the kinds of its readings, where no graph is traced.
        others: The replicas in other processes.
        beside: What else is summed over the workers, in the same collective.
        stay: Whether gradients are summed over the replicas of this process alone.

    Returns:
        The sum of each weight, on its device; None where no loss depends on it. And what was
        summed beside.
    """
    workers = None if stay else others.workers
    reducer = Reducer(None, workers)
    by_variable = list(zip(*found, strict=True))
    terms = [[own.dense for own in of_one if own.dense is not None] for of_one in by_variable]
    dense, summed = reducer.totals(
        [own or [None] for own in terms], list, () if workers is None else beside, variables
    )
    results = []
    for variable, total, of_one in zip(variables, dense, by_variable, strict=True):
        readers: dict[int, list[tf.IndexedSlices]] = {}
        for own in of_one:
            for reader, slices in own.sparse.items():
                readers.setdefault(reader, []).extend(slices)
        with tf.device(storage_of(variable).device):
            if total is not None and workers is not None:
                total = tf.identity(total)
            if readers:
                slices = reducer.slices([*readers.values()], kinds().get(id(variable)))
                total = slices if total is None else total + tf.convert_to_tensor(slices)
        results.append(total)
    return results, list(others.summed(beside) if workers is None else summed)
