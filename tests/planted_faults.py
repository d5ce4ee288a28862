"""Three faults of parallel training, planted in `data_parallel`: a check must find each.

Each function takes device names and returns a form, as `check_parity` takes it.
"""

import contextlib
import functools

import tensorflow as tf

import tfparallel
from tfparallel.collectives import reducer
from tfparallel.data.partition import row_ranges

__all__ = ["FAULTS", "data_parallel_on"]


def data_parallel_on(devices):
    """The form without a fault."""
    return functools.partial(tfparallel.data_parallel, devices=devices)


def loss_divided_by_the_wrong_number(devices):
    """The mean of the replicas' means: right where all have as many rows, as in many loops."""

    def mean_of_means(compute_loss, y, y_pred):
        ranges = row_ranges(_num_rows(y), len(devices))
        return tf.add_n(
            [_of_rows(compute_loss, y, y_pred, start, start + size) for start, size in ranges]
        ) / len(devices)

    return _with_loss(devices, mean_of_means)


def rows_of_a_replica_dropped(devices):
    """The last replica's rows count neither in the loss nor in the gradient."""

    def without_last(compute_loss, y, y_pred):
        end, _ = row_ranges(_num_rows(y), len(devices))[-1]
        return _of_rows(compute_loss, y, y_pred, 0, end)

    return _with_loss(devices, without_last)


def missing_reduction(devices):
    """The gradient of the first replica alone, without those of the others."""

    def make(build_model):
        model = tfparallel.data_parallel(build_model, devices=devices)
        return _replaced(model, "fit", functools.partial(_with_first_term_alone, model.fit))

    return make


FAULTS = {
    fault.__name__: fault
    for fault in (loss_divided_by_the_wrong_number, rows_of_a_replica_dropped, missing_reduction)
}


def _with_loss(devices, loss):
    def make(build_model):
        model = tfparallel.data_parallel(build_model, devices=devices)
        compute_loss = model.compute_loss

        def wrong(x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return loss(compute_loss, y, y_pred)

        return _replaced(model, "compute_loss", wrong)

    return make


def _replaced(model, name, method):
    object.__setattr__(model, name, method)
    return model


def _num_rows(y):
    return tf.shape(y)[0]


def _of_rows(compute_loss, y, y_pred, start, end):
    return compute_loss(y=y[start:end], y_pred=y_pred[start:end])


def _with_first_term_alone(fit, *args, **kwargs):
    whole = reducer.added
    reducer.added = lambda terms: whole(terms[:1])
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, reducer, "added", whole)
        return fit(*args, **kwargs)
