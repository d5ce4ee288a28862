"""Learning-rate warmup, with optional scaling by the batch size."""

import math
import numbers
from typing import Any

import keras

from tfparallel.keras_compat import MultiOptimizer
from tfparallel.seams.optimizers import rate_of

_SCALINGS = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate linearly, update by update, from a fraction to its full value.

    Update u of the first N uses η (f + (1 − f) (u + 1) / N), so the last of them uses η. After that
    the callback leaves the rate alone, so that another callback may lower it. A resumed run
    continues where it was, because the callback reads `optimizer.iterations`. With
    `steps_per_execution`, the rate is constant within an execution.

    More devices allow larger batches, which often need a higher rate. `scaling` derives η from the
    rate for a smaller batch; it is off by default.

    Args:
        learning_rate: The rate to reach; with `scaling`, the rate for `base_batch_size`.
        num_steps: N, the number of updates of the warmup, at least 1. With `sync="accumulate:4"`,
            an update is four steps.
        initial: f, the initial fraction, in [0, 1].
        scaling: `"linear"` multiplies η by `batch_size / base_batch_size` (Goyal et al. 2017), for
            SGD; `"sqrt"` multiplies by its square root, for Adam and similar optimizers; None does
            not scale η.
        batch_size: Rows per update, over all devices and workers.
        base_batch_size: Rows per update for which `learning_rate` was tuned.

    Attributes:
        target: The rate at the end of the warmup.

    Raises:
        ValueError: If a number is out of range, or if only one of `scaling` and the batch sizes is
            set. When training begins, if the optimizer has a schedule or is a MultiOptimizer.

    Example:
        >>> warmup = tfparallel.callbacks.LearningRateWarmup(
        ...     0.1, num_steps=500, scaling="linear", batch_size=2048, base_batch_size=256
        ... )
        >>> warmup.target
        0.8
        >>> model.fit(x, y, batch_size=2048, callbacks=[warmup])

    References:
        Priya Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
        arXiv:1706.02677, 2017. Without its momentum correction during the warmup.
        For the square root: Alex Krizhevsky, "One weird trick for parallelizing convolutional
        neural networks", arXiv:1404.5997, 2014.
    """

    async_safe = takes_tensors = True  # It reads no logs.

    def __init__(
        self,
        learning_rate: float,
        num_steps: int,
        *,
        initial: float = 0.0,
        scaling: str | None = None,
        batch_size: int | None = None,
        base_batch_size: int | None = None,
    ):
        super().__init__()
        _check(learning_rate, num_steps, initial)
        self.target = float(learning_rate) * _factor(scaling, batch_size, base_batch_size)
        self._num_steps = int(num_steps)
        self._initial = float(initial)
        self._is_over = self._has_begun = False

    def rate(self, update: int) -> float:
        """Returns the rate of an update, counted from 0."""
        done = min((update + 1) / self._num_steps, 1.0)
        return self.target * (self._initial + (1.0 - self._initial) * done)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if isinstance(optimizer, MultiOptimizer):
            raise ValueError(
                "LearningRateWarmup sets the rate of one optimizer. Received: a MultiOptimizer. "
                "Give each of its optimizers a schedule."
            )
        rate = rate_of(optimizer)
        if not isinstance(rate, keras.Variable):
            name = type(rate).__name__
            raise ValueError(
                "LearningRateWarmup sets the optimizer's learning rate, but a schedule overrides "
                f"it at each step. A number is required. Received: learning_rate={name}. Use a "
                "schedule with a warmup, such as CosineDecay(warmup_steps=…), without this "
                "callback; or pass a number."
            )
        self._is_over = self._has_begun = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the next update. Reading the count synchronizes during the warmup."""
        if self._is_over:
            return
        update = int(self.model.optimizer.iterations)
        was_warm, self._is_over = self._has_begun, update >= self._num_steps
        # An execution of several steps may skip the last one.
        if not self._is_over or was_warm or self._is_left_below():
            self.model.optimizer.learning_rate = self.rate(update)
        self._has_begun = True

    def _is_left_below(self) -> bool:
        """Whether the rate is that of an execution in which an earlier `fit` ended the warmup."""
        now, end = float(self.model.optimizer.learning_rate), self._num_steps
        updates = range(max(0, end - self.model.steps_per_execution), end - 1)
        return any(math.isclose(now, self.rate(update), rel_tol=1e-6) for update in updates)


def _check(learning_rate, num_steps, initial):
    for name, value, holds, required in (
        ("learning_rate", learning_rate, lambda x: x > 0, "a number above 0"),
        ("num_steps", num_steps, lambda x: int(x) == x >= 1, "a whole number of at least 1"),
        ("initial", initial, lambda x: 0 <= x <= 1, "a fraction from 0 to 1"),
    ):
        is_number = isinstance(value, numbers.Real) and math.isfinite(value)
        if not is_number or not holds(value):
            raise ValueError(f"`{name}`: {required} is required. Received: {name}={value!r}.")


def _factor(scaling, batch_size, base_batch_size) -> float:
    received = (
        f"Received: scaling={scaling!r}, batch_size={batch_size!r}, "
        f"base_batch_size={base_batch_size!r}."
    )
    sizes = (batch_size, base_batch_size)
    if scaling is None:
        if sizes != (None, None):
            raise ValueError(
                "Batch sizes are used only to scale the rate, and `scaling` must say how: 'linear' "
                f"or 'sqrt'. {received}"
            )
        return 1.0
    if scaling not in _SCALINGS or not all(size is not None and size >= 1 for size in sizes):
        raise ValueError(
            "`scaling` must be 'linear' or 'sqrt', and needs `batch_size`, the examples per "
            "update, and `base_batch_size`, the batch size that the rate was tuned for, both at "
            f"least 1. {received}"
        )
    return _SCALINGS[scaling](batch_size / base_batch_size)
