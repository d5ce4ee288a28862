"""AdaScale: the learning rate of an update follows the measured gain: `sync="adascale:8"`.

An update accumulates S steps, as `accumulate:8` does. With gᵢ and dᵢ the gradient and the divisor
of step i, D = Σ dᵢ and ḡ = Σ dᵢ gᵢ / D, the variance of a step's gradient and the squared norm of
the gradient without noise are

    σ² = S/D · (Σ dᵢ |gᵢ|² − D |ḡ|²) / (S − 1)      μ² = |ḡ|² − σ²/S

and with their moving averages the gain and the rate of update t are

    r = (σ² + μ²) / (σ²/S + μ²)      θ ← θ − r η(⌊τ⌋) ḡ      τ ← τ + r

where η is the optimizer's schedule. In noise alone r is S, the linear rule; without noise it is 1,
so that an update is one step. τ counts the steps of the small batch that the updates stand for.

The parts are steps of the data, not rows of a device, so the gain does not depend on the devices.
The price is that |gᵢ|² needs the gradient of all rows of a step: several workers sum gradients in
each step, as they do with `shard="gradients"`.
"""

import keras
import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.extend import attached
from tfparallel.replication.sync.accumulate import LEAST_MEASURED, Accumulate
from tfparallel.replication.sync.noise_scale import squares
from tfparallel.seams.optimizers import rate_of
from tfparallel.seams.tensorflow import ResourceVariable

_SPAN = 1000.0  # The averages remember about this many steps: they decay by 1 − S/1000 an update.


class Gain:
    """Measures the gain of updates.

    Attributes:
        state: The variables by name that a resumed run needs: the moving averages of σ² and μ², the
            number of updates in them, and how far τ is ahead of the updates.
    """

    def __init__(self):
        names = ("variance of a step", "squared gradient", "measured updates", "ahead")
        with tf.init_scope(), tf.device("CPU:0"):
            self.state = {name: ResourceVariable(0.0, dtype=tf.float64) for name in names}
            self._of_steps = ResourceVariable(0.0, dtype=tf.float64)  # Σ dᵢ |gᵢ|² of this update.
        self._variance, self._signal, self._count, self.ahead = self.state.values()

    def see_step(self, gradients, divisor) -> None:
        """Takes the gradients of a step, or this worker's shares of them, and their divisor."""
        self._of_steps.assign_add(divisor * _norm(gradients), read_value=False)

    def see_update(self, means, divisor, steps, workers: ProcessGroup | None) -> None:
        """Takes the means of the seen steps.

        Args:
            means: ḡ, in whole gradients or this worker's shares of them.
            divisor: D.
            steps: S.
            workers: The workers with the other shares; None if there are none.
        """
        norms = [tf.stack([self._of_steps.read_value(), _norm(means)])]
        of_steps, of_mean = tf.unstack((workers.all_reduce(norms) if workers else norms)[0])
        steps = tf.cast(steps, tf.float64)
        variance = tf.math.divide_no_nan(
            steps * (of_steps - divisor * of_mean), divisor * (steps - 1)
        )
        signal = of_mean - variance / steps
        # One step has no variance that could be measured; and NaN would never leave an average.
        counts = (steps > 1) & tf.math.is_finite(variance) & tf.math.is_finite(signal)
        count = self._count.assign_add(tf.cast(counts, tf.float64))
        share = tf.maximum(tf.math.divide_no_nan(tf.ones_like(count), count), steps / _SPAN)
        share = tf.minimum(share, 1.0)  # A plain mean at first.
        for average, value in ((self._variance, variance), (self._signal, signal)):
            moved = share * (value - average.read_value())
            average.assign_add(tf.where(counts, moved, 0.0), read_value=False)

    def _averages(self) -> tuple[tf.Tensor, tf.Tensor]:
        # An average of few updates may come out below 0.
        return tuple(tf.maximum(v.read_value(), 0.0) for v in (self._variance, self._signal))

    def of(self, steps) -> tf.Tensor:
        """r, for an update of so many steps; 1 if nothing is measured yet."""
        variance, signal = self._averages()
        steps = tf.cast(steps, tf.float64)
        return tf.maximum(tf.math.divide_no_nan(variance + signal, variance / steps + signal), 1.0)

    @property
    def num_measured(self) -> int:
        """The number of updates in the averages."""
        return int(self._count)

    def noise_ratio(self, steps: int) -> float:
        """The gradient noise scale, divided by the rows of so many steps."""
        variance, signal = map(float, self._averages())
        return variance / (steps * signal) if signal else float("inf")

    def forget_steps(self) -> None:
        """Forgets the steps of an update."""
        self._of_steps.assign(0.0, read_value=False)

    def restart(self) -> None:
        """Forgets all."""
        for variable in self.state.values():
            variable.assign(0.0)


