"""Private names of Keras."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
from keras.src.saving.keras_saveable import KerasSaveable
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
    "KerasSaveable",
    "MetricsList",
    "SafeModeScope",
    "added_loss",
    "apply_mask",
    "arguments_of",
    "as_outputs",
    "attention_axes",
    "batches_of",
    "begin_at",
    "calling_with",
    "calls_of",
    "calls_to",
    "class_weighting",
    "clear_losses",
    "compile_arguments",
    "compiled_loss",
    "compiled_metrics",
    "compute_output_spec",
    "dropout_of",
    "end_build",
    "first_epoch",
    "flat_inputs",
    "flat_targets",
    "functional_of",
    "get_global",
    "has_graph",
    "in_stateless_scope",
    "in_training",
    "initialize",
    "initializer_of",
    "inputs_of",
    "layers_in",
    "logits_beside",
    "loss_of_batch",
    "loss_terms",
    "loss_tracker",
    "make_global_seed_generator",
    "maker_of",
    "mask_epsilon",
    "mask_of",
    "metrics_by_output",
    "model_supports_jit",
    "noise_shape_of",
    "options_of",
    "output_projection",
    "reduce_weighted_values",
    "reduced_axes",
    "run_through",
    "seed_generators_of",
    "set_global",
    "set_initializer",
    "set_logits",
    "set_mask",
    "shapes_of_build",
    "squeeze_or_expand_to_same_rank",
    "takes_training",
    "unlocked",
    "untrack",
    "variables_held_by",
    "with_losses",
    "with_metrics_by_output",
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


def variables_held_by(layer: keras.Layer) -> list[keras.Variable]:
    """The variables that a layer holds itself, but for those of its seeds and metrics."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


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


def functional_of(model: keras.Model) -> Any:
    """The functional model that a Sequential one holds; of any other the model itself."""
    return getattr(model, "_functional", None) or model


def calls_of(model: keras.Model) -> list[Any]:
    """The calls of a functional model's graph, inputs among them, in the order of Keras's.

    Returns:
        Nodes, with `operation`, `is_input`, `input_tensors`, `outputs` and `arguments`; empty for
        what has no graph.
    """
    nodes = getattr(functional_of(model), "_nodes_by_depth", {})
    return [node for depth in sorted(nodes, reverse=True) for node in nodes[depth]]


def has_graph(layer: keras.Layer) -> bool:
    """Whether a layer is a functional model, or a Sequential one with an input shape."""
    return hasattr(functional_of(layer), "_nodes_by_depth")


def calls_to(operation: keras.Operation) -> list[Any]:
    """The calls of a layer, or of another operation, in all graphs: nodes, as of `calls_of`."""
    return operation._inbound_nodes


def maker_of(tensor: keras.KerasTensor) -> keras.Operation:
    """The operation that makes a symbolic tensor."""
    return tensor._keras_history.operation


def as_outputs(model: keras.Model, flat: Sequence[Any]) -> Any:
    """Puts values into the structure of a functional model's outputs."""
    return keras.tree.pack_sequence_as(functional_of(model)._outputs_struct, list(flat))


def flat_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """What is given to a functional model, as its inputs are asked for, in their order."""
    return model._standardize_inputs(inputs)


def run_through(model: keras.Model, inputs: Any, call: Callable[..., Any]) -> Any:
    """Computes a functional model of other tensors.

    Args:
        model: Functional.
        inputs: In its structure.
        call: Is given an operation of the model and its arguments, and returns its outputs.
    """
    return model._run_through_graph(inputs, lambda operation: operation, call)


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


def inputs_of(model: keras.Model) -> Any:
    """The structure of a functional or Sequential model's inputs; None of any other."""
    return getattr(functional_of(model), "_inputs_struct", None)


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


def dropout_of(layer: keras.Layer) -> keras.Layer:
    """What drops scores of attention."""
    return layer._dropout_layer


def options_of(loss: keras.losses.Loss) -> dict[str, Any]:
    """What a loss hands its function, beside targets and outputs."""
    return loss._fn_kwargs


def metrics_by_output(compiled: CompileMetrics) -> tuple[list[Any], list[Any]]:
    """Of each output the list of its metrics, and of its weighted ones; None for none."""
    return compiled._flat_metrics, compiled._flat_weighted_metrics


def with_metrics_by_output(
    compiled: CompileMetrics, metrics: list[Any], weighted: list[Any]
) -> CompileMetrics:
    """The same, with these lists in place of its own, and past Keras's tracking."""
    other = object.__new__(CompileMetrics)
    lists = {"_flat_metrics": metrics, "_flat_weighted_metrics": weighted}
    vars(other).update(vars(compiled) | lists)
    return other


def flat_targets(compiled: CompileMetrics, y: Any) -> list[Any]:
    """Targets, or outputs, in the order of the lists by output."""
    return compiled._flatten_y(y)


def clear_losses(layer: keras.Layer) -> None:
    """Forgets the losses that calls of a layer, and of what it holds, have added."""
    layer._clear_losses()


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """What a compiled model averages its losses in."""
    return model._loss_tracker


def loss_terms(compiled: CompileLoss) -> list[Any]:
    """The losses of a built `compile`, flat, each with `loss` and `name`."""
    return compiled._flat_losses


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """What `compile` was given, which is saved with the model; None before."""
    return None if model._compile_config is None else model._compile_config.config


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Has the `fit` that is running, or the next one, begin at an epoch; None takes that back."""
    model._initial_epoch = epoch


def first_epoch(model: keras.Model) -> int | None:
    """The epoch of `begin_at`."""
    return model._initial_epoch


def loss_of_batch(model: keras.Model, x, y, y_pred, sample_weight=None, training=True) -> Any:
    """The loss of a batch by the model's `compute_loss`, whose signature may be an older one."""
    given = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    return model._compute_loss(**given, training=training)


@contextlib.contextmanager
def with_losses(model: keras.Model, losses: Sequence[Any]) -> Iterator[None]:
    """Within it these are the losses that a model's layers have added."""
    object.__setattr__(model, "_losses_override", list(losses))
    try:
        yield
    finally:
        object.__setattr__(model, "_losses_override", [])


def added_loss(model: keras.Model, loss: Any) -> Any:
    """What a loss that a layer has added counts for in that of the batch."""
    return model._aggregate_additional_loss(loss)


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
