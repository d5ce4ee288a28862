"""Private names of what Keras's `compile` makes: losses and metrics."""

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
    """What `compile` made of a model's losses; None without any."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> CompileMetrics | None:
    """What `compile` made of a model's metrics; None without any."""
    return model._compile_metrics


def mask_epsilon() -> float:
    """What this Keras adds to the number of valid entries by which it divides a masked loss.

    Lest it divide by zero; later versions look whether there is none.
    """
    return 0.0 if "divide_no_nan" in apply_mask.__code__.co_names else keras.config.epsilon()


def loss_trackers_of(compiled: CompileLoss) -> list[Any]:
    """What logs the loss of each output; None for one that is not logged."""
    return list(compiled._metrics or ())


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


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """What a compiled model averages its losses in."""
    return model._loss_tracker


def loss_terms(compiled: CompileLoss) -> list[Any]:
    """The losses of a built `compile`, flat, each with `loss` and `name`."""
    return compiled._flat_losses


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """What `compile` was given, which is saved with the model; None before."""
    return None if model._compile_config is None else model._compile_config.config


def loss_of_batch(model: keras.Model, x, y, y_pred, sample_weight, training: bool = True) -> Any:
    """The loss of a batch by the model's `compute_loss`, whose signature may be an older one."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


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
