"""What local steps and accumulated ones have in common: in an epoch a worker's metrics are its own.

    worker 0   step ── step ── … ── step ──┐
    worker 1   step ── step ── … ── step ──┴── end of the epoch: their sums are added up

So what a step logs is the worker's own, and what an epoch logs is of all workers.
"""

import contextlib

import keras
import tensorflow as tf

from tfparallel.callbacks.nan import NaNGuard
from tfparallel.data import shard as shards
from tfparallel.data import share
from tfparallel.data.shard import Place, count_rows
from tfparallel.extend import attach
from tfparallel.replication.synchronization import EVERY_STEP

__all__ = ["BeginsEpochs", "OwnMetrics"]


class OwnMetrics:
    """Extends a replicated model whose workers say nothing in a step."""

    _sync = EVERY_STEP
    _is_in_epoch = False  # Whether the metrics are this worker's own, until it ends.
    _what_steps_are = "the workers say nothing in a step"  # For errors.

    @property
    def _workers_are_apart(self) -> bool:
        """Whether there are workers, of which each has seen its own rows when they say nothing."""
        return self._workers is not None

    @property
    def _is_silent(self) -> bool:
        """Whether the workers say nothing in the next step."""
        return False

    def _begin_own_epoch(self) -> None:
        attach(self, _is_in_epoch=self._is_silent)

    def _begin_own_step(self) -> None:
        """Called before each step of `fit`."""

    def _begin(self, call):
        if call.kind == "evaluate":
            call.enter(self._outside_of_epochs())
        elif call.kind == "predict":
            self.settle_workers()
        super()._begin(call)

    @contextlib.contextmanager
    def _outside_of_epochs(self):
        """Within it all workers have what is of all, and metrics are of all rows."""
        was_in_epoch = self._is_in_epoch
        attach(self, _is_in_epoch=False)
        self.settle_workers()
        try:
            yield
        finally:
            if was_in_epoch:  # Keras has reset the metrics, and all workers have the same now.
                self.metrics_were_restored()
            attach(self, _is_in_epoch=was_in_epoch)

    @contextlib.contextmanager
    def settled_workers(self):
        """Within it all workers hold what is of all: weights, and what metrics have seen."""
        self.settle_workers()
        if self._is_in_epoch:
            self.sum_metrics()
        try:
            yield
        finally:
            if self._is_in_epoch:
                self.metrics_were_restored()

    def settle_workers(self) -> None:
        """Gives all workers the weights of all, where each has its own. All must call it."""

    def _end_own_epoch(self) -> None:
        """What is left to do before anybody looks at the weights."""
        self.settle_workers()

    def _get_metrics_result_or_logs(self, logs):
        # Keras's loop calls it behind the steps of an epoch, before any callback. Others call
        # `get_metrics_result`, whenever they like.
        if self._is_in_epoch:
            attach(self, _is_in_epoch=False)
            self._end_own_epoch()
            self.sum_metrics()
        return super()._get_metrics_result_or_logs(logs)

    @contextlib.contextmanager
    def _training_silently(self):
        """Around a `fit`; one that is interrupted leaves no epoch open."""
        try:
            yield
        finally:
            attach(self, _is_in_epoch=False)

    def _check_callbacks(self, callbacks) -> None:
        """Raises for callbacks that stop a worker for what only its own rows say.

        Raises:
            ValueError: If there are some, and other workers.
        """
        stopping = [
            type(callback).__name__
            for callback in callbacks
            if isinstance(callback, keras.callbacks.TerminateOnNaN)
            or (isinstance(callback, NaNGuard) and callback.stop)
        ]
        if stopping and self._workers_are_apart:
            self._refuse(
                "What a step logs is a worker's own, and callbacks that let it go on are required",
                f"{stopping[0]}, which would stop one worker, and not the others",
            )

    def sum_metrics(self) -> None:
        """Gives all workers the sums of what their metrics have seen. All must call it."""
        if self._workers_are_apart:
            values = [tf.convert_to_tensor(v.value) for v in self.metrics_variables]
            self._assign_metrics(self._workers.all_reduce(values))

    def metrics_were_restored(self) -> None:
        """Of sums over all workers, which each of them has, one is kept."""
        if self._workers_are_apart and not self._is_chief:
            self._assign_metrics([tf.zeros_like(v.value) for v in self.metrics_variables])

    def _assign_metrics(self, values) -> None:
        with self.strategy.program():
            for variable, value in zip(self.metrics_variables, values, strict=True):
                variable.assign(value)

    def _cut_here(self, data):
        """This worker's rows of a batch that each worker has, and where they lie in it."""
        num_rows = count_rows(first_of(data))
        start, size = share.rows_of_worker(self.strategy)(num_rows)

        def cut(leaf):
            return None if leaf is None else shards.cut(leaf, start, size)

        place = Place(self.strategy.first_replica, start, size, num_rows)
        return keras.tree.map_structure(cut, data), place

    def _refuse(self, required: str, received: str):
        raise ValueError(
            f"Under sync='{self._sync}' {self._what_steps_are}. {required}. "
            f"Received: {received}. Take sync='every_step'."
        )

    def _refuse_joined(self, way) -> None:
        if not way.all_stay:
            required = "Losses and metrics that are sums over the rows are required"
            self._refuse(required, way.why_joined)


class BeginsEpochs(keras.callbacks.Callback):
    """Tells a model when an epoch begins, and each step before it is run."""

    async_safe = takes_tensors = True  # It reads no logs.

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        """What metrics sum up from now on may be this worker's own."""
        self.model._begin_own_epoch()

    def on_train_batch_begin(self, batch: int, logs=None) -> None:
        """Some steps are others than those before."""
        self.model._begin_own_step()


def first_of(data):
    """The first tensor of a batch."""
    return next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
