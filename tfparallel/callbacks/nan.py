"""Detects the first step whose loss is not finite."""

import math
import warnings
from typing import Any

import keras
import numpy as np


class NaNLossError(RuntimeError):
    """Training stopped because the loss was not finite."""


class NaNGuard(keras.callbacks.Callback):
    """Warns, or stops, at the first step whose loss is NaN or infinite.

    Keras passes callbacks the mean loss over the epoch's steps so far, which becomes non-finite at
    exactly the first step whose own loss is: that is the step reported. With
    `steps_per_execution=N`, Keras calls callbacks every N steps, and the reported step is the last
    of those N. At the end of each epoch, the weights are checked as well.

    Args:
        stop: Whether to stop training with an error. By default it warns once, and training
            continues.

    Attributes:
        epoch: The epoch of the first such step, counted from 1 as on the progress bar, or None.
        step: Its number within the epoch, counted from 1, or None.

    Raises:
        NaNLossError: In `fit`, with `stop=True`.

    Example:
        >>> guard = tfparallel.callbacks.NaNGuard(stop=True)
        >>> model.fit(x, y, callbacks=[guard])
        >>> guard.step is None  # Every loss was finite.
        True
    """

    def __init__(self, stop: bool = False):
        super().__init__()
        if not isinstance(stop, bool):
            raise ValueError(
                f"`stop` must be True (raise an error) or False (warn). Received: stop={stop!r}. "
                "Write NaNGuard(stop=True)."
            )
        self.stop = stop
        self.epoch: int | None = None
        self.step: int | None = None
        self._epoch = 1
        self._weights_reported = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.epoch = self.step = None
        self._weights_reported = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch + 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        loss = (logs or {}).get("loss")
        if self.step is not None or loss is None or math.isfinite(loss):
            return
        self.epoch, self.step = self._epoch, batch + 1
        message = (
            f"The loss is not a finite number at step {self.step} of epoch {self.epoch}; "
            f"every later loss and weight is suspect. Received: loss={float(loss)}. "
            "Lower the learning rate, clip the gradients (global_clipnorm=1.0), "
            "or look for NaN in the data."
        )
        self._report(message)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the weights: a ReLU may turn NaN into 0, so that the loss stays finite."""
        if self.step is not None or self._weights_reported:
            return
        for weight in self.model.trainable_weights:
            if not np.isfinite(np.asarray(weight, np.float64)).all():
                self._weights_reported = True
                self._report(
                    f"The variable {weight.path!r} contains NaN or infinity after epoch "
                    f"{epoch + 1}, although the loss is finite. Received: "
                    f"loss={(logs or {}).get('loss')}. Look for NaN in the data, and for "
                    "activations that hide it, such as ReLU."
                )
                return

    def _report(self, message: str) -> None:
        if self.stop:
            raise NaNLossError(message)
        warnings.warn(message, stacklevel=3)
