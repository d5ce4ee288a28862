"""A step whose predictions, loss and metrics stay where the rows are.

Each replica calls the model on its rows, takes the numerators of the losses over them, and updates
metrics that begin at zero. Summed over the replicas are

    N_p / D     its share of each loss whose divisor follows from sizes, such as B·T tokens; its
                gradient asks for nothing of the other replicas
    N_p, D_p    of the others, of a mask or of weights: J = Σ_p N_p / Σ_p D_p, and 1 / Σ_p D_p
                goes back to each replica
    s_p         what the state of each metric grows by

and, behind the backward pass, the gradients. No prediction leaves its device.
"""

import itertools
import warnings

import keras
import tensorflow as tf
from absl import logging
from keras.src import backend
from keras.src.models.functional import Functional

from tfparallel.data.shard import Shard, count_rows, current
from tfparallel.extend import attach, original_class
from tfparallel.replication.known_rows import is_known_by_rows
from tfparallel.replication.replicated_call import Sums, checked_output
from tfparallel.step.apart import why_not_apart
from tfparallel.step.by_rows import why_joined
from tfparallel.step.terms import growth, states, terms, whole_loss

__all__ = ["OwnRows"]


class OwnRows:
    """Extends a replicated Keras model, compiled with losses and metrics of Keras's own."""

    @property
    def why_joined(self) -> str | None:
        """Why the outputs of all rows met in the steps of `fit`, else in those of `evaluate`.

        None where they did not, and before there were any.
        """
        return next(iter(getattr(self, "_why_joined", {}).values()), None)

    def _rows_stay(self, data, kind: str) -> bool:
        """Whether a step on such data needs no joined outputs; says so once where it does.

        Args:
            data: A batch, as the step is given it.
            kind: "fit" or "evaluate".
        """
        known = getattr(self, "_why_joined", {})
        reason = why_joined(self) or _why_unaligned(data) or self._why_not_apart(data)
        if kind not in known or known[kind] != reason:
            attach(self, _why_joined=dict(sorted({**known, kind: reason}.items(), reverse=True)))
            where = "stay where the rows are" if reason is None else f"of all rows meet: {reason}"
            logging.info("Model '%s', %s: the outputs %s.", self.name, kind, where)
        return reason is None

    def _why_not_apart(self, data) -> str | None:
        """Asked once for each kind of data, and for each `compile`."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        types = keras.tree.map_structure(_type, (x, y, sample_weight))
        of_whom, known = getattr(self, "_known_apart", (None, {}))
        if of_whom is not self._compile_loss:
            known = {}
        if str(types) not in known:
            try:
                outputs = self._outputs_of(types[0])
            except Exception as error:  # Keras's own follows, if it is one of the program.
                found = f"the shapes of its outputs are not known: {str(error)[:200]}"
            else:
                found = why_not_apart(self, types[1], outputs, types[2])
            known[str(types)] = found
            attach(self, _known_apart=(self._compile_loss, known))
        return known[str(types)]

    def _outputs_of(self, types):
        """The types of the outputs, in their structure."""
        if original_class(self) in (keras.Sequential, Functional) and self.built:
            functional = getattr(self, "_functional", None) or self
            outputs = keras.tree.pack_sequence_as(functional._outputs_struct, functional.outputs)
        else:
            inputs = keras.tree.map_structure(
                lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype), types
            )
            with tf.init_scope(), self._strategy.scope():
                outputs = backend.compute_output_spec(self._call_of_layer, inputs)
        return keras.tree.map_structure(_type, outputs)

    def _train_on_own_rows(self, data):
        """One step of training, as `keras.Model.train_step` does it."""
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self._loss_of_own_rows(data, training=True))
        trained = self.trainable_weights
        if trained:
            gradients = tape.gradient(loss, trained)
            self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
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
        compiled, metrics = self._compile_loss, self._compile_metrics
        first = next(i for i in keras.tree.flatten(x) if i is not None)
        made = []

        def on_replica(x, y, sample_weight):
            outputs = call(x, **mode)
            shard = current() or _whole(count_rows(first))
            with tf.control_dependencies(self._as_many_rows_as_examples(outputs, shard)):
                own = terms(compiled, y, outputs, sample_weight, shard.num_global_rows)
                grown = growth(metrics, y, outputs, sample_weight)
            made.append((outputs, own))
            return Sums([*itertools.chain(*own), *grown])

        sums = iter(self._call_on_replicas(on_replica, (x, y, sample_weight), {}).tensors)
        outputs, like = made[0]
        of_losses = [[next(sums) for _ in term] for term in like]
        for variable, grown in zip(states(metrics), sums, strict=True):
            variable.assign_add(grown)
        outputs = keras.tree.map_structure(
            lambda t: tf.TensorSpec([first.shape[0], *t.shape[1:]], t.dtype), outputs
        )
        losses = [whole_loss(compiled, of_losses, y, outputs, sample_weight)]
        losses += [self._aggregate_additional_loss(loss) for loss in self.losses]
        loss = losses[0] if len(losses) == 1 else keras.ops.sum(losses)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(first)[0])
        return loss

    def _as_many_rows_as_examples(self, outputs, shard) -> list[tf.Operation]:
        """Assertions, or none where it is known: a loss would broadcast a row, and be wrong."""
        flat = [checked_output(self, output) for output in keras.tree.flatten(outputs)]
        if is_known_by_rows(self):
            return []
        return _equal(
            [(count_rows(output), shard.num_rows_used) for output in flat],
            f"Model '{self.name}' must put out a row for each example. Received, of a replica, "
            "outputs with another number of rows than its examples: a constant with rows of its "
            "own, perhaps. Train on one device, or give the constant one row.",
        )


def _whole(num_rows) -> Shard:
    """All rows, of a step that is traced for no replica (`collectives/traced_readings.py`)."""
    return Shard(0, 1, 0, num_rows, num_rows)


def _type(leaf):
    """The type of a tensor or an array, for batches of any size."""
    if leaf is None or not hasattr(leaf, "shape"):
        return None
    shape = tf.TensorShape(leaf.shape)
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, leaf.dtype)


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
