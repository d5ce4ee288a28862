"""What is different for a model that is trained by several workers, each running the whole program.

| | |
| --- | --- |
| before | the workers agree on what they train; of what can be indexed each reads its own rows |
| in the first steps | they compare their batches |
| meanwhile | the chief alone speaks and writes; a worker that stalls, or is lost, is named |
"""

import contextlib
import os
from contextlib import AbstractContextManager

import keras

from tfparallel.callbacks import chief_only
from tfparallel.callbacks.flight import FlightRecorder
from tfparallel.callbacks.stall import StallGuard
from tfparallel.checkpoint.whole_file import moved_into_place
from tfparallel.collectives.between_workers import naming_lost_worker
from tfparallel.data import share
from tfparallel.data.batch_size import full_batch_size
from tfparallel.extend import attach
from tfparallel.replication import agreement, sample_partition
from tfparallel.seams.keras import class_weighting
from tfparallel.step.ahead import types_of_batches
from tfparallel.step.call import Call
from tfparallel.strategies.distributed_data import whole_batches

__all__ = ["OneOfWorkers"]


class OneOfWorkers:
    """Extends a replicated Keras model; in a process without other workers it does nothing."""

    _fingerprints = None  # Compares the first batches, where there are several workers.

    @property
    def _workers(self):
        return self.strategy.workers if self.strategy is not None else None

    def _take_whole_batches(self, call: Call) -> None:
        """Puts what a distributed data set was made of in its place.

        Raises:
            ValueError: If another strategy has distributed it, or, where its batches are the rows
                of this worker, it has no known length.
        """
        for name in ("x", "validation_data"):
            given = call.asked.get(name)
            data, is_of_worker = whole_batches(given, self.strategy)
            if data is not given:
                by_worker = is_of_worker and self._workers is not None
                call.asked[name] = sample_partition.by_sample(data) if by_worker else data

    def _path_to_write(self, path, overwrite):
        """Where to write a file that other workers may write too, at the same time."""
        if self._workers is None or not overwrite:
            return contextlib.nullcontext(path)
        return moved_into_place(os.fspath(path))

    def _begin(self, call):
        if call.kind == "fit":
            if self._workers is not None:
                self._begin_fit(call)
        else:
            # `fit` validates within its own guard, whose callbacks Keras hands on.
            if self._workers is not None and not call.has_callback_list:
                self._compare_batches(call.kind)
                self._guard(call)
            self._read_own_rows(call.asked, "x", call.kind)
        super()._begin(call)

    def _guard(self, call: Call, *around: AbstractContextManager) -> None:
        """Has steps go on, or end with who is at fault; the chief alone speaks."""
        guard = StallGuard(self.strategy.stall_timeout, self._workers.worker_index)
        call.add_callbacks(guard)
        if not self._is_chief:
            call.asked["verbose"] = 0
        for context in (*around, guard, naming_lost_worker(), agreement.in_plain_words()):
            call.enter(context)

    def _begin_fit(self, call):
        self._choose_all_reduce()
        if hasattr(self.optimizer, "loaded_values"):
            self.optimizer.loaded_values()  # Which takes memory, and nobody sends any more.
        workers, callbacks = self._workers, call.callbacks
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
            call.add_callbacks(chief_only.RestoredByChief(workers))
        agreement.check_fit(workers, self, call.asked)
        recorder = FlightRecorder.wanted(workers.worker_index, workers.num_workers)
        self._compare_batches("fit", "evaluate")
        self._read_own_rows(call.asked, "x", "fit")
        self._read_own_rows(call.asked, "validation_data", "evaluate")
        self._guard(call, recorder, chief_only.writing_by_chief(callbacks, self._is_chief))
        if isinstance(recorder, FlightRecorder):
            call.asked["callbacks"] = [recorder.step_end, *call.callbacks, recorder]

    def _compare_batches(self, *kinds):
        """Has the first steps of these methods compare the workers' batches."""
        if self._fingerprints is None:
            attach(self, _fingerprints=agreement.BatchFingerprints(self._workers))
        self._fingerprints.restart(*kinds)

    def _held(self, data, kind):
        """What this worker holds of the batch, and how many rows each has; see `held`."""
        data, worker_rows = sample_partition.held(data, self.strategy)
        if self._fingerprints is not None and worker_rows is None:
            self._fingerprints.check(data, kind)
        return data, worker_rows

    def _whole_if_needed(self, way, data, worker_rows):
        """The global batch where outputs meet, and with them their targets."""
        if way.all_stay:
            return data, worker_rows
        return sample_partition.joined(data, worker_rows, self._workers), None

    def _read_own_rows(self, asked, name, kind):
        """Has this worker read its own rows alone, of what can be indexed.

        Args:
            asked: The arguments of the method, changed in place.
            name: Which of them is the data.
            kind: "fit", "evaluate" or "predict".
        """
        readings = share.readings_of(asked.get(name))
        if self._workers is None:
            return
        if readings is None:
            partition = sample_partition.weighted(asked.get(name), asked.get("class_weight"))
            if partition is not asked.get(name):
                asked |= {name: partition, "class_weight": None}
            return
        spec = types_of_batches(asked[name])
        if kind == "predict":
            stay = self.built and self._predicts_as_keras
        else:
            self._maybe_symbolic_build(data_batch=spec)
            with self._knowing_batches(kind, full_batch_size(asked[name])):
                stay = self._way(spec, kind).all_stay
        if not stay:  # All rows on each worker: what is read need not be sent.
            return
        weights = asked.pop("class_weight", None) if name == "x" else None
        change = None if weights is None else class_weighting(weights)
        asked[name] = readings.share(share.rows_of_worker(self.strategy), change)
