"""A traced step, prepared for planning: the required operations, in order."""

import collections
from collections.abc import Iterator

import tensorflow as tf

_READ = "ReadVariableOp"


class StepGraph:
    """The operations of a step's `FuncGraph` that its outputs and side effects need.

    Attributes:
        arguments: The names of its arguments.
        outputs: Its outputs.
        operations: The operations in order, without constants and reads.
        constants: The names of constants.
        reads: The names of reads of variables' values before the step.
        writers: All other operations that use a variable, by its argument name.
        position: The position of each operation in a valid order of execution.
        by_name: All operations by name.
    """

    def __init__(self, graph):
        self.arguments = {tensor.op.name for tensor in graph.inputs}
        self.outputs = graph.outputs
        order = [op for op in needed(graph) if op.name not in self.arguments]
        self.constants = {op.name for op in order if op.type == "Const"}
        self.reads: set[str] = set()
        self.writers = collections.defaultdict(list)
        self._first_reads: dict[tuple, str] = {}
        for op in order:
            if op.type == _READ and op.inputs[0].op.name in self.arguments:
                if op.inputs[0].op.name not in self.writers:
                    self.reads.add(op.name)
                    self._first_reads.setdefault(_value_of(op), op.name)
                    continue
            for tensor in op.inputs:
                if tensor.dtype == tf.resource:
                    self.writers[tensor.op.name].append(op)
        self.by_name = {op.name: op for op in order}
        self.position = {op.name: i for i, op in enumerate(order)}
        groups = {op.name for op in order if op.type == "NoOp"}
        self._free = self.constants | self.reads | groups
        self.operations = [op for op in order if op.name not in self._free]
        self._names = {op.name for op in self.operations}

    def sources(self, op: tf.Operation) -> Iterator[str]:
        """Yields the names of the operations that an operation reads from."""
        return (t.op.name for t in op.inputs if t.op.name in self._names)

    def controls(self, op: tf.Operation) -> Iterator[str]:
        """Yields the control inputs of an operation, and those of constants and reads it uses."""
        for source in (*op.control_inputs, *(tensor.op for tensor in op.inputs)):
            if source.name in self._free:
                yield from self.controls(source)
        for source in op.control_inputs:
            if source.name in self._names:
                yield source.name

    def first_like(self, op: tf.Operation) -> str:
        """Returns the name of the first operation that reads the same variable value."""
        return self._first_reads[_value_of(op)] if op.name in self.reads else op.name


def has_handle(op) -> bool:
    """Whether an operation is stateful or takes a variable handle."""
    return op.op_def.is_stateful or any(tensor.dtype == tf.resource for tensor in op.inputs)


def _value_of(op) -> tuple:
    """Identifies the value of a read: the variable, its dtype and the device."""
    return op.inputs[0].op.name, op.outputs[0].dtype, op.device


def needed(graph) -> list[tf.Operation]:
    """Returns the operations that a graph's outputs and side effects need, in topological order."""
    ends = [tensor.op for tensor in graph.outputs]
    ends += [op for op in graph.control_outputs if op.type != _READ]
    names, stack = set(), list(ends)
    while stack:
        op = stack.pop()
        if op.name not in names:
            names.add(op.name)
            stack += [tensor.op for tensor in op.inputs]
            # Each `assign` adds a read of the variable that nothing uses.
            stack += [source for source in op.control_inputs if source.type != _READ]
    done, ordered = set(), []
    for end in ends:
        stack = [(end, False)]
        while stack:
            op, is_ready = stack.pop()
            if op.name in done:
                continue
            if is_ready:
                done.add(op.name)
                ordered.append(op)
                continue
            stack.append((op, True))
            sources = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
            stack += [(each, False) for each in sources if each.name in names]
    return ordered
