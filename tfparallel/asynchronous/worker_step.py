"""A worker's step: gradients and an update, and the numbers that the chief adds to the logs."""

from typing import Any

import keras
import tensorflow as tf

from tfparallel.extend import is_own
from tfparallel.piece import count_rows
from tfparallel.seams.compiled import added_loss, compiled_loss, loss_of_batch, loss_trackers_of
from tfparallel.seams.keras import mask_of
from tfparallel.step.loss_terms import call_with
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.piece_sums import growth

# Index in a step's numbers: loss, rows, staleness, losses of the outputs, sums of metrics.
STALENESS = 2


class WorkerStep:
    """The step that a worker runs on a batch.

    Args:
        model: The model.
        metrics: Its metrics, divided into additive and other ones.
        version: The variable that counts updates.
        one_at_a_time: The critical section for updates.
    """

    def __init__(self, model, metrics: StepMetrics, version, one_at_a_time):
        self._model, self._metrics = model, metrics
        self._version, self._one_at_a_time = version, one_at_a_time
        self._functions: list[tuple[Any, Any]] = []

    def function_of(self, spec):
        """Returns the function for batches of a spec, traced once.

        It is traced outside of the strategy's scope, in which Keras's optimizers need a replica.
        """
        for traced_spec, function in self._functions:
            if traced_spec == spec:
                return function
        traced = tf.function(self._on_worker, input_signature=[spec]).get_concrete_function()
        self._functions.append((spec, traced))
        return traced

    def _on_worker(self, data):
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        # Read before any weight, so that the staleness counts every update.
        read_at = self._version.read_value()
        with tf.control_dependencies([read_at]), tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss, values = self._loss(x, y, outputs, sample_weight)
            scaled = model.optimizer.scale_loss(loss)
        weights = model.trainable_variables
        gradients = tape.gradient(scaled, [weight.value for weight in weights])
        sums = growth(self._metrics.summed, y, outputs, sample_weight)
        # An update starts once all its inputs are on the servers, so a worker that ends during the
        # transfer does not block the others.
        pairs = zip(gradients, weights, strict=True)
        gradients = [_beside(gradient, weight) for gradient, weight in pairs]
        with tf.control_dependencies([g for g in map(_tensor_of, gradients) if g is not None]):
            now = self._one_at_a_time.execute(lambda: self._update(gradients, weights))
        numbers = [loss, count_rows(keras.tree.flatten(x)[0]), now - read_at - 1, *values, *sums]
        flat = [tf.reshape(tf.cast(number, tf.float64), [-1]) for number in numbers]
        if self._metrics.joined is None:
            return tf.concat(flat, 0), (), {}
        masks = {
            str(place): mask_of(output)
            for place, output in enumerate(keras.tree.flatten(outputs))
            if mask_of(output) is not None
        }
        return tf.concat(flat, 0), outputs, masks

    def _update(self, gradients, weights):
        with tf.device(self._version.device):
            self._model.optimizer.apply(gradients, weights)
            return self._version.assign_add(1, read_value=True)

    def _loss(self, x, y, outputs, sample_weight):
        """Returns the loss of the batch, and the logged losses of its outputs."""
        model, values = self._model, []
        compiled = compiled_loss(model)
        if compiled is None or is_own(model, "compute_loss"):
            return loss_of_batch(model, x, y, outputs, sample_weight), values

        def noting(loss):
            def noted(y_true, y_pred, weight):
                values.append(loss(y_true, y_pred, weight))
                return values[-1]

            return noted

        losses = [call_with(noting, compiled, y, outputs, sample_weight)]
        losses += [added_loss(model, loss) for loss in model.losses]
        tracked = [value for tracker, value in zip(loss_trackers(model), values, strict=False)
                   if tracker is not None]  # fmt: skip
        return tf.add_n([tf.cast(loss, losses[0].dtype) for loss in losses]), tracked


def loss_trackers(model) -> list[Any]:
    """Returns the metric that logs each output's loss; None for outputs that are not logged."""
    compiled = compiled_loss(model)
    return [] if compiled is None else loss_trackers_of(compiled)


def _beside(gradient, weight):
    """Copies a gradient to the device of its weight."""
    if gradient is None:
        return None
    with tf.device(weight.value.device):
        if isinstance(gradient, tf.IndexedSlices):
            values, indices = tf.identity(gradient.values), tf.identity(gradient.indices)
            return tf.IndexedSlices(values, indices, gradient.dense_shape)
        return tf.identity(gradient)


def _tensor_of(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
