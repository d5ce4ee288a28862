"""Which losses and metrics of a compiled model may be computed where the rows are, by their names.

Keras's own are known: a value for each example, states that add up. What a user wrote is not
believed; a mean that is called a metric may hold a maximum. The exceptions are those that look at
the whole batch: hinge losses ask whether *all* labels are 0 or 1, `Dice`, `Tversky` and `Circle`
sum over the batch. `CTC` has a value for each example, but TensorFlow fails to compute it for none,
and a micro-batch may have none. What the rest do with the shapes of a program's data is tried
(`apart.py`).
"""

from collections.abc import Iterator

import keras

from tfparallel.extend import is_own, original_class
from tfparallel.seams.keras import accuracy_metrics
from tfparallel.seams.keras import losses as keras_losses
from tfparallel.seams.keras import metrics as keras_metrics
from tfparallel.step.loss import REDUCTIONS

__all__ = ["metrics_not_by_rows", "why_not_by_rows"]

_WRAPPER, _MEAN = keras_losses.LossFunctionWrapper, keras_metrics.MeanMetricWrapper
_fns = keras_losses.losses
_BY_EXAMPLE = {
    _fns.mean_squared_error, _fns.mean_absolute_error, _fns.mean_absolute_percentage_error,
    _fns.mean_squared_logarithmic_error, _fns.cosine_similarity, _fns.huber, _fns.log_cosh,
    _fns.categorical_hinge, _fns.kl_divergence, _fns.poisson, _fns.binary_crossentropy,
    _fns.binary_focal_crossentropy, _fns.categorical_crossentropy,
    _fns.categorical_focal_crossentropy, _fns.sparse_categorical_crossentropy,
    _fns.categorical_generalized_cross_entropy,
    accuracy_metrics.accuracy, accuracy_metrics.binary_accuracy,
    accuracy_metrics.categorical_accuracy, accuracy_metrics.sparse_categorical_accuracy,
    accuracy_metrics.top_k_categorical_accuracy,
    accuracy_metrics.sparse_top_k_categorical_accuracy,
    keras_metrics.regression_metrics.cosine_similarity,
}  # fmt: skip
# Metrics whose variables are sums over the examples.
_ADD_UP = (
    keras_metrics.RootMeanSquaredError, keras_metrics.R2Score, keras_metrics.FBetaScore,
    keras_metrics.F1Score, keras_metrics.IoU, keras_metrics.MeanIoU, keras_metrics.BinaryIoU,
    keras_metrics.OneHotIoU, keras_metrics.OneHotMeanIoU, keras_metrics.AUC,
    keras_metrics.Precision, keras_metrics.Recall, keras_metrics.TruePositives,
    keras_metrics.TrueNegatives, keras_metrics.FalsePositives, keras_metrics.FalseNegatives,
    keras_metrics.SensitivityAtSpecificity, keras_metrics.SpecificityAtSensitivity,
    keras_metrics.PrecisionAtRecall, keras_metrics.RecallAtPrecision,
)  # fmt: skip


def why_not_by_rows(model: keras.Model) -> str | None:
    """Why a model's loss is not known to be one of each row; None where it is.

    Args:
        model: A compiled model, its loss and metrics built.
    """
    for method in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        if is_own(model, method):
            return f"`{method}` is the user's own"
    return next(_reasons(model), None)


def metrics_not_by_rows(model: keras.Model) -> dict[int, str]:
    """Which compiled metrics are not known to be sums over the rows, by id, with the reason."""
    compiled = model._compile_metrics
    return {
        id(metric): f"metric '{metric.name}' may not be a sum over the examples"
        for metric in (() if compiled is None else compiled.metrics)
        if not _adds_up(metric)
    }


def _reasons(model) -> Iterator[str]:
    loss, metrics = model._compile_loss, model._compile_metrics
    for compiled in (loss, metrics):
        if compiled is not None and not compiled.built:
            yield "the loss and the metrics are not built"
            return
    if loss is None or not loss._flat_losses:
        yield "there is no loss"
        return
    for term in loss._flat_losses:
        if not _is_by_example(term.loss) or not _keeps(term.loss, "call", _WRAPPER):
            yield f"loss '{getattr(term.loss, 'name', term.loss)}' may look at several examples"
        elif type(term.loss).__call__ is not keras.losses.Loss.__call__:
            yield f"loss '{term.loss.name}' reduces in its own way"
        elif term.loss.reduction not in REDUCTIONS:
            yield f"loss '{term.loss.name}' has reduction={term.loss.reduction!r}"


def _keeps(thing, method: str, cls: type) -> bool:
    """Whether a method is still that of a class of Keras's."""
    return method not in vars(thing) and getattr(type(thing), method) is getattr(cls, method)


def _is_by_example(wrapper) -> bool:
    """Whether what wraps a function has one known to give a value for each example."""
    function = getattr(wrapper, "fn", getattr(wrapper, "_fn", None))
    return (
        any(function is known for known in _BY_EXAMPLE)
        and _is_kerass(wrapper)
        and getattr(wrapper, "_fn_kwargs", {}).get("axis", -1) == -1
    )


def _adds_up(metric) -> bool:
    if type(metric) in _ADD_UP:
        return "update_state" not in vars(metric)
    is_mean = isinstance(metric, _MEAN) and _keeps(metric, "update_state", _MEAN)
    return is_mean and _is_kerass(metric) and _is_by_example(metric)


def _is_kerass(thing) -> bool:
    return original_class(thing).__module__.startswith("keras.src.")
