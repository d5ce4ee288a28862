"""The edges of a traced step between a host and its GPUs, read on a machine without one.

A step is traced on logical CPUs, of which the first plays the host and each other one a GPU, and
run once: TensorFlow's placer, its optimizer and its partitioner do their work, and the partitioned
graphs say which operation is where. TensorFlow's registry of kernels, which the wheel for Linux
carries on any machine, says what would differ: an operation without a kernel for GPUs is the host's
(soft placement), and a kernel may keep some of its arguments in host memory. So for each tensor it
is known where it is made and where it is wanted.
"""

import dataclasses
import functools
import itertools
import re

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph, kernels, op_def_registry

HOST, GPUS = "CPU:0", ("CPU:1", "CPU:2")


@dataclasses.dataclass(frozen=True)
class Edge:
    """A tensor that is made in one memory and wanted in another.

    Attributes:
        source: The operation's name, without its scope of functions.
        op: What it does.
        consumer: What the operation that wants it does.
        dtype: Its type.
        made_in: The host or a GPU.
        wanted_in: Another.
        tensor: Where `Step` knows it by: the operation's device and name, and which output.
    """

    source: str
    op: str
    consumer: str
    dtype: tf.DType
    made_in: str
    wanted_in: str
    tensor: tuple[str, str, int] = dataclasses.field(repr=False)


class Step:
    """What ran on which device.

    Args:
        graphs: The partitioned graphs of a step.

    Attributes:
        not_entered: Calls of functions that are on a GPU, and whose operations are not read.
    """

    def __init__(self, graphs):
        self._nodes = {}
        self._sends = {}
        self._inside = {}  # Of functions that are called, by name alone.
        self._results = {}  # The names of what the function of a call returns.
        self._arguments = {}  # The call that an argument in a function is of.
        self.not_entered: list[str] = []
        functions = {f.signature.name: f for graph in graphs for f in graph.library.function}
        for node in itertools.chain.from_iterable(graph.node for graph in graphs):
            self._add(node, functions)

    def _add(self, node, functions):
        self._nodes[node.device, node.name] = node
        if node.op in ("_Send", "_HostSend"):
            self._sends[node.attr["tensor_name"].s, node.attr["recv_device"].s] = node
        called = [
            attr.func.name for attr in node.attr.values() if attr.WhichOneof("value") == "func"
        ]
        # XLA's programs are looked at from outside.
        is_program = node.attr["_XlaMustCompile"].b
        if node.op in _CALLS and called[0] in functions and not is_program:
            body, results = _body(node, functions[called[0]])
            self._results[node.name] = results
            for inner in body:
                self._inside[inner.name] = inner
                if inner.op == "_Arg":
                    self._arguments[inner.name] = node
                self._add(inner, functions)
        elif called and not is_program and _place(node.device) != HOST:
            self.not_entered.append(f"{node.op} {node.name} of {called}")

    def on_gpus(self) -> list:
        """The operations that a form has put on a GPU."""
        return [node for node in self._nodes.values() if _place(node.device) != HOST]

    def kinds(self) -> set[str]:
        """What these do, under the names that TensorFlow's own kernels have."""
        return {_plain(node.op).lstrip("_") for node in self.on_gpus()}

    def num_programs(self, device: str) -> int:
        """How many XLA programs a device runs."""
        return sum(
            node.attr["_XlaMustCompile"].b
            for node in self._nodes.values()
            if _place(node.device) == device and node.name not in self._inside
        )

    def without_kernel(self) -> dict[str, str]:
        """Of these, the ones that a GPU has no kernel for: what they do, and one's name."""
        return {node.op: node.name for node in self.on_gpus() if _kernel(node) is None}

    def with_strings(self) -> dict[str, str]:
        """Of these, the ones that take or return strings, of which a GPU has none."""
        return {
            node.op: node.name
            for node in self.on_gpus()
            if node.op not in _SENT
            if tf.string in _dtypes_of(node, "input_arg") + _dtypes_of(node, "output_arg")
        }

    def edges(self) -> list[Edge]:
        """The tensors that change their memory; each once for each memory that wants it."""
        edges = {}
        for node in self._nodes.values():
            if node.op in _PASSED_ON:
                continue
            for index, name in enumerate(each for each in node.input if not each.startswith("^")):
                source, output = self.made_by(node.device, name)
                if source is None:
                    continue
                made_in, dtype = _memory_of_output(source, output)
                wanted_in = _memory_of_input(node, index)
                if made_in != wanted_in and dtype not in (tf.resource, tf.variant):
                    tensor = (source.device, source.name, output)
                    edge = (_short(source.name), source.op, node.op, dtype, made_in, wanted_in)
                    edges.setdefault((*tensor, wanted_in), Edge(*edge, tensor))
        return list(edges.values())

    def made_by(self, device: str, name: str) -> tuple:
        """The operation behind an input, through what only passes it on, and which output it is."""
        node, output = self._named(device, name)
        while node is not None and node.op in _PASSED_ON:
            if node.op in ("_Recv", "_HostRecv"):
                send = self._sends.get((node.attr["tensor_name"].s, node.attr["recv_device"].s))
                if send is None:
                    return None, 0
                node, output = self._named(send.device, send.input[0])
            else:
                node, output = self._named(node.device, node.input[0])
        return node, output

    def through_calls(self, node, output: int) -> tuple:
        """The same, through the functions that are called, and what these were called with."""
        while node is not None:
            if node.name in self._results:
                node, output = self.made_by(node.device, self._results[node.name][output])
            elif node.name in self._arguments:
                call = self._arguments[node.name]
                node, output = self.made_by(call.device, call.input[node.attr["index"].i])
            else:
                break
        return node, output

    def _named(self, device, tensor):
        name, _, output = tensor.partition(":")
        return self._nodes.get((device, name), self._inside.get(name)), int(output or 0)


