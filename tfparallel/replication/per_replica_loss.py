"""A step whose predictions, loss and metrics stay on the device of their rows.

Each replica calls the model on its rows, computes the numerators of their losses, and updates
metrics that start at zero. The replicas sum

    N_p / D     their share of each loss whose divisor follows from sizes, such as B·T tokens; its
                gradient needs nothing from the other replicas
    N_p, D_p    for losses with a mask or weights: J = Σ_p N_p / Σ_p D_p, and 1 / Σ_p D_p goes
                back to each replica
    s_p         the increment of each metric's state

and, after the backward pass, the gradients. Between workers, one collective carries all of this
with the gradients, unless a divisor depends on the data. No prediction leaves its device, unless a
metric must see all rows of its output.
"""

import itertools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.extend import original_class
from tfparallel.flight.marks import mark
from tfparallel.piece import Piece, RowsOfWorker, count_rows, current
from tfparallel.replication.replicated_call import checked_output
from tfparallel.replication.row_sums import Summed, Sums
from tfparallel.seams.compiled import compiled_loss, loss_tracker
from tfparallel.seams.functional import Functional
from tfparallel.seams.keras import compute_output_spec, mask_of, takes_training
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.one_step import OneStep, PassResult
from tfparallel.step.piece_sums import growth, terms, whole_loss
from tfparallel.step.read_outputs import returning_read_outputs
from tfparallel.step.row_counts import aligned, as_many_rows
from tfparallel.step.where_rows_meet import (
    WhereRowsMeet,
    of_the_batch,
    type_of,
)
from tfparallel.tracing.trial_trace import traced_apart


