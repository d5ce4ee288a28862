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

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.data import rows_of_worker
from tfparallel.data.rows_of_replica import count_rows
from tfparallel.extend import is_own
from tfparallel.replication import sample_partition
from tfparallel.replication.sync_policy import BeginsEpochs, EveryStep, first_of
from tfparallel.seams.tensorflow import ResourceVariable

__all__ = ["LocalSgd"]


class _Since(NamedTuple):
    """What this worker has trained since something was averaged.

    Attributes:
        rows: How many rows it has seen.
        steps: How many steps; as many as the other workers.
    """

    rows: tf.Variable
    steps: tf.Variable

    @classmethod
    def now(cls) -> "_Since":
        with tf.init_scope(), tf.device("CPU:0"):
            return cls(ResourceVariable(0.0, dtype=tf.float64), ResourceVariable(0.0))

    def add(self, num_rows: tf.Tensor) -> tf.Tensor:
        """Counts a step; returns the number of steps."""
        self.rows.assign_add(tf.cast(num_rows, self.rows.dtype), read_value=False)
        return self.steps.assign_add(1.0)

    def forget(self) -> None:
        for count in self:
            count.assign(0.0)


class LocalSgd(EveryStep):
    """A worker steps by itself; of a replicated model, one of several workers'."""

    def __init__(self, model, sync):
        super().__init__(model, sync)
        self._has_begun = False  # Whether the steps before `start` are over.
        # An average of the weights, and one of the optimizer's state.
        self._since = (_Since.now(), _Since.now())

    @property
    def _is_ever_alone(self) -> bool:
        return self.model._workers is not None

    @property
    def is_silent(self) -> bool:
        """Whether the next step is one of this worker alone."""
        return self._is_ever_alone and (self._has_begun or not self.sync.start)

    def look_at(self, call):
        """Checks a `fit`, and has it tell when epochs begin."""
        if call.kind == "fit" and self._is_ever_alone:
            self._check_sync()
            self._has_begun = self._num_updates >= self.sync.start
            call.add_callbacks(BeginsEpochs())  # Behind those of which one may restore a run.
            self.check_callbacks(call.callbacks)

    def begin(self, call):
        """Enters what is around a call."""
        if call.kind == "fit":
            call.enter(self.training_silently())
        super().begin(call)

    @property
    def _num_updates(self) -> int:
        return int(self.model.optimizer.iterations)

    def before_step(self) -> None:
        """Until they begin, looks how many steps were done, for which it waits."""
        if self._is_ever_alone and not self._has_begun and self._num_updates >= self.sync.start:
            self._has_begun = self._is_in_epoch = True
            self.metrics_were_restored()
            self.model.make_train_function(force=True)

    def check_way(self, way):
        """Raises where outputs meet, which those of other workers' rows cannot."""
        if self._is_ever_alone:
            self.refuse_joined(way)

    def _check_sync(self) -> None:
        """Raises where a worker cannot step by itself.

        Raises:
            ValueError: For a step or an optimizer that only the job as a whole has.
        """
        if is_own(self.model, "train_step"):
            what = "a model with a `train_step` of its own"
        elif isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            what = "a LossScaleOptimizer, of which each worker would have another scale"
        elif self.model.optimizer.gradient_accumulation_steps:
            what = "an optimizer that accumulates gradients, which the workers add up"
        elif self.model._workers.compression is not None:
            what = f"compression={self.model._workers.compression.spec!r}, which is of gradients"
        else:
            return
        self.refuse("Keras's own step, an update in each, and whole gradients are required", what)

    def step(self, data, usual) -> dict[str, Any]:
        """A step on this worker's rows, and every H steps the average."""
        if not self.is_silent:
            return usual(data)
        if sample_partition.unmarked(data) is data:  # Of which each worker takes its rows.
            self.model._session.compare(data, "fit")
        own, num_rows = self._rows_here(data)
        way = self.model._way(own, "fit")
        self.refuse_joined(way)
        of_weights, of_state = self._since
        with self.model.strategy.apart():
            logs = tf.cond(
                num_rows > 0,
                lambda: self.model._train_on_own_rows(own, way.metrics),
                self._idle_step,
            )
        of_state.add(num_rows)
        is_time = of_weights.add(num_rows) >= float(self.sync.every)

        def average():
            self._average((self._weights(), of_weights))
            return True  # As the other branch: Python's None would be an operation in one alone.

        tf.cond(is_time, average, lambda: False)
        return logs

    def _idle_step(self):
        """The step of a worker without rows: it counts, as the learning rate of all may change."""
        self.model.optimizer.iterations.assign_add(1)
        return self.model.get_metrics_result()

    def _rows_here(self, data):
        """This worker's rows of what the step was given, and how many they are."""
        own = sample_partition.unmarked(data)
        if own is data:
            own, place = self.cut_here(data)
            return own, tf.convert_to_tensor(place.num_own_rows)
        found = rows_of_worker.unmarked(data)
        if found is not None:
            return own, rows_of_worker.rows_of_worker(self.model.strategy)(found[1]).size
        return own, tf.convert_to_tensor(count_rows(first_of(own)))

    def _weights(self) -> list[keras.Variable]:
        """What is averaged: whatever is no count, and no seed."""
        return [v for v in self.model.variables if tf.as_dtype(v.dtype).is_floating]

    def _average(self, *groups: tuple[list[keras.Variable], _Since]) -> None:
        """Gives all workers the averages of variables.

        Args:
            *groups: Variables, and what was trained since they were averaged: each worker's share
                in them is that of the rows that it has seen.
        """
        shares = [since.rows.read_value() for _, since in groups]
        variables = [(v, i) for i, (members, _) in enumerate(groups) for v in members]
        terms = [tf.convert_to_tensor(variable.value) for variable, _ in variables]
        weighted = [
            term * tf.cast(shares[i], term.dtype)
            for term, (_, i) in zip(terms, variables, strict=True)
        ]
        summed = self.model._workers.all_reduce([*weighted, *shares])
        sums, totals = summed[: len(terms)], summed[len(terms) :]
        for (variable, i), term, total in zip(variables, terms, sums, strict=True):
            mean = total / tf.cast(tf.maximum(totals[i], 1.0), term.dtype)
            variable.assign(tf.where(totals[i] > 0, mean, term))
        for _, since in groups:
            since.forget()

    def settle(self) -> None:
        """Averages now what the workers have, the optimizer's state too. All must call it.

        What nothing was trained of since its last average is not sent.
        """
        if not self.is_silent:
            return
        of_weights, of_state = self._since
        if not float(of_state.steps):
            return
        rate = self.model.optimizer.learning_rate
        state = [v for v in self.model.optimizer.variables if v is not rate]
        state = [v for v in state if tf.as_dtype(v.dtype).is_floating]
        groups = [(self._weights(), of_weights)] if float(of_weights.steps) else []
        with self.model.strategy.program():
            self._average(*groups, (state, of_state))