class AdaScale(Accumulate):
    """Updates a replicated model every N steps, with a learning rate that follows the gain.

    References:
        Tyler B. Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
        arXiv:2007.05105, 2020.
    """

    reason_in_errors = "the learning rate follows the noise in the gradients of several steps"

    def __init__(self, model, sync):
        super().__init__(model, sync)
        self._gain = Gain()
        self._optimizer: keras.Optimizer | None = None  # Whose updates τ counts.

    @property
    def is_silent(self) -> bool:
        """Never: the norm of a step's gradient needs the rows of all workers."""
        return False

    @property
    def gain(self) -> float:
        """The gain of an update of N steps."""
        return float(self._gain.of(self.num_steps))

    @property
    def num_scale_invariant_steps(self) -> float:
        """τ."""
        return float(self.model.optimizer.iterations) + float(self._gain.ahead)

    def resumable_state(self) -> dict[str, tf.Variable]:
        """The variables by name that a resumed run needs, equal on all workers."""
        return super().resumable_state() | self._gain.state

    def begin(self, call):
        """Enters the contexts of a call; a new optimizer counts and measures from the start."""
        if call.kind == "fit" and self.model.optimizer is not self._optimizer:
            if self._optimizer is not None:
                self._gain.restart()
            self._optimizer = self.model.optimizer
        super().begin(call)

    def forget(self) -> None:
        """Clears the accumulated gradients."""
        super().forget()
        self._gain.forget_steps()

    def _check(self) -> None:
        super()._check()
        optimizer, workers = self.model.optimizer, self.model._workers
        if not isinstance(optimizer, keras.optimizers.SGD):
            self.refuse(
                "SGD, whose steps are proportional to the gradient, is required",
                type(optimizer).__name__,
            )
        if self._are_sums:
            self.refuse("Losses that are means are required", "a loss with reduction='sum'")
        if workers is not None and workers.compression is not None:
            received = f"compression={workers.compression.spec!r}"
            self.refuse("Gradients that nothing has compressed are required", received)

    def see_step(self, gradients, divisor) -> None:
        """Measures the gradients of a step."""
        self._gain.see_step(gradients, divisor)

    def update(self, gradients, variables, means, divisor) -> None:
        """Updates the weights at the scaled learning rate."""
        sharing = self.model._workers if self._in_shares else None
        steps = self._counts.steps.read_value()
        self._gain.see_update(means, divisor, steps, sharing)
        gain = self._gain.of(steps)
        with attached(self.model.optimizer, _rate=self._rate(gain)):
            super().update(gradients, variables, means, divisor)
        self._gain.ahead.assign_add(gain - 1.0, read_value=False)

    def _rate(self, gain: tf.Tensor) -> tf.Tensor:
        optimizer = self.model.optimizer
        rate = rate_of(optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            updates = tf.cast(tf.convert_to_tensor(optimizer.iterations.value), tf.float64)
            tau = tf.floor(updates + self._gain.ahead.read_value())
            rate = rate(tf.cast(tau, optimizer.iterations.dtype))
        else:
            rate = optimizer.learning_rate
        return tf.cast(tf.convert_to_tensor(rate), tf.float64) * gain

    @property
    def _noise_ratio(self) -> float:
        """As of pairs of updates, which one step needs; but they differ by their weights, too."""
        if self.num_steps == 1:
            return super()._noise_ratio
        is_known = self._gain.num_measured >= LEAST_MEASURED
        return self._gain.noise_ratio(self.num_steps) if is_known else 0.0


def _norm(tensors) -> tf.Tensor:
    """The squared norm of tensors on any devices."""
    return tf.add_n([squares(tensor) for tensor in tensors])
