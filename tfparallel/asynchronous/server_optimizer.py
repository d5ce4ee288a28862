"""An optimizer whose variables, and whose update of each weight, are on the servers.

It stays the object that the program has, of its own class: its variables are given other storage,
and Keras, which asks a strategy to update a variable's copies, finds one with none but the variable
itself.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.keras_compat import MultiOptimizer
from tfparallel.seams.keras import set_storage
from tfparallel.update.built import own_variables

__all__ = ["move_to_servers"]


class _Extended:
    """Stands for `tf.distribute.StrategyExtended`.

    Args:
        strategy: The servers', which puts a slot where its weight is.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.colocate_vars_with = strategy.extended.colocate_vars_with

    @staticmethod
    def update(
        variable, function: Callable, args: tuple = (), kwargs=None, *, group: bool = True
    ) -> Any:
        """Calls a function that updates a variable, where the variable is."""
        with tf.device(variable.device):
            return function(variable, *args, **(kwargs or {}))


class OnServers:
    """Stands for the strategy of an optimizer, in a step that is traced outside of any scope."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.extended = _Extended(strategy)


def move_to_servers(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Gives an optimizer's variables storage on the servers, with the values that they have.

    Args:
        optimizer: Built or not; in place.
        strategy: The servers'.

    Raises:
        ValueError: If it wraps others.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer | MultiOptimizer):
        raise ValueError(
            "Under sync='async' an optimizer that wraps no others is required. Received: a "
            f"{type(optimizer).__name__}. Compile with one that does not, or take "
            "sync='every_step'."
        )
    for variable in own_variables(optimizer):
        if "/job:ps" not in variable.value.device:
            with tf.init_scope(), strategy.scope():
                value = variable.value.numpy()
                set_storage(variable, tf.Variable(value, dtype=variable.dtype, trainable=False))
    optimizer._distribution_strategy = OnServers(strategy)
