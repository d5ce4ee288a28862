"""Whether a larger batch would pay: the gradient noise scale.

Two updates of B rows have gradients G₁ and G₂ of about the same weights. With G the gradient of all
examples, and S the sum of the variances of one example's,

    E |G₁ − G₂|² / 2 = S/B        E G₁·G₂ = |G|²        S / |G|² = B r

Steps on batches much smaller than S/|G|² average out noise, and a larger batch saves almost as many
steps as it has more rows; on much larger ones it saves none. r above 1 says that a batch twice as
large pays.

Of gradients that all workers have anyway, so nothing is sent for it; or of shares of them, whose
two numbers are summed. It is the same number however the rows are spread. Reference: Sam McCandlish
et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162, 2018, which compares batches
of two sizes; here they are B and, of the mean of G₁ and G₂, 2B.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import ResourceVariable

__all__ = ["NoiseScale"]


class NoiseScale:
    """Compares each two updates that follow one another.

    Attributes:
        state: The variables that a run which is resumed needs, by name: sums over the pairs.
    """

    def __init__(self):
        with tf.init_scope(), tf.device("CPU:0"):
            names = ("noise", "signal", "pairs")
            self.state = {name: ResourceVariable(0.0, dtype=tf.float64) for name in names}
            self._waits = ResourceVariable(False)  # Whether a first of two is held.
        self._first: dict[int, tf.Variable] = {}

    def see(
        self,
        sums: Sequence[tf.Variable],
        gradients: Sequence[tf.Tensor],
        workers: ProcessGroup | None = None,
    ) -> None:
        """Takes the gradients of an update, of as many rows as those before.

        Args:
            sums: What they were added up in.
            gradients: Of weights, or of the shares that this worker has of them.
            workers: Who have the others; None if there are none.
        """
        held = [self._held(*pair) for pair in zip(sums, gradients, strict=True)]

        def second():
            pairs = list(zip(held, gradients, strict=True))
            noise = [_squares(first - gradient) / 2 for first, gradient in pairs]
            signal = [_products(first.read_value(), gradient) for first, gradient in pairs]
            of_all = [tf.stack([tf.add_n(noise), tf.add_n(signal)])]
            noise, signal = tf.unstack((workers.all_reduce(of_all) if workers else of_all)[0])
            terms = {"noise": noise, "signal": signal, "pairs": 1.0}
            is_finite = tf.math.is_finite(terms["noise"]) & tf.math.is_finite(terms["signal"])
            for name, term in terms.items():
                term = tf.where(is_finite, tf.cast(term, tf.float64), 0.0)
                self.state[name].assign_add(term, read_value=False)
            self._waits.assign(False, read_value=False)
            return True

        def first():
            for variable, gradient in zip(held, gradients, strict=True):
                variable.assign(gradient, read_value=False)
            self._waits.assign(True, read_value=False)
            return False

        tf.cond(self._waits.read_value(), second, first)

    def _held(self, sums, gradient) -> tf.Variable:
        if id(sums) not in self._first:
            with tf.init_scope(), tf.device(sums.device):
                zeros = tf.zeros(sums.shape, gradient.dtype)
                self._first[id(sums)] = ResourceVariable(zeros, trainable=False)
        return self._first[id(sums)]

    @property
    def is_between_pairs(self) -> bool:
        """Whether `state` holds all that was seen."""
        return not bool(self._waits)

    @property
    def num_pairs(self) -> int:
        """How many pairs the ratio is of."""
        return int(self.state["pairs"])

    @property
    def ratio(self) -> float:
        """r, the noise scale over the rows of an update; infinite if there is nothing but noise."""
        noise, signal = float(self.state["noise"]), float(self.state["signal"])
        return noise / signal if signal > 0 else float("inf")

    def forget_first(self) -> None:
        """The next update is the first of two."""
        self._waits.assign(False)

    def restart(self) -> None:
        """Forgets all, where updates become others."""
        for variable in self.state.values():
            variable.assign(0.0)
        self.forget_first()


def _squares(tensor) -> tf.Tensor:
    return _products(tensor, tensor)


def _products(one, other) -> tf.Tensor:
    # Multiplied as they are: in float64 a GPU would be slow.
    return tf.cast(tf.reduce_sum(one * other), tf.float64)
