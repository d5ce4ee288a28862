"""The gradient noise scale: whether a larger batch would pay.

Two consecutive updates of B rows have gradients G₁ and G₂ at about the same weights. With G the
gradient over all examples, and S the summed variances of the gradient of one example,

    E |G₁ − G₂|² / 2 = S/B        E G₁·G₂ = |G|²        S / |G|² = B r

On batches much smaller than S/|G|², steps mostly average out noise, and a batch that is k times as
large needs almost k times fewer steps; on much larger batches it saves none. If r is above 1, a
batch twice as large pays.

It uses gradients that all workers have anyway, so nothing is sent; or shares of them, whose two
numbers are summed. The result does not depend on how rows are distributed. Reference: Sam
McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162, 2018, which
compares two batch sizes; here they are B and, for the mean of G₁ and G₂, 2B.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import ResourceVariable


class NoiseScale:
    """Compares pairs of consecutive updates.

    Attributes:
        state: The variables by name that a resumed run needs: sums over the pairs.
    """

    def __init__(self):
        with tf.init_scope(), tf.device("CPU:0"):
            names = ("noise", "signal", "pairs")
            self.state = {name: ResourceVariable(0.0, dtype=tf.float64) for name in names}
            self._waits = ResourceVariable(False)  # Whether the first of a pair is stored.
        self._first: dict[int, tf.Variable] = {}

    def see(
        self,
        sums: Sequence[tf.Variable],
        gradients: Sequence[tf.Tensor],
        workers: ProcessGroup | None = None,
    ) -> None:
        """Takes the gradients of an update, over the same number of rows as those before.

        Args:
            sums: The accumulators of the gradients.
            gradients: Gradients of weights, or of this worker's shares of them.
            workers: The workers with the other shares; None if there are none.
        """
        gradients_before = [self._variable_for(*pair) for pair in zip(sums, gradients, strict=True)]

        def second():
            pairs = list(zip(gradients_before, gradients, strict=True))
            noise = [squares(first - gradient) / 2 for first, gradient in pairs]
            signal = [_products(first.read_value(), gradient) for first, gradient in pairs]
            totals = [tf.stack([tf.add_n(noise), tf.add_n(signal)])]
            noise, signal = tf.unstack((workers.all_reduce(totals) if workers else totals)[0])
            terms = {"noise": noise, "signal": signal, "pairs": 1.0}
            is_finite = tf.math.is_finite(terms["noise"]) & tf.math.is_finite(terms["signal"])
            for name, term in terms.items():
                term = tf.where(is_finite, tf.cast(term, tf.float64), 0.0)
                self.state[name].assign_add(term, read_value=False)
            self._waits.assign(False, read_value=False)
            return True

        def first():
            for variable, gradient in zip(gradients_before, gradients, strict=True):
                variable.assign(gradient, read_value=False)
            self._waits.assign(True, read_value=False)
            return False

        tf.cond(self._waits.read_value(), second, first)

    def _variable_for(self, sums, gradient) -> tf.Variable:
        if id(sums) not in self._first:
            with tf.init_scope(), tf.device(sums.device):
                zeros = tf.zeros(sums.shape, gradient.dtype)
                self._first[id(sums)] = ResourceVariable(zeros, trainable=False)
        return self._first[id(sums)]

    @property
    def is_between_pairs(self) -> bool:
        """Whether `state` includes every update so far."""
        return not bool(self._waits)

    @property
    def num_pairs(self) -> int:
        """The number of pairs behind the ratio."""
        return int(self.state["pairs"])

    @property
    def ratio(self) -> float:
        """r, the noise scale divided by the rows of an update; infinite if there is only noise."""
        noise, signal = float(self.state["noise"]), float(self.state["signal"])
        return noise / signal if signal > 0 else float("inf")

    def forget_first(self) -> None:
        """Makes the next update the first of a pair."""
        self._waits.assign(False)

    def restart(self) -> None:
        """Clears the sums, when the size of an update changes."""
        for variable in self.state.values():
            variable.assign(0.0)
        self.forget_first()


def squares(tensor) -> tf.Tensor:
    """The sum of the squares of a tensor, in float64."""
    return _products(tensor, tensor)


def _products(one, other) -> tf.Tensor:
    # In the gradients' own dtype: float64 is slow on a GPU.
    return tf.cast(tf.reduce_sum(one * other), tf.float64)
