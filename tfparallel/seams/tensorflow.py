"""Private names of TensorFlow."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import config, kernels, ops
from tensorflow.python.framework.errors import InaccessibleTensorError
from tensorflow.python.framework.func_graph import FuncGraph, func_graph_from_py_func
from tensorflow.python.ops import handle_data_util, script_ops
from tensorflow.python.ops.collective_ops import all_gather_v2, all_reduce_v2, all_to_all_v2
from tensorflow.python.ops.control_flow_ops import XLAControlFlowContext
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.util import nest

__all__ = [
    "FuncGraph",
    "InaccessibleTensorError",
    "ResourceVariable",
    "add_control_inputs",
    "all_gather_v2",
    "all_reduce_v2",
    "all_to_all_v2",
    "batch_size_of",
    "composite_of",
    "coordination_service",
    "copy_handle_data",
    "extend_operation",
    "function_again",
    "functions_prepared_as",
    "functions_traced_anew",
    "global_seed",
    "gradient_function_of",
    "graph_of",
    "is_deterministic",
    "is_recording",
    "leaves_with_paths",
    "made_of",
    "needs_gradient",
    "not_recording",
    "python_function_again",
    "record_operation",
    "recording",
    "registered_kernels",
    "run_alone",
    "run_independently",
    "runtime_has_started",
    "set_device",
    "set_input",
    "share_functions",
    "stand_for",
    "traced_graph",
    "waiting_for",
    "wait_for_other_processes",
]


def set_device(operation: tf.Operation, device: str) -> None:
    """Sets the device of a graph's operation, by its full name; "" for any."""
    operation._set_device_from_string(device)


def add_control_inputs(operation: tf.Operation, sources: Sequence[tf.Operation]) -> None:
    """Makes a graph's operation run only after others."""
    operation._add_control_inputs(list(sources))


class _Anew(XLAControlFlowContext):
    """A context in which functions are traced anew; operations are created as usual."""

    # A function's cache identifies a context by `id`, so none is freed: the id could be reused.
    _all: list["_Anew"] = []

    def __init__(self):
        super().__init__()
        _Anew._all.append(self)

    def IsXLAContext(self):  # noqa: N802 - TensorFlow's name; the next one, too.
        return False

    def RequiresUniqueFunctionRetracing(self):  # noqa: N802
        return True


@contextlib.contextmanager
def functions_traced_anew() -> Iterator[None]:
    """Traces each `tf.function` that the graph being traced calls for this graph alone."""
    fresh_context = _Anew()
    fresh_context.Enter()
    try:
        yield
    finally:
        fresh_context.Exit()