class OwnRows(WhereRowsMeet, OneStep):
    """Extends a replicated Keras model that was compiled with losses and metrics of Keras."""

    @property
    def _meeting_device(self) -> str:
        return self._strategy.devices[0]

    def _pieces_of(self, num_rows):
        return row_ranges(num_rows, self.strategy.num_replicas, self.strategy.replica_weights)

    def _outputs_of(self, types):
        if original_class(self) in (keras.Sequential, Functional) and self.built:
            return super()._outputs_of(types)
        inputs = keras.tree.map_structure(
            lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype), types
        )
        with tf.init_scope(), self._strategy.scope(), traced_apart():
            outputs, masks = compute_output_spec(self._outputs_and_masks, inputs)
        return keras.tree.map_structure(type_of, outputs), list(map(type_of, masks))

    def _outputs_and_masks(self, inputs):
        outputs = self._call_of_layer(inputs)
        flat = keras.tree.flatten(outputs)
        return outputs, [mask_of(output) for output in flat]

    def _train_on_own_rows(self, data, metrics: StepMetrics, worker_rows=None):
        """Runs one step of training, as `keras.Model.train_step` does.

        Args:
            data: The global batch, or this worker's rows of it.
            metrics: The compiled metrics. If some need joined rows, `data` is the global batch.
            worker_rows: How many rows each worker has, if `data` holds only this worker's.
        """
        with tf.GradientTape() as tape:
            batch_terms = self._terms_of_own_rows(data, metrics, worker_rows, training=True)
            added, wait = self.losses, batch_terms.sums.wait
            # Covers only this worker's rows if the others' sums arrive later: the loss is linear
            # in its terms, so its gradient is right.
            loss = batch_terms.loss(batch_terms.sums.tensors, added, tells_trackers=not wait)
            scaled = self.optimizer.scale_loss(loss)
        mark("forward", [scaled])
        trained = self.trainable_weights
        gradients = tape.gradient(scaled, trained) if trained else []
        sums = batch_terms.sums.of_all()
        if wait:
            loss = batch_terms.loss(sums, added)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        result = PassResult(
            loss,
            batch_terms.num_rows,
            trained,
            gradients,
            metrics=metrics,
            growth=batch_terms.growth(sums),
            outputs=batch_terms.outputs,
            rows=batch_terms.sums.rows,
            divisor=batch_terms.divisor(sums),
        )
        return self._trained_on(result, x, y, sample_weight)

    def _test_on_own_rows(self, data, metrics: StepMetrics, worker_rows=None):
        """Runs one step of evaluation, as `keras.Model.test_step` does."""
        result = self._terms_of_own_rows(data, metrics, worker_rows, training=False)
        sums = result.sums.of_all()
        loss = result.loss(sums, self.losses)
        loss_tracker(self).update_state(loss, sample_weight=result.num_rows)
        _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        metrics.update(result.growth(sums), y, result.outputs, result.sums.rows, sample_weight)
        return self.get_metrics_result()

    def _predict_on_own_rows(self, data, worker_rows=None, *, gathers=True):
        """Runs one step of prediction, as `keras.Model.predict_step` does.

        Args:
            data: As for `_train_on_own_rows`.
            worker_rows: As for `_train_on_own_rows`.
            gathers: Whether each worker gets the predictions of all workers.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        mode = {"training": False} if takes_training(self) else {}
        call = self._call_of_layer
        self._look_at_rows(call, (x,), mode)
        return self._call_on_replicas(call, (x,), mode, worker_rows=worker_rows, gathers=gathers)

    def _look_at_rows_of(self, data, training=True) -> None:
        """Refuses a model that mixes examples in outputs that a loss or a metric reads."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        mode = {"training": training} if takes_training(self) else {}
        call = returning_read_outputs(self, self._call_of_layer, y)
        self._look_at_rows(call, (x,), mode, read_by=compiled_loss(self))

    def _terms_of_own_rows(self, data, metrics, worker_rows, training) -> "_Terms":
        """Sums the loss terms and metric increments of all replicas' rows."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        mode = {"training": training} if takes_training(self) else {}
        call = returning_read_outputs(self, self._call_of_layer, y)
        self._look_at_rows_of(data, training)
        y, sample_weight = aligned(x, y, sample_weight)
        compiled, first = compiled_loss(self), _first(x)
        outputs_and_terms = []

        def on_replica(x, y, sample_weight):
            outputs = call(x, **mode)
            # Counted on the arguments: in the trace of an eager step, `first` is not symbolic.
            piece = current() or _whole(count_rows(_first(x)))
            flat = [checked_output(self, output) for output in keras.tree.flatten(outputs)]
            with tf.control_dependencies(as_many_rows(self, flat, piece.num_rows_used)):
                loss_terms = terms(compiled, y, outputs, sample_weight, piece.num_averaged_rows)
                grown = growth(metrics.summed, y, outputs, sample_weight)
            outputs_and_terms.append((outputs, loss_terms))
            by_sizes = all(len(of_loss) == 1 for of_loss in loss_terms)
            rows = [flat[place] for place in metrics.places(outputs)]
            return Sums([*itertools.chain(*loss_terms), *grown], may_wait=by_sizes, rows=rows)

        arguments = (x, y, sample_weight)
        sums = self._call_on_replicas(on_replica, arguments, {}, worker_rows=worker_rows)
        outputs, losses = outputs_and_terms[0]
        place, num_rows = self.strategy.place, count_rows(first)
        if worker_rows is not None:
            num_rows = tf.add_n(worker_rows)
        elif place is not None:
            num_rows = place.num_own_rows
        flat = of_the_batch(keras.tree.flatten(outputs), num_rows)
        outputs = keras.tree.pack_sequence_as(outputs, flat)
        return _Terms(self, sums, list(map(len, losses)), num_rows, y, outputs, sample_weight)


class _OfWorker(NamedTuple):
    """The tracker of an output's loss, on a worker that sees only its rows of the batch.

    Attributes:
        tracker: Keras's mean over the steps.
        place: The place of the rows in the global batch.
    """

    tracker: keras.metrics.Metric
    place: RowsOfWorker

    def update_state(self, value: tf.Tensor, sample_weight: int | None = None) -> None:
        """Weighs the worker's loss so that those of all workers weigh what Keras's one does."""
        del sample_weight  # Keras's: the rows if Python knows their number, else 1 per step.
        rows, of = self.place.num_own_rows, self.place.num_rows
        if not isinstance(of, int):
            rows = tf.cast(rows, value.dtype) / tf.cast(tf.maximum(of, 1), value.dtype)
        self.tracker.update_state(value, sample_weight=rows)


class _Terms(NamedTuple):
    """The loss terms and metric increments of a step's batch.

    Attributes:
        model: The model with the losses.
        sums: The terms, loss by loss, then the increments.
        lengths: The number of terms of each loss.
        num_rows: B.
        y: Targets.
        outputs: Type specs, in the structure of the outputs.
        sample_weight: Weights, or None.
    """

    model: keras.Model
    sums: Summed
    lengths: list[int]
    num_rows: Any
    y: Any
    outputs: Any
    sample_weight: Any

    def loss(self, sums, added, *, tells_trackers=True) -> tf.Tensor:
        """The total loss of these sums, with the losses that layers add."""
        trackers = compiled_loss(self.model).metrics if tells_trackers else ()
        place = self.model.strategy.place
        if place is not None:
            trackers = [_OfWorker(tracker, place) for tracker in trackers]
        remaining = iter(sums)
        of_losses = [list(itertools.islice(remaining, length)) for length in self.lengths]
        return whole_loss(
            self.model,
            of_losses,
            self.y,
            self.outputs,
            self.sample_weight,
            added,
            trackers,
        )

    def divisor(self, sums):
        """The divisor of the loss; None if its terms have different divisors."""
        if all(length == 1 for length in self.lengths):
            return self.num_rows
        return sums[1] if self.lengths == [2] else None

    def growth(self, sums) -> list[tf.Tensor]:
        """The increments of the metrics' states."""
        return sums[sum(self.lengths) :]


def _first(x):
    return next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)


def _whole(num_rows) -> Piece:
    """All rows, for a step that is traced outside of replicas (`collectives/indexed_slices.py`)."""
    return Piece(0, 1, 0, num_rows, num_rows)
