"""Updates of variables with copies: each replica runs the whole optimizer, on its own devices.

All copies get the same gradient and have the same slots, so they stay equal, and nothing is sent:
what looks at several weights at once, such as a norm of all of them, each replica computes of its
own copies.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.layers.variable import parts_of
from tfparallel.placement.copies import (
    Replica,
    at_work,
    copies_of,
    copy_to,
    first_copy,
    replica_at_work,
)
from tfparallel.placement.optimizer import wrapped_by

__all__ = ["update_copies"]


class CopyingOptimizer:
    """Extends any optimizer whose updates are placed (`placement/optimizer.py`)."""

    def build(self, variables):
        """Makes the slots, a copy of each in each replica."""
        super().build(variables)
        copy_to(self._replicas, _own_variables(self))

    def apply(self, grads, trainable_variables=None):
        """Applies the gradients in each replica."""
        if replica_at_work() is not None:  # Another optimizer hands them on.
            super().apply(grads, trainable_variables)
            return
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                self.build(trainable_variables)
            # Each replica would update it once more.
            copy_to(self._replicas, parts_of(trainable_variables))
        for replica in self._replicas:
            with at_work(replica):
                own = _brought(grads, trainable_variables or self._trainable_variables)
                super().apply(own, trainable_variables)

    def finalize_variable_values(self, var_list):
        """Sets the weights to their moving averages, if that was asked for, in each replica."""
        for replica in self._replicas:
            with at_work(replica):
                super().finalize_variable_values(var_list)

    def _var_key(self, variable):
        return super()._var_key(first_copy(variable))


def update_copies(optimizer: keras.Optimizer, replicas: Sequence[Replica]) -> None:
    """Has an optimizer, whose updates are placed, update all copies of variables; in place."""
    extend(optimizer, CopyingOptimizer, _replicas=replicas)
    if optimizer.built:
        copy_to(replicas, _own_variables(optimizer))
    for inner in wrapped_by(optimizer):
        update_copies(inner, replicas)


def _own_variables(optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, without the model's."""
    trained = {id(variable) for variable in getattr(optimizer, "_trainable_variables", ())}
    return [variable for variable in optimizer._variables if id(variable) not in trained]


def _brought(gradients, variables) -> list:
    """Gradients where the copies of their variables are, in the replica at work."""
    index = replica_at_work().index
    found = []
    for gradient, variable in zip(gradients, variables, strict=True):
        is_dense = tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)
        copies = copies_of(variable)
        if is_dense and index < len(copies):
            with tf.device(copies[index].device):
                gradient = tf.identity(gradient)
        found.append(gradient)
    return found
