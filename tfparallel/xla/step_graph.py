"""A traced step, as its plan looks at it: what must run, and in which order."""

import collections
from collections.abc import Iterator

import tensorflow as tf

__all__ = ["StepGraph", "has_handle", "needed"]

_READ = "ReadVariableOp"


class StepGraph:
    """The operations of a step's `FuncGraph` that its results and changes need.

    Attributes:
        given: The names of its arguments.
        outputs: What it returns.
        operations: Each behind those that it needs; those below are apart.
        constants: The names of constants.
        reads: The names of reads of what a variable holds before the step.
        writers: By variable, an argument's name: all operations that are given it but such reads.
        position: Of each operation, its place in an order in which they can run.
        by_name: All of them.
    """

    def __init__(self, graph):
        self.given = {tensor.op.name for tensor in graph.inputs}
        self.outputs = graph.outputs
        order = [op for op in needed(graph) if op.name not in self.given]
        self.constants = {op.name for op in order if op.type == "Const"}
        self.reads: set[str] = set()
        self.writers = collections.defaultdict(list)
        self._first_reads: dict[tuple, str] = {}
        for op in order:
            if op.type == _READ and op.inputs[0].op.name in self.given:
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
        """The names of the operations whose results another takes, but for what is apart."""
        return (t.op.name for t in op.inputs if t.op.name in self._names)

    def controls(self, op: tf.Operation) -> Iterator[str]:
        """What an operation is told to wait for, or a constant or a read is that it takes."""
        for source in (*op.control_inputs, *(tensor.op for tensor in op.inputs)):
            if source.name in self._free:
                yield from self.controls(source)
        for source in op.control_inputs:
            if source.name in self._names:
                yield source.name

    def first_like(self, op: tf.Operation) -> str:
        """The name of the first operation that reads the same value of a variable."""
        return self._first_reads[_value_of(op)] if op.name in self.reads else op.name


def has_handle(op) -> bool:
    """Whether an operation has a state, or is given a variable."""
    return op.op_def.is_stateful or any(tensor.dtype == tf.resource for tensor in op.inputs)


def _value_of(op) -> tuple:
    """What a read is of: a variable, and the type to read it as."""
    return op.inputs[0].op.name, op.outputs[0].dtype, op.device


def needed(graph) -> list[tf.Operation]:
    """What a graph's outputs are made of, and what changes something; each after its sources."""
    ends = [tensor.op for tensor in graph.outputs]
    ends += [op for op in graph.control_outputs if op.type != _READ]
    wanted, stack = set(), list(ends)
    while stack:
        op = stack.pop()
        if op.name not in wanted:
            wanted.add(op.name)
            stack += [tensor.op for tensor in op.inputs]
            # What a variable holds is read after each `assign`, for nobody.
            stack += [source for source in op.control_inputs if source.type != _READ]
    done, found = set(), []
    for end in ends:
        stack = [(end, False)]
        while stack:
            op, is_ready = stack.pop()
            if op.name in done:
                continue
            if is_ready:
                done.add(op.name)
                found.append(op)
                continue
            stack.append((op, True))
            sources = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
            stack += [(each, False) for each in sources if each.name in wanted]
    return found
