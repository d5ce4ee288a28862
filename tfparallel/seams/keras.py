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
    "layers_held_by",
    "layers_in",
    "logits_beside",
    "make_global_seed_generator",
    "mask_of",
    "metrics_held_by",
    "model_supports_jit",
    "noise_shape_of",
    "output_projection",
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

# Modules of Keras's, by which a caller is told in the frames of the stack.
LAYER_MODULE = "keras.src.layers.layer"
TRAINER_MODULE = "keras.src.backend.tensorflow.trainer"
COMPILE_MODULE = "keras.src.trainers.trainer"
BATCH_NORMALIZATION_MODULE = "keras.src.layers.normalization.batch_normalization"
OPTIMIZER_MODULE = "keras.src.backend.tensorflow.optimizer"
LOSS_MODULE = "keras.src.losses.loss"
LOSS_SCALER = "scale_loss_for_distribution"

# What Keras keeps for each thread, by name.
GLOBAL_SEED_GENERATOR = "global_seed_generator"
DTYPE_POLICY = "dtype_policy"
NAME_NUMBERS = "object_name_uids"
DEFERRED_VARIABLES = "uninitialized_variables"
SHAPES_GRAPH = "scratch_graph"  # How the name of a graph begins in which shapes are worked out.


def layers_in(
    layer: keras.Layer, *, include_self: bool = True, recursive: bool = True
) -> list[keras.Layer]:
    """A layer, and those that it holds, however deep."""
    return list(layer._flatten_layers(include_self=include_self, recursive=recursive))


