"""Coordinates several workers that train a model, each running the whole program.

In a process without other workers, a session does nothing.

| | |
| --- | --- |
| before | the workers agree on what to train; each reads only its own rows of indexable data |
| in the first steps of an epoch, and in `train_on_batch` | they compare their batches |
| at the start of a call, the end of `fit`, and after its first epoch | they compare their weights |
| at the end of an epoch | all stop if one must stop |
| meanwhile | only the chief prints and writes; errors name a stalled or lost worker |
"""

import contextlib
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from tfparallel.callbacks import chief_only
from tfparallel.callbacks.flight import FlightRecorder
from tfparallel.callbacks.stall import StallGuard
from tfparallel.checkpoint.model_files import is_written_by_chief, moved_into_place
from tfparallel.collectives.chief_alone import check_all_take_part
from tfparallel.collectives.lost_worker import naming_lost_worker
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.data import rows_of_worker
from tfparallel.data.batch_size import full_batch_size
from tfparallel.problems import PlacementError
from tfparallel.replication import agreement, sample_partition
from tfparallel.seams.compiled import class_weighting
from tfparallel.step.build import types_of_batches
from tfparallel.step.call import Call
from tfparallel.strategies.distributed_data import whole_batches
from tfparallel.update.whole_slots import wait_to_save

_ON_BATCH = {"fit": "train_on_batch", "evaluate": "test_on_batch", "predict": "predict_on_batch"}


