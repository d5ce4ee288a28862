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
    """Has an operation of a graph be on a device, by its whole name; "" for any."""
    operation._set_device_from_string(device)


def add_control_inputs(operation: tf.Operation, sources: Sequence[tf.Operation]) -> None:
    """Has an operation of a graph run only behind others."""
    operation._add_control_inputs(list(sources))


class _Anew(XLAControlFlowContext):
    """A context in which functions are traced anew. Operations are made as anywhere else."""

    # A function's cache knows each by its `id`, so none is freed: another could get that id.
    _all: list["_Anew"] = []

    def __init__(self):
        super().__init__()
        _Anew._all.append(self)

    def IsXLAContext(self):  # noqa: N802 - TensorFlow's name, as the next.
        return False

    def RequiresUniqueFunctionRetracing(self):  # noqa: N802
        return True


@contextlib.contextmanager
def functions_traced_anew() -> Iterator[None]:
    """Within it, each `tf.function` that the graph being traced calls is traced for it alone."""
    here = _Anew()
    here.Enter()
    try:
        yield
    finally:
        here.Exit()


def waiting_for(operation: tf.Operation) -> list[tf.Operation]:
    """The operations that wait for one, and take nothing of it."""
    return operation._control_outputs


def set_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Has an operation of a graph take another tensor, of the same type and shape."""
    operation._update_input(index, tensor)


def extend_operation(
    operation: tf.Operation,
    attributes: Mapping[str, Any],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
) -> None:
    """Gives a call, a loop or a branch other functions, and the inputs and outputs that they have.

    Args:
        operation: It.
        attributes: All of its attributes, as a node has them.
        inputs: Those behind its own.
        outputs: Tensors of the types and shapes of those behind its own.
    """
    known = operation.node_def.attr
    for name, value in attributes.items():
        if name not in known or known[name] != value:
            operation._set_attr(name, value)
    if inputs:
        operation._add_while_inputs(list(inputs))
    operation._add_outputs(
        [each.dtype.as_datatype_enum for each in outputs], [each.shape for each in outputs]
    )


def python_function_again(token: bytes, again: dict[bytes, bytes]) -> bytes:
    """Another token for a `tf.py_function`: by its token it finds the tape of its last call.

    Args:
        token: Of the function, or of the gradient of one.
        again: By the tokens of functions those that they were given here.
    """
    found = script_ops._py_funcs.get(token.decode())
    function = found._func
    if found._is_grad_func:
        forward = again[inspect.getclosurevars(function.__wrapped__).nonlocals["token"]]
        script_ops._py_funcs.get(forward.decode()).set_support_graph_mode_gradient()

        def function(*upstream):
            tape, inputs, outputs = script_ops.tape_cache.pop(forward)
            return tape.gradient(outputs, inputs, output_gradients=upstream)

    made = script_ops.EagerFunc(function, found._out_dtypes, found._is_grad_func)
    found.again = [*getattr(found, "again", []), made]  # It lives as long as the first.
    again[token] = script_ops._py_funcs.insert(made).encode()
    return again[token]


def function_again(
    graph: tf.Graph, name: str, suffix: str, change: Callable[[tf.Graph, Any], bool]
) -> str:
    """Another function like one that a graph knows by its name, with nodes that are changed.

    Args:
        graph: It will know the other one, too.
        name: Of the function.
        suffix: Of the name of the other one, followed by a number.
        change: Is given the function's graph and a node, and changes it; returns whether it did.

    Returns:
        The name of the other one; of the same function, if no node is another.
    """
    known = _function_of(graph, name)
    if known is None:
        return name
    definition = FunctionDef.FromString(known.cached_definition.SerializeToString())
    inner = known.graph
    changed = [change(inner, node) for node in definition.node_def]  # All of them, before any.
    if not any(changed):
        return name
    definition.signature.name = f"{name}{suffix}_{ops.uid()}"
    own = context.context()
    own.add_function_def(definition)
    children = [*inner._functions.values()]
    again = AtomicFunction(definition.signature.name, own, known.function_type, children)
    graph._add_function_recursive(again)
    return definition.signature.name


def stand_for(value: tf.Tensor, variable: Any, name: str) -> None:
    """Has a value do for an optimizer of the user's own what its variable does.

    Args:
        value: What was read of a variable that has no memory of its own.
        variable: That.
        name: By which an optimizer knows it.
    """
    value._unique_id = name
    value.assign = variable.assign
    value.assign_add = value.scatter_add = variable.assign_add
    value.assign_sub = value.scatter_sub = variable.assign_sub


def made_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that a data set is made of."""
    return dataset._inputs()


def batch_size_of(dataset: tf.data.Dataset) -> Any:
    """The size of the batches that a data set makes; None if it makes none."""
    return getattr(dataset, "_batch_size", None)


