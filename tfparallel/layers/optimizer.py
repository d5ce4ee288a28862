"""Optimizers of variables in parts: each part is updated where it lies.

An update that treats each element by itself is the same for a part as for the whole. What looks at
the whole (clipping by a norm, constraints) is given the whole here; an optimizer whose update does
(LAMB's and Adafactor's norms, Muon's matrices) is refused.
"""

import keras
import tensorflow as tf

from tfparallel.extend import extend, original_class
from tfparallel.layers.variable import SplitVariable, cut, parts_of, split_variable, whole_of
from tfparallel.newer_keras import MultiOptimizer
from tfparallel.placement.optimizer import PlacedOptimizer
from tfparallel.placement.stages import PlacementError
from tfparallel.step import elementwise

__all__ = ["split_updates"]

_optimizers = keras.optimizers


class SplitOptimizer(PlacedOptimizer):
    """Extends an optimizer of Keras: it holds and updates the parts, and shows the wholes."""

    def build(self, variables):
        """Makes the slots, each beside its part."""
        if self.built:
            return
        for name in ("_slots_of_parts", "_whole_lists"):  # Of other weights.
            vars(self).pop(name, None)
        left_out = getattr(self, "_exclude_from_weight_decay", set())
        for variable in variables:
            if isinstance(variable, SplitVariable) and self._var_key(variable) in left_out:
                left_out.update(map(self._var_key, variable.parts))
        super().build(parts_of(variables))

    def apply(self, grads, trainable_variables=None):
        """Applies gradients of the parts, in the order of `parts_of(trainable_variables)`.

        Those of whole variables, from a loop of the user's own, are cut into parts.
        """
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        grads, variables = list(grads), parts_of(trainable_variables)
        if len(grads) == len(trainable_variables) != len(variables):
            grads = [
                part
                for gradient, variable in zip(grads, trainable_variables, strict=True)
                for part in (
                    cut(gradient, variable)
                    if isinstance(variable, SplitVariable)
                    else [gradient]
                )
            ]
        super().apply(grads, variables)
        if _wrapped(self):
            return
        held = {
            id(whole_of(v)): whole_of(v)
            for gradient, v in zip(grads, variables, strict=True)
            if gradient is not None
        }
        for whole in held.values():
            if isinstance(whole, SplitVariable) and whole.constraint is not None:
                whole.assign(whole.constraint(whole))

    def finalize_variable_values(self, var_list):
        """Overwrites the weights with their averages, where there are some."""
        super().finalize_variable_values(parts_of(var_list))

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Makes a slot; it remembers whose part it is."""
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        whole = whole_of(reference_variable)
        if whole is not reference_variable:
            slot._group = (id(whole), name)
            slots = vars(self).setdefault("_slots_of_parts", {}).setdefault(slot._group, [])
            slots.append(slot)
            if len(slots) == len(whole.parts):
                object.__setattr__(slots[0], "_joined", _joined(slots, whole))
        return slot

    @property
    def variables(self):
        """The variables of the optimizer, as they are on one device."""
        return _wholes(super().variables)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        """What `tf.train.Checkpoint` writes: wholes, as on one device and on any other number."""
        children = dict(super()._trackable_children(save_type, **kwargs))
        held = vars(self).setdefault("_whole_lists", {})
        for name in children:
            variables = getattr(self, name, None)
            if not isinstance(variables, list) or not any(map(_is_part, variables)):
                continue
            wholes = _wholes(variables)
            if name not in held or len(vars(held[name])) < len(wholes):
                held[name] = tf.__internal__.tracking.AutoTrackable()
                for index, variable in enumerate(wholes):
                    setattr(held[name], str(index), variable)
            children[name] = held[name]
        return children

    def set_weights(self, weights):
        """Assigns values to all variables, as they are on one device."""
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)

    def _backend_apply_gradients(self, grads, trainable_variables):
        object.__setattr__(self, "_applied_to", trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads):
        if not self.clipnorm:
            return super()._clip_gradients(grads)
        groups: dict[int, list[int]] = {}
        for index, variable in enumerate(self._applied_to):
            groups.setdefault(id(whole_of(variable)), []).append(index)
        clipped = list(grads)
        for indices in groups.values():
            if len(indices) == 1:
                clipped[indices[0]] = self._clip_by_norm(grads[indices[0]])
            else:
                own = _clipped([grads[index] for index in indices], self.clipnorm)
                for index, gradient in zip(indices, own, strict=True):
                    clipped[index] = gradient
        return clipped


def split_updates(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer update variables in parts, in place.

    Raises:
        PlacementError: If its update looks at more than one element at a time, or is not known.
    """
    wrapped = _wrapped(optimizer)
    if not wrapped and not elementwise.is_elementwise(original_class(optimizer)):
        name = original_class(optimizer).__name__
        raise PlacementError(
            "tensor_parallel supports optimizers that update each element independently "
            f"({elementwise.NAMES}). Received: {name}, which looks at whole weights, or is not "
            "known. Take one of these, or `tfparallel.model_parallel`."
        )
    extend(optimizer, SplitOptimizer)
    for inner in wrapped:
        split_updates(inner)


def _is_part(variable) -> bool:
    return hasattr(variable, "_whole") or hasattr(variable, "_group")


def _wholes(variables) -> list[keras.Variable]:
    """The variables of an optimizer, of the model's or of its own, with their parts joined."""
    found = {}
    for variable in variables:
        if hasattr(variable, "_group"):
            if hasattr(variable, "_joined"):  # The first part knows the whole.
                found[id(variable)] = variable._joined
        else:
            found[id(whole_of(variable))] = whole_of(variable)
    return list(found.values())


def _wrapped(optimizer) -> list[keras.Optimizer]:
    """What an optimizer hands its variables on to; those that a function makes are not known."""
    cls = original_class(optimizer)
    if cls is _optimizers.LossScaleOptimizer:
        return [optimizer.inner_optimizer]
    if cls is MultiOptimizer and hasattr(optimizer._optimizer_map, "values"):
        return optimizer.optimizers
    return []


def _joined(slots, whole) -> keras.Variable:
    """A variable that shows the slots of a weight's parts as one."""
    shown = object.__new__(type(slots[0]))
    shown.__dict__.update(
        {name: value for name, value in vars(slots[0]).items() if name not in ("_group", "_value")}
    )
    shown._value = None
    shown._shape = tuple(whole.shape)
    path = slots[0].path
    split_variable(shown, slots, whole.axis)
    for slot in slots:
        slot._path = path
    return shown


def _clipped(gradients, clipnorm) -> list:
    """`tf.clip_by_norm` of a gradient in parts: by the norm of the whole."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    total = tf.add_n([tf.reduce_sum(v * v) for v in values])
    # As there: the gradient of a root is infinite at zero.
    is_some = total > 0
    norm = tf.where(is_some, tf.sqrt(tf.where(is_some, total, tf.ones_like(total))), total)
    found = []
    for gradient, value in zip(gradients, values, strict=True):
        own = value * clipnorm / tf.maximum(norm, clipnorm)
        if isinstance(gradient, tf.IndexedSlices):
            own = tf.IndexedSlices(own, gradient.indices, gradient.dense_shape)
        found.append(own)
    return found
