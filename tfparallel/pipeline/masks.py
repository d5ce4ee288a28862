"""Which calls of a model find a mask beside what they read, where one device makes all of them.

Keras keeps a mask on the tensor itself, and its attention takes it off what it reads: calls behind
it find none, and nor does the loss.

```
    embed ──► h (mask) ──┬──► attend(h, h)      takes the mask off h
                         └──► add(h, …)         comes later, and finds none
```

A stage that is sent `h` has a copy, from which nobody has taken anything. So one call of the whole
model is traced, to see who finds a mask, and each stage takes off what its calls must not find.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.pipeline.pass_context import computing
from tfparallel.seams.functional import calling_with, calls_of, in_training
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.tracing.apart import traced_apart

__all__ = ["Masks", "nodes_in_order"]


class _Found(NamedTuple):
    """Whether there is a mask.

    Attributes:
        by_call: On each input, by the id of the call's node.
        at_end: On what the model puts out, by the id of the symbolic tensor.
    """

    by_call: dict[int, list[bool]]
    at_end: dict[int, bool]


class Masks:
    """The masks of a functional model's tensors, in training.

    Args:
        model: The model that is called.
        functional: It, or the functional one that it holds.
        inputs: A batch's inputs, flat; None where there is none.
    """

    def __init__(self, model: keras.Model, functional: Any, inputs: Sequence[Any]):
        self._model = model
        self._functional = functional
        self._inputs = inputs

    def take_off(self, node, tensors: Sequence[Any]) -> None:
        """Takes off those that a call would not find on one device.

        Args:
            node: The call.
            tensors: What it reads, with None for what need not be looked at.
        """
        for place, tensor in enumerate(tensors):
            if mask_of(tensor) is not None and not self._found.by_call[id(node)][place]:
                set_mask(tensor, None)

    def at_end(self, key: int, tensor) -> Any:
        """The mask of an output of the model, by the symbolic tensor's id; None without."""
        mask = mask_of(tensor)
        return mask if mask is not None and self._found.at_end[key] else None

    @functools.cached_property
    def _found(self) -> _Found:
        """Found by a trace of its own, of which nothing is computed."""
        found = _Found({}, {})
        there = [tensor for tensor in self._inputs if tensor is not None]

        def call(*given):
            given = iter(given)
            values = {
                id(symbol): None if tensor is None else next(given)
                for symbol, tensor in zip(self._functional.inputs, self._inputs, strict=True)
            }
            with keras.StatelessScope(), traced_apart(), calling_with(self._model, training=True):
                for node in nodes_in_order(self._functional):
                    read = [values[id(symbol)] for symbol in node.input_tensors]
                    found.by_call[id(node)] = [mask_of(tensor) is not None for tensor in read]
                    args, kwargs = node.arguments.fill_in(values)
                    made = in_training(node.operation)(*args, **kwargs)
                    pairs = zip(node.outputs, keras.tree.flatten(made), strict=True)
                    values.update((id(symbol), tensor) for symbol, tensor in pairs)
            for symbol in self._functional.outputs:
                found.at_end[id(symbol)] = mask_of(values[id(symbol)]) is not None

        with tf.init_scope(), computing(None):
            types = [tf.type_spec_from_value(tensor) for tensor in there]
            tf.function(call, autograph=False).get_concrete_function(*types)
        return found


def nodes_in_order(functional) -> Iterator[Any]:
    """The calls of a functional model, in the order in which Keras makes them."""
    return (node for node in calls_of(functional) if node.operation and not node.is_input)
