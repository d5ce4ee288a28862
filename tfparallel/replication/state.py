"""State that a replicated call writes: batch norm's averages, seeds, metrics inside layers.

A replica writes variables to its own copies (`ReplicaScope`). Afterwards

* state that is equal on all replicas (seeds, averages of synchronized batch norm) stays as it is,
  at no cost;
* the sum of a metric grows by the increments of all replicas;
* any other floating-point state (such as a running mean of the batch) becomes the average over the
  replicas, weighted by their shares n_k / B of the batch; integers are those of replica 0. A value
  that all replicas wrote, such as a count of calls, stays as it is: (a + a + a) / 3 may round.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.draws.replica_seeds import ReplicaSeedGenerator, global_seed_generator, in_pieces
from tfparallel.piece import Piece
from tfparallel.problems import PlacementError
from tfparallel.seams.keras import (
    DTYPE_POLICY,
    GLOBAL_SEED_GENERATOR,
    get_global,
    layers_in,
    seed_generators_of,
    set_global,
)
from tfparallel.strategies import variables
from tfparallel.variables.sharded import ShardedVariable

# State that Keras keeps per thread; each replica of an eager step is a thread and needs it, too.
_THREAD_STATE = (GLOBAL_SEED_GENERATOR, DTYPE_POLICY)


class ReplicaScope(keras.StatelessScope):
    """Separates the losses of a replica's call, and writes to the replica's own copies.

    Args:
        replica: Index of the replica.
    """

    def __init__(self, replica: int):
        super().__init__(collect_losses=True)
        self.replica = replica
        self.written: dict[int, keras.Variable] = {}

    def add_update(self, update) -> None:
        """Writes at once, while Keras would store the value for later."""
        variable, value = update
        if isinstance(variable, ShardedVariable):
            raise PlacementError(
                "Under shard='parameters', a layer's call can assign only to weights that are not "
                f"sharded, such as small ones. Received: an assignment to '{variable.path}'. Use "
                "shard='optimizer'."
            )
        copies = variables.copies(variable)
        self.written[id(variable)] = variable
        if self.replica < len(copies):
            copies[self.replica].assign(tf.cast(value, copies[self.replica].dtype))


class CallState:
    """The thread state that a replicated call of a layer reads, and the variables that it writes.

    Create it before the call: it records the sums of the layer's metrics.

    Args:
        layer: The layer that is called.
    """

    def __init__(self, layer: keras.Layer):
        self._thread_state = _thread_state()
        generators = [self._thread_state[GLOBAL_SEED_GENERATOR]]
        equal: list[keras.Variable] = []
        self._sums: dict[int, list[tf.Tensor]] = {}
        for part in layers_in(layer):
            generators.extend(seed_generators_of(part))
            if getattr(part, "synchronize", False):
                equal.extend(part.non_trainable_variables)
            for metric in part.metrics:
                for variable in metric.variables:
                    copies = variables.copies(variable)
                    self._sums[id(variable)] = [tf.identity(copy) for copy in copies]
        equal.extend(generator.state for generator in generators)
        self._equal = {id(variable) for variable in equal}

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Gives a replica's thread the Keras state of the caller's thread, within the block.

        With Keras's global seed, a replica draws for its rows, as with a layer's seed.
        """
        before = {name: get_global(name) for name in self._thread_state}
        seed = in_pieces(self._thread_state[GLOBAL_SEED_GENERATOR], ReplicaSeedGenerator)
        for name, value in (self._thread_state | {GLOBAL_SEED_GENERATOR: seed}).items():
            set_global(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                set_global(name, value)

    def written(
        self, scopes: list[ReplicaScope], *, with_sums: bool = True
    ) -> list[tuple[int, keras.Variable]]:
        """The variables, with their ids, that the replicas wrote and that may differ between them.

        Args:
            scopes: The scope of each replica.
            with_sums: Whether to include the variables of metrics, which sum over all rows.
        """
        return [
            (key, variable)
            for key, variable in scopes[0].written.items()
            if key not in self._equal and variables.is_distributed(variable)
            if with_sums or key not in self._sums
        ]

    def combine(
        self,
        scopes: list[ReplicaScope],
        own_pieces: list[Piece],
        of_workers: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
        rows_of_workers: Callable[[], Sequence],
    ) -> None:
        """Combines what the replicas wrote into the state for the batch, in all copies.

        Args:
            scopes: The scopes of this worker's replicas, in order.
            own_pieces: Their pieces.
            of_workers: Stacks each of some tensors of all workers, in order.
            rows_of_workers: Returns the number of rows of each worker.
        """
        written = self.written(scopes)
        rows = rows_of_workers() if written else ()
        own_terms = []
        for key, variable in written:
            before, new = self._sums.get(key), variables.copies(variable)
            # On one device: XLA's programs end where a value leaves its device.
            with tf.device(new[0].device):
                new = [tf.identity(copy) for copy in new]
                own_terms.append(
                    averaged(new, [piece.num_rows for piece in own_pieces])
                    if before is None
                    else _added(before, new, own_pieces)
                )
        by_worker = of_workers(own_terms)
        for (key, variable), stacked in zip(written, by_worker, strict=True):
            if (before := self._sums.get(key)) is None:
                with tf.device(variables.copies(variable)[0].device):
                    average = averaged(tf.unstack(stacked, num=len(rows)), rows)
                variable.assign(tf.cast(average, variable.dtype))
                continue
            variable.assign(before[0] + tf.reduce_sum(stacked, 0))
            # In a program the first copy holds the total; the others would count it again.
            for other, previous in zip(variables.copies(variable)[1:], before[1:], strict=True):
                other.assign(previous)


def _added(old, new, own_pieces):
    """The increments of a metric's sum by the replicas with examples."""
    return tf.add_n(
        [
            piece.if_it_has_rows(after - before)
            for piece, before, after in zip(own_pieces, old, new, strict=True)
        ]
    )


def averaged(values: Sequence[tf.Tensor], rows: Sequence) -> tf.Tensor:
    """Returns Σ_k n_k x_k / Σ_k n_k, which is exactly x if all x_k with n_k > 0 are x.

    The mean of the first k values follows from that of the first k − 1:

        m_k = (1 − s_k) m_{k−1} + s_k x_k,    s_k = n_k / (n_1 + … + n_k)

    Args:
        values: x_k; if they are integers or booleans, only the first counts.
        rows: n_k, the number of rows that each was computed from.
    """
    mean, total = values[0], rows[0]
    if not mean.dtype.is_floating:
        return tf.cast(mean, tf.uint8) if mean.dtype.is_bool else mean
    for value, number in zip(values[1:], rows[1:], strict=True):
        total += number
        share = tf.math.divide_no_nan(tf.cast(number, tf.float64), tf.cast(total, tf.float64))
        share = tf.cast(share, mean.dtype)
        # Without rows, a value may be NaN.
        mean_of_both = tf.math.multiply_no_nan(mean, 1 - share)
        mean_of_both += tf.math.multiply_no_nan(value, share)
        mean = tf.where(tf.equal(value, mean), mean, mean_of_both)
    return mean


def _thread_state() -> dict:
    global_seed_generator()
    return {name: get_global(name) for name in _THREAD_STATE}
