"""Has `fit` pass over the steps of an epoch that were done before the run was interrupted.

Keras can begin with any epoch, and with no step but its first. So the epoch is run from there, and
in place of the train function, which `fit` looks up at each step, stands one that takes the batches
and leaves the model alone. Steps keep their numbers, the epoch its length, and a data set that
cannot start in its middle moves on by itself.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfparallel.checkpoint import state

__all__ = ["PassedSteps"]


class PassedSteps:
    """The steps of one epoch that are not to be trained again.

    Args:
        model: The model that is trained.
        num_steps: How many they are.
        metrics: What the epoch's metrics had summed up by then, as `state.capture` gives it.
    """

    def __init__(self, model: keras.Model, num_steps: int, metrics: Sequence[np.ndarray]):
        self._model = model
        self._num_steps = num_steps
        self._metrics = metrics
        self._logs: dict[str, Any] | None = None
        self._train_function = None
        self.num_calls = 0

    def before_step(self, step: int) -> bool:
        """Called before each step; whether the step is one to pass over."""
        if step >= self._num_steps:
            self._num_steps = 0  # The next epoch has steps of the same numbers.
            return False
        # For this one call: a `fit` that is interrupted leaves the model as it was.
        self._train_function = self._model.train_function
        self._model.train_function = self._pass
        return True

    def _pass(self, iterator):
        self._model.train_function = self._train_function
        batch = None
        for _ in range(self._model.steps_per_execution):
            batch = next(iterator)
        if self._logs is None:
            # Not before: Keras resets the metrics when an epoch begins, and may not have built
            # them until a step needs them.
            if not state.restore_metrics(self._model, self._metrics, batch):
                warnings.warn(
                    "The metrics are not those of the checkpoint; of this epoch, what is logged "
                    "covers the steps from here on. The weights are not concerned.",
                    stacklevel=2,
                )
            if hasattr(self._model, "metrics_were_restored"):
                self._model.metrics_were_restored()
            self._logs = self._model.get_metrics_result()
        self.num_calls += 1
        return self._logs
