"""Private names of Keras."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec, get_stateless_scope, in_stateless_scope
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.trainers.trainer import model_supports_jit

__all__ = [
    "BATCH_NORMALIZATION_MODULE",
    "COMPILE_MODULE",
    "DEFERRED_VARIABLES",
    "DTYPE_POLICY",
    "GLOBAL_SEED_GENERATOR",
    "LAYER_MODULE",
    "LOSS_MODULE",
    "LOSS_SCALER",
    "NAME_NUMBERS",
    "OPTIMIZER_MODULE",
    "SHAPES_GRAPH",
    "TRAINER_MODULE",
    "KerasSaveable",
    "SafeModeScope",
    "arguments_of",
    "attention_axes",
    "attention_parts",
    "attention_window",
    "autocast",
    "batches_of",
    "begin_at",
    "clear_losses",
    "compute_output_spec",
    "drop_masks",
    "dropout_of",
    "end_build",
    "first_epoch",
    "get_global",
    "in_stateless_scope",
    "initialize",
    "initializer_of",
    "is_in_call",
    "key_of_storage",
    "layers_held_by",
    "layers_in",
    "layout_map_of",
    "logits_beside",
    "make_global_seed_generator",
    "mask_of",
    "metrics_held_by",
    "model_supports_jit",
    "output_projection",
    "pass_epochs",
    "reduced_axes",
    "seed_generators_of",
    "set_global",
    "set_initializer",
    "set_logits",
    "set_mask",
    "set_storage",
    "shapes_of_build",
    "storage_of",
    "takes_training",
    "unlocked",
    "untrack",
    "value_in_scope",
    "variables_held_by",
    "weights_held_by",
]

# Keras modules that identify a caller in the frames of the stack.
LAYER_MODULE = "keras.src.layers.layer"
TRAINER_MODULE = "keras.src.backend.tensorflow.trainer"
COMPILE_MODULE = "keras.src.trainers.trainer"
BATCH_NORMALIZATION_MODULE = "keras.src.layers.normalization.batch_normalization"
OPTIMIZER_MODULE = "keras.src.backend.tensorflow.optimizer"
LOSS_MODULE = "keras.src.losses.loss"
LOSS_SCALER = "scale_loss_for_distribution"

# Keys of Keras's thread-local state.
GLOBAL_SEED_GENERATOR = "global_seed_generator"
DTYPE_POLICY = "dtype_policy"
NAME_NUMBERS = "object_name_uids"
DEFERRED_VARIABLES = "uninitialized_variables"
SHAPES_GRAPH = "scratch_graph"  # The prefix of the names of graphs for shape inference.


def layers_in(
    layer: keras.Layer, *, include_self: bool = True, recursive: bool = True
) -> list[keras.Layer]:
    """Returns a layer and all layers that it holds, at any depth."""
    return list(layer._flatten_layers(include_self=include_self, recursive=recursive))


def seed_generators_of(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the seed generators that a layer holds directly."""
    return layer._seed_generators


def takes_training(layer: keras.Layer) -> bool:
    """Returns whether a layer's call has an argument `training`."""
    return getattr(layer, "_call_has_training_arg", False)


