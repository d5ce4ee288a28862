"""Saves the state of a run during training, and resumes from it after a restart."""

import collections
import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfparallel.callbacks.callback_states import CallbackStates
from tfparallel.callbacks.passed_steps import PassedSteps, problems_of_position
from tfparallel.checkpoint import state
from tfparallel.checkpoint.broadcast import broadcast
from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.checkpoint.history import as_logged, as_numbers
from tfparallel.checkpoint.stored import CheckpointError, ForeignCheckpointError, StoredCheckpoint
from tfparallel.collectives.group import workers_of
from tfparallel.data.batches import EpochBatches
from tfparallel.layout.layout import Layout
from tfparallel.seams.keras import begin_at, pass_epochs
from tfparallel.variables.sharded import ShardedVariable

_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ForeignCheckpointError)}


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints, and resumes `fit` exactly where the newest one left off.

    A checkpoint holds the weights, the optimizer (slots, step count, accumulated gradients), the
    counters of the random layers, the position in the data, the running sums of the metrics, the
    variables that losses read, the state of Keras's callbacks, and the history. A run that is
    killed and restarted ends with the same weights, logs and history as an uninterrupted one.
    Checkpoints are written atomically, with checksums; if the newest one is damaged, `fit` warns
    and resumes from the one before it. A step only waits for a copy of the state into host memory,
    and for the previous write if it has not finished; the write itself runs in the background. For
    a model with stages or parts, which may be larger than one device, arrays are written one by one
    while training waits.

    `fit` restarts the interrupted epoch, so that step numbers and the progress bar match those of
    an uninterrupted run. It skips the steps that were already done: other callbacks see them with
    the metrics of the checkpoint.

    The data must come in the same order again. `EpochBatches` guarantees that, and does not even
    read the batches of the skipped steps. Any other dataset is read up to the position, so its
    order must not change between starts (no unseeded shuffle, and the same order in each epoch).
    With `steps_per_epoch`, a model of a builder reads the batches of earlier epochs again, too.

    With several workers, all of them need the callback, but only the chief reads and writes: the
    folder need not be shared, and the number of workers may change between starts.

    Put it last in the list of callbacks, so that the checkpoint includes changes that other
    callbacks make at the end of an epoch (such as a learning rate); but before
    `SwapEMAWeights(swap_on_epoch=True)`. For a model of a builder it also holds the state of each
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` before it. That of your own callbacks
    is not saved.

    Args:
        directory: The folder, which is created if needed. `fit` resumes from its newest checkpoint.
        every_steps: Also write whenever the run's number of steps passes a multiple of this, in
            addition to the start of the run and the end of each epoch.
        keep: Number of newest checkpoints to keep; with one, there is no fallback if it is damaged.
        batches: The `EpochBatches` whose dataset you pass to `fit`, if any.
        configuration: JSON-serializable values that must be the same when the run resumes.

    Attributes:
        resumed: Where this `fit` resumed: `epoch` and `step_in_epoch`, and `step`, the number of
            completed steps in all epochs. None for a fresh start.
        num_passed: Number of calls of the train function that were skipped.
        is_passing: Whether the current step is skipped because it was already done.
        written_at: Number of steps in the newest checkpoint.

    Raises:
        ValueError: If an argument is out of range. In `fit`, before training: if the folder is not
            writable, another run writes to it, or its checkpoints belong to another model or
            configuration.
        RuntimeError: In `fit`, if a checkpoint could not be written; raised when the next one is
            due or training ends. Earlier checkpoints stay intact.

    Example:
        >>> checkpoint = tfparallel.callbacks.Checkpoint("checkpoints", every_steps=500)
        >>> model.fit(dataset, epochs=10, callbacks=[checkpoint])
    """

    async_safe = takes_tensors = True  # It reads only the logs of epochs.

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        keep: int = 2,
        batches: EpochBatches | None = None,
        configuration: dict[str, Any] | None = None,
    ):
        super().__init__()
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise ValueError(
                f"Checkpoint needs a folder to write to. Received: directory={directory!r}. Write "
                "Checkpoint('checkpoints')."
            )
        if (every_steps is not None and every_steps < 1) or keep < 1:
            raise ValueError(
                "`every_steps` and `keep` must be at least 1. Received: "
                f"every_steps={every_steps}, keep={keep}."
            )
        self._folder = CheckpointFolder(os.fspath(directory), keep)
        self._earlier: list[keras.callbacks.Callback] = []  # Before this one in the list.
        self._every_steps = every_steps
        self._batches = batches
        self._configuration = configuration or {}
        self._stored: StoredCheckpoint | None = None
        self.resumed: dict[str, int] | None = None
        self._forget()

    def _forget(self):
        self.resumed = None
        self._metrics: list[np.ndarray] = []
        self._restore_again: Callable[[], Any] | None = None
        self._passed: PassedSteps | None = None
        self.is_passing = False
        self._written_on: Layout | None = None
        self._epoch = 0
        self._first_epoch: int | None = None  # That `fit` was called with.
        self._epoch_start = 0  # Steps done when the epoch began.
        self._steps_in_epoch = 0
        self.written_at = 0

    @property
    def speaks(self) -> bool:
        """Whether this worker prints messages for the user."""
        return self._is_chief

    @property
    def num_passed(self) -> int:
        """Number of calls of the train function that were skipped."""
        return self._passed.num_calls if self._passed is not None else 0

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        begin_at(model, None)  # An interrupted `fit` may have left it.
        callbacks, _ = getattr(model, "_callbacks_of_fit", None) or (None, None)
        all_callbacks = getattr(callbacks, "callbacks", ())
        self._earlier = list(itertools.takewhile(lambda each: each is not self, all_callbacks))
        if any(
            isinstance(each, keras.callbacks.SwapEMAWeights) and each.swap_on_epoch
            for each in self._earlier
        ):
            raise ValueError(
                "A checkpoint must be written before the weights are swapped with their averages, "
                "since a resumed run would not swap them back. Received: "
                "SwapEMAWeights(swap_on_epoch=True) before Checkpoint in the list of callbacks. "
                "List it after Checkpoint."
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the newest checkpoint, and restores it into the model on every worker."""
        self._forget()
        self._states = CallbackStates(self._earlier)
        state.build(self.model)
        newest = self._by_chief(self._find)
        if newest is None:
            # Save the initial weights: a failing disk shows before any training, and an unseeded
            # run can be repeated from them.
            self._write(0, 0, 0, {})
            return
        content, specs = newest
        self._check(content, specs)
        self._metrics, arrays = self._restore(content, specs)
        self._states.restore(content.get("callbacks", {}), arrays)
        self.resumed = {name: content[name] for name in ("step", "epoch", "step_in_epoch")}
        self.written_at = content["step"]
        self._epoch_start = content["step"] - content["step_in_epoch"]
        self._first_epoch = content.get("first_epoch", 0)
        written_on = content.get("layout")
        self._written_on = written_on and Layout.from_json(written_on)
        # As in Keras's BackupAndRestore; `fit` reads it next.
        has_stopped = self._states.has_stopped
        begin_at(self.model, self.params["epochs"] if has_stopped else content["epoch"])
        self._history().history = as_logged(content["history"])
        if self._is_chief:
            print(self._announcement(), flush=True)
        self._restore_again = functools.partial(self._restore, content, specs)
        if self._goes_on and content["epoch"] < self.params["epochs"] and not has_stopped:
            pass_epochs(self.model._batches_of_fit, content["epoch"] - (self._first_epoch or 0))

    def _restore(self, content, specs) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Restores the model's state; returns the metrics, and the arrays of callbacks by name."""
        training, *others = broadcast(self._stored, content, specs, self._workers)
        others = [list(group) for group in others]  # The large group is read lazily.
        metrics, seeds, *later = others
        state.restore_training(self.model, training, seeds)
        if later:  # Checkpoints of earlier versions have no such group.
            unsent = state.specs_of("unsent", content["num_arrays"], specs)
            state.restore_unsent(self.model, [name for name, *_ in unsent], later[0])
        if len(later) > 1:  # The same.
            state.restore_losses(self.model, later[1])
        of_callbacks = state.specs_of("callbacks", content["num_arrays"], specs) or ()
        names = [name for name, *_ in of_callbacks]
        return metrics, dict(zip(names, later[2] if names else (), strict=True))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """In the interrupted epoch, prepares to skip the completed steps."""
        self._epoch, self._steps_in_epoch = epoch, 0
        if self._first_epoch is None:
            self._first_epoch = epoch
        begin_at(self.model, None)  # `fit` has read it.
        if self.resumed is None or epoch != self.resumed["epoch"] or self._passed is not None:
            return
        # Keras cleared it when training began.
        self._history().epoch = list(range(self._first_epoch, epoch))
        done = self.resumed["step_in_epoch"]
        self._passed = PassedSteps(self.model, done, self._metrics, self._restore_again)
        if self._batches is not None:
            self._batches.start_at(epoch, done)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the state before this step, if a checkpoint is due."""
        self.is_passing = self._passed is not None and self._passed.before_step(batch)
        if self.is_passing:
            return
        step = self._epoch_start + batch
        every = self._every_steps
        is_time = every is not None and step // every > self.written_at // every
        # Pending accumulated gradients are not saved; wait for a step without any.
        if is_time and getattr(self.model, "is_between_updates", True):
            self._write(step, self._epoch, batch, self._history().history)

    def save_before(self, batch: int) -> None:
        """Writes the state before step `batch` of the epoch, and waits for the write."""
        step = self._epoch_start + batch
        if step != self.written_at:
            self._write(step, self._epoch, batch, self._history().history)
        self._by_chief(self._folder.settle)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps_in_epoch = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the state at the start of the next epoch."""
        # With several steps per execution, the last number may exceed the epoch.
        num_steps = min(self._steps_in_epoch, self.params.get("steps") or self._steps_in_epoch)
        if self._passed is not None:
            self._passed.end_epoch(num_steps)
        self._epoch_start += num_steps
        history = {name: list(values) for name, values in self._history().history.items()}
        for name, value in (logs or {}).items():
            history.setdefault(name, []).append(value)  # Keras's History runs later.
        self._states.take()
        self._write(self._epoch_start, epoch + 1, 0, history)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the last write, and resets the initial epoch for the next `fit`."""
        self._by_chief(self._folder.release)
        begin_at(self.model, None)  # Without any epoch, nothing has yet.

    def _write(self, step, epoch, step_in_epoch, history):
        content = {
            "step": step,
            "epoch": epoch,
            "first_epoch": self._first_epoch,
            "step_in_epoch": step_in_epoch,
            "steps_per_epoch": self.params.get("steps"),
            "history": as_numbers(history),
            "configuration": self._configuration,
            "layout": self._layout and self._layout.to_json(),
            "callbacks": self._states.numbers,
        }
        # The first write is synchronous, so that a failing disk shows before the first step.
        beside = step > 0 and not self._is_spread
        # Between averages, workers with local steps have different weights and metrics.
        with getattr(self.model, "settled_workers", contextlib.nullcontext)():
            of_callbacks = self._states.arrays
            specs = state.describe(self.model) | {"callbacks": state.specs_of_arrays(of_callbacks)}
            captured = state.capture(self.model) | {"callbacks": of_callbacks.values()}
            arrays: Iterator[np.ndarray] = itertools.chain.from_iterable(captured.values())
            if not self._is_spread:
                arrays = iter(list(arrays))
            content["num_arrays"] = [len(specs[group]) for group in state.GROUPS]
            all_specs = sum(specs.values(), [])

            def write():
                try:
                    self._folder.write(step, all_specs, arrays, content, beside=beside)
                finally:
                    if not beside:
                        _read_rest(arrays)

            if not self._is_chief:
                _read_rest(arrays)
            self._by_chief(write)
        self.written_at = step

    def _find(self):
        """Finds the newest checkpoint; returns its metadata for all workers."""
        self._folder.prepare()
        self._stored = self._folder.newest()
        return None if self._stored is None else [self._stored.content, self._stored.specs]

    def _check(self, content, specs):
        """Raises if the checkpoint belongs to another model, dataset or configuration."""
        old = content["configuration"]
        problems = [
            f"{name}={value!r} (the checkpoint has {old.get(name)!r})"
            for name, value in self._configuration.items()
            if value != old.get(name)
        ]
        described = state.describe(self.model)
        for group in ("training", "losses"):
            saved = state.specs_of(group, content["num_arrays"], specs)
            if saved is not None:
                problems += state.differences(described[group], saved)
            elif described[group] and self._is_chief:
                names = ", ".join(name for name, *_ in described[group])
                warnings.warn(
                    "An earlier version wrote this checkpoint, without the variables that losses "
                    f"read. They keep the values that they have: {names}.",
                    stacklevel=3,
                )
        problems += problems_of_position(content, self.model, self.params.get("steps"))
        if problems:
            raise ForeignCheckpointError(
                f"The checkpoint in {self._folder.directory} belongs to another run; to resume, "
                "the model, the data and the training configuration must be the same. Received: "
                f"{'; '.join(problems)}. Use the original settings, or an empty folder."
            )

    def _announcement(self) -> str:
        epoch, done = self.resumed["epoch"], self.resumed["step_in_epoch"]
        if epoch >= self.params["epochs"]:
            return f"nothing to do: {epoch} of {self.params['epochs']} epochs are done"
        if self._states.has_stopped:
            return f"nothing to do: EarlyStopping ended the training after {epoch} epochs"
        at_step = f", step {done + 1}" if done else ""
        text = f"resuming at epoch {epoch + 1}{at_step} ({self.resumed['step']} steps are done)"
        if self._goes_on and epoch > (self._first_epoch or 0):
            text += "; reading and skipping the batches of all completed steps"
        elif done and (self._batches is None or not self._batches.starts_anywhere):
            text += f"; reading and skipping the first {done} batches of the epoch"
        text += f", from {self._stored.path}"
        if self._written_on not in (None, self._layout):
            text += f", written on {self._written_on.title}"
        return text

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch continues in the data where the last one stopped."""
        batches = getattr(self.model, "_batches_of_fit", None)
        return self._batches is None and bool(getattr(batches, "steps_per_epoch", None))

    def _history(self) -> keras.callbacks.History:
        return getattr(self.model, "history", None) or keras.callbacks.History()

    @property
    def _layout(self) -> Layout | None:
        return getattr(self.model, "layout", None)

    @property
    def _is_spread(self) -> bool:
        """Whether the model is spread over devices, and may be too large for host memory."""
        layout = self._layout
        has_parts = layout is not None and layout.num_stages * layout.mesh.tensor > 1
        return has_parts or any(isinstance(v, ShardedVariable) for v in self.model.variables)

    @property
    def _workers(self):
        return workers_of(self.model)

    @property
    def _is_chief(self) -> bool:
        return self._workers is None or self._workers.worker_index == 0

    def _by_chief(self, function: Callable[[], Any]) -> Any:
        """Calls a function on the chief; returns its result, or raises its error, everywhere."""
        returned, error = None, None
        if self._is_chief:
            try:
                returned = function()
            except tuple(_ERRORS.values()) as raised:
                error = raised
        if self._workers is not None:
            failure = [type(error).__name__, str(error)] if error is not None else None
            returned, failure = self._workers.exchange([returned, failure], "`Checkpoint`")[0]
            if failure is not None and error is None:
                error = _ERRORS[failure[0]](failure[1])
        if error is not None:
            raise error
        return returned


def _read_rest(arrays: Iterator[np.ndarray]) -> None:
    """Consumes the remaining arrays: reading is collective, so other workers would wait."""
    collections.deque(arrays, maxlen=0)
