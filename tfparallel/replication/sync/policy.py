"""The synchronization policy of a model: when workers communicate, and when weights change.

    a step of `fit`       before_step ──► step: on all workers' rows, or one worker's ──► apply
    after the last step   end_epoch: synchronizes the workers

| policy | a step trains on | updates |
| --- | --- | --- |
| `EveryStep` | all workers' rows | in each step |
| `Accumulate` (`accumulate.py`) | a worker's rows | every N steps |
| `AdaScale` (`adascale.py`) | all workers' rows | every N steps, at a scaled learning rate |
| `LocalSgd` (`local_sgd.py`) | a worker's rows | in each step, of the worker's own weights |

If the workers exchange nothing in a step, its logs are those of one worker, while the logs of an
epoch cover all workers: the sums of metrics are added up at its end. Workers of a mesh sum losses
and metrics in each step, under every policy (`pipeline/accumulate.py`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfparallel.callbacks.nan import NaNGuard
from tfparallel.data import rows_of_worker
from tfparallel.extend import attach
from tfparallel.piece import RowsOfWorker, cut
from tfparallel.replication.inputs import as_tensor, count_common_rows, has_batch_axis
from tfparallel.replication.sync.option import EVERY_STEP, Synchronization
from tfparallel.step.call import Call
from tfparallel.step.one_step import PassResult


class EveryStep:
    """Updates the weights in every step, by the rows of all workers.

    Args:
        model: The extended model.
        sync: The parsed `sync=` option.
    """

    reason_in_errors = "the workers do not communicate during a step"
    accumulates = False  # Whether an update may cover several steps.
    num_steps = 1  # Per update.
    gain = 1.0  # What the learning rate of the last update was multiplied by.
    is_between_updates = True  # Whether a checkpoint would be complete.

    def __init__(self, model: keras.Model, sync: Synchronization = EVERY_STEP):
        self.model, self.sync = model, sync
        self._is_in_epoch = False  # Whether the end of the epoch must synchronize the workers.

    @property
    def num_scale_invariant_steps(self) -> float:
        """The sum of the gains of all updates."""
        return float(self.model.optimizer.iterations)

    @property
    def workers_are_apart(self) -> bool:
        """Whether the metrics of several workers may each cover only the worker's rows."""
        return self.model._workers is not None and self.model._metrics_may_be_own

    @property
    def is_silent(self) -> bool:
        """Whether the workers exchange nothing in the next step."""
        return False

    def look_at(self, call: Call) -> None:
        """Checks or extends the arguments of a call."""

    def begin(self, call: Call) -> None:
        """Enters the contexts of a call."""
        if call.kind == "evaluate":
            call.enter(self._outside_of_epochs())
        elif call.kind == "predict":
            self.settle()

    def begin_epoch(self) -> None:
        """Begins an epoch, in which metrics may sum only this worker's rows."""
        self._is_in_epoch = self.is_silent or self.accumulates
        self.metrics_were_restored()  # The initial value of a metric counts once, too.

    def before_step(self) -> None:
        """Called before each step of `fit`."""

    def step(self, data: Any, default: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Runs a step and returns its logs.

        Args:
            data: A batch.
            default: Runs the step on the rows of all workers.
        """
        return default(data)

    def check_way(self, way) -> None:
        """Raises for a way to compute the loss that this policy does not support."""

    def apply(self, result: PassResult, default: Callable[[PassResult], None]) -> None:
        """Applies the gradients of a step.

        Args:
            result: The result of the passes.
            default: Updates the weights.
        """
        default(result)

    def end_epoch(self) -> None:
        """Synchronizes after the steps of an epoch, before anything reads weights and metrics."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self.finish()
            self.sum_metrics()

    def finish(self) -> None:
        """Completes the training of an epoch."""
        self.settle()

    def settle(self) -> None:
        """Synchronizes the weights if they differ by worker. All workers must call it."""

    def forget(self) -> None:
        """Called when the model is compiled: drops gradients of another loss."""

    def resumable_state(self) -> dict[str, tf.Variable]:
        """The variables by name that a resumed run needs, equal on all workers."""
        return {}

    def state_was_restored(self) -> None:
        """Called when the weights and the optimizer are restored, the same on all workers."""

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Synchronizes the weights and metrics of all workers within the block."""
        self.settle()
        if self._is_in_epoch:
            self.sum_metrics()
        try:
            yield
        finally:
            self.metrics_were_restored()

    def sum_metrics(self) -> None:
        """Sums the metrics of all workers, on every worker. All must call it."""
        if self.workers_are_apart:
            values = [tf.convert_to_tensor(v.value) for v in self.model.metrics_variables]
            self._assign_metrics(self.model._workers.all_reduce(values))

    def metrics_were_restored(self) -> None:
        """Resets metrics that hold the total on all workers but the chief, if summed again."""
        if self._is_in_epoch and self.workers_are_apart and not self.model._is_chief:
            # Reads nothing, since the workers would have to read together.
            zeros = [tf.zeros(v.shape, v.dtype) for v in self.model.metrics_variables]
            self._assign_metrics(zeros)

    def _assign_metrics(self, values) -> None:
        with self.model.strategy.program():
            for variable, value in zip(self.model.metrics_variables, values, strict=True):
                variable.assign(value)

    @contextlib.contextmanager
    def _outside_of_epochs(self) -> Iterator[None]:
        """Suspends the epoch within the block: workers are in sync, and metrics cover all rows."""
        was_in_epoch, self._is_in_epoch = self._is_in_epoch, False
        self.settle()
        try:
            yield
        finally:
            self._is_in_epoch = was_in_epoch
            self.metrics_were_restored()  # Keras has reset them to the same on all workers.

    @contextlib.contextmanager
    def training_silently(self) -> Iterator[None]:
        """Surrounds a `fit`, and closes the epoch even if it is interrupted."""
        try:
            yield
        finally:
            self._is_in_epoch = False

    def check_callbacks(self, callbacks) -> None:
        """Raises for callbacks that would stop a worker because of its own rows.

        Raises:
            ValueError: If there are any, and other workers.
        """
        stopping = [
            type(callback).__name__
            for callback in callbacks
            if isinstance(callback, keras.callbacks.TerminateOnNaN)
            or (isinstance(callback, NaNGuard) and callback.stop)
        ]
        if stopping and self.workers_are_apart:
            self.refuse(
                "A step's logs are local to a worker, so callbacks that do not stop training "
                "within an epoch are required",
                f"{stopping[0]}, which would stop some workers but not others",
            )

    def cut_here(self, data):
        """This worker's rows of a global batch, and their place in it."""
        data = keras.tree.map_structure(as_tensor, data)
        num_rows = count_common_rows(keras.tree.flatten(data))
        of_worker = rows_of_worker.rows_of_worker(self.model.strategy)(num_rows)
        start, size = rows_of_worker.rows_to_read(of_worker, num_rows, tf.minimum, tf.maximum)

        def rows_here(leaf):
            return cut(leaf, start, size) if has_batch_axis(leaf) else leaf

        first_replica = self.model.strategy.first_replica
        place = RowsOfWorker(first_replica, of_worker.start, of_worker.size, num_rows)
        return keras.tree.map_structure(rows_here, data), place

    def refuse(self, required: str, received: str):
        raise ValueError(
            f"Under sync='{self.sync}', {self.reason_in_errors}. {required}. Received: {received}. "
            "Use sync='every_step'."
        )

    def refuse_joined(self, way) -> None:
        if not way.all_stay:
            required = "Losses and metrics that are sums over the rows are required"
            self.refuse(required, way.why_joined)


class HasPolicy:
    """Extends a model that trains on pieces of the batch with a synchronization policy."""

    _sync = EVERY_STEP  # The parsed `sync=` option.
    _metrics_may_be_own = True  # Whether a worker's metrics may cover only its rows in an epoch.
    _made_policy: EveryStep | None = None

    @property
    def _policy(self) -> EveryStep:
        if self._made_policy is None or self._made_policy.sync is not self._sync:
            attach(self, _made_policy=self._make_policy(self._sync))
        return self._made_policy

    def _make_policy(self, sync: Synchronization) -> EveryStep:
        return EveryStep(self, sync)

    @property
    def _accumulates(self) -> bool:
        return self._policy.accumulates

    def _look_at(self, call):
        if call.kind == "compile":
            self._policy.forget()
        self._policy.look_at(call)
        super()._look_at(call)

    def _begin(self, call):
        self._policy.begin(call)
        super()._begin(call)

    @contextlib.contextmanager
    def _around_a_batch(self, kind):
        settled = contextlib.nullcontext() if kind == "fit" else self.settled_workers()
        with settled, super()._around_a_batch(kind):
            yield

    def _apply_result(self, result):
        self._policy.apply(result, super()._apply_result)

    def _get_metrics_result_or_logs(self, logs):
        # Keras's loop calls this after the steps of an epoch, before any callback. Other code may
        # call `get_metrics_result` at any time.
        self._policy.end_epoch()
        return super()._get_metrics_result_or_logs(logs)

    # The interface of callbacks and checkpoints to any kind of model.

    @property
    def is_between_updates(self) -> bool:
        """Whether no gradients are held; only then is a checkpoint complete."""
        return self._policy.is_between_updates

    @property
    def num_accumulated_steps(self) -> int:
        """N, the number of steps per update."""
        return self._policy.num_steps

    @property
    def learning_rate_gain(self) -> float:
        """What `sync="adascale:N"` multiplied the learning rate of the last update by; else 1."""
        return self._policy.gain

    @property
    def num_scale_invariant_steps(self) -> float:
        """How many steps of a small batch the updates stand for: their gains, added up."""
        return self._policy.num_scale_invariant_steps

    def kept_between_updates(self) -> dict[str, tf.Variable]:
        """The variables by name that a resumed run needs, equal on all workers."""
        return self._policy.resumable_state()

    def state_was_restored(self) -> None:
        """Drops what was counted before the weights and the optimizer were restored."""
        self._policy.state_was_restored()

    def settled_workers(self) -> contextlib.AbstractContextManager[None]:
        """Synchronizes the weights and metrics of all workers within the block."""
        return self._policy.settled()

    def metrics_were_restored(self) -> None:
        """Resets metrics that hold the total on all workers but the chief, if summed again."""
        self._policy.metrics_were_restored()


class BeginsEpochs(keras.callbacks.Callback):
    """Notifies a model's policy before each epoch and each step."""

    async_safe = takes_tensors = True  # It reads no logs.

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        """Begins an epoch of the policy."""
        self.model._policy.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs=None) -> None:
        """Lets the policy prepare the step."""
        self.model._policy.before_step()
