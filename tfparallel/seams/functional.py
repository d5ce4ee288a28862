"""Private names of Keras's functional models: their graphs of calls."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.common import AutocastScope
from keras.src.layers.layer import CallContext
from keras.src.models import functional
from keras.src.models.functional import Functional

from tfparallel.seams.keras import get_global, set_global

__all__ = [
    "LEAVES_TRAINING",
    "Functional",
    "as_outputs",
    "calling_with",
    "calls_of",
    "calls_to",
    "flat_inputs",
    "functional_of",
    "has_graph",
    "in_training",
    "inputs_of",
    "maker_of",
    "run_through",
]

_CALL = "current_call_ctx"

# Up to Keras 3.15, a functional model passes its own `training` to each call. Since then, a call
# reads it from the context, and a call with another value leaves that value to all later calls.
LEAVES_TRAINING = not hasattr(functional, "operation_fn")


def in_training(operation: keras.Operation) -> Callable[..., Any]:
    """Returns what a functional model calls for an operation, in training."""
    return operation if LEAVES_TRAINING else functional.operation_fn(operation, training=True)


@contextlib.contextmanager
def calling_with(layer: keras.Layer, training: bool) -> Iterator[CallContext]:
    """Makes operations called within the block find what `layer` sets when it is called.

    They find `training`, and with mixed precision the dtype to which variables are cast.

    Yields:
        The context in which they find `training`.
    """
    call_context, outer = CallContext(entry_layer=layer), get_global(_CALL)
    call_context.set_value("training", training)
    set_global(_CALL, call_context)
    is_mixed = layer.compute_dtype != layer.variable_dtype
    try:
        with AutocastScope(layer.compute_dtype) if is_mixed else contextlib.nullcontext():
            yield call_context
    finally:
        set_global(_CALL, outer)


def functional_of(model: keras.Model) -> Any:
    """Returns the functional model inside a Sequential model; any other model itself."""
    return getattr(model, "_functional", None) or model


def calls_of(model: keras.Model) -> list[Any]:
    """Returns the calls of a functional model's graph, inputs included, in Keras's order.

    Returns:
        Nodes, with `operation`, `is_input`, `input_tensors`, `outputs` and `arguments`; empty for a
        model without graph.
    """
    nodes = getattr(functional_of(model), "_nodes_by_depth", {})
    return [node for depth in sorted(nodes, reverse=True) for node in nodes[depth]]


def has_graph(layer: keras.Layer) -> bool:
    """Returns whether a layer is a functional model, or a Sequential one with an input shape."""
    return hasattr(functional_of(layer), "_nodes_by_depth")


def calls_to(operation: keras.Operation) -> list[Any]:
    """Returns the calls of a layer or another operation in all graphs: nodes, as `calls_of`."""
    return operation._inbound_nodes


def maker_of(tensor: keras.KerasTensor) -> keras.Operation:
    """Returns the operation that makes a symbolic tensor."""
    return tensor._keras_history.operation


def as_outputs(model: keras.Model, flat: Sequence[Any]) -> Any:
    """Packs values into the structure of a functional model's outputs."""
    return keras.tree.pack_sequence_as(functional_of(model)._outputs_struct, list(flat))


def flat_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """Flattens the inputs of a functional model, in the order of its `Input`s."""
    return model._standardize_inputs(inputs)


def run_through(model: keras.Model, inputs: Any, call: Callable[..., Any]) -> Any:
    """Runs a functional model on other tensors.

    Args:
        model: A functional model.
        inputs: The tensors, in its structure.
        call: Takes an operation of the model and its arguments, and returns its outputs.
    """
    return model._run_through_graph(inputs, lambda operation: operation, call)


def inputs_of(model: keras.Model) -> Any:
    """Returns the structure of a functional or Sequential model's inputs; else None."""
    return getattr(functional_of(model), "_inputs_struct", None)
