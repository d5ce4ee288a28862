"""Creates the variables of a step before it is traced.

A `tf.function` that creates variables is traced twice. Keras creates the states of compiled
metrics and its global seed in the first step, whose traces take most of the first epoch of a deep
network. With the variables created here, the step is traced once. `make_train_function` creates the
optimizer's slots (`one_step.py`).
"""

import contextlib

import keras
import tensorflow as tf

from tfparallel.extend import is_own
from tfparallel.seams.compiled import compiled_loss, compiled_metrics, loss_of_batch
from tfparallel.seams.keras import batches_of, compute_output_spec, end_build
from tfparallel.tracing.trial_trace import traced_apart


def types_of_batches(dataset: tf.data.Dataset):
    """The types of a data set's batches, in their structure; None for leaves without a shape."""
    return keras.tree.map_structure(
        lambda spec: spec if hasattr(spec, "shape") else None, dataset.element_spec
    )


def build_ahead(model: keras.Model, iterator, data_batch, scope) -> None:
    """Builds a compiled model's loss and metrics, if Keras can do so without a step.

    Args:
        model: The model. Does nothing if it overrides `train_step`, since only the override knows
            what it calls.
        iterator: Keras's iterator over batches, from which none is taken; or None.
        data_batch: A batch, if there is no iterator.
        scope: The context in which to create the variables.
    """
    if is_own(model, "train_step"):
        return
    if iterator is not None:
        data_batch = types_of_batches(batches_of(iterator))
    # On failure, the step raises the error, or creates them itself.
    with contextlib.suppress(Exception), scope:
        symbolic_build(model, data_batch)


def symbolic_build(model: keras.Model, data_batch) -> None:
    """Builds a compiled model, its loss and metrics, from a batch or its types.

    Keras would replace ragged tensors by dense ones, and a `call` that pads ragged tensors would
    fail. So we call such a model with the types that it will receive.

    With `run_eagerly`, a loss or metric may read values, which a symbolic call does not have. Keras
    builds each just before it calls it; what is still unbuilt is built by the eager step.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data_batch)
    may_fail = contextlib.suppress(Exception) if model.run_eagerly else contextlib.nullcontext()
    if model.built or not any(map(_is_ragged, keras.tree.flatten(x))):
        try:
            model._symbolic_build(data_batch=data_batch)
            return
        except Exception:
            if not (model.built and model.run_eagerly):
                raise

    @tf.function(autograph=False)
    def outputs(x):
        with traced_apart():
            return model(x, training=False)

    types = keras.tree.map_structure(_type_of, x)
    with may_fail if model.built else contextlib.nullcontext():
        with keras.StatelessScope():  # Creates the variables on exit, outside of the function.
            specs = outputs.get_concrete_function(types).structured_outputs
        y_pred, y, sample_weight = keras.tree.map_structure(_symbolic, (specs, y, sample_weight))
        metrics, loss = compiled_metrics(model), compiled_loss(model)
        arguments = (None, y, y_pred, sample_weight)
        if metrics is not None and not metrics.built:
            with may_fail, traced_apart():
                compute_output_spec(model.compute_metrics, *arguments)
        if loss is not None and not loss.built:
            with may_fail, traced_apart():
                compute_output_spec(loss_of_batch, model, *arguments, training=False)
    end_build(model)


def _is_ragged(leaf) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.RaggedTensorSpec)


def _type_of(leaf) -> tf.TypeSpec | None:
    return leaf if leaf is None or isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)


def _symbolic(leaf) -> keras.KerasTensor | None:
    if leaf is None:
        return None
    return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
