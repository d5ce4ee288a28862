"""Keras's own callbacks in a job of several workers: one worker writes, all resume.

Keras knows no chief: every worker would write the same files. Saving is every worker's work all
the same, since parts of the state may be spread over them; so each worker's callbacks run, and all
but the chief's write into a folder that is thrown away (as TensorFlow's own guide to multi-worker
training does by hand). The directory of the chief need not be shared: what `BackupAndRestore`
finds there is sent to the others.
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
    """On every worker but the chief, turns what the callbacks write into a temporary folder.

    Their paths are as before when the block ends.
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
            # Callbacks keep further paths that begin with this one.
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
    """Yields `path` on the chief, and on the others a path of that name that is thrown away."""
    if is_chief:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tfparallel_") as folder:
        yield os.path.join(folder, os.path.basename(path))


def send_state(model: keras.Model, workers) -> None:
    """Gives all workers the chief's weights and optimizer state.

    Args:
        model: A built model, its optimizer built or not, alike on all workers.
        workers: The strategy's `ProcessGroup`.
    """
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        known = {id(variable) for variable in found}
        found += [v for v in model.optimizer.variables if id(v) not in known]
    in_pieces = list(filter(is_in_pieces, found))  # Of which each worker has its own.
    found = [variable for variable in found if not is_in_pieces(variable)]
    sent = workers.broadcast([tf.convert_to_tensor(variable.value) for variable in found])
    for variable, value in zip(found, sent, strict=True):
        variable.assign(value)
    if in_pieces:
        loaded, kept = model.optimizer.loaded_values(), model.optimizer.variables
        store: dict[str, Any] = {}
        if not workers.exchange(loaded is not None, "sending the optimizer's state")[0]:
            model.optimizer.save_own_variables(store)
        elif workers.worker_index == 0:  # Which alone has read a file, and has all of it.
            store = {str(i): value for i, value in enumerate(loaded)}
        else:
            shown = [getattr(variable, "_shown", variable) for variable in kept]
            store = {str(i): np.zeros(variable.shape) for i, variable in enumerate(shown)}
        pairs = zip(store.values(), kept, strict=True)
        values = workers.broadcast([tf.cast(value, own.dtype) for value, own in pairs])
        model.optimizer.load_own_variables(
            {name: value.numpy() for name, value in zip(store, values, strict=True)}
        )
        model.optimizer.loaded_values()


class RestoredByChief(keras.callbacks.Callback):
    """Gives all workers what the chief's `BackupAndRestore` found when training began."""

    def __init__(self, workers):
        super().__init__()
        self._workers = workers

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        mine = [first_epoch(self.model), bool(optimizer is not None and optimizer.built)]
        everyones = self._workers.exchange(mine, "what `BackupAndRestore` has read")
        initial_epoch, has_slots = everyones[0]
        if has_slots and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        send_state(self.model, self._workers)
        begin_at(self.model, initial_epoch)
