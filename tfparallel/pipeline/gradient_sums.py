"""Σ_m g_m for each weight, added up on the weight's device, micro-batch by micro-batch.

Each replica adds up its own gradients; the results are summed once over all replicas, including
those of other processes, unless an update of several batches sums them later.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.seams.keras import storage_of
from tfparallel.strategies.variables import copies
from tfparallel.variables.sharded import ShardedVariable, rows_of_share, shape_shared_out

OF_LOSS = -2  # The reader of a weight in the loss: no stage.


class Added(NamedTuple):
    """The sum of the gradients of a weight.

    Attributes:
        dense: The sum of the dense gradients, for a sharded weight those of the replica's share;
            None without any.
        sparse: The sparse gradients, by reader of the weight.
        of_shares: For a sharded weight, other gradients of each local share, or None.
    """

    dense: tf.Tensor | None
    sparse: dict[Any, list[tf.IndexedSlices]]
    of_shares: list[tf.Tensor | None]


class GradientSums:
    """The running sums of gradients.

    Dense gradients are added immediately, so at most two are held, not M. Sparse ones are joined,
    not added: Keras squares each row as it comes.
    """

    def __init__(self):
        self._dense: dict[int, tf.Tensor] = {}  # By the id of the weight, or of a share.
        # By weight, then by reader; each micro-batch has the same readings, in the same order.
        self._sparse: dict[int, dict[Any, list[tf.IndexedSlices]]] = {}

    def add(
        self, variable: keras.Variable | tf.Variable, gradient: Any, reader: Any
    ) -> list[Any]:
        """Adds a gradient; returns tensors that exist once it has been added.

        Args:
            variable: The weight, or a share of one.
            gradient: Dense, sparse, or None.
            reader: The stage that computed it, or another key.
        """
        key = id(variable)
        if gradient is None:
            return []
        with tf.device(local_storage(variable).device):
            if isinstance(gradient, tf.IndexedSlices):
                # An identity copies the values to the weight's device.
                slices = tf.IndexedSlices(
                    tf.identity(gradient.values),
                    tf.identity(gradient.indices),
                    gradient.dense_shape,
                )
                self._sparse.setdefault(key, {}).setdefault(reader, []).append(slices)
                return [slices.values]
            dense = self._dense
            dense[key] = dense[key] + gradient if key in dense else gradient
            return [dense[key]]

    def of(self, variables: Sequence[keras.Variable]) -> list[Added]:
        """Returns the sum of the gradients of each weight."""
        added = []
        for each in variables:
            shares = each.pieces if isinstance(each, ShardedVariable) else []
            of_shares = [self._dense.get(id(share)) for share in shares]
            added.append(
                Added(self._dense.get(id(each)), self._sparse.get(id(each), {}), of_shares)
            )
        return added


def local_storage(variable) -> tf.Variable:
    """The memory of a weight, or of its share."""
    if isinstance(variable, tf.Variable):
        return variable
    return storage_of(variable.share if isinstance(variable, ShardedVariable) else variable)


def summed(gradients: Sequence[Any], tensor: Any) -> Any:
    """Sums the gradients of a tensor from several readers, on its device."""
    with tf.device(getattr(tensor, "device", "")):
        if len(gradients) == 1:
            return tf.identity(gradients[0])
        if isinstance(gradients[0], tf.RaggedTensor):  # `tf.add_n` rejects it.
            return functools.reduce(operator.add, gradients)
        return tf.add_n(gradients)


def read_by(
    tape: tf.GradientTape, variables: Sequence[keras.Variable]
) -> list[tuple[keras.Variable, tf.Variable]]:
    """Returns the variables that were read under a tape, with the copies that were read."""
    seen = {id(each) for each in tape.watched_variables()}
    return [(v, copy) for v in variables for copy in copies(v) if id(copy) in seen]


def totals(
    added: Sequence[Sequence[Added]],
    variables: Sequence[keras.Variable],
    kinds: Callable[[], dict[int, Any]],
    others: Others,
    beside: Sequence[tf.Tensor] = (),
    *,
    stay: bool = False,
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums gradients over the replicas, and further tensors over the workers.

    Args:
        added: The sum of each weight's gradients in each replica.
        variables: The weights.
        kinds: Returns the kinds of a weight's readings, by the weight's id, in an eager step.
        others: The replicas in other processes.
        beside: Further tensors to sum over the workers, in the same collective.
        stay: Whether to sum gradients only over the replicas of this process.

    Returns:
        The sum of each weight's gradients, on its device, None where no loss depends on it; and
        the sums of `beside`.
    """
    workers = None if stay else others.workers
    reducer = Reducer(None, workers)
    by_variable = list(zip(*added, strict=True))
    pairs = list(zip(variables, by_variable, strict=True))
    terms = [
        [
            each.dense
            for each in of_one
            if each.dense is not None and not isinstance(variable, ShardedVariable)
        ]
        for variable, of_one in pairs
    ]
    dense, summed = reducer.totals(
        [of_one or [None] for of_one in terms], list, () if workers is None else beside, variables
    )
    results = []
    for variable, total, of_one in zip(variables, dense, by_variable, strict=True):
        readers: dict[Any, list[tf.IndexedSlices]] = {}
        for each in of_one:
            for reader, slices in each.sparse.items():
                readers.setdefault(reader, []).extend(slices)
        with tf.device(local_storage(variable).device):
            if total is not None and workers is not None:
                total = tf.identity(total)
            slices = None
            if readers:
                slices = reducer.slices([*readers.values()], kinds().get(id(variable)))
                total = slices if total is None else total + tf.convert_to_tensor(slices)
        if isinstance(variable, ShardedVariable):
            total = _of_shares(variable, of_one, slices)
        results.append(total)
    return results, list(others.summed(beside) if workers is None else summed)


def _of_shares(
    variable: ShardedVariable, added: Sequence[Added], slices: tf.IndexedSlices | None
) -> Any:
    """Adds up the gradients of the shares of a weight; None if there are none.

    Args:
        variable: The weight.
        added: The sums of each replica, then those of the whole batch.
        slices: Of the whole batch, for rows of the whole weight.
    """
    shape, totals = shape_shared_out(variable.shape), []
    bounds = variable.places.bounds(variable.share.shape[0])
    for k, (share, bounds_of_share) in enumerate(zip(variable.pieces, bounds, strict=True)):
        terms = [added[k].dense, *(each.of_shares[k] for each in added)]
        terms = [term for term in terms if term is not None]
        with tf.device(share.device):
            rows = None if slices is None else rows_of_share(slices, shape, *bounds_of_share)
            if terms:
                terms += [] if rows is None else [tf.convert_to_tensor(rows)]
                rows = tf.add_n(terms) if terms[1:] else terms[0]
        totals.append(rows)
    return None if all(each is None for each in totals) else variable.gradient_of(totals)
