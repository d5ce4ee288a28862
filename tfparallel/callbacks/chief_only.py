"""Callbacks that write, in a job of several workers: one worker writes, all resume.

Keras has no notion of a chief: every worker would write the same files. All workers must still take
part in saving, since the state may be spread over them. So each worker's callbacks run, and all but
the chief write to a temporary folder (as TensorFlow's guide to multi-worker training does by hand).
The chief's directory need not be shared: the state that `BackupAndRestore` loads there is sent to
the other workers. `ChiefOnly` is for the callbacks of others, such as loggers.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.collectives.chief_alone import on_chief_alone
from tfparallel.collectives.group import workers_of
from tfparallel.seams.keras import begin_at, first_epoch
from tfparallel.update.whole_slots import is_in_pieces

_PATH_OF = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.BackupAndRestore: "backup_dir",
}
# These change the training, so they must do so on every worker.
_CHANGES_TRAINING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


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


class ChiefOnly(keras.callbacks.Callback):
    """Runs a callback on the chief alone; on the other workers, it does nothing.

    Use it for callbacks that write to one place: loggers such as W&B's and MLflow's, and callbacks
    of your own. In a single process, the callback runs as always. Keras's `ModelCheckpoint`,
    `TensorBoard`, `CSVLogger` and `BackupAndRestore` do not need it: only the chief's files are
    kept.

    The callback must not do what needs all workers: `model.evaluate`, `model.predict`, a save of
    sharded weights, a collective. On the chief alone it would wait forever, so it raises an error
    there instead.

    Args:
        callback: A Keras callback; or a function without arguments, such as a class, that returns
            one. The function is called when `fit` begins, once, and only on the chief: let it start
            the logger's run, too.

    Raises:
        ValueError: If `callback` is neither, or is one that changes the training, such as
            `ReduceLROnPlateau`.

    Example:
        >>> class Lines(keras.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print(f"epoch {epoch + 1}: {sorted(logs)}")
        >>> model = tfparallel.data_parallel(build_model)
        >>> model.compile("sgd", "mse")
        >>> callbacks = [tfparallel.callbacks.ChiefOnly(Lines())]
        >>> history = model.fit(x, y, epochs=1, verbose=0, callbacks=callbacks)
        epoch 1: ['loss']
    """

    def __init__(self, callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback]):
        super().__init__()
        is_function = callable(callback) and not isinstance(callback, keras.callbacks.Callback)
        self._create = callback
        self._callback = None if is_function else _checked(callback)

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if self._callback is not None:
            self._callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Takes on the methods of the callback, if this worker is the chief."""
        super().set_model(model)
        for name in _HOOKS:
            vars(self).pop(name, None)
        workers = workers_of(model)
        if workers is not None and workers.worker_index > 0:
            return
        if self._callback is None:
            self._callback = _checked(self._create())
        self._callback.set_model(model)
        # Not those that it inherits from Keras: Keras reads the logs of a step only if it must.
        for name in _HOOKS:
            hook = getattr(self._callback, name)
            if getattr(hook, "__func__", hook) is not getattr(keras.callbacks.Callback, name):
                setattr(self, name, hook if workers is None else self._on_chief(name, hook))
        self.takes_tensors = getattr(self._callback, "takes_tensors", False)

    def _on_chief(self, name, hook):
        what = f"`{name}` of {type(self._callback).__name__}"
        instead = (
            "List the callback without `ChiefOnly`, and let it write only where "
            "`tfparallel.worker_index()` is 0; or validate by `fit(validation_data=…)`."
        )

        def call(*args, **kwargs):
            with on_chief_alone(what, instead):
                return hook(*args, **kwargs)

        return call


def _checked(callback) -> keras.callbacks.Callback:
    name = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise ValueError(
            "ChiefOnly needs a Keras callback, or a function without arguments that returns one. "
            f"Received: {name}."
        )
    package = type(callback).__module__.partition(".")[0]
    if isinstance(callback, _CHANGES_TRAINING) or package == __name__.partition(".")[0]:
        raise ValueError(
            "ChiefOnly is for callbacks that only write; one that changes the training, or is part "
            f"of it, must run on every worker. Received: {name}. List it without ChiefOnly."
        )
    return callback
