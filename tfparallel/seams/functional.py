"""Private names of Keras's functional models: their graphs of calls."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
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

# Up to Keras 3.15 a functional model hands its own `training` to each call. Since then a call finds
# it in the context, and one that is given another value leaves that to all calls that follow.
LEAVES_TRAINING = not hasattr(functional, "operation_fn")


def in_training(operation: keras.Operation) -> Callable[..., Any]:
    """What a functional model calls for an operation, in training."""
    return operation if LEAVES_TRAINING else functional.operation_fn(operation, training=True)


@contextlib.contextmanager
def calling_with(layer: keras.Layer, training: bool) -> Iterator[CallContext]:
    """Has layers that are called find `training` where `layer` would have left it for them.

    Yields:
        Where they find it, as `training`.
    """
    own, outer = CallContext(entry_layer=layer), get_global(_CALL)
    own.set_value("training", training)
    set_global(_CALL, own)
    try:
        yield own
    finally:
        set_global(_CALL, outer)


def functional_of(model: keras.Model) -> Any:
    """The functional model that a Sequential one holds; of any other the model itself."""
    return getattr(model, "_functional", None) or model


def calls_of(model: keras.Model) -> list[Any]:
    """The calls of a functional model's graph, inputs among them, in the order of Keras's.

    Returns:
        Nodes, with `operation`, `is_input`, `input_tensors`, `outputs` and `arguments`; empty for
        what has no graph.
    """
    nodes = getattr(functional_of(model), "_nodes_by_depth", {})
    return [node for depth in sorted(nodes, reverse=True) for node in nodes[depth]]


def has_graph(layer: keras.Layer) -> bool:
    """Whether a layer is a functional model, or a Sequential one with an input shape."""
    return hasattr(functional_of(layer), "_nodes_by_depth")


def calls_to(operation: keras.Operation) -> list[Any]:
    """The calls of a layer, or of another operation, in all graphs: nodes, as of `calls_of`."""
    return operation._inbound_nodes


def maker_of(tensor: keras.KerasTensor) -> keras.Operation:
    """The operation that makes a symbolic tensor."""
    return tensor._keras_history.operation


def as_outputs(model: keras.Model, flat: Sequence[Any]) -> Any:
    """Puts values into the structure of a functional model's outputs."""
    return keras.tree.pack_sequence_as(functional_of(model)._outputs_struct, list(flat))


def flat_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """What is given to a functional model, as its inputs are asked for, in their order."""
    return model._standardize_inputs(inputs)


def run_through(model: keras.Model, inputs: Any, call: Callable[..., Any]) -> Any:
    """Computes a functional model of other tensors.

    Args:
        model: Functional.
        inputs: In its structure.
        call: Is given an operation of the model and its arguments, and returns its outputs.
    """
    return model._run_through_graph(inputs, lambda operation: operation, call)


def inputs_of(model: keras.Model) -> Any:
    """The structure of a functional or Sequential model's inputs; None of any other."""
    return getattr(functional_of(model), "_inputs_struct", None)
