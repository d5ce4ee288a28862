"""Softmax cross-entropy of logits in parts.

With z_k the logits of device k, and m the largest of all:

    loss = log Σ_k Σ_j exp(z_kj − m) + m − z_label

The devices exchange one number per example and term (the largest logit, the sum, the label's
logit), whatever the number of classes; the gradient, softmax(z) − onehot, is computed on the
devices of the logits.

References:
    Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism, arXiv 1909.08053, 2019 (section 3).
"""

import keras
import tensorflow as tf

from tfparallel.device_names import canonical
from tfparallel.extend import extend, original_class
from tfparallel.layers.parts import Parts, on_devices
from tfparallel.seams.compiled import options_of
from tfparallel.seams.keras import logits_beside


class LossInParts:
    """Extends a sparse categorical cross-entropy: logits stay in parts."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        parts = getattr(y_pred, "_tfparallel_logits", None)
        is_known = parts is not None and self._finds_logits_of(y_pred)
        object.__setattr__(self, "_parts", parts if is_known else None)
        try:
            return super().__call__(y_true, y_pred, sample_weight)
        finally:
            object.__setattr__(self, "_parts", None)

    def _finds_logits_of(self, y_pred) -> bool:
        """Whether Keras's loss would look at the logits, instead of clipped probabilities."""
        if options_of(self)["from_logits"]:
            return logits_beside(y_pred) is None
        # A softmax computed the probabilities, and no cast makes another tensor of them.
        is_cast = keras.backend.standardize_dtype(y_pred.dtype) != self.dtype
        return logits_beside(y_pred) is not None and not is_cast

    def call(self, y_true, y_pred):
        if self._parts is None:
            return super().call(y_true, y_pred)
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = tf.squeeze(y_true, -1)
        if not y_pred.shape[:-1].is_compatible_with(y_true.shape):
            return super().call(y_true, y_pred)  # It raises an error.
        return cross_entropy(tf.cast(y_true, tf.int64), self._parts, y_pred.dtype)


def in_parts(loss):
    """Extends a loss that supports logits in parts, in place; returns any other unchanged."""
    if (
        isinstance(loss, keras.losses.Loss)
        and original_class(loss) is keras.losses.SparseCategoricalCrossentropy
        and options_of(loss).get("ignore_class") is None
        and options_of(loss).get("axis", -1) == -1
    ):
        return extend(loss, LossInParts, _parts=None)
    return loss


def cross_entropy(labels: tf.Tensor, logits: Parts, dtype) -> tf.Tensor:
    """Returns −log softmax(logits)[label].

    Args:
        labels: `(batch, …)`, integers from 0 to the number of classes − 1.
        logits: `(batch, …, classes)`, in parts along the last axis.
        dtype: The dtype of the computation.

    Returns:
        `(batch, …)`, on the first device.
    """
    starts = [sum(logits.sizes[:k]) for k in range(len(logits.sizes))]
    devices = logits.devices
    parts = on_devices(devices, lambda z: tf.cast(z, dtype), logits.tensors)
    largest = on_devices(devices, lambda z: tf.reduce_max(tf.stop_gradient(z), -1), parts)
    num_classes = tf.cast(sum(logits.sizes), labels.dtype)
    # A label outside of all parts would cost nothing. The whole softmax raises for it on a CPU; on
    # a GPU, which runs asynchronously, it returns NaN.
    raises = _raises_for_bad_labels(devices[0])
    if raises:
        with tf.control_dependencies(
            [
                tf.debugging.assert_equal(
                    tf.shape(labels), tf.shape(parts[0])[:-1], "Each softmax must have one label."
                ),
                tf.debugging.assert_non_negative(labels, "A label is negative."),
                tf.debugging.assert_less(labels, num_classes, "A label is out of range."),
            ]
        ):
            labels = tf.identity(labels)
    top = tf.reduce_max(tf.stack(largest), 0)

    def sum_of_exponentials(z):
        return _sum_of_classes(tf.exp(z - tf.identity(top)[..., None]))

    def logit_of_label(z, start, size):
        is_label = tf.one_hot(labels - start, size, on_value=True, off_value=False, dtype=tf.bool)
        return _sum_of_classes(tf.where(is_label, z, tf.zeros_like(z)))

    sums = on_devices(devices, sum_of_exponentials, parts)
    chosen = on_devices(devices, logit_of_label, parts, starts, logits.sizes)
    loss = tf.math.log(tf.add_n(sums)) + top - tf.add_n(chosen)
    if raises:
        return loss
    is_class = (labels >= 0) & (labels < num_classes)
    return tf.where(is_class, loss, tf.constant(float("nan"), loss.dtype))


def _sum_of_classes(tensor):
    # If the sum dropped the axis, its gradient would compute its shape on the device, and wait.
    return tf.squeeze(tf.reduce_sum(tensor, -1, keepdims=True), -1)


def _raises_for_bad_labels(device):
    return "CPU:" in canonical(device)
