"""Private names of Keras."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend import compute_output_spec, in_stateless_scope
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext
from keras.src.losses.loss import (
    apply_mask,
    reduce_weighted_values,
    squeeze_or_expand_to_same_rank,
)
from keras.src.models import functional
from keras.src.models.functional import Functional
from keras.src.random import seed_generator
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList
from keras.src.trainers.data_adapters.tf_dataset_adapter import (
    make_class_weight_map_fn as class_weighting,
)
from keras.src.trainers.trainer import model_supports_jit

__all__ = [
    "BATCH_NORMALIZATION_MODULE",
    "COMPILE_MODULE",
    "DEFERRED_VARIABLES",
    "DTYPE_POLICY",
    "GLOBAL_SEED_GENERATOR",
    "LAYER_MODULE",
    "LEAVES_TRAINING",
    "LOSS_MODULE",
    "LOSS_SCALER",
    "NAME_NUMBERS",
    "OPTIMIZER_MODULE",
    "SHAPES_GRAPH",
    "TRAINER_MODULE",
    "CompileLoss",
    "CompileMetrics",
    "Functional",
    "MetricsList",
    "SafeModeScope",
    "apply_mask",
    "arguments_of",
    "batches_of",
    "calling_with",
    "class_weighting",
    "compiled_loss",
    "compiled_metrics",
    "compute_output_spec",
    "get_global",
    "in_stateless_scope",
    "in_training",
    "layers_in",
    "make_global_seed_generator",
    "mask_epsilon",
    "mask_of",
    "model_supports_jit",
    "reduce_weighted_values",
    "seed_generators_of",
    "set_global",
    "set_mask",
    "squeeze_or_expand_to_same_rank",
    "takes_training",
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
_CALL = "current_call_ctx"

# Up to Keras 3.15 a functional model hands its own `training` to each call. Since then a call finds
# it in the context, and one that is given another value leaves that to all calls that follow.
LEAVES_TRAINING = not hasattr(functional, "operation_fn")


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


def compiled_loss(model: keras.Model) -> CompileLoss | None:
    """What `compile` made of a model's losses; None without any."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> CompileMetrics | None:
    """What `compile` made of a model's metrics; None without any."""
    return model._compile_metrics


def mask_of(tensor: Any) -> Any:
    """The mask that Keras keeps beside a tensor; None without."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Has Keras find a mask beside a tensor, or none."""
    tensor._keras_mask = mask


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


def mask_epsilon() -> float:
    """What this Keras adds to the number of valid entries by which it divides a masked loss.

    Lest it divide by zero; later versions look whether there is none.
    """
    return 0.0 if "divide_no_nan" in apply_mask.__code__.co_names else keras.config.epsilon()


def in_training(operation: keras.Operation) -> Callable[..., Any]:
    """What a functional model calls for an operation, in training."""
    return operation if LEAVES_TRAINING else functional.operation_fn(operation, training=True)


@contextlib.contextmanager
def calling_with(layer: keras.Layer, training: bool) -> Iterator[CallContext]:
    """Has layers that are called find `training` where `layer` would have left it for them.

    Yields:
        Where they find it, as `training`.
    """
    own, outer = CallContext(entry_layer=layer), get_global(_CALL)
    own.set_value("training", training)
    set_global(_CALL, own)
    try:
        yield own
    finally:
        set_global(_CALL, outer)
