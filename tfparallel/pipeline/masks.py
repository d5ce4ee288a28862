"""Which calls of a model find a mask on their inputs, as on one device.

Keras keeps a mask on the tensor itself, and its attention removes the mask from its inputs: later
calls find none, nor does the loss.

```
    embed ──► h (mask) ──┬──► attend(h, h)      removes the mask from h
                         └──► add(h, …)         comes later, and finds none
```

A stage that receives `h` has its own copy, which still has the mask. So one call of the whole model
is traced to see which calls find a mask, and each stage removes those that its calls must not find.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.pipeline.pass_context import computing
from tfparallel.seams.functional import calling_with, calls_of, in_training
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.tracing.trial_trace import traced_apart


class _Presence(NamedTuple):
    """Whether tensors have a mask.

    Attributes:
        by_call: Whether each input of a call has one, by the id of the call's node.
        at_end: Whether each output of the model has one, by the id of the symbolic tensor.
    """

    by_call: dict[int, list[bool]]
    at_end: dict[int, bool]


class Masks:
    """The masks of a functional model's tensors, in training.

    Args:
        model: The model to call.
        functional: The model, or the functional model that it holds.
        inputs: A batch's inputs, flat; None for a missing one.
    """

    def __init__(self, model: keras.Model, functional: Any, inputs: Sequence[Any]):
        self._model = model
        self._functional = functional
        self._inputs = inputs

    def take_off(self, node, tensors: Sequence[Any]) -> None:
        """Removes the masks that a call would not find on one device.

        Args:
            node: The call.
            tensors: Its inputs; None for those to skip.
        """
        for place, tensor in enumerate(tensors):
            if mask_of(tensor) is not None and not self._presence.by_call[id(node)][place]:
                set_mask(tensor, None)

    def at_end(self, key: int, tensor) -> Any:
        """Returns the mask of a model output, by the symbolic tensor's id; None without."""
        mask = mask_of(tensor)
        return mask if mask is not None and self._presence.at_end[key] else None

    @functools.cached_property
    def _presence(self) -> _Presence:
        """Traces a call of the model in a separate graph, which is never run."""
        presence = _Presence({}, {})
        inputs = [tensor for tensor in self._inputs if tensor is not None]

        def call(*tensors):
            tensors = iter(tensors)
            values = {
                id(symbol): None if tensor is None else next(tensors)
                for symbol, tensor in zip(self._functional.inputs, self._inputs, strict=True)
            }
            with keras.StatelessScope(), traced_apart(), calling_with(self._model, training=True):
                for node in nodes_in_order(self._functional):
                    read = [values[id(symbol)] for symbol in node.input_tensors]
                    presence.by_call[id(node)] = [mask_of(tensor) is not None for tensor in read]
                    args, kwargs = node.arguments.fill_in(values)
                    outputs = in_training(node.operation)(*args, **kwargs)
                    pairs = zip(node.outputs, keras.tree.flatten(outputs), strict=True)
                    values.update((id(symbol), tensor) for symbol, tensor in pairs)
            for symbol in self._functional.outputs:
                presence.at_end[id(symbol)] = mask_of(values[id(symbol)]) is not None

        with tf.init_scope(), computing(None):
            types = [tf.type_spec_from_value(tensor) for tensor in inputs]
            tf.function(call, autograph=False).get_concrete_function(*types)
        return presence


def nodes_in_order(functional) -> Iterator[Any]:
    """Yields the calls of a functional model, in the order in which Keras makes them."""
    return (node for node in calls_of(functional) if node.operation and not node.is_input)
