"""Injects a fault into a training worker, to test how the job handles it."""

import glob
import os
import signal
import sys
import time
from typing import Any

import keras

from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.collectives.group import workers_of
from tfparallel.diagnostics.faults import Fault, parse_fault

_RESTART_COUNT = "TFPARALLEL_RESTART_COUNT"


class Inject(keras.callbacks.Callback):
    """Injects a fault into a worker, in the first attempt of a job only.

    A restarted job (`tfparallel launch --max_restarts`) passes the step unharmed. List it after
    `tfparallel.callbacks.Checkpoint`, so that the checkpoint is written before the fault strikes.

    Args:
        fault: A `Fault`, or its text: "kill:worker=1,step=20", "hang:worker=0,step=5",
            "exit:worker=1,step=3,code=5", "preempt:worker=1,step=20", "slow:worker=1,ms=50",
            "corrupt_checkpoint:worker=0,step=20". Workers count from 0. Steps count across all
            epochs: the fault strikes after `step` steps.
        checkpoint_dir: The checkpoint folder, for "corrupt_checkpoint".

    Raises:
        ValueError: If the text violates the grammar, or, in `fit`, if the worker does not exist.

    Example:
        >>> model.fit(dataset, callbacks=[checkpoint, Inject("kill:worker=1,step=20")])
    """

    def __init__(self, fault: Fault | str, checkpoint_dir: str | None = None):
        super().__init__()
        self._fault = parse_fault(fault) if isinstance(fault, str) else fault
        self._checkpoint_dir = checkpoint_dir
        if self._fault.kind == "corrupt_checkpoint" and checkpoint_dir is None:
            raise ValueError(
                f"This fault needs a checkpoint folder. Received: {self._fault}, without "
                "`checkpoint_dir`. Pass one."
            )
        self._is_first_attempt = int(os.environ.get(_RESTART_COUNT) or 0) == 0
        self._strikes = False
        self._epoch_start = 0
        self._num_steps = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        workers = workers_of(self.model)
        num_workers = 1 if workers is None else workers.num_workers
        if self._is_first_attempt and self._fault.worker >= num_workers:
            raise ValueError(
                f"The fault's worker must be one of the job's {num_workers} "
                f"worker{'s' * (num_workers > 1)}, numbered from 0. Received: {self._fault}."
            )
        worker_index = 0 if workers is None else workers.worker_index
        self._strikes = self._is_first_attempt and worker_index == self._fault.worker

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of all earlier epochs, including those before a resume."""
        self._epoch_start = epoch * (self.params.get("steps") or self._num_steps)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._num_steps = batch + 1
        if not self._strikes:
            return
        if self._fault.kind == "slow":
            time.sleep(self._fault.ms / 1000)
            return
        begun = self._epoch_start + batch
        if begun <= self._fault.step < begun + self.model.steps_per_execution:
            self._strike(begun)

    def _strike(self, num_done):
        verbs = {"kill": "kills itself", "hang": "hangs", "exit": f"exits with {self._fault.code}"}
        verbs["preempt"] = "gets SIGTERM"
        verbs["corrupt_checkpoint"] = "damages the newest checkpoint and kills itself"
        print(
            f"inject: worker {self._fault.worker} {verbs[self._fault.kind]} after {num_done} steps",
            flush=True,
        )
        sys.stderr.flush()
        if self._fault.kind == "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._fault.kind == "corrupt_checkpoint":
            _damage(self._checkpoint_dir)
        if self._fault.kind in ("kill", "corrupt_checkpoint"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault.kind == "exit":
            # Skips TensorFlow's shutdown, which would wait for the other workers.
            os._exit(self._fault.code)
        while True:
            time.sleep(3600)


def _damage(checkpoint_dir):
    """Flips a byte in the middle of the newest checkpoint."""
    CheckpointFolder(checkpoint_dir, keep=1).settle()
    newest = max(glob.glob(os.path.join(checkpoint_dir, "step_*", "state.npy")))
    with open(newest, "r+b") as file:
        file.seek(os.path.getsize(newest) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