def waiting_for(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that wait for one by control dependencies only."""
    return operation._control_outputs


def set_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of a graph's operation by a tensor of the same type and shape."""
    operation._update_input(index, tensor)


def extend_operation(
    operation: tf.Operation,
    attributes: Mapping[str, Any],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
) -> None:
    """Gives a call, a loop or a branch other functions, with more inputs and outputs.

    Args:
        operation: The operation.
        attributes: All of its attributes, as in a node.
        inputs: The additional inputs, after its own.
        outputs: Tensors with the types and shapes of the additional outputs.
    """
    node_attributes = operation.node_def.attr
    for name, value in attributes.items():
        if name not in node_attributes or node_attributes[name] != value:
            operation._set_attr(name, value)
    if inputs:
        operation._add_while_inputs(list(inputs))
    operation._add_outputs(
        [each.dtype.as_datatype_enum for each in outputs], [each.shape for each in outputs]
    )


def python_function_again(token: bytes, again: dict[bytes, bytes]) -> bytes:
    """Registers a `tf.py_function` under another token; the token finds the tape of its last call.

    Args:
        token: The token of the function, or of the gradient of one.
        again: The new tokens of functions, by their tokens.
    """
    original = script_ops._py_funcs.get(token.decode())
    function = original._func
    if original._is_grad_func:
        forward = again[inspect.getclosurevars(function.__wrapped__).nonlocals["token"]]
        script_ops._py_funcs.get(forward.decode()).set_support_graph_mode_gradient()

        def function(*upstream):
            tape, inputs, outputs = script_ops.tape_cache.pop(forward)
            return tape.gradient(outputs, inputs, output_gradients=upstream)

    copy = script_ops.EagerFunc(function, original._out_dtypes, original._is_grad_func)
    original.again = [*getattr(original, "again", []), copy]  # It lives as long as the first.
    again[token] = script_ops._py_funcs.insert(copy).encode()
    return again[token]


def function_again(
    graph: tf.Graph, name: str, suffix: str, change: Callable[[tf.Graph, Any], bool]
) -> str:
    """Makes a copy of a graph's function with changed nodes.

    Args:
        graph: The graph, to which the copy is added.
        name: The name of the function.
        suffix: The suffix of the copy's name, before a number.
        change: Changes a node, given the function's graph; returns whether it did.

    Returns:
        The name of the copy; that of the same function if no node changed.
    """
    original = _function_of(graph, name)
    if original is None:
        return name
    definition = FunctionDef.FromString(original.cached_definition.SerializeToString())
    inner = original.graph
    changed = [change(inner, node) for node in definition.node_def]  # All of them, before any.
    if not any(changed):
        return name
    definition.signature.name = f"{name}{suffix}_{ops.uid()}"
    eager = context.context()
    eager.add_function_def(definition)
    children = [*inner._functions.values()]
    again = AtomicFunction(definition.signature.name, eager, original.function_type, children)
    graph._add_function_recursive(again)
    return definition.signature.name


def stand_for(value: tf.Tensor, variable: Any, name: str) -> None:
    """Makes a value usable like its variable for a user's own optimizer.

    Args:
        value: The value of a variable that has no storage of its own.
        variable: The variable.
        name: The name by which an optimizer knows it.
    """
    value._unique_id = name
    value.assign = variable.assign
    value.assign_add = value.scatter_add = variable.assign_add
    value.assign_sub = value.scatter_sub = variable.assign_sub


def made_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the input data sets of a data set."""
    return dataset._inputs()


def batch_size_of(dataset: tf.data.Dataset) -> Any:
    """Returns the size of the batches that a data set makes; None if it makes none."""
    return getattr(dataset, "_batch_size", None)


def gradient_function_of(operation: tf.Operation) -> Callable | None:
    """Returns the function of `(operation, *upstream)` of a `tf.custom_gradient`, or None."""
    if "_gradient_op_type" not in operation.node_def.attr:
        return None
    return ops.get_gradient_function(operation)


def composite_of(spec: tf.TypeSpec, make: Callable[[tf.TensorSpec], tf.Tensor]) -> Any:
    """Returns a sparse or ragged tensor of a type, from components that `make` returns."""
    return spec._from_components(tf.nest.map_structure(make, spec._component_specs))


def graph_of(graph: tf.Graph, function: str) -> tf.Graph | None:
    """Returns the graph of a function that a graph calls by name; None if TensorFlow kept none."""
    return getattr(_function_of(graph, function), "graph", None)


def _function_of(graph, name):
    """Finds a function in a graph, or in one that it is traced in."""
    function = None
    while graph is not None and function is None:
        function = graph._get_function(name)
        graph = getattr(graph, "outer_graph", None)
    return function


def traced_graph(name: str, function: Callable[..., Any], args: Sequence[Any]) -> FuncGraph:
    """Traces a function of nested tensors into a graph within the one that is being built."""
    return func_graph_from_py_func(name, function, tuple(args), {})


def share_functions(source: tf.Graph, target: tf.Graph, used_by=None) -> None:
    """Adds the functions of a graph to another.

    Args:
        source: The graph with the functions.
        target: The graph that they are added to.
        used_by: A `GraphDef`, to add only the functions that its nodes name; None for all.
    """
    names = None if used_by is None else _functions_named_in(used_by)
    for name, function in source._functions.items():
        if names is None or name in names:
            target._add_function_recursive(function)


def _functions_named_in(definition) -> set[str]:
    names = set()
    for node in definition.node:
        for value in node.attr.values():
            names.add(value.func.name)
            names.update(each.name for each in value.list.func)
    return names


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Copies the type and shape behind a handle or a list."""
    handle_data_util.copy_handle_data(source, target)


def registered_kernels(operation_type: str) -> list:
    """Returns the kernels of an operation: messages of type `KernelDef`."""
    return list(kernels.get_registered_kernels_for_op(operation_type).kernel)


def run_alone(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Computes a graph's operation on other inputs.

    Args:
        operation: An operation that calls no function of its graph.
        inputs: Tensors of its inputs' types.
    """
    attributes = {k: v for k, v in operation.node_def.attr.items() if not k.startswith("_")}

    @tf.function(autograph=False)
    def alone(*tensors):
        graph = tf.compat.v1.get_default_graph()
        result = graph._create_op_internal(
            operation.type,
            [graph.capture(tensor) for tensor in tensors],
            [output.dtype for output in operation.outputs],
            attrs=attributes,
            op_def=operation.op_def,
        )
        return list(result.outputs)

    return alone(*inputs)


def needs_gradient(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether a tape needs the gradient of one of these."""
    return record.should_record_backprop(list(tensors))


def is_recording() -> bool:
    """Returns whether a tape of this thread may be recording."""
    return record.could_possibly_record()


def not_recording() -> AbstractContextManager[None]:
    """Hides the computation of the block from all tapes."""
    return record.stop_recording()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Shows the computation of the block to tapes, even where it is hidden from them."""
    was_hidden = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if was_hidden:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if was_hidden:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def record_operation(
    name: str, outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], backward: Callable
) -> None:
    """Records on the tapes that `outputs` depend on `inputs`, with the gradient function."""
    record.record_operation(name, list(outputs), list(inputs), backward)


def leaves_with_paths(structure: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nested structure, each with its path, "a/0/b"."""
    return nest.flatten_with_joined_string_paths(structure)


def run_independently(operation: tf.Operation) -> None:
    """Runs an operation of the function being traced, and lets nothing else wait for it.

    Other operations with a state, but without a resource, run in program order.
    """
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)


def runtime_has_started() -> bool:
    """Returns whether devices are fixed: an operation has run, or devices were listed."""
    return context.context()._context_handle is not None


def is_deterministic() -> bool:
    """Returns whether `enable_op_determinism` was called, which forbids clocks."""
    return config.is_op_determinism_enabled()


def global_seed() -> int | None:
    """Returns the argument of `tf.random.set_seed`."""
    return context.global_seed()


def coordination_service() -> Any:
    """Returns the key-value store and the barriers that workers share."""
    return context.context()


def wait_for_other_processes() -> None:
    """Waits until other processes have executed all eager operations sent to them."""
    context.async_wait()


@contextlib.contextmanager
def functions_prepared_as(change: Callable[[ConfigProto], None]) -> Iterator[None]:
    """Makes TensorFlow prepare functions called in the block with settings changed by `change`."""
    options = context.context().function_call_options
    context.context().function_call_options = _changed(
        options.executor_type, options.config_proto_serialized, change
    )
    try:
        yield
    finally:
        context.context().function_call_options = options


@functools.lru_cache
def _changed(executor_type, config_proto, change):
    proto = ConfigProto.FromString(config_proto)
    change(proto)
    return context.FunctionCallOptions(executor_type, proto)
