"""Saves a run that is told to end, and ends it so that it is started again."""

import signal
from collections.abc import Sequence
from typing import Any

import keras

from tfparallel.callbacks.checkpoint import Checkpoint
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN, SignalWatch
from tfparallel.collectives.coordination import PreemptionSync
from tfparallel.collectives.group import workers_of

__all__ = ["Preempted", "Preemption"]


class Preempted(SystemExit):
    """Ends a program whose state is in a checkpoint, with exit code 75: it should go on later."""

    def __init__(self):
        super().__init__(TRY_AGAIN)


class Preemption(keras.callbacks.Callback):
    """Writes a checkpoint before the next step, and ends the program, when a signal comes.

    Schedulers send one some time before they kill a job. Of several workers it is enough that one
    is told: all write, and end, before the same step. The exit code is 75, by which `tfparallel
    launch` starts all of them again, if it has restarts left and was not itself told to end.

    It is a context manager around `fit`, in which the signals do nothing else, and after
    `Preempted` nothing at all until the program has ended; and a callback, behind the checkpoint.
    A program that catches `Preempted` and goes on, such as a notebook, gets its signals back by
    `signal.signal(signal.SIGTERM, signal.SIG_DFL)`, and likewise for SIGUSR1.

    Args:
        checkpoint: The callback that writes, which the list of callbacks has, too.
        signals: SIGTERM and SIGUSR1, or others.

    Raises:
        ValueError: If the checkpoint is none.
        Preempted: From `fit`, a `SystemExit`, when the state is written.

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
                "Preemption needs the callback that writes, a `tfparallel.callbacks.Checkpoint`. "
                f"Received: {checkpoint!r}. Write `checkpoint = Checkpoint('checkpoints')`, pass "
                "it here, and give both to `fit`."
            )
        self._checkpoint = checkpoint
        self._watch = SignalWatch(signals, self._told)
        self._agreement: PreemptionSync | None = None
        self._signal: int | None = None
        self._num_begun = 0

    def __enter__(self) -> "Preemption":
        self._watch.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Preempted):
            # A further signal would end the program by itself, and not with code 75.
            self._watch.ignore()
        else:
            self._watch.__exit__()
        self._end()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end()
        self._num_begun = 0
        workers = workers_of(self.model)
        self._agreement = PreemptionSync(workers).__enter__()
        if self._signal is not None:  # It came before.
            self._agreement.ask()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._checkpoint.is_passing:
            return
        is_time = self._agreement.stops_before(self._num_begun)
        self._num_begun += 1
        # Gradients that wait for an update are in no file; one of the next steps has none.
        if is_time and getattr(self.model, "is_between_updates", True):
            self._checkpoint.save_before(batch)
            if self._checkpoint.speaks:
                told = "another worker"
                if self._signal is not None:
                    told = signal.Signals(self._signal).name
                print(
                    f"stopped by {told}: {self._checkpoint.written_at} steps are in the "
                    "checkpoint; the same command goes on from there",
                    flush=True,
                )
            raise Preempted

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._checkpoint.is_passing:
            self._agreement.ended()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._end()

    def _told(self, number):
        self._signal = number
        if self._agreement is not None:
            self._agreement.ask()

    def _end(self):
        if self._agreement is not None:
            self._agreement.__exit__()
            self._agreement = None
