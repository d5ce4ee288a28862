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
import re

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels, op_def_registry

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
    """

    source: str
    op: str
    consumer: str
    dtype: tf.DType
    made_in: str
    wanted_in: str


class Step:
    """What ran on which device.

    Args:
        graphs: The partitioned graphs of a step.
    """

    def __init__(self, graphs):
        self._nodes = {}
        sends = {}
        for graph in graphs:
            for node in graph.node:
                self._nodes[node.device, node.name] = node
                if node.op in ("_Send", "_HostSend"):
                    sends[node.attr["tensor_name"].s, node.attr["recv_device"].s] = node
        self._sends = sends

    def on_gpus(self) -> list:
        """The operations that a form has put on a GPU."""
        return [node for node in self._nodes.values() if _place(node.device) != HOST]

    def kinds(self) -> set[str]:
        """What these do, under the names that TensorFlow's own kernels have."""
        return {_plain(node.op).lstrip("_") for node in self.on_gpus()}

    def without_kernel(self) -> dict[str, str]:
        """Of these, the ones that a GPU has no kernel for: what they do, and one's name."""
        return {node.op: node.name for node in self.on_gpus() if _kernel(node) is None}

    def edges(self) -> list[Edge]:
        """The tensors that change their memory; each once for each memory that wants it."""
        found = {}
        for node in self._nodes.values():
            if node.op in _PASSED_ON:
                continue
            for index, name in enumerate(each for each in node.input if not each.startswith("^")):
                source, output = self._made_by(node.device, name)
                if source is None:
                    continue
                made_in, dtype = _memory_of_output(source, output)
                wanted_in = _memory_of_input(node, index)
                if made_in != wanted_in and dtype not in (tf.resource, tf.variant):
                    edge = Edge(_short(source.name), source.op, node.op, dtype, made_in, wanted_in)
                    found.setdefault((source.name, output, wanted_in), edge)
        return list(found.values())

    def _made_by(self, device, name):
        """The operation behind an input, through what only passes it on."""
        name, _, output = name.partition(":")
        node = self._nodes.get((device, name))
        while node is not None and node.op in _PASSED_ON:
            if node.op in ("_Recv", "_HostRecv"):
                send = self._sends.get((node.attr["tensor_name"].s, node.attr["recv_device"].s))
                if send is None:
                    return None, 0
                node_input, device = send.input[0], send.device
            else:
                node_input, device = node.input[0], node.device
            name, _, output = node_input.partition(":")
            node = self._nodes.get((device, name))
        return node, int(output or 0)


_PASSED_ON = ("_Send", "_HostSend", "_Recv", "_HostRecv", "Identity")


def traced(make, x, y) -> Step:
    """Runs one training step and returns where it ran.

    Args:
        make: Returns a compiled model.
        x: Inputs of a batch.
        y: Its targets.
    """
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(y))
    iterator = iter(data)
    with tf.device(GPUS[0]):  # As on a machine with GPUs: the default device is the first.
        model = make()
        model._maybe_symbolic_build(data_batch=next(iter(data)))
        model.make_train_function()
        return graphs_of(lambda: model.train_function(iterator))


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
    found = [kernel for n in names for kernel in kernels.get_registered_kernels_for_op(n).kernel]
    own = [kernel for kernel in found if kernel.device_type == "GPU" and not kernel.label]
    return own + [kernel for kernel in found if kernel.device_type == "DEFAULT"]


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


def _memory_of_output(node, index) -> tuple[str, tf.DType]:
    dtypes, names = _arguments(node, op_def_registry.get(node.op).output_arg)
    return _memory(node, dtypes[index], names[index]), dtypes[index]


def _memory_of_input(node, index) -> str:
    dtypes, names = _arguments(node, op_def_registry.get(node.op).input_arg)
    return _memory(node, dtypes[index], names[index])


def _memory(node, dtype: tf.DType, argument: str) -> str:
    place, kernel = _place(node.device), _kernel(node)
    is_hosts = dtype in (tf.string, tf.resource)  # Wherever an operation is.
    if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
        is_hosts |= dtype == tf.int32
    if place == HOST or is_hosts or kernel is None or argument in kernel.host_memory_arg:
        return HOST
    return place


def _arguments(node, definitions) -> tuple[list[tf.DType], list[str]]:
    """The type and the name of each argument, those of lists one by one."""
    dtypes, names = [], []
    for definition in definitions:
        if definition.type_list_attr:
            own = [tf.as_dtype(t) for t in node.attr[definition.type_list_attr].list.type]
        else:
            attr = definition.type_attr
            dtype = tf.as_dtype(node.attr[attr].type if attr else definition.type)
            count = node.attr[definition.number_attr].i if definition.number_attr else 1
            own = [dtype] * count
        dtypes += own
        names += [definition.name] * len(own)
    return dtypes, names