_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_SENT = ("_Send", "_HostSend", "_Recv", "_HostRecv")
_PASSED_ON = (*_SENT, "Identity")


def traced(make, *batch) -> Step:
    """Runs one training step and returns where it ran.

    Args:
        make: Returns a compiled model.
        batch: Inputs, targets and perhaps weights.
    """
    data = tf.data.Dataset.from_tensor_slices(batch).batch(len(batch[0]))
    iterator = iter(data)
    with tf.device(GPUS[0]):  # As on a machine with GPUs: the default device is the first.
        model = make()
        model._maybe_symbolic_build(data_batch=next(iter(data)))
        model.make_train_function()
        # Else of a call with constants a function of its own is made, which no graph holds.
        tf.config.optimizer.set_experimental_options({"function_optimization": False})
        try:
            return graphs_of(lambda: model.train_function(iterator))
        finally:
            tf.config.optimizer.set_experimental_options({"function_optimization": True})


def graphs_of(call) -> Step:
    """Calls a function of TensorFlow's for the first time, and returns where it ran."""
    # Not `enable_run_metadata`: TensorFlow 2.21 goes on collecting after `disable_run_metadata`,
    # and the next reader would see what ran in between.
    context.enable_graph_collection()
    try:
        context.export_run_metadata()  # Drops what somebody else has collected.
        call()
        functions = context.export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    if not functions:
        raise ValueError("TensorFlow made no graph: the function has run before, or ran eagerly.")
    # Each operation that runs eagerly, as initializers do, is a function as well. The step is on
    # most devices, and the largest of those.
    step = max(functions, key=lambda each: (len(each.partition_graphs), each.ByteSize()))
    return Step(step.partition_graphs)


