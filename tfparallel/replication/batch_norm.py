"""Batch normalization over the global batch, with one reduction per layer.

Each replica computes its count n_k, mean m_k and sum of squared deviations M_k, and all are
combined at once (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The
American Statistician 37(3), 1983):

    n = Σ n_k,    m = Σ n_k m_k / n,    v = (Σ M_k + Σ n_k (m_k − m)²) / n

Unlike E[x²] − E[x]², this subtracts no large numbers. A replica without examples computes one
dummy row and counts it 0 times. The gradient, from the sums over replicas of ∂J/∂m and ∂J/∂v:

    ∂J/∂x = (∂J/∂m + 2 (x − m) ∂J/∂v) / n

With a mask, Keras adds its epsilon to n in each division. Then Σ n_k (m_k − m) is not 0, and ∂J/∂m
gets the additional term of ∂v/∂m.
"""

import keras
import tensorflow as tf

from tfparallel.collectives import differentiable
from tfparallel.collectives.in_replica import Replicas, of_all_here
from tfparallel.piece import current
from tfparallel.seams.keras import reduced_axes
from tfparallel.tracing.custom_gradient import call_with_gradient


class SynchronizedBatchNormalization:
    """Extends `keras.layers.BatchNormalization` with global moments in a replicated call."""

    synchronize = True  # False on the instance: each replica uses its own moments.

    def _moments(self, inputs, mask):
        piece = current()
        if piece is None or not self.synchronize:
            return super()._moments(inputs, mask)
        return _global_moments(self, piece, inputs, mask)

    def _own_moments(self, inputs):
        """Returns n_k, m_k and M_k of this replica's rows; n_k is the same for all channels."""
        count = tf.cast(tf.size(inputs) // inputs.shape[self.axis], inputs.dtype)
        mean, variance = tf.nn.moments(inputs, reduced_axes(self))
        return count, mean, variance * count

    def _own_masked_moments(self, inputs, mask):
        """Returns the same with n_k per channel, which is a time step for such an `axis`."""
        is_valid, axes = _is_valid(inputs, mask), reduced_axes(self)
        count = tf.reduce_sum(tf.cast(is_valid, inputs.dtype), axes, keepdims=True)
        # `where`, not a product: a masked position may hold NaN.
        total = tf.reduce_sum(tf.where(is_valid, inputs, 0), axes, keepdims=True)
        mean = tf.math.divide_no_nan(total, count)
        squares = tf.where(is_valid, tf.math.squared_difference(inputs, mean), 0)
        per_channel = [tf.reshape(each, [-1]) for each in (count, mean)]
        return *per_channel, tf.reduce_sum(squares, axes)


def in_rows(counts):
    """Counts of K parts, one per row: shape `(K, 1)`, or `(K, C)` if counted per channel."""
    return counts if counts.shape.rank == 2 else counts[:, None]


def _of_all_replicas(*tensors):
    """Stacks each tensor of all replicas, one per row; every replica combines them itself.

    If one replica did it for all, the others would wait for it: under XLA, for its whole program.
    """
    context = tf.distribute.get_replica_context()
    stacked_here = [tf.stack(of_replicas) for of_replicas in of_all_here(tensors)]
    workers = context.strategy.workers
    if workers is None:
        return stacked_here

    def of_all_workers(strategy, *stacked):
        rows = [strategy.experimental_local_results(each)[0] for each in stacked]
        counts = [len(strategy.devices)] * workers.num_workers
        return tuple(workers.all_gather(rows, counts))

    return context.merge_call(of_all_workers, args=tuple(stacked_here))


def _global_moments(layer, piece, inputs, mask):
    """Combines (n_k, m_k, M_k) of all replicas; returns the global mean and variance."""
    # Keras adds its epsilon to the count of a masked input.
    correction = 0.0 if mask is None else keras.config.epsilon()

    def forward(x):
        of_rows = layer._own_moments(x) if mask is None else layer._own_masked_moments(x, mask)
        count, mean, deviations = of_rows
        if piece.may_be_idle:
            count, mean, deviations = map(piece.if_it_has_rows, (count, mean, deviations))
        counts, means, squares = _of_all_replicas(count, mean, deviations)
        counts = in_rows(counts)
        n = tf.reduce_sum(counts, 0) + correction
        mean_of_all = tf.reduce_sum(counts * means, 0) / n
        differences = tf.math.squared_difference(means, mean_of_all)
        v = tf.reduce_sum(squares + counts * differences, 0) / n

        def backward(dm, dv):
            # A second derivative is that of one device. Without a mask it treats the mean in this
            # formula as a constant, since `tf.nn.moments` stops gradients there.
            m = mean_of_all if mask is None else moments[0]
            dm, dv = _totals(dm, dv)
            if dv is not None and mask is not None:
                dm = (0 if dm is None else dm) - 2 * (m * correction / n) * dv
            terms = [] if dm is None else [along(dm / n)]
            if dv is not None:
                terms.append((x - along(m)) * along(2 * dv / n))
            dx = sum(terms[1:], terms[0])
            dx = dx if dv is not None else tf.broadcast_to(dx, tf.shape(x))
            if mask is not None:
                dx = tf.where(_is_valid(x, mask), dx, 0)
            return [dx]

        return [mean_of_all, v], backward

    def along(per_channel):
        """Reshapes a vector to broadcast along the input's channel axis."""
        axis, rank = layer.axis % inputs.shape.rank, inputs.shape.rank
        shape = [1] * rank
        shape[axis] = -1
        return per_channel if axis == rank - 1 else tf.reshape(per_channel, shape)

    moments = call_with_gradient("batch normalization", forward, [inputs])
    return tuple(moments)


def _is_valid(inputs, mask):
    """The mask, broadcast to the elements of the inputs."""
    return tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))


def _totals(*gradients):
    """Sums gradients over all replicas in one exchange; None stays None."""
    present = [each for each in gradients if each is not None]
    totals = iter(differentiable.all_reduce(Replicas(), present))
    return [None if each is None else next(totals) for each in gradients]
