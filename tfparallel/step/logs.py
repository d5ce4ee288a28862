"""The logs of a step, which stay on their device unless a callback needs numbers.

Keras on TensorFlow converts the logs of each step to numbers before it calls any callback, so the
host waits for the device, and a GPU idles until it gets the next step. `fit` accepts a
`keras.callbacks.CallbackList`, and this one converts logs only if a callback reads them.
"""

from typing import Any

import keras
import tensorflow as tf

_BASE = keras.callbacks.Callback
# Keras's callbacks that read no logs of a batch if they save at the end of an epoch.
_SAVING = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class LogsWhereTheyAre(keras.callbacks.CallbackList):
    """The callbacks of a `fit`, and Keras's history and progress bar.

    A callback with `takes_tensors = True` sees the logs of a batch as scalar tensors, and so does
    the progress bar, which reads them when it draws. If any other callback has a method for
    batches, all see numbers, as in Keras. The logs of an epoch are always numbers.

    Args:
        callbacks: The user's callbacks.
        verbose: As for `fit`.
    """

    def __init__(self, callbacks: Any, verbose: Any):
        super().__init__(callbacks, add_history=True, add_progbar=verbose != 0)
        self._asks_in = {"train": True, "test": True}

    def begin(self, model: keras.Model, **params: Any) -> None:
        """Sets the model and parameters of all callbacks, as Keras does for a new list.

        Args:
            model: The model.
            **params: `verbose`, `epochs` and `steps`.
        """
        self.set_model(model)
        self.set_params(params)
        for kind in self._asks_in:
            hooks = ("on_batch_end", f"on_{kind}_batch_end")
            self._asks_in[kind] = any(_asks(callback, hooks) for callback in self.callbacks)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notifies all callbacks that a training step has ended, or runs on a device."""
        if self._asks_in["train"] or not _is_flat(logs):
            super().on_train_batch_end(batch, logs)
            return
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs=dict(sorted(logs.items())))

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notifies all callbacks that a validation step has ended, or runs on a device."""
        if self._asks_in["test"] or not _is_flat(logs):
            super().on_test_batch_end(batch, logs)
            return
        for callback in self.callbacks:
            callback.on_test_batch_end(batch, logs=dict(sorted(logs.items())))


def _asks(callback, hooks) -> bool:
    if getattr(callback, "takes_tensors", False):
        return False
    # Only Keras's own classes: subclasses may read any logs.
    if type(callback) is keras.callbacks.ProgbarLogger:
        return False
    if type(callback) in _SAVING and callback.save_freq == "epoch":
        return False
    methods = [getattr(callback, hook) for hook in hooks]
    functions = [getattr(method, "__func__", method) for method in methods]
    return functions != [getattr(_BASE, hook) for hook in hooks]


def _is_flat(logs) -> bool:
    """Whether logs are scalars by name, which only need to be read."""
    return isinstance(logs, dict) and all(
        tf.is_tensor(value) and value.shape.rank == 0 for value in logs.values()
    )