class WorkerSession:
    """Decides which worker prints, reads, compares and waits.

    Args:
        model: The replicated model; its `strategy` has the workers.
        each_reads_all: Whether every worker needs whole batches.
    """

    def __init__(self, model: keras.Model, *, each_reads_all: bool = False):
        self._model = model
        self._each_reads_all = each_reads_all
        self._fingerprints: agreement.BatchFingerprints | None = None
        self._compared: set[str] = set()  # The methods on batches whose weights were compared.
        self._fits = False
        self._between_calls: StallGuard | None = None  # Guards between calls of Keras's methods.

    @property
    def workers(self) -> ProcessGroup | None:
        """The process group of the job; None for one process."""
        strategy = self._model.strategy
        return None if strategy is None else strategy.workers

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes for all workers."""
        return self.workers is None or self.workers.worker_index == 0

    def take_whole_batches(self, call: Call) -> None:
        """Replaces a distributed data set by the data set that it was made of.

        Raises:
            ValueError: If another strategy distributed it, or its batches are the rows of this
                worker and its length is unknown.
        """
        for name in ("x", "validation_data"):
            data_of_user = call.arguments.get(name)
            data, is_of_worker = whole_batches(data_of_user, self._model.strategy)
            if data is not data_of_user:
                by_worker = is_of_worker and self.workers is not None
                call.arguments[name] = sample_partition.by_sample(data) if by_worker else data

    @contextlib.contextmanager
    def path_to_write(
        self, path: str | os.PathLike, overwrite: bool, *, by_all: bool = False, once: bool = False
    ) -> Iterator[str | os.PathLike | None]:
        """The path for a file that other workers may write at the same time.

        Args:
            path: The path that the user wants.
            overwrite: Whether to replace an existing file.
            by_all: Whether each worker has a part of it, so all must write it together.
            once: Whether the chief may write the file for other workers that save it to the same
                place. They get None, and only take part in reading the values.

        Raises:
            RuntimeError: If `by_all`, and not all workers arrive within two minutes.
        """
        if self.workers is None:
            yield path
            return
        with contextlib.ExitStack() as stack:
            if by_all:
                stack.enter_context(self.together())
                wait_to_save(self.workers, "weights")
                if is_written_by_chief(self.workers, os.fspath(path), once and overwrite):
                    yield None
                    self._wait_until_saved()
                    return
            with moved_into_place(os.fspath(path)) if overwrite else nullcontext(path) as written:
                yield written
            if by_all:
                self._wait_until_saved()

    def _wait_until_saved(self) -> None:
        self.workers.exchange(None, "the end of saving")

    def begin(self, call: Call) -> None:
        """Enters the contexts of a call, and restricts its data to this worker's rows."""
        if self.workers is None:
            self._read_own_rows(call.arguments, "x", call.kind)
            return
        with self.together():
            if call.kind == "fit":
                self._begin_fit(call)
                return
            # `fit` validates within its own guard; Keras passes its callbacks on.
            if not call.has_callback_list:
                self._compare_weights(call.kind)
                self._compare_batches(call.kind)
                self._guard(call)
            self._read_own_rows(call.arguments, "x", call.kind)

    @contextlib.contextmanager
    def around_a_batch(self, kind: str) -> Iterator[None]:
        """Surrounds `train_on_batch` and its like: the workers compare each batch."""
        if self.workers is None:
            yield
            return
        with self.together():
            self._compare_batches(kind)
            if kind not in self._compared:
                self._compare_weights(_ON_BATCH[kind])
                self._compared.add(kind)
            yield

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Surrounds code in which workers wait for each other, at most `stall_timeout` long."""
        check_all_take_part()
        if self._between_calls is None:
            guard = StallGuard(self._model.strategy.stall_timeout, self.workers.worker_index)
            guard.start()
            weakref.finalize(self, guard.stop)
            self._between_calls = guard
        self._between_calls.timeout_seconds = self._model.strategy.stall_timeout
        with naming_lost_worker(), agreement.in_plain_words(), self._between_calls.waiting():
            yield

    def _compare_weights(self, kind: str) -> None:
        """Fails a call on all workers if their weights differ, as after a load by the chief."""
        if not self._is_local:  # Local weights differ, and are averaged before they are used.
            when = f"at the start of `{kind}`"
            agreement.check_values(self.workers, self._model, when, states=False)
        elif not self._fits:
            self.workers.exchange(None, f"the start of `{kind}`")

    def compare(self, data: Any, kind: str) -> None:
        """Fails a first step of a method on all workers if their batches differ."""
        if self._fingerprints is not None:
            self._fingerprints.check(data, kind)

    def rows_and_counts(self, data: Any, kind: str) -> tuple[Any, Any]:
        """As `sample_partition.rows_and_counts`; also compares batches that all workers read."""
        data, worker_rows = sample_partition.rows_and_counts(
            data, self._model.strategy, self._model._read
        )
        if worker_rows is None:
            self.compare(data, kind)
        return data, worker_rows

    def whole_if_needed(self, way, data: Any, worker_rows: Any) -> tuple[Any, Any]:
        """Gathers the global batch if outputs must be joined with their targets."""
        if way.all_stay:
            return data, worker_rows
        return sample_partition.joined(data, worker_rows, self.workers), None

    def _guard(self, call: Call, *around: AbstractContextManager) -> None:
        """Guards a call against stalls and lost workers; only the chief prints."""
        guard = StallGuard(self._model.strategy.stall_timeout, self.workers.worker_index)
        call.add_callbacks(guard)
        if not self.is_chief:
            call.arguments["verbose"] = 0
        for context in (*around, guard, naming_lost_worker(), agreement.in_plain_words()):
            call.enter(context)

    def _begin_fit(self, call):
        model, workers, callbacks = self._model, self.workers, call.callbacks
        model._choose_all_reduce()
        if hasattr(model.optimizer, "loaded_values"):
            model.optimizer.loaded_values()  # Frees values that are not needed any more.
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
            call.add_callbacks(chief_only.RestoredByChief(workers))
        agreement.check_fit(workers, model, call.arguments)
        agreement.check_values(workers, model, "at the start of `fit`", states=not self._is_local)
        recorder = FlightRecorder.if_enabled(workers.worker_index, workers.num_workers)
        self._compare_batches("fit", "evaluate")
        self._read_own_rows(call.arguments, "x", "fit")
        self._read_own_rows(call.arguments, "validation_data", "evaluate")
        self._guard(call, recorder, chief_only.writing_by_chief(callbacks, self.is_chief))
        call.add_callbacks(_TogetherInEpochs(self))
        call.enter(self._ending_together())
        if isinstance(recorder, FlightRecorder):
            call.arguments["callbacks"] = [recorder.step_end, *call.callbacks, recorder]

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Ends a successful `fit` together, so all workers can read what the chief wrote."""
        outer, self._fits = self._fits, True
        try:
            yield
        finally:
            self._fits = outer
        # The next `fit` reports different seeds and counts; nothing is lost until then.
        agreement.check_values(self.workers, self._model, "at the end of `fit`", states=False)

    def _compare_batches(self, *kinds):
        """Makes the next first steps of these methods compare the workers' batches."""
        if self._fingerprints is None:
            self._fingerprints = agreement.BatchFingerprints(self.workers)
        self._fingerprints.restart(*kinds)

    def begin_epoch(self) -> None:
        """Makes the first steps of an epoch compare the workers' batches."""
        self._compare_batches("fit")

    @property
    def _is_local(self) -> bool:
        """Whether workers step alone, with different seeds and counts."""
        sync = getattr(self._model, "_sync", None)
        return sync is not None and sync.is_local

    def end_epoch(self, last_batch: int | None, *, compares: bool) -> None:
        """Stops all workers if one stops, since the others would wait for it.

        Args:
            last_batch: The index of the epoch's last batch; None if there was none.
            compares: Whether to compare the workers' weights, which callbacks may have changed.

        Raises:
            RuntimeError: If some workers stopped within the epoch, and others did not.
        """
        stops, batches = zip(
            *self.workers.exchange(
                [bool(self._model.stop_training), last_batch], "the end of an epoch of `fit`"
            ),
            strict=True,
        )
        if len(set(batches)) > 1:
            counts = ", ".join(str(0 if batch is None else batch + 1) for batch in batches)
            raise RuntimeError(
                "All workers must take the same number of steps. Received: epochs of different "
                f"lengths, by worker: {counts}. If a callback stops training within an epoch based "
                "on a batch's logs, which may be local to a worker, let it stop at the end of the "
                "epoch."
            )
        self._model.stop_training = any(stops)
        if compares:
            when = "after the first epoch of `fit`"
            agreement.check_values(self.workers, self._model, when, states=False)

    def _read_own_rows(self, arguments, name, kind):
        """Restricts indexable data to this worker's rows.

        Args:
            arguments: The arguments of the method, changed in place.
            name: The argument with the data.
            kind: "fit", "evaluate" or "predict".

        Raises:
            ValueError: If each worker must read all rows, but received only its own.
        """
        model, data = self._model, arguments.get(name)
        if self._each_reads_all:
            if getattr(data, "_tfparallel_by_sample", False):
                raise PlacementError(
                    "`hybrid_parallel` requires the whole batch on every worker. Received: "
                    f"`{name}` of `{kind}`, marked by `tfparallel.data.by_sample` as this worker's "
                    "own rows. Pass the same data on all workers."
                )
            return
        readings = rows_of_worker.readings_of(data)
        if self.workers is None:
            return
        if readings is None:
            if name == "x":
                partition = sample_partition.weighted(data, arguments.get("class_weight"))
                if partition is not data:
                    arguments |= {name: partition, "class_weight": None}
            return
        if kind != "fit":  # `check_fit` has already compared it.
            agreement.check_readings(self.workers, readings.facts())
        spec = types_of_batches(data)
        if kind == "predict":
            stay = model.built and model._predicts_as_keras
        else:
            model._maybe_symbolic_build(data_batch=spec)
            with model._knowing_batches(kind, full_batch_size(data)):
                stay = model._way(spec, kind).all_stay
        if not stay:  # Each worker needs all rows; reading them is cheaper than sending.
            return
        weights = arguments.pop("class_weight", None) if name == "x" else None
        change = None if weights is None else class_weighting(weights)
        arguments[name] = readings.share(rows_of_worker.rows_of_worker(model.strategy), change)


class _TogetherInEpochs(keras.callbacks.Callback):
    """Notifies a session of epochs; must be the last callback."""

    async_safe = takes_tensors = True  # It reads no logs.

    def __init__(self, session: WorkerSession):
        super().__init__()
        self._session = session
        self._last_batch: int | None = None
        self._is_first = True

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        """Compares batches again, since their order may change."""
        self._session.begin_epoch()
        self._last_batch = None

    def on_train_batch_begin(self, batch: int, logs=None) -> None:
        """Records the progress of this worker."""
        self._last_batch = batch

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        """Applies a callback's decision on one worker to all."""
        # After the last epoch, the end of `fit` compares weights anyway.
        goes_on = epoch + 1 < self.params.get("epochs", 1)
        self._session.end_epoch(self._last_batch, compares=self._is_first and goes_on)
        self._is_first = False
