"""The nodes of a plan: programs and outside operations, in a valid order of execution."""

import collections
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.xla.step_graph import StepGraph

# An operation's name, or a program's (device, level); the device is None if it is not compiled.
Node = str | tuple[int | None, int]


class Outside(NamedTuple):
    """An operation that stays as it was traced.

    Attributes:
        operation: The operation.
        after: The nodes that it must wait for, in addition to those that it reads from.
        device: For a function that XLA compiles, the index of its device.
        same: Other reads of the same variable value, which share this one.
    """

    operation: tf.Operation
    after: list[Node]
    device: int | None = None
    same: Sequence[tf.Operation] = ()

    @property
    def node(self) -> Node:
        """Its identifier in `after`."""
        return self.operation.name

    @property
    def outputs(self) -> Sequence[tf.Tensor]:
        """Its outputs."""
        return self.operation.outputs


class Program(NamedTuple):
    """Operations that XLA compiles together, or that a branch runs together, uncompiled.

    Attributes:
        device: Index of the device; None if the program is not compiled.
        level: Number of exchanges before it.
        operations: Its operations in order, including copies of constants and variable reads.
        inputs: The tensors that it reads from elsewhere.
        outputs: Its tensors that are read elsewhere.
        after: As for `Outside`.
    """

    device: int | None
    level: int
    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    after: list[Node]

    @property
    def node(self) -> Node:
        """Its identifier in `after`."""
        return self.device, self.level


class Programs:
    """Assembles programs from operations, given their places and levels.

    Args:
        step: The step.
        place: The rank of each operation's device, by name; None outside of all programs.
        level: The number of exchanges before each operation.
        waits_for: The operations that each one must wait for, in addition to its inputs.
        alone: The ranks of outside functions that XLA compiles separately.
        homes: The ranks of the variables' devices, by argument.
        is_branch: As for `plan_of`.
    """

    def __init__(
        self,
        step: StepGraph,
        place: Mapping[str, int | None],
        level: Mapping[str, int],
        waits_for: Mapping[str, Sequence[str]],
        alone: Mapping[str, int],
        homes: Mapping[str, int | None],
        is_branch: bool,
    ):
        self._step = step
        self._place = place
        self._level = level
        self._waits_for = waits_for
        self._alone = alone
        self._homes = homes
        self._is_branch = is_branch
        # By node: its operations, its copied operations, the nodes that it reads from, and other
        # nodes that must run before it.
        self._members = collections.defaultdict(list)
        self._copies = collections.defaultdict(set)
        self._wants = collections.defaultdict(set)
        self._waits = collections.defaultdict(set)
        self._leaving: dict[tuple[str, int], tf.Tensor] = {}  # Tensors that other nodes read.
        self._readers = collections.defaultdict(set)  # Variable -> the nodes that read it.

    def in_turn(self) -> list[Outside | Program]:
        """Returns the nodes, each after its dependencies."""
        step = self._step
        for op in step.operations:
            self._members[self.node(op.name)].append(op.name)
        for op in step.operations:
            node = self.node(op.name)
            for tensor in op.inputs:
                self._read(tensor, node)
            self._waits[node] |= {self.node(name) for name in self._waits_for[op.name]}
        for tensor in step.outputs:
            self._read(tensor, None)
        self._wants.pop(None, None)
        for variable, writers in step.writers.items():
            for op in writers:
                self._waits[self.node(op.name)] |= self._readers[variable]
        for node in self._members:
            self._waits[node] -= {node} | self._wants[node]
        return [self._assembled(node) for node in self._sorted()]

    def node(self, name: str) -> Node:
        """Returns the node of an operation."""
        place = self._place.get(name)
        is_alone = place is None and (name not in self._place or not self._is_branch)
        return name if is_alone else (place, self._level[name])

    def _read(self, tensor, node) -> None:
        """Records that a node reads a tensor; None is the caller of the step."""
        source, step = tensor.op, self._step
        if source.name in step.arguments:
            return
        if source.name in self._place:
            giver = self.node(source.name)
            if giver != node:
                self._wants[node].add(giver)
                self._leaving[source.name, tensor.value_index] = tensor
            return
        if self._may_copy(source, node):
            self._copies[node].add(source.name)
            giver = node
        else:
            giver = step.first_like(source)
            self._members[giver].append(source.name)
            self._wants[node].add(giver)
        if source.name in step.reads:
            self._readers[source.inputs[0].op.name].add(giver)

    def _may_copy(self, op, node) -> bool:
        """Whether a program may have its own copy of a constant or of a variable's value."""
        if not isinstance(node, tuple):
            return False
        if op.name in self._step.constants:
            return True
        place, level = node
        variable = op.inputs[0].op.name
        if self._homes.get(variable) != place:
            return False
        for writer in self._step.writers[variable]:
            is_here = self._place.get(writer.name) == place
            if self._level[writer.name] < level + (not is_here):
                return False
        return True

    def _sorted(self) -> Iterator[Node]:
        """Yields the nodes, each after its dependencies, otherwise in the order of the trace."""
        position = self._step.position
        first = {u: min(map(position.__getitem__, names)) for u, names in self._members.items()}
        followers = collections.defaultdict(list)
        missing = {}
        for node in self._members:
            needed = self._wants[node] | self._waits[node]
            missing[node] = len(needed)
            for each in needed:
                followers[each].append(node)
        ready = [(first[node], node) for node, number in missing.items() if not number]
        heapq.heapify(ready)
        while ready:
            _, node = heapq.heappop(ready)
            yield node
            for follower in followers[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, (first[follower], follower))
        if any(missing.values()):
            raise RuntimeError(
                "The programs of a step wait for each other; this is a bug in tfparallel."
            )

    def _assembled(self, node) -> Outside | Program:
        step, after = self._step, list(self._waits[node])
        names = {*self._members[node], *self._copies[node]}
        operations = [step.by_name[name] for name in sorted(names, key=step.position.__getitem__)]
        if isinstance(node, str):
            same = [op for op in operations if op.name != node]
            return Outside(step.by_name[node], after, self._alone.get(node), same)
        inputs = {
            (tensor.op.name, tensor.value_index): tensor
            for op in operations
            for tensor in op.inputs
            if tensor.op.name not in names
        }
        outputs = [tensor for (name, _), tensor in self._leaving.items() if name in names]
        return Program(*node, operations, list(inputs.values()), outputs, after)
