"""The logs of a step, which stay where the step left them unless a callback asks for numbers.

Keras on TensorFlow turns the logs of each step into numbers before it calls any callback, and the
host waits until the device is done: the next step is handed to a GPU that has nothing left to do.
`fit` may be given a `keras.callbacks.CallbackList`, so here is one that does so only if somebody
reads them.
"""

from typing import Any

import keras
import tensorflow as tf

__all__ = ["LogsWhereTheyAre"]

_BASE = keras.callbacks.Callback
# Keras's, which read no logs of a batch where they save at the ends of epochs.
_SAVING = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class LogsWhereTheyAre(keras.callbacks.CallbackList):
    """The callbacks of a `fit`, and Keras's history and progress bar.

    A callback that says `takes_tensors = True` sees the logs of a batch as scalar tensors, and so
    does the progress bar, which reads them when it draws. If one that does not say so has a method
    for batches, all see numbers, as Keras has it. The logs of an epoch are numbers always.

    Args:
        callbacks: The user's.
        verbose: As for `fit`.
    """

    def __init__(self, callbacks: Any, verbose: Any):
        super().__init__(callbacks, add_history=True, add_progbar=verbose != 0)
        self._asks_in = {"train": True, "test": True}

    def begin(self, model: keras.Model, **params: Any) -> None:
        """Tells all callbacks what is trained, as Keras does when it makes a list of them.

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
        """Tells all callbacks that a step of training has ended, or is under way on a device."""
        if self._asks_in["train"] or not _is_flat(logs):
            super().on_train_batch_end(batch, logs)
            return
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs=dict(sorted(logs.items())))

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Likewise of a step of validation."""
        if self._asks_in["test"] or not _is_flat(logs):
            super().on_test_batch_end(batch, logs)
            return
        for callback in self.callbacks:
            callback.on_test_batch_end(batch, logs=dict(sorted(logs.items())))


def _asks(callback, hooks) -> bool:
    if getattr(callback, "takes_tensors", False):
        return False
    # Of Keras's own classes alone: what extends them may read what it likes.
    if type(callback) is keras.callbacks.ProgbarLogger:
        return False
    if type(callback) in _SAVING and callback.save_freq == "epoch":
        return False
    found = [getattr(callback, hook) for hook in hooks]
    own = [getattr(method, "__func__", method) for method in found]
    return own != [getattr(_BASE, hook) for hook in hooks]


def _is_flat(logs) -> bool:
    """Whether logs are scalars by name, which need nothing but to be read."""
    return isinstance(logs, dict) and all(
        tf.is_tensor(value) and value.shape.rank == 0 for value in logs.values()
    )