def _body(call, function) -> tuple[list, list[str]]:
    """What a function does that is one node of a step, as a stage of a pipeline is.

    TensorFlow optimizes and partitions it when it is called, and keeps that to itself. So it is
    read as it was traced, each operation on the device of the call unless it says another.

    Returns:
        Its nodes, under the call's name, and the names of the tensors that it returns.
    """
    graph, names = function_def_to_graph.function_def_to_graph_def(function)
    arguments = [argument.name for argument in function.signature.input_arg]
    results = [names[function.ret[each.name]] for each in function.signature.output_arg]
    for index, (argument, result) in enumerate(
        zip(function.signature.output_arg, results, strict=True)
    ):
        node = graph.node.add(name=f"result {index}", op="_Retval", input=[result])
        node.attr["T"].type, node.attr["index"].i = argument.type, index
    for node in graph.node:
        if node.name in arguments:
            node.op = "_Arg"
            node.attr["T"].type = node.attr["dtype"].type
            node.attr["index"].i = arguments.index(node.name)
        inputs = [re.sub(r"^(\^?)", rf"\1{call.name}/", each) for each in node.input]
        node.ClearField("input")
        node.input.extend(inputs)
        node.name = f"{call.name}/{node.name}"
        host = call.device.partition("/device:")[0]
        node.device = host + node.device if node.device else call.device
    return list(graph.node), [f"{call.name}/{each}" for each in results]


def _place(device: str) -> str:
    return device.rpartition("/device:")[2]


def _short(name: str) -> str:
    return name.rpartition("StatefulPartitionedCall/")[2]


def _plain(op: str) -> str:
    """The name of TensorFlow's kernel, in whose place oneDNN puts one of its own on CPUs."""
    return re.sub("^_Mkl(Native)?|(?<=Filter)WithBias$", "", op)


@functools.cache
def _kernels_of(op: str):
    plain = _plain(op)
    names = [op] if plain == op else [plain, f"_{plain}"]
    registered = [
        kernel for n in names for kernel in kernels.get_registered_kernels_for_op(n).kernel
    ]
    of_gpu = [kernel for kernel in registered if kernel.device_type == "GPU" and not kernel.label]
    return of_gpu + [kernel for kernel in registered if kernel.device_type == "DEFAULT"]


def _kernel(node):
    """The kernel that a GPU has for an operation, or None."""
    for kernel in _kernels_of(node.op):
        if all(
            node.attr[constraint.name].type in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            if node.attr[constraint.name].WhichOneof("value") == "type"
        ):
            return kernel
    return None


def _dtypes_of(node, arguments: str) -> list[tf.DType]:
    return _arguments(node, getattr(op_def_registry.get(node.op), arguments))[0]


def _memory_of_output(node, index) -> tuple[str, tf.DType]:
    dtypes, names = _arguments(node, op_def_registry.get(node.op).output_arg)
    return _memory(node, dtypes[index], names[index]), dtypes[index]


def _memory_of_input(node, index) -> str:
    dtypes, names = _arguments(node, op_def_registry.get(node.op).input_arg)
    return _memory(node, dtypes[index], names[index])


def _memory(node, dtype: tf.DType, argument: str) -> str:
    place, kernel = _place(node.device), _kernel(node)
    is_hosts = dtype in (tf.string, tf.resource)  # Wherever an operation is.
    if node.op in (*_CALLS, "_Arg", "_Retval"):
        is_hosts |= dtype == tf.int32
    if place == HOST or is_hosts or kernel is None or argument in kernel.host_memory_arg:
        return HOST
    return place


def _arguments(node, definitions) -> tuple[list[tf.DType], list[str]]:
    """The type and the name of each argument, those of lists one by one."""
    dtypes, names = [], []
    for definition in definitions:
        if definition.type_list_attr:
            types = [tf.as_dtype(t) for t in node.attr[definition.type_list_attr].list.type]
        else:
            attr = definition.type_attr
            dtype = tf.as_dtype(node.attr[attr].type if attr else definition.type)
            count = node.attr[definition.number_attr].i if definition.number_attr else 1
            types = [dtype] * count
        dtypes += types
        names += [definition.name] * len(types)
    return dtypes, names
