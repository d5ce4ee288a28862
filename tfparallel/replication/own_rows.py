"""A step whose predictions, loss and metrics stay where the rows are.

Each replica calls the model on its rows, takes the numerators of the losses over them, and updates
metrics that begin at zero. Summed over the replicas are

    N_p, D_p    of each loss: J = Σ_p N_p / Σ_p D_p, and 1 / Σ_p D_p goes back to each replica
    s_p         what the state of each metric grows by

and, behind the backward pass, the gradients. No prediction leaves its device.
"""

import keras
import tensorflow as tf
from absl import logging

from tfparallel.data.shard import count_rows, current
from tfparallel.extend import attach
from tfparallel.replication.known_rows import is_known_by_rows
from tfparallel.replication.replicated_call import Sums, checked_output
from tfparallel.step.by_rows import why_joined
from tfparallel.step.loss import call_with, values_of

__all__ = ["OwnRows"]


class OwnRows:
    """Extends a replicated Keras model, compiled with losses and metrics of Keras's own."""

    @property
    def why_joined(self) -> str | None:
        """Why the outputs of all rows met in the last step traced; None if they did not."""
        return getattr(self, "_why_joined", None)

    def _rows_stay(self, data) -> bool:
        """Whether a step on such data needs no joined outputs; says so once where it does."""
        reason = why_joined(self) or _why_unaligned(data)
        if reason != self.why_joined:
            attach(self, _why_joined=reason)
            logging.info("Model '%s': the outputs of all rows are joined: %s.", self.name, reason)
        return reason is None

    def _train_on_own_rows(self, data):
        """One step of training, as `keras.Model.train_step` does it."""
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self._loss_of_own_rows(data, training=True))
        trained = self.trainable_weights
        if trained:
            gradients = tape.gradient(loss, trained)
            self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        return self.get_metrics_result()

    def _test_on_own_rows(self, data):
        """One step of evaluation, as `keras.Model.test_step` does it."""
        self._loss_of_own_rows(data, training=False)
        return self.get_metrics_result()

    def _loss_of_own_rows(self, data, training):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        mode = {"training": training} if self._call_has_training_arg else {}
        call = self._call_of_layer
        self._look_at_rows(call, (x,), mode)
        with tf.control_dependencies(_aligned(x, y, sample_weight)):
            y = keras.tree.map_structure(lambda t: None if t is None else tf.identity(t), y)
        predicted = []

        def on_replica(x, y, sample_weight):
            outputs = call(x, **mode)
            predicted.append(outputs)
            with tf.control_dependencies(self._as_many_rows_as_examples(outputs)):
                terms = self._terms(y, outputs, sample_weight)
                return Sums([*terms, *self._growth(y, outputs, sample_weight)])

        sums = self._call_on_replicas(on_replica, (x, y, sample_weight), {}).tensors
        states = self._states()
        for variable, growth in zip(states, sums[len(sums) - len(states) :], strict=True):
            variable.assign_add(growth)
        num_rows = next(i for i in keras.tree.flatten(x) if i is not None).shape[0]
        like = keras.tree.map_structure(
            lambda t: tf.TensorSpec([num_rows, *t.shape[1:]], t.dtype), predicted[0]
        )
        loss = self._whole_loss(sums, y, like, sample_weight)
        batch_size = tf.shape(next(i for i in keras.tree.flatten(x) if i is not None))[0]
        self._loss_tracker.update_state(loss, sample_weight=batch_size)
        return loss

    def _as_many_rows_as_examples(self, outputs) -> list[tf.Operation]:
        """Assertions, or none where it is known: a loss would broadcast a row, and be wrong."""
        flat = [checked_output(self, output) for output in keras.tree.flatten(outputs)]
        if is_known_by_rows(self):
            return []
        num_rows = current().num_rows_used
        return _equal(
            [(count_rows(output), num_rows) for output in flat],
            f"Model '{self.name}' must put out a row for each example. Received, of a replica, "
            "outputs with another number of rows than its examples: a constant with rows of its "
            "own, perhaps. Train on one device, or give the constant one row.",
        )

    def _terms(self, y, outputs, sample_weight) -> list[tf.Tensor]:
        """A replica's numerator and divisor of each loss."""
        found: list[tf.Tensor] = []

        def instead(loss):
            def find(y_true, y_pred, weight):
                values = values_of(loss, y_true, y_pred, weight)
                found.append(values.numerator())
                found.append(tf.stop_gradient(values.divisor()))
                return tf.zeros([], found[0].dtype)

            return find

        call_with(instead, self._compile_loss, y, outputs, sample_weight)
        return found

    def _states(self) -> list[keras.Variable]:
        """The variables of the compiled metrics."""
        return [] if self._compile_metrics is None else self._compile_metrics.variables

    def _growth(self, y, outputs, sample_weight) -> list[tf.Tensor]:
        """What a replica's rows add to each of them."""
        if not (states := self._states()):
            return []
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in states]
        grown = self._compile_metrics.stateless_update_state(
            zeros, y, outputs, sample_weight=sample_weight
        )
        return [tf.stop_gradient(tf.convert_to_tensor(state)) for state in grown]

    def _whole_loss(self, sums, y, like, sample_weight):
        """The loss of all rows, with what layers and regularizers add, as `compute_loss`."""
        remaining = iter(sums)

        def instead(loss):
            def find(*_):
                numerator, divisor = next(remaining), next(remaining)
                if loss.reduction == "sum":
                    return numerator
                return tf.math.divide_no_nan(numerator, divisor)

            return find

        compiled = self._compile_loss
        losses = [call_with(instead, compiled, y, like, sample_weight, compiled.metrics)]
        losses += [self._aggregate_additional_loss(loss) for loss in self.losses]
        return losses[0] if len(losses) == 1 else keras.ops.sum(losses)


def _row_counts(*structures) -> list:
    """Of each tensor with a batch axis, an int or, until it is known, a tensor."""
    leaves = keras.tree.flatten(structures)
    return [
        count_rows(leaf) if tf.is_tensor(leaf) else leaf.shape[0]  # Eagerly, an array.
        for leaf in leaves
        if getattr(leaf, "shape", None)
    ]


def _why_unaligned(data) -> str | None:
    """Targets may have several rows for an example, or one for all."""
    known = {n for n in _row_counts(data) if isinstance(n, int)}
    return f"inputs and targets have {sorted(known)} rows" if len(known) > 1 else None


def _aligned(x, y, sample_weight) -> list[tf.Operation]:
    """Assertions, of sizes that are not known yet."""
    expected, *others = _row_counts(x, y, sample_weight)
    return _equal(
        [(other, expected) for other in others],
        "Inputs, targets and sample weights must have a row for each example. Received tensors "
        "of other sizes of axis 0. Give batches of a fixed size (`drop_remainder=True`), and "
        "the outputs of all rows are joined.",
    )


def _equal(pairs, message) -> list[tf.Operation]:
    """Assertions of what is not known to be equal; run at once, they leave nothing."""
    checks = [
        tf.debugging.assert_equal(one, other, message)
        for one, other in pairs
        if not (isinstance(one, int) and isinstance(other, int) and one == other)
    ]
    return [check for check in checks if check is not None]
