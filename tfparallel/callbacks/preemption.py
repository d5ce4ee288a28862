"""Saves a run that receives a stop signal, and exits so that it is restarted."""

import signal
from collections.abc import Sequence
from typing import Any

import keras

from tfparallel.callbacks.checkpoint import Checkpoint
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN, SignalWatch
from tfparallel.collectives.coordination import PreemptionSync
from tfparallel.collectives.group import workers_of


class Preempted(SystemExit):
    """Ends a program whose state is saved, with exit code 75: it should be restarted."""

    def __init__(self):
        super().__init__(TRY_AGAIN)


class Preemption(keras.callbacks.Callback):
    """On a signal, writes a checkpoint before the next step and ends the program.

    Schedulers send a signal some time before they kill a job. It is enough that one worker receives
    it: all workers save, and exit, before the same step. The exit code is 75, upon which
    `tfparallel launch` restarts all of them, if it has restarts left and did not receive a signal
    itself.

    It is both a callback, listed after the checkpoint, and a context manager around `fit`. Within
    the context the signals have no other effect; after `Preempted` they are ignored until the
    program exits. A program that catches `Preempted` and continues, such as a notebook, restores
    its signals with `signal.signal(signal.SIGTERM, signal.SIG_DFL)`, and the same for SIGUSR1.

    Args:
        checkpoint: The callback that writes; it must be in the list of callbacks too.
        signals: The signals; by default SIGTERM and SIGUSR1.

    Raises:
        ValueError: If `checkpoint` is not a `Checkpoint`.
        Preempted: In `fit`, a `SystemExit`, once the state is saved.

    Example:
        >>> checkpoint = tfparallel.callbacks.Checkpoint("checkpoints")
        >>> with tfparallel.callbacks.Preemption(checkpoint) as preemption:
        ...     model.fit(dataset, epochs=10, callbacks=[checkpoint, preemption])
    """

    async_safe = takes_tensors = True  # It reads no logs.

    def __init__(self, checkpoint: Checkpoint, signals: Sequence[int] = SIGNALS):
        super().__init__()
        if not isinstance(checkpoint, Checkpoint):
            raise ValueError(
                "Preemption needs the callback that writes checkpoints, a "
                f"`tfparallel.callbacks.Checkpoint`. Received: {checkpoint!r}. Write `checkpoint = "
                "Checkpoint('checkpoints')`, pass it here, and pass both to `fit`."
            )
        self._checkpoint = checkpoint
        self._watch = SignalWatch(signals, self._on_signal)
        self._agreement: PreemptionSync | None = None
        self._signal: int | None = None
        self._num_begun = 0

    def __enter__(self) -> "Preemption":
        self._watch.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Preempted):
            # Another signal would end the program, with another exit code than 75.
            self._watch.ignore()
        else:
            self._watch.__exit__()
        self._end()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end()
        self._num_begun = 0
        workers = workers_of(self.model)
        self._agreement = PreemptionSync(workers).__enter__()
        if self._signal is not None:  # It arrived before training began.
            self._agreement.ask()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._checkpoint.is_passing:
            return
        is_time = self._agreement.stops_before(self._num_begun)
        self._num_begun += 1
        # Pending accumulated gradients are not saved; wait for a step without any.
        if is_time and getattr(self.model, "is_between_updates", True):
            self._checkpoint.save_before(batch)
            if self._checkpoint.speaks:
                source = "another worker"
                if self._signal is not None:
                    source = signal.Signals(self._signal).name
                print(
                    f"stopped by {source}: {self._checkpoint.written_at} steps are in the "
                    "checkpoint; run the same command to resume",
                    flush=True,
                )
            raise Preempted

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._checkpoint.is_passing:
            self._agreement.ended()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._end()

    def _on_signal(self, number):
        self._signal = number
        if self._agreement is not None:
            self._agreement.ask()

    def _end(self):
        if self._agreement is not None:
            self._agreement.__exit__()
            self._agreement = None
