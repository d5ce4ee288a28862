"""Updates of variables with copies: each replica runs the whole optimizer, on its own devices.

All copies get the same gradient and have the same slots. So with an optimizer of Keras's they stay
equal, and nothing is sent: what looks at several weights at once, such as a norm of all of them,
each replica computes of its own copies. Where two runs of an update may differ, the first replica
alone makes it, and sends the others what comes of it: an optimizer or a schedule of the user's own
may draw, or keep a state that nobody knows of; devices of several kinds round in their own ways;
and a GPU adds up the rows of a sparse gradient in any order.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.device_names import canonical
from tfparallel.extend import extend, original_class
from tfparallel.layers.variable import SplitVariable, cut, parts_of
from tfparallel.placement.copies import (
    Replica,
    at_work,
    copies_of,
    copy_to,
    first_copy,
    replica_at_work,
    send_first,
)
from tfparallel.placement.optimizer import place_updates
from tfparallel.step.built_optimizer import wrapped_by

__all__ = ["in_parts", "update_copies", "updates_alike"]


class CopyingOptimizer:
    """Extends any optimizer whose updates are placed (`placement/optimizer.py`)."""

    def build(self, variables):
        """Makes the slots, a copy of each in each replica."""
        super().build(variables)
        copy_to(self._replicas, parts_of(variables))
        copy_to(self._replicas, _own_variables(self))
        for inner in wrapped_by(self):  # Some are made only now.
            place_updates(inner)
            update_copies(inner, self._replicas)

    def apply(self, grads, trainable_variables=None):
        """Applies the gradients in each replica."""
        if replica_at_work() is not None:  # Another optimizer hands them on.
            super().apply(grads, trainable_variables)
            return
        grads = list(grads)
        if trainable_variables is not None:
            grads, trainable_variables = in_parts(grads, list(trainable_variables))
            if not self.built:
                self.build(trainable_variables)
            # One that was made since; each replica would update it once more.
            copy_to(self._replicas, trainable_variables)
        updated = trainable_variables or self._trainable_variables
        with self._in_replicas(updated, grads) as replicas:
            for replica in replicas:
                with at_work(replica):
                    super().apply(_on_own_devices(grads, updated), trainable_variables)

    def finalize_variable_values(self, var_list):
        """Sets the weights to their moving averages, if that was asked for, in each replica."""
        with self._in_replicas(var_list) as replicas:
            for replica in replicas:
                with at_work(replica):
                    super().finalize_variable_values(var_list)

    @contextlib.contextmanager
    def _in_replicas(self, updated, gradients=()) -> Iterator[Sequence[Replica]]:
        """The replicas in which to update; the others' copies are sent afterwards."""
        if updates_alike(self) and not _may_differ(self._replicas, gradients):
            yield self._replicas
            return
        yield self._replicas[:1]
        send_first([*parts_of(updated), *_all_variables(self)])

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


def _all_variables(optimizer) -> list[keras.Variable]:
    """Its own, and those of the optimizers that it hands gradients on to."""
    inner = [variable for each in wrapped_by(optimizer) for variable in _all_variables(each)]
    return [*_own_variables(optimizer), *inner]


def updates_alike(optimizer) -> bool:
    """Whether an update is known to give the same each time, of the same variables."""
    rate = getattr(optimizer, "_learning_rate", None)
    own = [original_class(optimizer), type(rate)]
    is_kerass = all(cls.__module__.startswith("keras.") for cls in own)
    return is_kerass and all(map(updates_alike, wrapped_by(optimizer)))


def _may_differ(replicas, gradients) -> bool:
    """Whether the devices may come to different results."""
    names = [canonical(name) for replica in replicas for name in replica.devices.values()]
    kinds = {name.rpartition("/device:")[2].partition(":")[0] for name in names}
    is_sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    return len(kinds) > 1 or (is_sparse and kinds != {"CPU"})


def in_parts(gradients, variables) -> tuple[list[Any], list[keras.Variable]]:
    """Gradients of whole variables, from a loop of the user's own, cut into those of the parts."""
    parts = parts_of(variables)
    if len(gradients) != len(parts):
        pairs = zip(gradients, variables, strict=True)
        gradients = [
            part
            for gradient, variable in pairs
            for part in (
                cut(gradient, variable) if isinstance(variable, SplitVariable) else [gradient]
            )
        ]
    return gradients, parts


def _on_own_devices(gradients, variables) -> list[Any]:
    """Dense gradients where the copies of their variables are, in the replica at work."""
    index, found = replica_at_work().index, []
    for gradient, variable in zip(gradients, variables, strict=True):
        is_dense = tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)
        copies = copies_of(variable)
        if is_dense and index < len(copies):
            with tf.device(copies[index].device):
                gradient = tf.identity(gradient)
        found.append(gradient)
    return found