def gradient_function_of(operation: tf.Operation) -> Callable | None:
    """The function of `(operation, *upstream)` that a `tf.custom_gradient` gave it, if any did."""
    if "_gradient_op_type" not in operation.node_def.attr:
        return None
    return ops.get_gradient_function(operation)


def composite_of(spec: tf.TypeSpec, make: Callable[[tf.TensorSpec], tf.Tensor]) -> Any:
    """A sparse or ragged tensor of a type, whose parts `make` gives for theirs."""
    return spec._from_components(tf.nest.map_structure(make, spec._component_specs))


def graph_of(graph: tf.Graph, function: str) -> tf.Graph | None:
    """The graph of a function that a graph calls by its name; None where TensorFlow kept none."""
    return getattr(_function_of(graph, function), "graph", None)


def _function_of(graph, name):
    """A graph knows the functions of those that it is traced in, too."""
    found = None
    while graph is not None and found is None:
        found = graph._get_function(name)
        graph = getattr(graph, "outer_graph", None)
    return found


def traced_graph(name: str, function: Callable[..., Any], args: Sequence[Any]) -> FuncGraph:
    """Traces a function of nested tensors into a graph within the one that is being built."""
    return func_graph_from_py_func(name, function, tuple(args), {})


def share_functions(source: tf.Graph, target: tf.Graph, used_by=None) -> None:
    """Has a graph know the functions of another.

    Args:
        source: The other.
        target: The graph.
        used_by: A `GraphDef`, of whose nodes alone; None for all.
    """
    wanted = None if used_by is None else _functions_named_in(used_by)
    for name, function in source._functions.items():
        if wanted is None or name in wanted:
            target._add_function_recursive(function)


def _functions_named_in(definition) -> set[str]:
    found = set()
    for node in definition.node:
        for value in node.attr.values():
            found.add(value.func.name)
            found.update(each.name for each in value.list.func)
    return found


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Says of a handle, or of a list, what another holds."""
    handle_data_util.copy_handle_data(source, target)


def registered_kernels(operation_type: str) -> list:
    """The kernels of an operation: messages of type `KernelDef`."""
    return list(kernels.get_registered_kernels_for_op(operation_type).kernel)


def run_alone(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Computes an operation of a graph of other inputs.

    Args:
        operation: One that calls no function of its graph.
        inputs: Tensors of its inputs' types.
    """
    attributes = {k: v for k, v in operation.node_def.attr.items() if not k.startswith("_")}

    @tf.function(autograph=False)
    def alone(*given):
        graph = tf.compat.v1.get_default_graph()
        found = graph._create_op_internal(
            operation.type,
            [graph.capture(tensor) for tensor in given],
            [output.dtype for output in operation.outputs],
            attrs=attributes,
            op_def=operation.op_def,
        )
        return list(found.outputs)

    return alone(*inputs)


def needs_gradient(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape needs the gradient of one of these."""
    return record.should_record_backprop(list(tensors))


def is_recording() -> bool:
    """Whether a tape of this thread may be recording."""
    return record.could_possibly_record()


def not_recording() -> AbstractContextManager[None]:
    """Hides what is computed in it from all tapes."""
    return record.stop_recording()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within it tapes see what is computed, though it is hidden from them outside."""
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
    """Tells the tapes that `outputs` come of `inputs`, and how gradients go back."""
    record.record_operation(name, list(outputs), list(inputs), backward)


def leaves_with_paths(structure: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested structure, each with its path, "a/0/b"."""
    return nest.flatten_with_joined_string_paths(structure)


def run_independently(operation: tf.Operation) -> None:
    """Has an operation of a function that is being traced run, and nothing else wait for it.

    Others that have a state, and no resource, run in the order of the program.
    """
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)


def runtime_has_started() -> bool:
    """Whether devices are fixed: an operation has run, or devices were listed."""
    return context.context()._context_handle is not None


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called, which forbids clocks."""
    return config.is_op_determinism_enabled()


def global_seed() -> int | None:
    """What `tf.random.set_seed` was given."""
    return context.global_seed()


def coordination_service() -> Any:
    """The key-value store and the barriers that workers share."""
    return context.context()


def wait_for_other_processes() -> None:
    """Waits until other processes have done all that was asked of them eagerly."""
    context.async_wait()


@contextlib.contextmanager
def functions_prepared_as(change: Callable[[ConfigProto], None]) -> Iterator[None]:
    """Has TensorFlow prepare what is called here by its settings as `change` leaves them."""
    known = context.context().function_call_options
    context.context().function_call_options = _changed(
        known.executor_type, known.config_proto_serialized, change
    )
    try:
        yield
    finally:
        context.context().function_call_options = known


@functools.lru_cache
def _changed(executor_type, config_proto, change):
    proto = ConfigProto.FromString(config_proto)
    change(proto)
    return context.FunctionCallOptions(executor_type, proto)
