"""Workers that train alone, and average their weights now and then: `sync="local_sgd:8"`.

    worker 0   θ ── step ── step ── … ── step ──┐              n_w rows in H steps
    worker 1   θ ── step ── step ── … ── step ──┴── θ ← Σ_w n_w θ_w / Σ_w n_w

Each worker steps on its rows of the batch as if it were the only one: its replicas stay exact, with
batch normalization over all rows of the worker. Nothing is sent between averages. At the end of an
epoch, the weights and the optimizer state are averaged, so `evaluate`, files and checkpoints see
the state of all workers; metrics are summed then, too. `sync="diloco:8"` follows each average of
the weights with an outer step (`outer_step.py`).

References:
    H steps: Sebastian U. Stich, "Local SGD Converges Fast and Communicates Little",
    arXiv:1805.09767, 2018. Only from some step on: Tao Lin et al., "Don't Use Large Mini-Batches,
    Use Local SGD", arXiv:1808.07217, 2018.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.data import rows_of_worker
from tfparallel.extend import is_own
from tfparallel.replication import sample_partition
from tfparallel.replication.inputs import count_common_rows
from tfparallel.replication.sync.outer_step import OuterStep
from tfparallel.replication.sync.policy import BeginsEpochs, EveryStep
from tfparallel.seams.optimizers import rate_of
from tfparallel.seams.tensorflow import ResourceVariable
from tfparallel.update.built_optimizers import with_wrapped


class _Since(NamedTuple):
    """Counts this worker's training since variables were averaged.

    Attributes:
        rows: The number of rows that it has seen.
        steps: The number of steps, the same on all workers.
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
    """Each worker of a replicated model steps alone; averages synchronize the workers."""

    def __init__(self, model, sync):
        super().__init__(model, sync)
        self._has_begun = False  # Whether the steps before `start` are over.
        # Since the last average of the weights, and of the optimizer state.
        self._since = (_Since.now(), _Since.now())
        self._outer = OuterStep() if sync.is_outer else None

    @property
    def _is_ever_alone(self) -> bool:
        return self.model._workers is not None

    @property
    def is_silent(self) -> bool:
        """Whether this worker takes the next step alone."""
        return self._is_ever_alone and (self._has_begun or not self.sync.start)

    def look_at(self, call):
        """Checks a call of `fit`, and adds the callback that reports the start of each epoch."""
        if call.kind == "fit" and self._is_ever_alone:
            self._check_sync()
            self._has_begun = self._num_updates >= self.sync.start
            call.add_callbacks(BeginsEpochs())  # After a callback that may restore a run.
            self.check_callbacks(call.callbacks)

    def begin(self, call):
        """Enters the contexts of a call."""
        if call.kind == "fit":
            call.enter(self.training_silently())
        super().begin(call)

    @property
    def _num_updates(self) -> int:
        return int(self.model.optimizer.iterations)

    def begin_epoch(self) -> None:
        """Begins an epoch: the next outer step is taken from the current weights."""
        # A restored run may be beyond `start`. Later, `Checkpoint` replaces the train function.
        self.before_step()
        super().begin_epoch()
        if self._outer is not None and self.is_silent:
            with self.model.strategy.program():
                self._outer.begin(self.model.trainable_weights)

    def resumable_state(self) -> dict[str, tf.Variable]:
        """The variables by name that a resumed run needs, equal on all workers."""
        return self._outer.momentums(self.model.trainable_weights) if self._outer else {}

    def state_was_restored(self) -> None:
        """Starts counting anew: a checkpoint holds averages."""
        for since in self._since:
            since.forget()

    def before_step(self) -> None:
        """Switches to local steps after `start` updates; waits for their count until then."""
        if self._is_ever_alone and not self._has_begun and self._num_updates >= self.sync.start:
            self._has_begun = self._is_in_epoch = True
            self.metrics_were_restored()
            self.model.make_train_function(force=True)

    def check_way(self, way):
        """Raises if outputs must be joined, since those of the other workers are not available."""
        if self._is_ever_alone:
            self.refuse_joined(way)

    def _check_sync(self) -> None:
        """Raises if a worker cannot step alone.

        Raises:
            ValueError: For a step or an optimizer that needs all workers.
        """
        if is_own(self.model, "train_step"):
            cause = "a model with a custom `train_step`"
        elif isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            cause = "a LossScaleOptimizer, whose scale would differ between workers"
        elif any(each.gradient_accumulation_steps for each in with_wrapped(self.model.optimizer)):
            cause = (
                "an optimizer that accumulates gradients, which would be summed over the workers"
            )
        elif self.model._workers.compression is not None:
            cause = (
                f"compression={self.model._workers.compression.spec!r}, which applies to gradients"
            )
        else:
            return
        self.refuse(
            "Keras's own `train_step`, with an update in every step and uncompressed gradients, is "
            "required",
            cause,
        )

    def step(self, data, default) -> dict[str, Any]:
        """Trains on this worker's rows, and averages the weights every H steps."""
        if not self.is_silent:
            return default(data)
        if self._outer is not None:
            self._outer.prepare(self.model.trainable_weights)
        local_rows, num_rows = self._local_rows(data)
        way = self.model._way(local_rows, "fit")
        self.refuse_joined(way)
        of_weights, of_state = self._since
        with self.model.strategy.apart():
            logs = tf.cond(
                num_rows > 0,
                lambda: self.model._train_on_own_rows(local_rows, way.metrics),
                self._idle_step,
            )
        of_state.add(num_rows)
        is_due = of_weights.add(num_rows) >= float(self.sync.every)

        def average():
            self._average((self._weights(), of_weights))
            return True  # Both branches must return the same type; None would add an operation.

        tf.cond(is_due, average, lambda: False)
        return logs

    def _idle_step(self):
        """A step without rows; it still counts, since a schedule may change the learning rate."""
        for optimizer in with_wrapped(self.model.optimizer):
            if optimizer.built:  # One that a map gives no weights counts no steps.
                optimizer.iterations.assign_add(1)
        return self.model.get_metrics_result()

    def _local_rows(self, data):
        """This worker's rows of the step's data, and their number."""
        batch = sample_partition.unmarked(data)
        rows = self.model._read(batch)
        if batch is data:  # A global batch: each worker takes its rows.
            self.model._session.compare(rows, "fit")
            rows, place = self.cut_here(rows)
            return rows, tf.convert_to_tensor(place.num_own_rows)
        marked = rows_of_worker.unmarked(data)
        if marked is not None:
            return rows, rows_of_worker.rows_of_worker(self.model.strategy)(marked[1]).size
        return rows, tf.convert_to_tensor(count_common_rows(keras.tree.flatten(rows)))

    def _weights(self) -> list[keras.Variable]:
        """The variables to average: all but counters and seeds."""
        return [v for v in self.model.variables if tf.as_dtype(v.dtype).is_floating]

    def _average(self, *groups: tuple[list[keras.Variable], _Since]) -> None:
        """Averages variables over all workers.

        Args:
            *groups: Variables, and the counts since their last average: each worker weighs in
                with the rows that it has seen since.
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
        in_outer_step = {id(v) for v in self.model.trainable_weights} if self._outer else ()
        for (variable, i), term, total in zip(variables, terms, sums, strict=True):
            mean = total / tf.cast(tf.maximum(totals[i], 1.0), term.dtype)
            value = tf.where(totals[i] > 0, mean, term)
            if id(variable) in in_outer_step:
                value = self._outer.step(variable, value)
            variable.assign(value)
        for _, since in groups:
            since.forget()

    def settle(self) -> None:
        """Averages the weights and the optimizer state now. All workers must call it.

        Variables that were not trained since their last average are not sent.
        """
        if not self.is_silent:
            return
        of_weights, of_state = self._since
        if not float(of_state.steps):
            return
        rates = {id(rate_of(each)) for each in with_wrapped(self.model.optimizer)}
        state = [v for v in self.model.optimizer.variables if id(v) not in rates]
        state = [v for v in state if tf.as_dtype(v.dtype).is_floating]
        groups = [(self._weights(), of_weights)] if float(of_weights.steps) else []
        with self.model.strategy.program():
            self._average(*groups, (state, of_state))
