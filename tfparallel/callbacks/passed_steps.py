"""The steps of an interrupted epoch that a resumed `fit` does not train again."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfparallel.checkpoint import state
from tfparallel.checkpoint.stored import ForeignCheckpointError


def problems_of_position(
    content: dict[str, Any], model: keras.Model, steps_per_epoch: int | None
) -> list[str]:
    """Returns why a `fit` cannot skip the steps that a checkpoint has of an epoch.

    Args:
        content: The content of the checkpoint.
        model: The training model.
        steps_per_epoch: That of the `fit`; None if unknown.
    """
    done, problems = content["step_in_epoch"], []
    if done and steps_per_epoch != content["steps_per_epoch"]:
        problems.append(
            f"{steps_per_epoch} steps per epoch (the checkpoint, written in mid-epoch, has "
            f"{content['steps_per_epoch']})"
        )
    if done % model.steps_per_execution:
        problems.append(
            f"steps_per_execution={model.steps_per_execution} (the checkpoint was written after "
            f"{done} steps of an epoch)"
        )
    return problems


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
            self._finish()
            return False
        # For this call only, so that an interrupted `fit` leaves the model unchanged.
        trains = self._model.train_function
        self._model.train_function = lambda iterator: self._pass(iterator, trains)
        return True

    def end_epoch(self, num_steps: int) -> None:
        """Called after the steps of an epoch.

        Args:
            num_steps: Number of steps that the epoch had.

        Raises:
            ForeignCheckpointError: If the data ended among the steps to skip.
        """
        if num_steps < self._num_steps and not self._model.stop_training:
            raise ForeignCheckpointError(
                "The data ended before the step of the checkpoint; to resume, the data must be the "
                f"same. Received: {num_steps} steps in an epoch (the checkpoint was written after "
                f"{self._num_steps}). Use the original data, or an empty folder."
            )
        self._finish()

    def _finish(self):
        if self._num_steps:
            self._restore()
        self._num_steps = 0  # The next epoch starts again at step 0.

    def _pass(self, iterator, train_function):
        self._model.train_function = train_function
        batch = next(iterator)
        for _ in range(self._model.steps_per_execution - 1):
            batch = next(iterator, batch)  # The last execution of an epoch may be short.
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
