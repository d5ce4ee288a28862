"""The training step (`data_parallel` with joined outputs uses Keras's own).

| | |
| --- | --- |
| passes | forward and backward, as the parallelism defines; they return a `PassResult` |
| update | the optimizer, once, with the gradients of the whole batch |
| logs | the loss and the metrics: from the increments of pieces, or from joined predictions |
"""

import contextlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import attach, attached
from tfparallel.layout.layout import Layout
from tfparallel.seams.compiled import compiled_metrics, loss_tracker
from tfparallel.step.call import Call
from tfparallel.step.extended_model import ExtendedModel
from tfparallel.step.jit_compile import CompiledByDevice
from tfparallel.step.logs import LogsWhereTheyAre
from tfparallel.step.metrics import StepMetrics
from tfparallel.tracing.trial_trace import traced_apart
from tfparallel.variables.sharded import ShardedGradient


class PassResult(NamedTuple):
    """The result of a step's passes over the whole batch.

    Attributes:
        loss: The unscaled loss, a scalar.
        num_rows: B.
        variables: The trained variables.
        gradients: The gradient of each, scaled as the optimizer requires.
        predictions: The joined outputs; None if they were not joined.
        metrics: The compiled metrics, if outputs were not joined.
        growth: The increments of the metrics that are sums over the rows.
        outputs: The types of the outputs, in their structure, if some metric is no such sum.
        rows: The joined rows of the outputs that this metric reads.
        checked: Operations that must run before the weights change.
        divisor: The divisor of the loss, if there is a single one.
        num_added: The number of losses that layers and regularizers add; None for those that the
            model lists.
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


class OneStep(ExtendedModel, CompiledByDevice):
    """Extends a compiled Keras model of any layout.

    Attributes:
        layout: The devices of replicas, stages and parts.
    """

    layout: Layout
    _metrics_built_ahead: Any = None  # Metrics that plain Keras would not have built yet.
    _batches_of_fit: Any = None  # The batches of a running `fit`, as Keras counts them.

    def _symbolic_build(self, iterator=None, data_batch=None):
        metrics = compiled_metrics(self)
        is_new = metrics is not None and not metrics.built
        optimizer, vars(self)["optimizer"] = self.optimizer, None
        try:
            with traced_apart():
                super()._symbolic_build(iterator, data_batch)
        finally:
            vars(self)["optimizer"] = optimizer
            if is_new and metrics.built:
                attach(self, _metrics_built_ahead=metrics)

    def _build_optimizer(self) -> None:
        """Builds the optimizer for the weights that are trained now, if any."""
        weights = self.trainable_variables
        if self.optimizer is not None and not self.optimizer.built and weights:
            self.optimizer.build(weights)

    def make_train_function(self, force=False):
        """Builds the optimizer, and creates the function of a step of `fit`.

        Keras builds it in the first step. Here it is built before that step is traced, as initial
        values are assigned (`ScheduleFreeAdamW`), but not before training begins.
        """
        self._build_optimizer()
        return super().make_train_function(force)

    @contextlib.contextmanager
    def _around_a_batch(self, kind):
        with super()._around_a_batch(kind):
            yield
        if kind != "predict":
            attach(self, _metrics_built_ahead=None)  # Older versions of Keras have not reset them.

    def reset_metrics(self):
        """Resets the metrics, except those that Keras would only build in the first step.

        Such a metric continues from an earlier count in the first epoch, as in Keras.
        """
        metrics = self._metrics_built_ahead
        attach(self, _metrics_built_ahead=None)
        is_first = metrics is not None and metrics is compiled_metrics(self)
        states = metrics.variables if is_first else []
        before = [(copy, copy.numpy()) for state in states for copy in _copies_here(state)]
        super().reset_metrics()
        for copy, value in before:
            copy.assign(value)

    def _begin(self, call: Call) -> None:
        """Enters the contexts of a call. In `fit`, no step waits for logs that are not read."""
        super()._begin(call)
        # A user's own `fit` may do anything with its list.
        if call.kind != "fit" or call.is_own or call.has_callback_list:
            return
        epochs, max_epochs = call.arguments.get("epochs", 1), keras.config.max_epochs()
        epochs = epochs if max_epochs is None else min(epochs, max_epochs)  # Like Keras.
        params = {"verbose": call.arguments.get("verbose", "auto"), "epochs": epochs}
        callbacks = LogsWhereTheyAre(call.arguments.get("callbacks"), params["verbose"])
        call.arguments["callbacks"] = callbacks
        call.enter(attached(self, _callbacks_of_fit=(callbacks, params), _batches_of_fit=None))

    def _tell_callbacks(self, iterator) -> None:
        """Passes the parameters of a starting `fit`, with the batches, to its callbacks."""
        callbacks_of_fit = getattr(self, "_callbacks_of_fit", None)
        if callbacks_of_fit is not None and iterator is not None:
            callbacks, params = callbacks_of_fit
            callbacks.begin(self, steps=iterator.num_batches, **params)
            # The next build belongs to a validation.
            attach(self, _callbacks_of_fit=None, _batches_of_fit=iterator)

    def _beside_the_loss(self) -> AbstractContextManager:
        """The context of the loss, the metrics and their states, which belong to no layer."""
        return contextlib.nullcontext()

    def _trained_on(self, result: PassResult, x, y, sample_weight) -> dict[str, Any]:
        """Updates the weights and the metrics; returns the step's logs.

        Args:
            result: The result of the passes.
            x: The inputs of the step.
            y: Targets.
            sample_weight: Weights, or None.
        """
        with self._beside_the_loss():
            loss_tracker(self).update_state(result.loss, sample_weight=result.num_rows)
        if result.variables:
            with tf.control_dependencies(result.checked):
                gradients = result.gradients
                if result.checked:
                    gradients = [_where_it_is(gradient) for gradient in gradients]
            self._apply_result(result._replace(gradients=gradients))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        with self._beside_the_loss():
            if result.predictions is not None:
                return self.compute_metrics(x, y, result.predictions, sample_weight=sample_weight)
            result.metrics.update(result.growth, y, result.outputs, result.rows, sample_weight)
            return self.get_metrics_result()

    def _apply_result(self, result: PassResult) -> None:
        """Updates the weights with the gradients of the batch."""
        self.optimizer.apply_gradients(zip(result.gradients, result.variables, strict=True))


def _where_it_is(gradient):
    """Copies a gradient on its own device; a sparse one stays sparse."""
    if gradient is None:
        return None
    if isinstance(gradient, ShardedGradient):
        return ShardedGradient(list(map(_where_it_is, gradient.terms)))
    if isinstance(gradient, tf.IndexedSlices):
        values = _where_it_is(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    with tf.device(gradient.device):
        return tf.identity(gradient)


def _copies_here(variable: keras.Variable) -> Sequence:
    """The local storage of a variable: itself, or its copy on each device."""
    return getattr(variable.value, "values", [variable.value])
