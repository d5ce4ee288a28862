"""What a step would make when it is traced, made ahead of it.

A `tf.function` that makes a variable is traced twice, the second time without. The states of
compiled metrics, an optimizer's slots and Keras's global seed are made in the first step, which is
most of a first epoch of a deep network; made here, the step is traced once.
"""

import contextlib

import keras
import tensorflow as tf

from tfparallel.extend import is_own, original_class
from tfparallel.seams.compiled import compiled_loss, compiled_metrics, loss_of_batch
from tfparallel.seams.functional import Functional, as_outputs, functional_of, has_graph
from tfparallel.seams.keras import batches_of, compute_output_spec, end_build, layers_in
from tfparallel.tracing.apart import traced_apart

__all__ = [
    "build_ahead",
    "build_compiled",
    "outputs_of_graph",
    "symbolic_build",
    "types_of_batches",
]


def types_of_batches(dataset: tf.data.Dataset):
    """The types of a data set's batches, in their structure; None for what has no shape."""
    return keras.tree.map_structure(
        lambda spec: spec if hasattr(spec, "shape") else None, dataset.element_spec
    )


def build_ahead(model: keras.Model, iterator, data_batch, scope) -> None:
    """Builds a compiled model's loss, metrics and optimizer, if Keras can without a step.

    Args:
        model: The model; nothing is done of one with a `train_step` of its own, which alone
            knows what it calls.
        iterator: Keras's, of the batches, of which none is taken; or None.
        data_batch: A batch, where there is no iterator.
        scope: A context in which the variables are made.
    """
    if is_own(model, "train_step"):
        return
    if iterator is not None:
        data_batch = types_of_batches(batches_of(iterator))
    # Where it cannot, the step says what is wrong, or makes them itself.
    with contextlib.suppress(Exception), scope:
        symbolic_build(model, data_batch)


def symbolic_build(model: keras.Model, data_batch) -> None:
    """Builds a compiled model, its loss, metrics and optimizer, of a batch or its types.

    As Keras does, who calls the model with dense tensors for ragged ones: a `call` that pads them
    has none to pad then, so it is called with what it will be given.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data_batch)
    if model.built or not any(map(_is_ragged, keras.tree.flatten(x))):
        model._symbolic_build(data_batch=data_batch)
        return

    @tf.function(autograph=False)
    def outputs(x):
        with traced_apart():
            return model(x, training=False)

    types = keras.tree.map_structure(_type_of, x)
    with keras.StatelessScope():  # Whose end makes the variables, outside of the function.
        found = outputs.get_concrete_function(types).structured_outputs
    with traced_apart():
        build_compiled(model, found, y, sample_weight)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    end_build(model)


def build_compiled(model: keras.Model, y_pred, y, sample_weight) -> None:
    """Makes the states of compiled losses and metrics, of tensors or their types."""
    y_pred, y, sample_weight = keras.tree.map_structure(_symbolic, (y_pred, y, sample_weight))
    metrics, loss = compiled_metrics(model), compiled_loss(model)
    if metrics is not None and not metrics.built:
        compute_output_spec(model.compute_metrics, None, y, y_pred, sample_weight=sample_weight)
    if loss is not None and not loss.built:
        given = (None, y, y_pred, sample_weight)
        compute_output_spec(loss_of_batch, model, *given, training=False)


def outputs_of_graph(model: keras.Model):
    """The types of a model's outputs, where its graph knows them and no layer makes variables.

    Keras calls the model to learn them, which takes as long as a forward pass takes to trace. None
    where only a call tells: of a class of the user's own, or of pictures of any size.
    """
    if original_class(model) not in (keras.Sequential, Functional) or not has_graph(model):
        return None
    flat = functional_of(model).outputs
    if any(size is None for output in flat for size in output.shape[1:]):
        return None
    return as_outputs(model, flat) if all(each.built for each in layers_in(model)) else None


def _is_ragged(leaf) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.RaggedTensorSpec)


def _type_of(leaf) -> tf.TypeSpec | None:
    return leaf if leaf is None or isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)


def _symbolic(leaf) -> keras.KerasTensor | None:
    if leaf is None:
        return None
    return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
