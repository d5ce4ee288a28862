"""When the workers of a job say something, and when weights change: the policy of a model.

    a step of `fit`   before_step ──► step: of all workers' rows, or a worker's own ──► apply
    behind the last   end_epoch: what is left, so that all workers have the same

| policy | a step | an update |
| --- | --- | --- |
| `EveryStep` | of all workers' rows | each |
| `Accumulate` (`accumulate.py`) | of a worker's rows | of N steps |
| `LocalSgd` (`local_sgd.py`) | of a worker's rows | each, the worker's own |

Where the workers say nothing in a step, what it logs is the worker's own, and what an epoch logs is
of all: the sums of metrics are added up at its end. Workers of a mesh sum losses and metrics in
each step, under every policy (`pipeline/accumulate.py`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfparallel.callbacks.nan import NaNGuard
from tfparallel.data import rows_of_replica as shards
from tfparallel.data import rows_of_worker
from tfparallel.data.rows_of_replica import Place, count_rows
from tfparallel.extend import attach
from tfparallel.replication.sync_option import EVERY_STEP, Synchronization
from tfparallel.step.call import Call
from tfparallel.step.one_step import PassResult

__all__ = ["BeginsEpochs", "EveryStep", "HasPolicy", "first_of"]


class EveryStep:
    """Every step is an update, of all workers' rows.

    Args:
        model: The extended model.
        sync: What was asked for.
    """

    reason_in_errors = "the workers say nothing in a step"
    accumulates = False  # Whether an update may be of several steps.
    num_steps = 1  # Of an update.
    is_between_updates = True  # Whether a checkpoint holds all that there is.

    def __init__(self, model: keras.Model, sync: Synchronization = EVERY_STEP):
        self.model, self.sync = model, sync
        self._is_in_epoch = False  # Whether there is something to do when it ends.

    @property
    def workers_are_apart(self) -> bool:
        """Whether there are workers, of which each has seen its own rows when they say nothing."""
        return self.model._workers is not None and self.model._metrics_may_be_own

    @property
    def is_silent(self) -> bool:
        """Whether the workers say nothing in the next step."""
        return False

    def look_at(self, call: Call) -> None:
        """Checks the arguments of a call, or adds to them."""

    def begin(self, call: Call) -> None:
        """Enters what is around a call."""
        if call.kind == "evaluate":
            call.enter(self._outside_of_epochs())
        elif call.kind == "predict":
            self.settle()

    def begin_epoch(self) -> None:
        """What metrics sum up from now on may be this worker's own."""
        self._is_in_epoch = self.is_silent or self.accumulates
        self.metrics_were_restored()  # What a metric begins with counts once, too.

    def before_step(self) -> None:
        """Called before each step of `fit`."""

    def step(self, data: Any, usual: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Makes a step; returns its logs.

        Args:
            data: A batch.
            usual: Makes the step of all workers' rows.
        """
        return usual(data)

    def check_way(self, way) -> None:
        """Raises for a way to the loss that this policy cannot take."""

    def apply(self, found: PassResult, usual: Callable[[PassResult], None]) -> None:
        """Takes the gradients of a step.

        Args:
            found: What the passes left.
            usual: Changes the weights as they say.
        """
        usual(found)

    def end_epoch(self) -> None:
        """Behind the steps of an epoch, before anybody looks at weights and metrics."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self.finish()
            self.sum_metrics()

    def finish(self) -> None:
        """What is left to do at the end of an epoch."""
        self.settle()

    def settle(self) -> None:
        """Gives all workers the weights of all, where each has its own. All must call it."""

    def forget(self) -> None:
        """Called when the model is compiled: drops gradients of another loss."""

    def kept(self) -> dict[str, tf.Variable]:
        """What a run that is resumed needs, the same on all workers, by name."""
        return {}

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Within it all workers hold what is of all: weights, and what metrics have seen."""
        self.settle()
        if self._is_in_epoch:
            self.sum_metrics()
        try:
            yield
        finally:
            self.metrics_were_restored()

    def sum_metrics(self) -> None:
        """Gives all workers the sums of what their metrics have seen. All must call it."""
        if self.workers_are_apart:
            values = [tf.convert_to_tensor(v.value) for v in self.model.metrics_variables]
            self._assign_metrics(self.model._workers.all_reduce(values))

    def metrics_were_restored(self) -> None:
        """All workers hold the total: the chief alone keeps it, if they are to be summed again."""
        if self._is_in_epoch and self.workers_are_apart and not self.model._is_chief:
            # Nothing is read, which the workers would have to do together.
            zeros = [tf.zeros(v.shape, v.dtype) for v in self.model.metrics_variables]
            self._assign_metrics(zeros)

    def _assign_metrics(self, values) -> None:
        with self.model.strategy.program():
            for variable, value in zip(self.model.metrics_variables, values, strict=True):
                variable.assign(value)

    @contextlib.contextmanager
    def _outside_of_epochs(self) -> Iterator[None]:
        """Within it all workers have what is of all, and metrics are of all rows."""
        was_in_epoch, self._is_in_epoch = self._is_in_epoch, False
        self.settle()
        try:
            yield
        finally:
            self._is_in_epoch = was_in_epoch
            self.metrics_were_restored()  # Keras has reset them, and all workers have the same now.

    @contextlib.contextmanager
    def training_silently(self) -> Iterator[None]:
        """Around a `fit`; one that is interrupted leaves no epoch open."""
        try:
            yield
        finally:
            self._is_in_epoch = False

    def check_callbacks(self, callbacks) -> None:
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
        if stopping and self.workers_are_apart:
            self.refuse(
                "What a step logs is a worker's own, and callbacks that let it go on are required",
                f"{stopping[0]}, which would stop one worker, and not the others",
            )

    def cut_here(self, data):
        """This worker's rows of a batch that each worker has, and where they lie in it."""
        num_rows = count_rows(first_of(data))
        own = rows_of_worker.rows_of_worker(self.model.strategy)(num_rows)
        start, size = rows_of_worker.rows_to_read(own, num_rows, tf.minimum, tf.maximum)

        def cut(leaf):
            return None if leaf is None else shards.cut(leaf, start, size)

        place = Place(self.model.strategy.first_replica, own.start, own.size, num_rows)
        return keras.tree.map_structure(cut, data), place

    def refuse(self, required: str, received: str):
        raise ValueError(
            f"Under sync='{self.sync}' {self.reason_in_errors}. {required}. "
            f"Received: {received}. Take sync='every_step'."
        )

    def refuse_joined(self, way) -> None:
        if not way.all_stay:
            required = "Losses and metrics that are sums over the rows are required"
            self.refuse(required, way.why_joined)


class HasPolicy:
    """Extends a model of which a step takes the batch in pieces; a policy says when they meet."""

    _sync = EVERY_STEP  # What was asked for.
    _metrics_may_be_own = True  # Whether a worker's metrics may be of its own rows, in an epoch.
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

    def compile(self, *args, **kwargs):
        """Compiles the model, as `keras.Model.compile`; gradients of another loss are dropped."""
        super().compile(*args, **kwargs)
        self._policy.forget()

    def _look_at(self, call):
        self._policy.look_at(call)
        super()._look_at(call)

    def _begin(self, call):
        self._policy.begin(call)
        super()._begin(call)

    def _apply_found(self, found):
        self._policy.apply(found, super()._apply_found)

    def _get_metrics_result_or_logs(self, logs):
        # Keras's loop calls it behind the steps of an epoch, before any callback. Others call
        # `get_metrics_result`, whenever they like.
        self._policy.end_epoch()
        return super()._get_metrics_result_or_logs(logs)

    # What callbacks and checkpoints ask, of a model of any kind.

    @property
    def is_between_updates(self) -> bool:
        """Whether no gradients are held; only then a checkpoint holds all that there is."""
        return self._policy.is_between_updates

    @property
    def num_accumulated_steps(self) -> int:
        """N, of how many steps an update is."""
        return self._policy.num_steps

    def kept_between_updates(self) -> dict[str, tf.Variable]:
        """What a run that is resumed needs, the same on all workers, by name."""
        return self._policy.kept()

    def settled_workers(self) -> contextlib.AbstractContextManager[None]:
        """Within it all workers hold what is of all: weights, and what metrics have seen."""
        return self._policy.settled()

    def metrics_were_restored(self) -> None:
        """All workers hold the total: the chief alone keeps it, if they are to be summed again."""
        self._policy.metrics_were_restored()


class BeginsEpochs(keras.callbacks.Callback):
    """Tells a model when an epoch begins, and each step before it is run."""

    async_safe = takes_tensors = True  # It reads no logs.

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        """What metrics sum up from now on may be this worker's own."""
        self.model._policy.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs=None) -> None:
        """Some steps are others than those before."""
        self.model._policy.before_step()


def first_of(data):
    """The first tensor of a batch."""
    return next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