def layers_held_by(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a layer holds directly."""
    return layer._layers


def layout_map_of(
    distribution: keras.distribution.ModelParallel,
) -> keras.distribution.LayoutMap:
    """Returns the layout map that a distribution was made with."""
    return distribution._layout_map


def metrics_held_by(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """Returns the metrics that a layer holds directly."""
    return layer._metrics


def variables_held_by(holder: keras.Layer | keras.Optimizer) -> list[keras.Variable]:
    """Returns the variables that a layer or optimizer holds directly.

    For a layer, without those of its seeds and metrics; for an optimizer, without those of another
    optimizer that it passes gradients to.
    """
    if isinstance(holder, keras.Optimizer):
        return holder._variables
    return [*holder._trainable_variables, *holder._non_trainable_variables]


def storage_of(variable: keras.Variable) -> tf.Variable | None:
    """Returns the TensorFlow variable of a Keras variable; None before it has a value."""
    return variable._value


def key_of_storage(variable: keras.Variable) -> str | None:
    """Returns the name by which an optimizer knows a variable's storage; None without."""
    return getattr(variable._value, "_unique_id", None)


def set_storage(variable: keras.Variable, storage: tf.Variable | None) -> None:
    """Sets the TensorFlow variable of a Keras variable."""
    variable._value = storage


def value_in_scope(variable: keras.Variable) -> Any:
    """Returns a variable's value in the current stateless scope; None without."""
    return get_stateless_scope().get_current_value(variable) if in_stateless_scope() else None


def autocast(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Casts a variable's value to the compute dtype of the layer being called."""
    return variable._maybe_autocast(value)


def weights_held_by(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that a layer holds directly and trains unless it is frozen."""
    return layer._trainable_variables


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras keeps on a tensor; None without."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Sets the mask that Keras keeps on a tensor; None removes it."""
    tensor._keras_mask = mask


def logits_beside(output: Any) -> Any:
    """Returns the logits that Keras keeps on a softmax or sigmoid output; None without."""
    return getattr(output, "_keras_logits", None)


def set_logits(output: Any, logits: Any) -> None:
    """Sets the logits of an output, for a loss."""
    output._keras_logits = logits


def get_global(name: str) -> Any:
    """Returns a value of Keras's thread-local state; None if there is none."""
    return global_state.get_global_attribute(name)


def set_global(name: str, value: Any) -> None:
    """Sets a value of Keras's thread-local state."""
    global_state.set_global_attribute(name, value)


def is_in_call() -> bool:
    """Returns whether a layer is being called in this thread."""
    return get_global("current_call_ctx") is not None


def arguments_of(layer: keras.Layer) -> dict[str, Any] | None:
    """Returns the arguments of a layer's constructor; None if Keras has not recorded them."""
    auto_config = getattr(layer, "_auto_config", None)
    return None if auto_config is None else dict(auto_config.config)


def batches_of(iterator):
    """Returns the data set behind the iterator of a `fit`, without taking a batch."""
    return iterator._get_iterator()


def make_global_seed_generator() -> None:
    """Creates the seed generator of layers without their own, if there is none yet."""
    seed_generator.global_seed_generator()


def end_build(model: keras.Model) -> None:
    """Marks a model as built, if something other than Keras built it."""
    model._post_build()


def initializer_of(variable: keras.Variable) -> Any:
    """Returns the initializer of a variable that has no value yet."""
    return variable._initializer


def set_initializer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
    """Sets the initializer of a variable that has no value yet."""
    variable._initializer = initializer


def initialize(variable: keras.Variable, value: Any = None) -> None:
    """Allocates a variable where TensorFlow places it now.

    Args:
        variable: The variable.
        value: Its value; None runs its initializer, which must be pending.
    """
    if value is None:
        variable._deferred_initialize()
    else:
        variable._initialize(value)


def shapes_of_build(layer: keras.Layer) -> dict[str, Any]:
    """Returns the shapes that a layer was built for, by argument."""
    return getattr(layer, "_build_shapes_dict", None) or {}


def reduced_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Returns the axes that batch normalization reduces."""
    return layer._reduction_axes


def output_projection(layer: keras.Layer) -> keras.Layer:
    """Returns the output projection of multi-head attention."""
    return layer._output_dense


def attention_axes(layer: keras.Layer) -> Sequence[int]:
    """Returns the axes along which queries attend to keys."""
    return getattr(layer, "_attention_axes", None) or (1,)


class AttentionParts(NamedTuple):
    """The projections of multi-head attention, and its scale; `gate` may be None."""

    query: keras.Layer
    key: keras.Layer
    value: keras.Layer
    gate: keras.Layer | None
    output: keras.Layer
    scale: float


def attention_parts(layer: keras.Layer) -> AttentionParts:
    """Returns the projections of multi-head attention, and the scale of its queries."""
    names = ("query", "key", "value", "gate", "output")
    projections = [getattr(layer, f"_{name}_dense", None) for name in names]
    scale = getattr(layer, "_inverse_sqrt_key_dim", None)
    return AttentionParts(*projections, layer._inverse_sqrt_head_dim if scale is None else scale)


def attention_window(layer: keras.Layer) -> int | None:
    """Returns how far queries of attention attend; None without limit."""
    return getattr(layer, "_sliding_window", None) or getattr(layer, "sliding_window", None)


def drop_masks(layer: keras.Layer, query: Any, value: Any, *rest: Any) -> Any:
    """Removes the masks from the inputs of attention, as Keras's does; returns the query's.

    Args:
        layer: The attention.
        query: The query.
        value: The value.
        *rest: The key, if there is one, and the query's mask argument.
    """
    *keys, query_mask = rest
    if isinstance(layer, keras.layers.GroupQueryAttention):
        return query_mask
    query_mask = mask_of(query)
    for tensor in (query, value, *keys):
        set_mask(tensor, None)
    return query_mask


def dropout_of(layer: keras.Layer) -> keras.Layer:
    """Returns the layer that drops attention scores."""
    return layer._dropout_layer


def clear_losses(layer: keras.Layer) -> None:
    """Clears the losses that calls of a layer, and of its inner layers, have added."""
    layer._clear_losses()


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Makes the running `fit`, or the next one, begin at an epoch; None resets it."""
    model._initial_epoch = epoch


def first_epoch(model: keras.Model) -> int | None:
    """Returns the epoch of `begin_at`."""
    return model._initial_epoch


def pass_epochs(batches: Any, number: int) -> None:
    """Reads from the batches of a `fit` with `steps_per_epoch` those of the first epochs."""
    for _ in range(number):
        with batches.catch_stop_iteration():
            for *_, iterator in batches:
                for _ in range(batches.steps_per_execution):
                    next(iterator)


def untrack(holder: Any, value: Any) -> None:
    """Makes a layer, a model or an optimizer forget a variable or layer that it holds."""
    holder._tracker.untrack(value)


@contextlib.contextmanager
def unlocked(layer: keras.Layer) -> Iterator[None]:
    """Lets a built layer track new attributes, within the block."""
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()
