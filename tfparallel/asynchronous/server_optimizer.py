"""An optimizer whose update is done where the weights are: on the servers."""

import keras
import tensorflow as tf

from tfparallel.extend import extend

__all__ = ["on_servers"]


class ServerOptimizer:
    """Extends an optimizer: no strategy, and each variable's update on its own device.

    Keras asks the strategy to update the copies of a variable; here there are none.
    """

    def _apply_weight_decay(self, variables):
        if self.weight_decay is None:
            return
        for variable in variables:
            if self._use_weight_decay(variable):
                with _beside(variable):
                    rate = tf.cast(self.learning_rate, variable.dtype)
                    decay = tf.cast(self.weight_decay, variable.dtype)
                    self.assign_sub(variable, variable * decay * rate)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            with _beside(variable):
                self.update_step(gradient, variable, learning_rate)

    def _backend_increment_gradient_accumulators(self, grads, acc_grads):
        for gradient, accumulated in zip(grads, acc_grads, strict=True):
            with _beside(accumulated):
                accumulated.assign(accumulated + gradient)

    def _overwrite_model_variables_with_average_value(self, trainable_variables):
        pairs = zip(trainable_variables, self._model_variables_moving_average, strict=True)
        for variable, average in pairs:
            with _beside(variable):
                variable.assign(average)


def _beside(variable):
    return tf.device(variable.value.device)


def on_servers(optimizer: keras.Optimizer, scope) -> keras.Optimizer:
    """A new optimizer of the same kind, whose variables are made in a scope.

    Args:
        optimizer: One that has not been built.
        scope: What has the servers' `scope()`.

    Raises:
        ValueError: If it has state already, wraps others, or cannot be made from its config.
    """
    received = None
    if optimizer.built:
        received = f"a {type(optimizer).__name__} with slots"
    elif isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer
    ):
        received = f"a {type(optimizer).__name__}, which wraps others"
    if received is not None:
        raise ValueError(
            "Under sync='async' the servers hold the optimizer. A new one, that wraps no others, "
            f"is required. Received: {received}. Compile with a new optimizer of another kind, or "
            "take sync='every_step'."
        )
    with scope():
        try:
            copy = type(optimizer).from_config(optimizer.get_config())
        except Exception as error:
            raise ValueError(
                f"{type(optimizer).__name__} cannot be made from its config, as it must be to be "
                f"made on the servers: {error}."
            ) from error
    return extend(copy, ServerOptimizer)
