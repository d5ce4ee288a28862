"""Workers that step by themselves, and average their weights now and then: `sync="local_sgd:8"`.

    worker 0   θ ── step ── step ── … ── step ──┐              n_w rows in H steps
    worker 1   θ ── step ── step ── … ── step ──┴── θ ← Σ_w n_w θ_w / Σ_w n_w

A worker's step is that of a job of one, on its rows of the batch: replicas of one worker stay
exact, with batch normalization over all rows of the worker. Between averages nothing is sent. At
the end of an epoch the weights are averaged too, and with them the optimizer's state, so that
`evaluate`, files and checkpoints hold what all workers have; metrics are summed then.

References:
    H steps: Sebastian U. Stich, "Local SGD Converges Fast and Communicates Little",
    arXiv:1805.09767, 2018. Only from some step on: Tao Lin et al., "Don't Use Large Mini-Batches,
    Use Local SGD", arXiv:1808.07217, 2018.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfparallel.callbacks import chief_only
from tfparallel.data import shard as shards
from tfparallel.data import share
from tfparallel.data.shard import count_rows
from tfparallel.extend import attach, original_class
from tfparallel.replication import sample_partition
from tfparallel.replication.synchronization import EVERY_STEP
from tfparallel.seams.tensorflow import ResourceVariable

__all__ = ["BeginsLocalSteps", "LocalSteps"]


class LocalSteps:
    """Extends a replicated model, one of several workers'."""

    _sync = EVERY_STEP
    _has_begun = False  # Whether the steps before `start` are over.
    _sums_metrics = False  # Whether the metrics are this worker's own, until the epoch ends.

    @property
    def _is_ever_alone(self) -> bool:
        return self._workers is not None and self._sync.is_local

    @property
    def _steps_alone(self) -> bool:
        """Whether the next step is one of this worker alone."""
        return self._is_ever_alone and (self._has_begun or not self._sync.start)

    def _fit_as_worker(self, asked):
        if self._is_ever_alone:
            self._check_sync()
            attach(self, _has_begun=self._num_updates >= self._sync.start)
            # Behind those of the user, of which one may restore a run.
            callbacks = [*chief_only.flatten(asked.get("callbacks")), BeginsLocalSteps()]
            asked = asked | {"callbacks": callbacks}
        return super()._fit_as_worker(asked)

    def evaluate(self, *args, **kwargs):
        """Evaluates the model, as `keras.Model.evaluate`, with what all workers have."""
        with self._settled():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        """Predicts, as `keras.Model.predict`, with what all workers have."""
        with self._settled():
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _settled(self):
        """Within an epoch too, where a callback calls for it."""
        are_own = self._sums_metrics
        attach(self, _sums_metrics=False)
        self.settle()
        try:
            yield
        finally:
            if are_own:
                self._let_chief_have_metrics()
            attach(self, _sums_metrics=are_own)

    @property
    def _num_updates(self) -> int:
        return int(self.optimizer.iterations)

    def _check_sync(self) -> None:
        """Raises where a worker cannot step by itself.

        Raises:
            ValueError: For a step or an optimizer that only the job as a whole has.
        """
        if original_class(self).train_step is not keras.Model.train_step:
            what = "a model with a `train_step` of its own"
        elif isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            what = "a LossScaleOptimizer, of which each worker would have another scale"
        elif self.optimizer.gradient_accumulation_steps:
            what = "an optimizer that accumulates gradients, which the workers add up"
        elif self._workers.compression is not None:
            what = f"compression={self._workers.compression.spec!r}, which is of gradients"
        else:
            return
        self._refuse("Keras's own step, an update in each, and whole gradients are required", what)

    def _refuse(self, required, received):
        raise ValueError(
            f"Under sync='{self._sync}' workers step by themselves, and send their weights. "
            f"{required}. Received: {received}. Take sync='every_step'."
        )

    def _refuse_joined(self, way) -> None:
        if not way.all_stay:
            required = "Losses and metrics that are sums over the rows are required"
            self._refuse(required, way.why_joined)

    def _train_alone(self, data) -> dict[str, Any]:
        """A step on this worker's rows, and every H steps the average."""
        own, num_rows = self._own_of(data)
        way = self._way(own, "fit")
        self._refuse_joined(way)
        rows, steps = self._since_average
        with self.strategy.apart():
            logs = tf.cond(
                num_rows > 0,
                lambda: self._train_on_own_rows(own, way.metrics),
                self.get_metrics_result,
            )
        rows.assign_add(tf.cast(num_rows, rows.dtype), read_value=False)
        is_time = steps.assign_add(1.0) >= float(self._sync.every)

        def average():
            self._average(self._weights())
            return True  # As the other branch: Python's None would be an operation in one alone.

        tf.cond(is_time, average, lambda: False)
        return logs

    def _own_of(self, data):
        """This worker's rows of what the step was given, and how many they are."""
        own = sample_partition.unmarked(data)
        if own is not data:
            return own, tf.convert_to_tensor(count_rows(_first(own)))
        start, size = share.rows_of_worker(self.strategy)(count_rows(_first(data)))

        def cut(leaf):
            return None if leaf is None else shards.cut(leaf, start, size)

        return keras.tree.map_structure(cut, data), tf.convert_to_tensor(size)

    @property
    def _since_average(self) -> tuple[tf.Variable, tf.Variable]:
        """The rows and the steps of this worker that the next average is of."""
        found = getattr(self, "_counted_since_average", None)
        if found is None:
            with tf.init_scope(), tf.device("CPU:0"):
                found = (ResourceVariable(0.0, dtype=tf.float64), ResourceVariable(0.0))
            attach(self, _counted_since_average=found)
        return found

    def _weights(self) -> list[keras.Variable]:
        """What is averaged: whatever is no count, and no seed."""
        return [v for v in self.variables if tf.as_dtype(v.dtype).is_floating]

    def _average(self, variables: list[keras.Variable]) -> None:
        """Gives all workers the average, by the rows that each has seen since the last one."""
        rows, steps = self._since_average
        own = rows.read_value()
        terms = [tf.convert_to_tensor(variable.value) for variable in variables]
        weighted = [term * tf.cast(own, term.dtype) for term in terms]
        *sums, total = self._workers.all_reduce([*weighted, own])
        for variable, term, summed in zip(variables, terms, sums, strict=True):
            mean = summed / tf.cast(tf.maximum(total, 1.0), term.dtype)
            variable.assign(tf.where(total > 0, mean, term))
        rows.assign(0.0)
        steps.assign(0.0)

    def settle(self) -> None:
        """Averages now what the workers have, the optimizer's state too. All must call it.

        Where nothing was trained since the last average it changes nothing.
        """
        if not self._steps_alone:
            return
        rate = self.optimizer.learning_rate
        state = [v for v in self.optimizer.variables if v is not rate]
        state = [v for v in state if tf.as_dtype(v.dtype).is_floating]
        with self.strategy.program():
            self._average([*self._weights(), *state])

    def get_metrics_result(self):
        """Returns the metrics by name; at the end of an epoch, those of all workers."""
        if self._sums_metrics and not self._in_train_step:
            attach(self, _sums_metrics=False)
            self.settle()
            variables = self.metrics_variables
            values = [tf.convert_to_tensor(variable.value) for variable in variables]
            self._assign_metrics(self._workers.all_reduce(values))
        return super().get_metrics_result()

    def _begin_alone(self) -> None:
        """From now on the steps are local; what metrics have summed up is of all workers."""
        attach(self, _has_begun=True, _sums_metrics=True)
        self._let_chief_have_metrics()
        self.make_train_function(force=True)

    def _let_chief_have_metrics(self) -> None:
        """Of sums over all workers, which each of them has, one is kept."""
        if not self._is_chief:
            self._assign_metrics([tf.zeros_like(v.value) for v in self.metrics_variables])

    def _assign_metrics(self, values) -> None:
        with self.strategy.program():
            for variable, value in zip(self.metrics_variables, values, strict=True):
                variable.assign(value)


class BeginsLocalSteps(keras.callbacks.Callback):
    """Tells a model when its steps begin to be local, and when an epoch begins."""

    async_safe = takes_tensors = True  # It reads no logs.

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """What metrics sum up in an epoch of local steps is this worker's own."""
        attach(self.model, _sums_metrics=self.model._steps_alone)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Until they begin, looks how many steps were done, for which it waits."""
        model = self.model
        if not model._has_begun and model._num_updates >= model._sync.start:
            model._begin_alone()


def _first(data):
    return next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
