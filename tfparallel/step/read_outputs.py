"""The outputs of a model that its compiled losses and metrics read."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfparallel.seams.compiled import compiled_loss, compiled_metrics
from tfparallel.step.loss_terms import call_with
from tfparallel.step.metrics import StepMetrics


def returning_read_outputs(model: keras.Model, call: Callable, y: Any) -> Callable:
    """Wraps a model's call: others take the place of outputs that no loss and no metric reads.

    As in Keras, such outputs may have any shape: they are neither judged nor joined.

    Args:
        model: A model with a built loss, whose step is Keras's.
        call: Its own `__call__`.
        y: The targets, of which only the structure counts.
    """

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        outputs = call(*args, **kwargs)
        flat = keras.tree.flatten(outputs)
        read = _places_read(model, y, outputs)
        if not read or len(read) == len(flat):
            return outputs
        replaced = [each if place in read else flat[min(read)] for place, each in enumerate(flat)]
        return keras.tree.pack_sequence_as(outputs, replaced)

    return wrapped


def _places_read(model, y, outputs) -> set[int]:
    """The indices, in the flat outputs, of those that a loss or a metric reads."""
    places = list(range(len(keras.tree.flatten(outputs))))
    structure = keras.tree.pack_sequence_as(outputs, places)
    metrics = compiled_metrics(model)
    each = () if metrics is None else map(id, metrics.metrics)
    read = set(StepMetrics.divided(metrics, list(each)).places(outputs))

    def noting(_):
        return lambda y_true, y_pred, weight: read.update(keras.tree.flatten(y_pred)) or 0.0

    call_with(noting, compiled_loss(model), y, structure, None)
    return read
