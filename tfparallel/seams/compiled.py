"""Private names of the losses and metrics that Keras's `compile` builds."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.losses.loss import apply_mask, reduce_weighted_values, squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList
from keras.src.trainers.data_adapters.tf_dataset_adapter import (
    make_class_weight_map_fn as class_weighting,
)

__all__ = [
    "CompileLoss",
    "CompileMetrics",
    "MetricsList",
    "added_loss",
    "apply_mask",
    "class_weighting",
    "compile_arguments",
    "compiled_loss",
    "compiled_metrics",
    "flat_targets",
    "loss_of_batch",
    "loss_terms",
    "loss_tracker",
    "loss_trackers_of",
    "mask_epsilon",
    "metrics_by_output",
    "options_of",
    "reduce_weighted_values",
    "squeeze_or_expand_to_same_rank",
    "with_losses",
    "with_metrics_by_output",
]


def compiled_loss(model: keras.Model) -> CompileLoss | None:
    """Returns a model's compiled losses; None without any."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> CompileMetrics | None:
    """Returns a model's compiled metrics; None without any."""
    return model._compile_metrics


def mask_epsilon() -> float:
    """Returns what this Keras adds to the number of valid entries that divides a masked loss.

    It avoids a division by zero; later versions check for zero instead.
    """
    return 0.0 if "divide_no_nan" in apply_mask.__code__.co_names else keras.config.epsilon()


def loss_trackers_of(compiled: CompileLoss) -> list[Any]:
    """Returns the trackers that log the loss of each output; None for one that is not logged."""
    return list(compiled._metrics or ())


def options_of(loss: keras.losses.Loss) -> dict[str, Any]:
    """Returns the keyword arguments that a loss passes to its function."""
    return loss._fn_kwargs


def metrics_by_output(compiled: CompileMetrics) -> tuple[list[Any], list[Any]]:
    """Returns the metrics and the weighted metrics of each output, as lists; None for none."""
    return compiled._flat_metrics, compiled._flat_weighted_metrics


def with_metrics_by_output(
    compiled: CompileMetrics, metrics: list[Any], weighted: list[Any]
) -> CompileMetrics:
    """Returns a copy with these lists instead of its own; bypasses Keras's tracking."""
    other = object.__new__(CompileMetrics)
    lists = {"_flat_metrics": metrics, "_flat_weighted_metrics": weighted}
    vars(other).update(vars(compiled) | lists)
    return other


def flat_targets(compiled: CompileMetrics, y: Any) -> list[Any]:
    """Flattens targets, or outputs, in the order of the lists by output."""
    return compiled._flatten_y(y)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Returns the metric that averages a compiled model's losses."""
    return model._loss_tracker


def loss_terms(compiled: CompileLoss) -> list[Any]:
    """Returns the losses of a built `compile`, flat, each with `loss` and `name`."""
    return compiled._flat_losses


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """Returns the arguments of `compile`, which are saved with the model; None before."""
    return None if model._compile_config is None else model._compile_config.config


def loss_of_batch(model: keras.Model, x, y, y_pred, sample_weight, training: bool = True) -> Any:
    """Returns the loss of a batch by the model's `compute_loss`; handles older signatures."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


@contextlib.contextmanager
def with_losses(model: keras.Model, losses: Sequence[Any]) -> Iterator[None]:
    """Replaces the losses that a model's layers have added, within the block."""
    object.__setattr__(model, "_losses_override", list(losses))
    try:
        yield
    finally:
        object.__setattr__(model, "_losses_override", [])


def added_loss(model: keras.Model, loss: Any) -> Any:
    """Returns the contribution of a layer's added loss to the loss of the batch."""
    return model._aggregate_additional_loss(loss)
