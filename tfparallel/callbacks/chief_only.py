"""Keras's own callbacks in a job of several workers: one worker writes, all resume.

Keras has no notion of a chief: every worker would write the same files. All workers must still take
part in saving, since the state may be spread over them. So each worker's callbacks run, and all but
the chief write to a temporary folder (as TensorFlow's guide to multi-worker training does by hand).
The chief's directory need not be shared: the state that `BackupAndRestore` loads there is sent to
the other workers.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.seams.keras import begin_at, first_epoch
from tfparallel.update.files import is_in_pieces

_PATH_OF = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.BackupAndRestore: "backup_dir",
}


@contextlib.contextmanager
def writing_by_chief(
    callbacks: Iterable[keras.callbacks.Callback], is_chief: bool
) -> Iterator[None]:
    """Redirects the callbacks' files to a temporary folder, except on the chief.

    The paths are restored when the block ends.
    """
    if is_chief:
        yield
        return
    changed = []
    with tempfile.TemporaryDirectory(prefix="tfparallel_") as folder:
        for index, callback in enumerate(callbacks):
            name = next((n for cls, n in _PATH_OF.items() if isinstance(callback, cls)), None)
            if name is None:
                continue
            old = os.fspath(getattr(callback, name))
            new = os.path.join(folder, str(index), os.path.basename(os.path.normpath(old)))
            os.makedirs(os.path.dirname(new))
            # Callbacks derive further paths from this one.
            for key, value in list(vars(callback).items()):
                if isinstance(value, str | os.PathLike) and os.fspath(value).startswith(old):
                    changed.append((callback, key, value))
                    setattr(callback, key, new + os.fspath(value)[len(old) :])
        try:
            yield
        finally:
            for callback, key, value in changed:
                setattr(callback, key, value)


@contextlib.contextmanager
def path_of_chief(path: str, is_chief: bool) -> Iterator[str]:
    """Yields `path` on the chief, and a temporary path of the same name on other workers."""
    if is_chief:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tfparallel_") as folder:
        yield os.path.join(folder, os.path.basename(path))


def send_state(model: keras.Model, workers) -> None:
    """Sends the chief's weights and optimizer state to all workers.

    Args:
        model: A built model. Its optimizer may be unbuilt, but in the same way on all workers.
        workers: The strategy's `ProcessGroup`.
    """
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        model_ids = {id(variable) for variable in variables}
        variables += [v for v in model.optimizer.variables if id(v) not in model_ids]
    in_pieces = list(filter(is_in_pieces, variables))  # Different on each worker.
    variables = [variable for variable in variables if not is_in_pieces(variable)]
    sent = workers.broadcast([tf.convert_to_tensor(variable.value) for variable in variables])
    for variable, value in zip(variables, sent, strict=True):
        variable.assign(value)
    if in_pieces:
        loaded, slots = model.optimizer.loaded_values(), model.optimizer.variables
        store: dict[str, Any] = {}
        if not workers.exchange(loaded is not None, "sending the optimizer's state")[0]:
            model.optimizer.save_own_variables(store)
        elif workers.worker_index == 0:  # Only the chief has read the file; it has all values.
            store = {str(i): value for i, value in enumerate(loaded)}
        else:
            whole_slots = [getattr(variable, "_shown", variable) for variable in slots]
            store = {str(i): np.zeros(variable.shape) for i, variable in enumerate(whole_slots)}
        pairs = zip(store.values(), slots, strict=True)
        values = workers.broadcast([tf.cast(value, slot.dtype) for value, slot in pairs])
        model.optimizer.load_own_variables(
            {name: value.numpy() for name, value in zip(store, values, strict=True)}
        )
        model.optimizer.loaded_values()


class RestoredByChief(keras.callbacks.Callback):
    """Sends the state that the chief's `BackupAndRestore` loaded to all workers."""

    def __init__(self, workers):
        super().__init__()
        self._workers = workers

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        local_state = [first_epoch(self.model), bool(optimizer is not None and optimizer.built)]
        by_worker = self._workers.exchange(local_state, "the state that `BackupAndRestore` loaded")
        initial_epoch, has_slots = by_worker[0]
        if has_slots and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        send_state(self.model, self._workers)
        begin_at(self.model, initial_epoch)