def seed_generators_of(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """The seeds that a layer holds itself."""
    return layer._seed_generators


def takes_training(layer: keras.Layer) -> bool:
    """Whether a layer's call says whether it is one in training."""
    return getattr(layer, "_call_has_training_arg", False)


def layers_held_by(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that a layer holds itself."""
    return layer._layers


def metrics_held_by(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """The metrics that a layer holds itself."""
    return layer._metrics


def variables_held_by(holder: keras.Layer | keras.Optimizer) -> list[keras.Variable]:
    """The variables that a layer or optimizer holds itself.

    Of a layer without those of its seeds and metrics; of an optimizer without those of another that
    it hands gradients on to.
    """
    if isinstance(holder, keras.Optimizer):
        return holder._variables
    return [*holder._trainable_variables, *holder._non_trainable_variables]


def storage_of(variable: keras.Variable) -> tf.Variable | None:
    """TensorFlow's variable in which one of Keras's has its value; None before it has one."""
    return variable._value


def set_storage(variable: keras.Variable, storage: tf.Variable | None) -> None:
    """Has a variable of Keras's have its value elsewhere."""
    variable._value = storage


def value_in_scope(variable: keras.Variable) -> Any:
    """The value that a stateless scope has for a variable; None without."""
    return get_stateless_scope().get_current_value(variable) if in_stateless_scope() else None


def autocast(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """A value of a variable in the type in which the layer that is called computes."""
    return variable._maybe_autocast(value)


def weights_held_by(layer: keras.Layer) -> list[keras.Variable]:
    """The weights that a layer holds itself and trains where it is not frozen."""
    return layer._trainable_variables


def mask_of(tensor: Any) -> Any:
    """The mask that Keras keeps beside a tensor; None without."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Has Keras find a mask beside a tensor, or none."""
    tensor._keras_mask = mask


def logits_beside(output: Any) -> Any:
    """The logits that Keras keeps beside an output of a softmax or sigmoid; None without."""
    return getattr(output, "_keras_logits", None)


def set_logits(output: Any, logits: Any) -> None:
    """Has a loss find logits beside an output."""
    output._keras_logits = logits


def get_global(name: str) -> Any:
    """Returns what Keras keeps for this thread under a name; None if there is nothing."""
    return global_state.get_global_attribute(name)


def set_global(name: str, value: Any) -> None:
    """Has Keras keep a value for this thread."""
    global_state.set_global_attribute(name, value)


def arguments_of(layer: keras.Layer) -> dict[str, Any] | None:
    """What a layer's constructor was called with; None where Keras has not kept it."""
    kept = getattr(layer, "_auto_config", None)
    return None if kept is None else dict(kept.config)


def batches_of(iterator):
    """The data set behind the iterator of a `fit`, of which no batch is taken."""
    return iterator._get_iterator()


def make_global_seed_generator() -> None:
    """Makes the generator of layers without a seed of their own, if there is none yet."""
    seed_generator.global_seed_generator()


def end_build(model: keras.Model) -> None:
    """Tells a model, built otherwise than by Keras, that it is."""
    model._post_build()


def initializer_of(variable: keras.Variable) -> Any:
    """What makes the value of a variable that has none yet."""
    return variable._initializer


def set_initializer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
    """Has something else make the value of a variable that has none yet."""
    variable._initializer = initializer


def initialize(variable: keras.Variable, value: Any = None) -> None:
    """Gives a variable its memory where TensorFlow places it now.

    Args:
        variable: It.
        value: Its value; None for that of its initializer, which it must wait for.
    """
    if value is None:
        variable._deferred_initialize()
    else:
        variable._initialize(value)


def shapes_of_build(layer: keras.Layer) -> dict[str, Any]:
    """By argument the shapes that a layer was built for."""
    return getattr(layer, "_build_shapes_dict", None) or {}


def reduced_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """The axes of which batch normalization takes the moments."""
    return layer._reduction_axes


def noise_shape_of(layer: keras.layers.Dropout, inputs: Any) -> Sequence[int | None]:
    """Sizes of what a dropout layer draws; None for those of the inputs."""
    if hasattr(layer, "_get_noise_shape"):
        return layer._get_noise_shape(inputs)
    return layer.noise_shape or (None,) * len(inputs.shape)


def output_projection(layer: keras.Layer) -> keras.Layer:
    """What attention of several heads ends with."""
    return layer._output_dense


def attention_axes(layer: keras.Layer) -> Sequence[int]:
    """Along which axes queries look at keys."""
    return getattr(layer, "_attention_axes", None) or (1,)


class AttentionParts(NamedTuple):
    """What attention of several heads is made of; the gate is None where there is none."""

    query: keras.Layer
    key: keras.Layer
    value: keras.Layer
    gate: keras.Layer | None
    output: keras.Layer
    scale: float


def attention_parts(layer: keras.Layer) -> AttentionParts:
    """What attention of several heads projects, and scales its queries, by."""
    names = ("query", "key", "value", "gate", "output")
    own = [getattr(layer, f"_{name}_dense", None) for name in names]
    scale = getattr(layer, "_inverse_sqrt_key_dim", None)
    return AttentionParts(*own, layer._inverse_sqrt_head_dim if scale is None else scale)


def attention_window(layer: keras.Layer) -> int | None:
    """How far queries of attention look; None for all the way."""
    return getattr(layer, "_sliding_window", None) or getattr(layer, "sliding_window", None)


def drop_masks(layer: keras.Layer, query: Any, value: Any, *rest: Any) -> Any:
    """Takes the masks off what attention reads, as Keras's own does; returns the query's.

    Args:
        layer: The attention.
        query: What it reads.
        value: Likewise.
        *rest: The key, if it is given, and the query's mask as it is given.
    """
    *keys, query_mask = rest
    if isinstance(layer, keras.layers.GroupQueryAttention):
        return query_mask
    query_mask = mask_of(query)
    for tensor in (query, value, *keys):
        set_mask(tensor, None)
    return query_mask


def dropout_of(layer: keras.Layer) -> keras.Layer:
    """What drops scores of attention."""
    return layer._dropout_layer


def clear_losses(layer: keras.Layer) -> None:
    """Forgets the losses that calls of a layer, and of what it holds, have added."""
    layer._clear_losses()


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Has the `fit` that is running, or the next one, begin at an epoch; None takes that back."""
    model._initial_epoch = epoch


def first_epoch(model: keras.Model) -> int | None:
    """The epoch of `begin_at`."""
    return model._initial_epoch


def untrack(holder: Any, value: Any) -> None:
    """Has a layer, a model or an optimizer forget a variable or a layer that it holds."""
    holder._tracker.untrack(value)


@contextlib.contextmanager
def unlocked(layer: keras.Layer) -> Iterator[None]:
    """Within it a built layer takes what it is given as its own."""
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()
