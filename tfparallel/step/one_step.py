"""The step of training (`data_parallel` with joined outputs takes Keras's own).

| | |
| --- | --- |
| passes | rows go forward and backward, in the parallelism's own way; they leave a `PassResult` |
| update | the optimizer, once, with the gradients of the whole batch |
| logs | the loss, and the metrics: of what each piece found, or of joined predictions |
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import attach, attached
from tfparallel.layout.layout import Layout
from tfparallel.seams.compiled import compiled_metrics, loss_tracker
from tfparallel.step.call import Call
from tfparallel.step.jit_compile import CompiledByDevice
from tfparallel.step.logs import LogsWhereTheyAre
from tfparallel.step.metrics import StepMetrics
from tfparallel.tracing.apart import traced_apart

__all__ = ["PassResult", "OneStep"]


class PassResult(NamedTuple):
    """What the passes of a step leave, of the whole batch.

    Attributes:
        loss: A scalar, not scaled.
        num_rows: B.
        variables: What is trained.
        gradients: Of each of them, scaled as the optimizer asks.
        predictions: Where the outputs met; else None.
        metrics: The compiled metrics, where they did not.
        growth: What the states of those grow by that are sums over the rows.
        outputs: The outputs' types, in their structure, where one of the metrics is not.
        rows: The joined rows of the outputs that it looks at.
        checked: What must be done before the weights may change.
        divisor: By what the loss is divided, if all of it is by one number.
        num_added: How many losses are added to it, of layers and of regularizers; None for those
            that the model lists.
    """

    loss: tf.Tensor
    num_rows: Any
    variables: Sequence[keras.Variable]
    gradients: Sequence[Any]
    predictions: Any = None
    metrics: StepMetrics | None = None
    growth: Sequence[tf.Tensor] = ()
    outputs: Any = None
    rows: Sequence[tf.Tensor] = ()
    checked: Sequence[tf.Operation] = ()
    divisor: Any = None
    num_added: int | None = None


class OneStep(CompiledByDevice):
    """Extends a compiled Keras model, whatever its layout.

    Attributes:
        layout: What is where.
    """

    layout: Layout
    _metrics_built_ahead: Any = None  # Those that plain Keras would not have built yet.

    def _symbolic_build(self, iterator=None, data_batch=None):
        metrics = compiled_metrics(self)
        is_new = metrics is not None and not metrics.built
        optimizer, vars(self)["optimizer"] = self.optimizer, None
        try:
            with traced_apart():
                super()._symbolic_build(iterator, data_batch)
        finally:
            vars(self)["optimizer"] = optimizer
        # Outside of that trace: what it begins with, as `ScheduleFreeAdamW` does, is assigned.
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.trainable_variables)
        if is_new and metrics.built:
            attach(self, _metrics_built_ahead=metrics)

    def reset_metrics(self):
        """Resets the metrics; not those that Keras builds in the first step, as it does not then.

        One that has counted before goes on from there, in the first epoch.
        """
        metrics = self._metrics_built_ahead
        attach(self, _metrics_built_ahead=None)
        is_first = metrics is not None and metrics is compiled_metrics(self)
        states = metrics.variables if is_first else []
        before = [(copy, copy.numpy()) for state in states for copy in _copies_here(state)]
        super().reset_metrics()
        for copy, value in before:
            copy.assign(value)

    def fit(self, *args, **kwargs):
        """Trains the model, as `keras.Model.fit`; batch sizes are global."""
        return self._run(Call(self, "fit", args, kwargs), super().fit)

    def evaluate(self, *args, **kwargs):
        """Evaluates the model, as `keras.Model.evaluate`."""
        return self._run(Call(self, "evaluate", args, kwargs), super().evaluate)

    def predict(self, *args, **kwargs):
        """Predicts, as `keras.Model.predict`."""
        return self._run(Call(self, "predict", args, kwargs), super().predict)

    def train_on_batch(self, *args, **kwargs):
        """Trains on a global batch, as `keras.Model.train_on_batch`."""
        with self._around_a_batch("fit"):
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args, **kwargs):
        """Evaluates on a global batch, as `keras.Model.test_on_batch`."""
        with self._around_a_batch("evaluate"):
            return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args, **kwargs):
        """Predicts of a global batch, as `keras.Model.predict_on_batch`."""
        with self._around_a_batch("predict"):
            return super().predict_on_batch(*args, **kwargs)

    def _around_a_batch(self, kind: str) -> AbstractContextManager:
        """What is around a step that is called by itself: "fit", "evaluate" or "predict"."""
        return contextlib.nullcontext()

    def _run(self, call: Call, method: Callable) -> Any:
        with call:
            self._look_at(call)
            self._begin(call)
            return call.run(method)

    def _look_at(self, call: Call) -> None:
        """Checks the arguments of a call, or puts others in their place."""

    def _begin(self, call: Call) -> None:
        """Enters what is around a call. Of `fit`: no step waits for logs that nobody reads."""
        # A `fit` of the user's own may do anything with its list.
        if call.kind != "fit" or call.is_own or call.has_callback_list:
            return
        epochs, most = call.asked.get("epochs", 1), keras.config.max_epochs()
        epochs = epochs if most is None else min(epochs, most)  # As Keras tells its callbacks.
        params = {"verbose": call.asked.get("verbose", "auto"), "epochs": epochs}
        callbacks = LogsWhereTheyAre(call.asked.get("callbacks"), params["verbose"])
        call.asked["callbacks"] = callbacks
        call.enter(attached(self, _callbacks_of_fit=(callbacks, params)))

    def _tell_callbacks(self, iterator) -> None:
        """Tells the callbacks of a `fit` that begins what Keras tells them, of its batches too."""
        if iterator is None:  # A step of `train_on_batch`, in which Keras builds them.
            attach(self, _metrics_built_ahead=None)
        told = getattr(self, "_callbacks_of_fit", None)
        if told is not None and iterator is not None:
            callbacks, params = told
            callbacks.begin(self, steps=iterator.num_batches, **params)
            attach(self, _callbacks_of_fit=None)  # What else is built is of a validation.

    def _beside_the_loss(self) -> AbstractContextManager:
        """Where the loss is, and what belongs to no layer: metrics, and their states."""
        return contextlib.nullcontext()

    def _trained_on(self, found: PassResult, x, y, sample_weight) -> dict[str, Any]:
        """Updates the weights and the metrics; returns the step's logs.

        Args:
            found: What the passes left.
            x: Inputs, as the step was given them.
            y: Targets.
            sample_weight: Weights, or None.
        """
        with self._beside_the_loss():
            loss_tracker(self).update_state(found.loss, sample_weight=found.num_rows)
        if found.variables:
            with tf.control_dependencies(found.checked):
                gradients = found.gradients
                if found.checked:
                    gradients = [_where_it_is(gradient) for gradient in gradients]
            self._apply_found(found._replace(gradients=gradients))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        with self._beside_the_loss():
            if found.predictions is not None:
                return self.compute_metrics(x, y, found.predictions, sample_weight=sample_weight)
            found.metrics.update(found.growth, y, found.outputs, found.rows, sample_weight)
            return self.get_metrics_result()

    def _apply_found(self, found: PassResult) -> None:
        """Changes the weights as the gradients of the batch say."""
        self.optimizer.apply_gradients(zip(found.gradients, found.variables, strict=True))


def _where_it_is(gradient):
    """The same, on its own device; sparse values stay sparse."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _where_it_is(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    with tf.device(gradient.device):
        return tf.identity(gradient)


def _copies_here(variable: keras.Variable) -> Sequence:
    """What this process has of a variable: itself, or a copy on each device."""
    return getattr(variable.value, "values", [variable.value])
