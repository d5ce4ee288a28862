"""The steps of an interrupted epoch that a resumed `fit` does not train again."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfparallel.checkpoint import state


class PassedSteps:
    """The completed steps at the start of one epoch, which are not trained again.

    Keras can start at any epoch, but only at its first step. So the epoch runs from its start, and
    the train function, which `fit` looks up at each step, is replaced by one that consumes the
    batches without training. Steps keep their numbers, the epoch keeps its length, and a dataset
    that cannot start in the middle advances on its own.

    Args:
        model: The training model.
        num_steps: Number of steps to skip.
        metrics: The state of the epoch's metrics at the interruption, from `state.capture`.
        restore: Restores all other state. Other callbacks change some when an epoch or a step
            begins, such as the learning rate, which the restored state already includes.
    """

    def __init__(
        self,
        model: keras.Model,
        num_steps: int,
        metrics: Sequence[np.ndarray],
        restore: Callable[[], Any],
    ):
        self._model = model
        self._num_steps = num_steps
        self._metrics = metrics
        self._restore = restore
        self._logs: dict[str, Any] | None = None
        self.num_calls = 0

    def before_step(self, step: int) -> bool:
        """Called before each step; returns whether to skip the step."""
        if step >= self._num_steps:
            if self._num_steps:
                self._restore()
            self._num_steps = 0  # The next epoch starts again at step 0.
            return False
        # For this call only, so that an interrupted `fit` leaves the model unchanged.
        trains = self._model.train_function
        self._model.train_function = lambda iterator: self._pass(iterator, trains)
        return True

    def _pass(self, iterator, train_function):
        self._model.train_function = train_function
        batch = None
        for _ in range(self._model.steps_per_execution):
            batch = next(iterator)
        if self._logs is None:
            # Not earlier: Keras resets the metrics at the start of an epoch, and may build them
            # only when a step needs them.
            if not state.restore_metrics(self._model, self._metrics, batch):
                warnings.warn(
                    "The metrics of the checkpoint could not be restored; those logged for this "
                    "epoch cover only the steps from here on. The weights are not affected.",
                    stacklevel=2,
                )
            if hasattr(self._model, "metrics_were_restored"):
                self._model.metrics_were_restored()
            self._logs = self._model.get_metrics_result()
        self.num_calls += 1
        return self._logs
